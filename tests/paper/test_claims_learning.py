"""Evidence that reads trained models: other outcomes of the runs give other verdicts, and missing runs give none."""

import pytest
from learning_fakes import CPU, along_budgets, digits, made_up, real, record, text

from paper.claims import Verdict
from paper.claims.evidence import does_freezing_hold as freezing
from paper.claims.evidence import gradient_depth, one_learned_head
from paper.experiments import EXPERIMENTS, measure
from paper.experiments.learning import fine_tuning, images, language, synthetic
from paper.experiments.learning.synthetic import Learnt
from paper.experiments.statistics import Decision, success_interval

CONFIRMED, CONDITIONAL = Verdict.CONFIRMED, Verdict.CONDITIONAL
REFUTED, UNTESTABLE = Verdict.REFUTED, Verdict.UNTESTABLE


def runs(make, levels, **kwargs):
    """The records of several arms at their levels."""
    return [run for arm, level in levels.items() for run in make(arm, level, **kwargs)]


def test_made_up_records_have_what_is_read_of_real_ones():
    real = measure(EXPERIMENTS["images"], images.case("linear", 1, steps=2, B=2, d=16, L=1, tested=8), "cpu")
    made = digits("linear", 0.5)[0]
    assert made.keys() <= real.keys() and made["repetitions"].keys() == real["repetitions"].keys()
    assert made["configuration"].keys() == real["configuration"].keys()
    assert made["facts"].keys() <= real["facts"].keys()
    assert made["repetitions"]["test"].keys() <= real["repetitions"]["test"].keys()


# ---------------------------------------------------------------- frozen queries and keys with other attention (S2, S4)


# ------------------------------------------------------------------------------------- whether freezing holds (S0, S2)


def test_every_experiment_has_its_settings(stored):
    few = {"limit": 50_000}
    budgets = {"frozen": {"steps": 150}, "learned": {"steps": 2400}, "stopped": {"d": 128}}
    scores = {name: {"loss_nats": 1.0} for name in ("old", "new", "old, before", "new, before")}
    looks = [{"step": 100, "correct_fraction": 0.95}]
    learnt = record(synthetic.case("induction", "frozen", 1), {"test": {"correct_fraction": 0.99}}, validation=looks)
    stored(
        bytes=text("frozen", 3.0),
        bytes_little=text("frozen", 3.0, **few) + text("learned", 3.0, dropout=0.1, **few),
        bytes_budgets=[run for arm, choice in budgets.items() for run in text(arm, 3.0, **choice)],
        images=digits("frozen", 0.9),
        fine_tuning=[record(fine_tuning.case("QK redrawn", 1), scores)],
        translation=real({"8 frozen": 0.3}),
        translation_budgets=along_budgets("8 frozen", (3.0,), (10,)),
        transduction=made_up({"8 frozen": 0.3}, 0),
        synthetic=[learnt],
    )
    found = freezing.every_setting()
    assert {label: (*one.arms.runs, *one.learnt) for label, one in found.items()} == {
        "bytes, the whole text": ("frozen",),
        "bytes, 50,000 to train on": ("frozen",),
        "bytes, d = 64, 0.25 times the steps": ("frozen",),
        "bytes, d = 128": ("stopped",),
        "bytes, d = 64, 4 times the steps": ("learned",),
        "images, digits": ("frozen",),
        "fine-tuning, QK drawn anew": ("frozen",),
        "translation, 1,000 pairs": ("frozen",),
        "translation, 5,000 pairs, up to 1 passes": ("frozen",),
        "transduction, new pairs": ("frozen",),
        "synthetic, induction": ("frozen",),
    }
    assert freezing.missing() == [] and "No record" not in freezing.tried().ours
    assert found["synthetic, induction"].rule.margin == synthetic.MARGIN


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
    ("lost", "draws", "tried", "tasks"),
    [
        ((0.0, 0.0), 0.0, CONFIRMED, CONFIRMED),
        ((0.3, 0.0), 0.0, CONDITIONAL, REFUTED),  # images are no task of language
        ((0.3, 0.1), 0.0, REFUTED, REFUTED),
        ((0.0, 0.0), 0.3, REFUTED, CONFIRMED),  # frozen matrices that are not orthogonal lose
    ],
)
def test_the_open_questions_are_answered_by_the_outcomes(stored, lost, draws, tried, tasks):
    bits = {"learned": 2.7, "frozen": 2.7 + lost[0], "stopped": 3.4, "static random": 3.4}
    bits |= dict.fromkeys(freezing.DRAWS, 2.7 + lost[0] + draws)
    stored(bytes=runs(text, bits), images=runs(digits, {"learned": 0.9, "frozen": 0.9 - lost[1]}))
    assert freezing.tried().verdict == tried
    found = freezing.tasks()
    assert found.verdict == tasks and "No record yet of: bytes-little, bytes-budgets" in found.ours
    assert "against learned worse in 1; against frozen worse in 1; against static random equivalent in 1" in found.ours


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


@pytest.mark.parametrize(("frozen", "identity"), [(0.9, 0.7), (0.9, 0.9), (0.8, 0.9)])
def test_digits_count_where_a_difference_shows(stored, frozen, identity):
    """If heads that see no other token do better than learned ones, only a difference that shows is kept."""
    shares = {"learned": 0.8, "frozen": frozen, "identity": identity}
    stored(bytes=runs(text, {"learned": 2.7, "frozen": 3.0}), images=runs(digits, shares))
    found, shows = freezing.generalisation(), frozen == 0.9
    assert ("holds at images, digits" in found.ours) == shows
    assert ("Kept, as a difference shows" in found.ours) == (shows and identity == 0.9)
    assert ("Left out" in found.ours) == (not shows)
    kept = freezing.at_issue("frozen", "learned", freezing.every_setting(freezing.GENERAL))
    assert list(kept) == ["bytes, the whole text", "images, digits"][: 1 + shows]


def test_shares_and_rates_within_the_margin_are_nothing_to_lose(stored):
    for share, stake in ((0.004, False), (0.5, True)):
        (setting,) = freezing.settings("images", digits("learned", share + 0.0055)).values()
        assert Decision.of(setting.arms.runs["learned"].configuration).margin > 0.004
        assert setting.at_stake("learned") is stake
    assert [rates(learned=successes).at_stake("learned") for successes in (0, 1, 2)] == [False, False, True]


def test_a_wrong_map_is_noticed(monkeypatch):
    error, allowed = freezing.unreached()
    assert 0 < error <= allowed < 1e-9
    right = freezing.carrying
    monkeypatch.setattr(freezing, "carrying", lambda *arguments: right(*arguments) * 1.001)
    error, allowed = freezing.unreached.__wrapped__()
    assert error > allowed


@pytest.mark.parametrize(
    ("bits", "gaps", "verdict"),
    [
        ((2.5, 2.5), (0.2, 0.2), CONFIRMED),
        ((2.5, 2.5), (0.2, 0.5), CONDITIONAL),
        ((2.5, 2.9), (0.2, 0.2), CONDITIONAL),
        ((2.9, 2.9), (0.2, 0.2), REFUTED),
        ((2.5, 2.5), (0.5, 0.7), REFUTED),
    ],
)
def test_generalisation_takes_a_better_test_and_a_smaller_gap(stored, bits, gaps, verdict):
    whole, few = (
        text("learned", 2.7, limit=limit) + text("frozen", own, gap=gap, limit=limit)
        for own, gap, limit in zip(bits, gaps, (0, 50_000), strict=True)
    )
    stored(bytes=whole, bytes_little=few)
    found = freezing.generalisation()
    assert found.verdict == verdict
    assert "attention: 50 %, a block: 16.7 %" in found.ours


@pytest.mark.parametrize("sizes", [(1e-3, 5.0, 10.0), (10.0, 5.0, 1e-3)])
def test_decades_are_those_between_the_ends(monkeypatch, sizes):
    monkeypatch.setattr(gradient_depth, "sizes", lambda *_: sizes)
    assert gradient_depth.decades("frozen", True, "trained", 1) == pytest.approx(4)


@pytest.mark.parametrize(("more", "outcome"), [(0.0, "equivalent"), (1.0, "worse"), (-1.0, "better")])
def test_stacks_are_compared_by_the_rule(more, outcome):
    def measure(arm, residual, stage, seed):
        return seed / 10 + more * (arm == "frozen")

    (mean, (low, high)), found = gradient_depth.compared("frozen", True, "trained", measure=measure)
    assert found == outcome and mean == pytest.approx(more) and low - 1e-9 <= mean <= high + 1e-9


@pytest.mark.parametrize(
    ("learned", "verdict"), [({}, REFUTED), ({False: 3.0}, CONDITIONAL), ({True: 3.0, False: 3.0}, CONFIRMED)]
)
def test_stability_is_judged_against_learned_heads(monkeypatch, learned, verdict):
    """Frozen heads pass everywhere, but they avoid a failure only where learned heads do not pass."""

    def decades(arm, residual, stage, seed):
        return learned.get(residual, 0.5) if arm == "learned" else 0.5

    compared = gradient_depth.compared
    monkeypatch.setattr(gradient_depth, "decades", decades)
    monkeypatch.setattr(gradient_depth, "compared", lambda *place: compared(*place, measure=decades))
    assert freezing.stability().verdict == verdict


# ----------------------------------------------------------------------------------- orthogonal or Gaussian (S0, 5.2d)


# --------------------------------------------------------------------------------- one learned head beside others (S2)


def beside(arm, more=0.0, **kwargs):
    """Runs of an arm at 2 + `more` bits a byte."""
    return text(arm, 2 + more, **kwargs)


def by_arm(levels, **kwargs):
    return language.by_arm(runs(beside, levels, **kwargs), CPU)


def test_the_middle_budget_joins_where_an_arm_is_followed():
    middle = by_arm({"learned": 0.0, "frozen": 0.0, "tied": 0.0})
    records = [*beside("learned", steps=150), *beside("frozen", steps=2400), *beside("learned", d=32)]
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
