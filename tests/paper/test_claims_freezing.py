"""The evidence on freezing: what its figures are by other ways, and which records would make it say something else."""

from math import inf

import pytest

from paper import experiments
from paper.claims import Verdict
from paper.claims.evidence import does_freezing_hold as freezing
from paper.claims.evidence import does_freezing_hold as learning
from paper.claims.evidence import gradient_depth as depth
from paper.claims.evidence import low_resource
from paper.claims.outcomes import BITS_A_BYTE
from paper.experiments.learning import fine_tuning, images, language, rates, synthetic, translating
from paper.experiments.learning.synthetic import Learnt
from paper.experiments.statistics import Decision, success_interval

CONFIRMED, CONDITIONAL = Verdict.CONFIRMED, Verdict.CONDITIONAL
REFUTED, UNTESTABLE = Verdict.REFUTED, Verdict.UNTESTABLE

SEEDS = (1, 2, 3, 4, 5)
JITTER = (0.0, 0.01, -0.01, 0.02, -0.02)  # of the seeds, in both arms alike: pairs take it away
DEVICE = "cpu-abacus"
LN2 = 0.6931471805599453


@pytest.fixture
def stored(monkeypatch):
    """Name -> records that `experiments.load` then finds; none to begin with."""
    monkeypatch.setattr(rates, "table", dict)
    found = {name: [] for name in learning.NAMES}
    monkeypatch.setattr(experiments, "load", lambda name: found[name])
    return found


def record(name, case, tests, **facts):
    facts = {"loss": [1.0], "validation": [], "parameters": 10, "train_s": 1.0, **facts}
    return {"experiment": name, "device": DEVICE, "configuration": case, "repetitions": tests, "facts": facts}


def scores(nats=1.0, correct=0.5):
    return {"loss_nats": [nats], "correct_fraction": [correct]}


def text(name, arm, bits, gap=0.5, **choice):
    """Five runs of a model of bytes."""
    return [
        record(
            name,
            language.case(arm, seed, **choice),
            {"test": scores((bits + jitter) * LN2)},
            loss=[9.0, (bits + jitter - gap) * LN2],
            validation=[{"step": 1, "loss_nats": 0.1}, {"step": 2, "loss_nats": (bits + jitter) * LN2}],
        )
        for seed, jitter in zip(SEEDS, JITTER, strict=True)
    ]


def digits(arm, correct):
    return [
        record("images", images.case(arm, seed), {"test": scores(1.0, correct + jitter / 10)})
        for seed, jitter in zip(SEEDS, JITTER, strict=True)
    ]


# ------------------------------------------------------------------------------------------------ what is read


def test_every_experiment_has_its_settings(stored):
    stored["bytes"] = text("bytes", "frozen", 3.0)
    stored["bytes-little"] = text("bytes-little", "frozen", 3.0, limit=50_000)
    stored["bytes-little"] += text("bytes-little", "learned", 3.0, limit=50_000, dropout=0.1)
    stored["bytes-budgets"] = [
        *text("bytes-budgets", "frozen", 3.0, steps=150),
        *text("bytes-budgets", "learned", 3.0, steps=2400),
        *text("bytes-budgets", "stopped", 3.0, d=128),
    ]
    stored["images"] = digits("frozen", 0.9)
    tests = {name: scores() for name in ("old", "new", "old, before", "new, before")}
    stored["fine-tuning"] = [record("fine-tuning", fine_tuning.case("QK redrawn", 1), tests)]
    for name, test in (("translation", "test"), ("transduction", "like training")):
        more = {"seen": scores(), "source_tokens": 9, "target_tokens": 9, "vocab_size": 9}
        values = {test: {**scores(), "bleu_fraction": [0.3], "faultless_fraction": [0.3]}}
        pairs = min(translating.STEPS[name]["cpu"])
        more["seen"]["loss_nats"] = 1.0
        stored[name] = [record(name, translating.case(name, "8 frozen", 1, pairs=pairs), values, **more)]
    looked = [{"step": 100, "correct_fraction": 0.95}]
    synthetics = synthetic.case("induction", "frozen", 1)
    stored["synthetic"] = [record("synthetic", synthetics, {"test": scores(1.0, 0.99)}, validation=looked)]
    found = learning.every_setting()
    assert {label: (*one.runs, *one.learnt) for label, one in found.items()} == {
        "bytes, the whole text": ("frozen",),
        "bytes, 50,000 to train on": ("frozen",),
        "bytes, d = 64, 0.25 times the steps": ("frozen",),
        "bytes, d = 128": ("stopped",),
        "bytes, d = 64, 4 times the steps": ("learned",),
        "images, digits": ("frozen",),
        "fine-tuning, QK drawn anew": ("frozen",),
        "translation, 1,000 pairs": ("frozen",),
        "transduction, new pairs": ("frozen",),
        "synthetic, induction": ("frozen",),
    }
    assert learning.missing() == []
    assert "No record" not in learning.tried().ours
    assert found["synthetic, induction"].rule.margin == synthetic.MARGIN


def test_without_records_nothing_is_said(stored):
    assert learning.every_setting() == {} and learning.missing() == list(stored)
    assert "No record yet of: bytes, bytes-little" in learning.tried().ours
    for finding in (learning.tried, freezing.generalisation, freezing.tasks):
        assert finding().verdict == UNTESTABLE


def test_runs_are_compared_by_their_rule(stored):
    stored["bytes"] = text("bytes", "learned", 2.7) + text("bytes", "frozen", 3.0)
    stored["images"] = digits("learned", 0.8) + digits("frozen", 0.9)
    pairs = learning.compared("frozen", "learned", learning.every_setting())
    assert {label: pair.outcome for label, pair in pairs.items()} == {
        "bytes, the whole text": "worse",
        "images, digits": "better",
    }
    assert pairs["bytes, the whole text"].mean == pytest.approx(0.3) and pairs["images, digits"].runs == 5
    assert learning.compared("stopped", "learned", learning.every_setting()) == {}


def learnt(successes, runs=10):
    steps = (100,) * successes + (None,) * (runs - successes)
    return Learnt("a task", "an arm", tuple(range(runs)), (0.5,) * runs, steps)


@pytest.mark.parametrize(
    ("ours", "theirs", "outcome"), [(10, 0, "better"), (0, 10, "worse"), (10, 10, "undecided"), (10, 6, "undecided")]
)
def test_rates_of_successes_are_compared_by_exact_intervals(ours, theirs, outcome):
    rule = Decision(margin=0.1, level=0.05, higher_is_better=True)
    arms = {"frozen": learnt(ours), "learned": learnt(theirs)}
    pair = learning.Setting({}, "", learning.RATE, arms, rule).compare("frozen", "learned")
    assert pair.outcome == outcome and pair.mean == pytest.approx((ours - theirs) / 10)
    (low, high), (other_low, other_high) = success_interval(ours, 10), success_interval(theirs, 10)
    assert pair.interval == (low - other_high, high - other_low)


@pytest.mark.parametrize(
    ("interval", "unit", "told"),
    [
        ((-inf, inf), BITS_A_BYTE, (-inf, inf)),
        ((-0.00049, 0.0126), BITS_A_BYTE, (0.0, 0.013)),
        ((-0.00049, 0.0126), learning.RIGHT, (0.0, 1.3)),
    ],
)
def test_differences_are_told_in_their_unit(interval, unit, told):
    pair = learning.Compared(0.1, interval, "undecided", 2, unit)
    found = learning.judged({"a setting": pair})
    assert found == {f"a setting ({unit.name})": (told, "undecided")}
    assert "-0.0" not in repr(found)
    assert (unit.signed(-0.0126), unit.signed(inf)) == (f"{-0.0126 * unit.scale:+.{unit.digits}f}", "+inf")


# ------------------------------------------------------------------------------------------------ S0.5.2c, S2.5.3c


def frozen_worse(stored, on_bytes, on_digits, draws=0.0):
    """Frozen heads that are worse by so much, or that others than orthogonal ones are worse by."""
    stored["bytes"] = text("bytes", "learned", 2.7) + text("bytes", "frozen", 2.7 + on_bytes)
    for draw in learning.DRAWS:
        stored["bytes"] += text("bytes", draw, 2.7 + on_bytes + draws)
    stored["images"] = digits("learned", 0.9) + digits("frozen", 0.9 - on_digits)


@pytest.mark.parametrize(
    ("lost", "draws", "tried", "tasks"),
    [
        ((0.0, 0.0), 0.0, CONFIRMED, CONFIRMED),
        ((0.3, 0.0), 0.0, CONDITIONAL, CONDITIONAL),
        ((0.3, 0.1), 0.0, REFUTED, REFUTED),
        ((0.0, 0.0), 0.3, REFUTED, CONFIRMED),
    ],
)
def test_the_open_questions_are_answered_by_the_outcomes(stored, lost, draws, tried, tasks):
    frozen_worse(stored, *lost, draws)
    assert learning.tried().verdict == tried
    assert freezing.tasks().verdict == tasks
    assert "No record yet of: bytes-little, bytes-budgets" in freezing.tasks().ours


def test_where_nothing_can_be_lost_only_what_shows_counts(stored):
    """Learned heads that are no better than those which see no other token have nothing to lose."""
    frozen_worse(stored, 0.3, 0.0)
    stored["images"] += digits("identity", 0.9)
    told = freezing.tasks()
    assert told.verdict == REFUTED
    assert "nothing to lose and no difference shows: images, digits" in told.ours
    stored["images"] = digits("learned", 0.8) + digits("frozen", 0.9) + digits("identity", 0.9)
    assert freezing.tasks().verdict == CONDITIONAL  # a gain shows
    stored["images"] = digits("learned", 0.9) + digits("frozen", 0.9) + digits("identity", 0.8)
    assert freezing.tasks().verdict == CONDITIONAL  # nothing is lost of what there is


@pytest.mark.parametrize(("share", "stake"), [(0.004, False), (0.5, True)])
def test_shares_within_the_margin_are_nothing_to_lose(stored, share, stake):
    stored["images"] = digits("learned", share)
    (setting,) = learning.settings("images", stored["images"]).values()
    assert Decision.of(setting.runs["learned"].configuration).margin > 0.004
    assert setting.at_stake("learned") is stake


@pytest.mark.parametrize(("successes", "stake"), [(0, False), (1, False), (2, True)])
def test_rates_within_the_margin_are_nothing_to_lose(successes, stake):
    rule = Decision(margin=0.1, level=0.05, higher_is_better=True)
    setting = learning.Setting({}, "", learning.RATE, {"learned": learnt(successes)}, rule)
    assert setting.at_stake("learned") is stake


def test_stopped_heads_are_told_beside(stored):
    frozen_worse(stored, 0.0, 0.0)
    stored["bytes"] += text("bytes", "stopped", 3.4) + text("bytes", "static random", 3.4)
    said = freezing.tasks().ours
    assert "against learned worse in 1; against frozen worse in 1; against static random equivalent in 1" in said


# ------------------------------------------------------------------------------------------------ S2.4.2a


def test_a_drawn_map_approximates_nothing_but_one_head_behind_a_map_has_all():
    found = freezing.expressiveness()
    assert found.verdict == REFUTED
    assert "outside everywhere (refuted)" in found.ours
    assert "holds at one head, a trained map of $x$ before it; not at all heads and one map" in found.ours


def test_the_verdict_follows_what_is_reached(monkeypatch):
    monkeypatch.setattr(freezing, "expected_missed", lambda _: 0.4)
    assert freezing.expressiveness().verdict == CONDITIONAL
    monkeypatch.setattr(freezing, "unreached", lambda: (1.0, 1e-9))
    assert freezing.expressiveness().verdict == REFUTED


def test_a_wrong_map_is_noticed(monkeypatch):
    error, allowed = freezing.unreached()
    assert 0 < error <= allowed < 1e-9
    right = freezing.carrying
    monkeypatch.setattr(freezing, "carrying", lambda *arguments: right(*arguments) * 1.001)
    freezing.unreached.cache_clear()
    error, allowed = freezing.unreached()
    freezing.unreached.cache_clear()
    assert error > allowed


# ------------------------------------------------------------------------------------------------ S2.4.2c


def test_the_gap_is_that_of_the_last_look_and_the_last_part():
    (one, *_) = text("bytes", "frozen", 3.0, gap=0.25)
    assert low_resource.gap(one) == pytest.approx(0.25)


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
    stored["bytes"] = text("bytes", "learned", 2.7) + text("bytes", "frozen", bits[0], gaps[0])
    few = {"limit": 50_000}
    stored["bytes-little"] = text("bytes-little", "learned", 2.7, **few)
    stored["bytes-little"] += text("bytes-little", "frozen", bits[1], gaps[1], **few)
    found = freezing.generalisation()
    assert found.verdict == verdict
    assert "attention: 0.5, a block: 0.833" in found.ours


# ------------------------------------------------------------------------------------------------ S2.4.3b


def test_decades_are_those_between_the_ends(monkeypatch):
    monkeypatch.setattr(depth, "sizes", lambda *_: (1e-3, 5.0, 10.0))
    assert depth.decades("frozen", True, "trained", 1) == pytest.approx(4)
    monkeypatch.setattr(depth, "sizes", lambda *_: (10.0, 5.0, 1e-3))
    assert depth.decades("frozen", True, "trained", 1) == pytest.approx(4)


@pytest.mark.parametrize(("more", "outcome"), [(0.0, "equivalent"), (1.0, "worse"), (-1.0, "better")])
def test_stacks_are_compared_by_the_rule(more, outcome):
    def measure(arm, residual, stage, seed):
        return seed / 10 + more * (arm == "frozen") + JITTER[seed - 1]

    (mean, (low, high)), found = depth.compared("frozen", True, "trained", measure=measure)
    assert found == outcome and mean == pytest.approx(more) and low <= mean + 1e-9 and high >= mean - 1e-9


@pytest.mark.parametrize(
    ("decades", "verdict"), [({}, CONFIRMED), ({False: 3.0}, CONDITIONAL), ({True: 3.0, False: 3.0}, REFUTED)]
)
def test_stability_follows_the_gradients(monkeypatch, decades, verdict):
    monkeypatch.setattr(depth, "decades", lambda arm, residual, stage, seed: decades.get(residual, 0.5))
    monkeypatch.setattr(depth, "compared", lambda *_: ((0.0, (0.0, 0.0)), "equivalent"))
    assert freezing.stability().verdict == verdict


def test_stability_without_records(monkeypatch):
    monkeypatch.setattr(experiments, "load", lambda _: [])
    assert freezing.stability().verdict == UNTESTABLE


def test_matrices_that_change_lengths_are_noticed(monkeypatch):
    monkeypatch.setattr(depth, "decades", lambda *_: 0.5)
    monkeypatch.setattr(depth, "compared", lambda *_: ((0.0, (0.0, 0.0)), "equivalent"))
    freezing.scale_changed.cache_clear()
    right = freezing.haar
    monkeypatch.setattr(freezing, "haar", lambda *sizes, **kwargs: 1.01 * right(*sizes, **kwargs))
    assert freezing.stability().verdict == REFUTED
    freezing.scale_changed.cache_clear()
