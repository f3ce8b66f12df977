"""Evidence that reads trained models: other outcomes of the runs give other verdicts, and missing runs give none."""

from math import log

import pytest
from experiment_fakes import made_up

from paper.claims import Verdict
from paper.claims.shared import does_freezing_hold as freezing
from paper.claims.shared import one_learned_head
from paper.experiments.learning import images, language
from paper.experiments.learning.synthetic import Learnt
from paper.experiments.statistics import Decision, success_interval

CONDITIONAL, REFUTED = Verdict.CONDITIONAL, Verdict.REFUTED
CPU = "cpu-abacus"
LEVEL = 0.1  # added by each seed: more than arms differ, so that only pairs of runs show a difference
ALL = 900_000  # bytes of the whole made-up text
BIT = log(2)  # nats


def record(case, tests, **facts):
    """One run; `tests` has the numbers of each test."""
    tests = {test: {quantity: [value] for quantity, value in found.items()} for test, found in tests.items()}
    return made_up("made-up", case, tests, device=CPU, **facts)  # an experiment for which no learning rate was chosen


def text(arm, bits, **choice):
    """Runs of a byte model with a loss of `bits` a byte on other text, and half a bit less on its own."""
    records = []
    for seed in language.SEEDS:
        nats = (bits + LEVEL * (seed - 1)) * BIT
        case = language.case(arm, seed, 0.01, **choice)
        size = {"train": {"bytes": case["limit"] or ALL}}
        facts = {"validation": [{"step": 1, "loss_nats": nats}], "loss": [9.0, nats - BIT / 2], "text": size}
        records.append(record(case, {"test": {"loss_nats": nats, "correct_fraction": 0.5}}, **facts))
    return records


def digits(arm, share):
    """Runs of an image model that names a share `share` of the digits correctly."""
    shares = {seed: share - LEVEL / 100 * seed for seed in images.SEEDS}
    return [
        record(images.case(arm, seed, 0.01), {"test": {"loss_nats": 1.0, "correct_fraction": correct}})
        for seed, correct in shares.items()
    ]


def runs(make, levels):
    """The records of several arms at their levels."""
    return [run for arm, level in levels.items() for run in make(arm, level)]


# ------------------------------------------------------------------------------------- whether freezing holds (S0, S2)


def test_runs_are_compared_by_their_rule(stored):
    stored(bytes=runs(text, {"learned": 2.7, "frozen": 3.0}), images=runs(digits, {"learned": 0.8, "frozen": 0.9}))
    found = freezing.compared("frozen", "learned", freezing.every_setting())
    assert [pair.outcome for pair in found.values()] == ["worse", "better"]
    assert found["bytes, the whole text"].mean == pytest.approx(0.3) and found["images, digits"].runs == 10
    assert freezing.compared("stopped", "learned", freezing.every_setting()) == {}


def rates(**successes):
    """A setting in which each arm has learnt the task in the given number of ten runs."""
    arms = {
        arm: Learnt("a task", arm, tuple(range(10)), (0.5,) * 10, (100,) * n + (None,) * (10 - n))
        for arm, n in successes.items()
    }
    rule = Decision(margin=0.1, level=0.05, higher_is_better=True)
    return freezing.Setting(freezing.Arms({}, "", freezing.RATE), arms, rule)


@pytest.mark.parametrize(
    ("ours", "theirs", "outcome"), [(10, 0, "better"), (0, 10, "worse"), (10, 10, "undecided"), (10, 6, "undecided")]
)
def test_rates_of_successes_are_compared_by_exact_intervals(ours, theirs, outcome):
    pair = rates(frozen=ours, learned=theirs).compare("frozen", "learned")
    assert pair.outcome == outcome and pair.mean == pytest.approx((ours - theirs) / 10)
    (low, high), (other_low, other_high) = success_interval(ours, 10), success_interval(theirs, 10)
    assert pair.interval == (low - other_high, high - other_low)


@pytest.mark.parametrize(
    ("shares", "verdict"),
    [
        ({"learned": 0.9, "frozen": 0.9, "identity": 0.9}, REFUTED),  # nothing to lose: left out
        ({"learned": 0.8, "frozen": 0.9, "identity": 0.9}, CONDITIONAL),  # a gain shows
        ({"learned": 0.9, "frozen": 0.9, "identity": 0.8}, CONDITIONAL),  # what could be lost is not lost
    ],
)
def test_where_nothing_can_be_lost_only_what_shows_counts(stored, shares, verdict):
    """Learned heads that are no better than those which see no other token have nothing to lose."""
    stored(bytes=runs(text, {"learned": 2.7, "frozen": 3.0}), images=runs(digits, shares))
    found = freezing.lost("nothing is lost", "frozen", "learned", freezing.every_setting())
    assert found.verdict == verdict
    left_out = "learned heads have nothing to lose by it: images, digits" in found.ours
    assert left_out == (verdict == REFUTED)


def test_shares_and_rates_within_the_margin_are_nothing_to_lose(stored):
    for share, stake in ((0.004, False), (0.5, True)):
        (setting,) = freezing.settings("images", digits("learned", share + 0.0055)).values()
        assert Decision.of(setting.arms.runs["learned"].configuration).margin > 0.004
        assert setting.at_stake("learned") is stake
    assert [rates(learned=successes).at_stake("learned") for successes in (0, 1, 2)] == [False, False, True]


# --------------------------------------------------------------------------------- one learned head beside others (S2)


def test_the_middle_budget_joins_where_an_arm_is_followed():
    middle = language.by_arm(runs(text, {"learned": 2, "frozen": 2, "tied": 2}), CPU)
    records = [*text("learned", 2, steps=150), *text("frozen", 2, steps=2400), *text("learned", 2, d=32)]
    found = one_learned_head.along_budgets(records, CPU, middle)
    expected = {
        (32, 1.0): {"learned"},
        (64, 0.25): {"learned"},
        (64, 1.0): {"learned", "frozen"},
        (64, 4.0): {"frozen"},
    }
    assert {key: set(stage) for key, stage in found.items()} == expected
    assert list(found) == sorted(found)
    assert one_learned_head.along_budgets([], CPU, middle) == {}
