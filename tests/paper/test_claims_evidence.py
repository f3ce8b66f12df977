"""Evidence of `paper.claims.shared`: other outcomes of trained models give other verdicts, and missing runs give none;
figures against others found independently."""

from math import log

import pytest
import torch
from experiment_fakes import made_up

from paper.claims import Verdict
from paper.claims.shared import does_freezing_hold as freezing
from paper.claims.shared import gates_and_losses as forms
from paper.claims.shared import methods, one_learned_head
from paper.claims.shared.printed_models import whole_limit
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
    """Identity heads see no other token. If learned heads do no better, nothing can be lost."""
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


# ------------------------------------------------------------------------------------------ figures found independently


def test_limits_of_whole_models_by_hand():
    """Each model's products, with pairs of tokens as either form counts them; the form that allows more is the
    bound."""
    N, d = 512, 768
    pooler = 3 * 2 * d * d
    step = 12 * (72 * N * d**2 + 12 * N**2 * d) + pooler
    assert whole_limit("BERT-base") == pytest.approx(100 * (step / (step - 12 * 4 * N * d**2) - 1))
    N, d = 1024, 1024
    read_out, pairs = 3 * 2 * N * d * 50257, 14 * d * N * (N + 1) / 2  # fused: forward 4, backward 10, by pairs
    step = 24 * (72 * N * d**2 + pairs) + read_out
    assert whole_limit("GPT-2 medium") == pytest.approx(100 * (step / (step - 24 * 4 * N * d**2) - 1))
    N, d = 197, 768
    ends = 2 * 2 * 196 * d * d + 3 * 2 * 1000 * d  # patches (of the gradients only the weights'), and the head
    step = 12 * (72 * N * d**2 + 12 * N**2 * d) + ends
    assert whole_limit("ViT") == pytest.approx(100 * (step / (step - 12 * 4 * N * d**2) - 1))


def test_misplaced_weight():
    exact = torch.tensor([[1.0, 0.0], [0.5, 0.5]])
    assert methods.misplaced(exact, exact) == 0
    assert methods.misplaced(exact.flip(1), exact) == 50  # all of the first row, none of the second


# ------------------------------------------------------------------------------------------------- Gains in the records

BEYOND = ("tokens 17 to 32", "tokens 33 to 64", "tokens 65 to 128")


def records(product, one, device="cpu-x"):
    """Records with given shares of right answers by arm, as the experiment stores them, the longest test first."""
    for arm, shares in (("delta-product", product), ("delta, beta to 2", one)):
        for seed, share in enumerate(shares, 1):
            answered = {**dict.fromkeys(reversed(BEYOND), share), "tokens 1 to 16": 1.0}
            tests = {t: {"correct_fraction": [x], "faultless_fraction": [x]} for t, x in answered.items()}
            yield made_up("permutations", {"arm": arm, "seed": seed, "rate": 1e-2}, tests, device=device)


HIGH, LOW = (0.9, 0.92, 0.94, 0.96, 0.98), (0.3, 0.31, 0.32, 0.33, 0.34)
ARMS = ("permutations", "delta-product", "delta, beta to 2", BEYOND)


def test_the_interval_of_a_gain_by_hand(stored):
    """With three tests, each end may leave out two of the 25 differences: 4 of 252 choices have fewer than three."""
    stored(permutations=list(records(HIGH, LOW)))
    gains = forms.gained(*ARMS)
    assert list(gains) == [f"{test} on cpu-x" for test in BEYOND]
    assert set(gains.values()) == {(58.0, 66.0)}  # of the differences 56, 57, 58, ... 66, 67, 68
    stored(permutations=[*records(HIGH, LOW), *records(HIGH, LOW, "cuda-y")])
    assert set(forms.gained(*ARMS).values()) == {(57.0, 67.0)}
