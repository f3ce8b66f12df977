"""The ladder: its arms, a run at every budget and after a kill, the rules by which records are judged."""

from functools import partial
from math import log

import numpy as np
import pytest
import torch

from ortho import cost
from paper.experiments.learning import budgets, fitting, ladder, ladder_analysis, ladder_lengths, rates
from paper.experiments.learning.ladder_analysis import (
    BESIDE_HYPOTHESES,
    HYPOTHESES,
    SELECTIVE,
    SELECTIVE_HYPOTHESES,
    SHIFTED_HYPOTHESES,
    Curve,
    at,
    at_equal,
    judged,
)
from paper.experiments.learning.ladder_arms import ARMS, CONVOLUTION, MimeticProjection
from paper.experiments.statistics import student_below
from paper.tasks import text
from paper.training import Recipe, Trainer

TINY = {"base": 4, "tested": 8, "N": 32, "B": 2, "d": 16, "L": 1}


def tiny(arm="2 induction + 2 positional", **kwargs):
    kwargs = {"H": ARMS[arm].num_heads, **kwargs}
    return ladder.case("python", arm, **{"budget": 2, **TINY, **kwargs}) | {"validated": 6, "blocks": 3}


@pytest.mark.parametrize("convolution", [0, 4])
@pytest.mark.parametrize("arm", ARMS)
def test_flop(arm, convolution):
    """Declared = counted, exactly."""
    case = tiny(arm, convolution=convolution)
    model = ARMS[arm].build(case, torch.Generator().manual_seed(0))
    counts = cost.of(model, torch.zeros(2, 32, dtype=torch.int64))
    assert counts.forward + counts.backward == ladder_analysis.step_flop(case)


def test_a_case_has_as_many_heads_as_its_arm():
    with pytest.raises(ValueError, match="H: expected 8, the heads of the arm '8 learned', got 4"):
        ladder.case("python", "8 learned")


def test_larger_models(monkeypatch):
    """On a GPU alone; 25 million weights in the layers; rates first, and then two seeds of each arm."""
    assert ladder.large_cases("cpu") == []
    tried = ladder.large_cases("cuda")
    assert {case["seed"] for case in tried} == {rates.TUNING}
    model = ARMS["8 learned"].build(tried[0], torch.Generator())
    layers = sum(p.numel() for name, p in model.named_parameters() if "embedding" not in name)
    assert 25e6 < layers < 26e6
    monkeypatch.setattr(rates, "chosen", lambda experiment, case: 0.001)
    counted = ladder.large_cases("cuda")[len(tried) :]
    assert len(counted) == len(tried) and {case["budget"] for case in counted} == {ladder.LONG}


def test_mimetic():
    """The product of W_Q and W_K has about 0.7 of the identity in it: its mean diagonal is that times the share of the
    singular values kept, all of them with one head; of noise it has 0.7 / sqrt(d d), 5 of which bound it."""
    made = MimeticProjection(64, 1, generator=torch.Generator().manual_seed(0))
    product = made.weight_q.mT @ made.weight_k
    assert abs(product.diagonal().mean().item() - 0.7) < 5 * 0.7 / 64


@pytest.fixture(scope="module")
def outcome():
    return ladder.run(tiny(seed=1))


def test_a_run(outcome):
    """Each budget is tested, as a model of its own steps; parts average to the whole; places and sorts too."""
    looks = outcome["facts"]["validation"]
    assert [(look["budget"], look["step"]) for look in looks] == [(1, 4), (2, 8)]
    for look in looks:
        parts = outcome["repetitions"][f"{look['budget']} x"]
        assert len(parts["test_bits"]) == len(parts["validation_bits"]) == 3
        assert abs(np.mean(parts["validation_bits"]) * log(2) - look["loss_nats"]) < 1e-5
        shares, bits = look["repeats_fraction"], look["repeats_bits"]
        assert abs(sum(shares.values()) - 1) < 1e-4
        whole = sum(shares[name] * bits[name] for name in shares)
        blocks = np.average(parts["test_bits"], weights=[3, 3, 2])
        assert abs(whole - blocks) < 1e-3 * blocks


def test_a_run_that_chooses_a_rate_leaves_the_test_alone():
    assert set(ladder.run(tiny(budget=1))["repetitions"]["1 x"]) == {"validation_bits"}


def test_the_schedule():
    """Up, level, and down to the last step, which is not 0."""
    stable, cooling = budgets.Stable(100, 0.1, 1), budgets.Cooling(4, 0.1, 1)
    assert [stable.share_of_rate(s) for s in (0, 29, 59, 99)] == [1 / 60, 0.5, 1.0, 1.0]
    assert [cooling.share_of_rate(s) for s in range(4)] == [1.0, 0.75, 0.5, 0.25]
    assert [budgets.steps({"base": 300}, n) for n in (1, 16)] == [(240, 60), (3840, 960)]


class Planned(Recipe):
    """The two schedules one after the other."""

    def share_of_rate(self, step):
        return min(1.0, (step + 1) / ladder.WARM_UP) if step < 8 else 1 - (step - 8) / 2


def test_a_budget_s_copy_is_a_run_of_that_length():
    """Trained without a break on the same batches, a model has the same bits: the copy takes over weights, moments and
    the place in the batches."""
    case = tiny(seed=1, budget=1, base=10)
    found = ladder.run(case)
    seeds = found["seeds"]
    model = ARMS[case["arm"]].build(case, torch.Generator().manual_seed(seeds["weights"]))
    task = text.language_modelling("python", "", text.python_parts(), case["N"])
    recipe = Planned(10, case["rate"], case["B"], weight_decay=fitting.WEIGHT_DECAY)
    Trainer(model, task.train, recipe, torch.Generator().manual_seed(seeds["training"])).run()
    assert ladder._examined(model, task, case)["blocks"]["test"] == found["repetitions"]["1 x"]["test_bits"]


def test_after_a_kill(tmp_path, monkeypatch, outcome):
    """To the bit, but for the seconds."""
    whole, file = Trainer.run, tmp_path / "one.pt"

    def stopped(self, until=None):
        whole(self, 5 if self.checkpoint is not None else until)
        if self.checkpoint is not None:
            raise KeyboardInterrupt

    monkeypatch.setattr(Trainer, "run", stopped)
    with pytest.raises(KeyboardInterrupt):
        ladder.run(tiny(seed=1), checkpoint=file)
    monkeypatch.setattr(Trainer, "run", whole)
    again = ladder.run(tiny(seed=1), checkpoint=file)
    assert again["repetitions"] == outcome["repetitions"] and again["facts"]["loss"] == outcome["facts"]["loss"]


def test_cases(monkeypatch):
    """Rates first; with these chosen the longer ones; never a case twice."""
    monkeypatch.setattr(rates, "chosen", lambda experiment, case: None)
    every = (ladder.cases, ladder.selective_cases, ladder.other_cases)
    for cases in every:
        assert all(case["budget"] == ladder.TUNED and case["seed"] == rates.TUNING for case in cases("cpu"))
    monkeypatch.setattr(rates, "chosen", lambda experiment, case: 0.004)
    for cases in every:
        found = [repr(case) for case in cases("cpu")]
        assert len(found) == len(set(found))
        assert {case["budget"] for case in cases("cpu")} >= {ladder.TUNED, ladder.LONG}
    shifted = {case["convolution"] for case in ladder.other_cases("cpu") if "KV shift" in case["arm"]}
    assert shifted == {0}
    longest = {case["arm"] for case in ladder.other_cases("cpu") if case["budget"] == ladder.LONGEST}
    assert longest == set(ladder.TO_THE_LONGEST)
    families = (
        (HYPOTHESES, ladder.cases),
        (SELECTIVE_HYPOTHESES + BESIDE_HYPOTHESES, ladder.selective_cases),
        (SHIFTED_HYPOTHESES, ladder.other_cases),
    )
    for family, cases in families:
        assert {(h.text, h.arm, h.convolution, h.budget) for h in family if h.budget == ladder.LONGEST} <= {
            (c["text"], c["arm"], c["convolution"], c["budget"]) for c in cases("cpu")
        }


def test_a_difference():
    """By hand: means over seeds 0 and 2, over parts 1 and 1; the error of both, and Student's 6.314 of one degree."""
    ours = {1: np.array([1.0, 1.0]), 2: np.array([2.0, 4.0]), 3: np.array([9.0, 9.0])}
    theirs = {1: np.array([1.0, 1.0]), 2: np.array([1.0, 1.0])}
    found = ladder_analysis.tested(ours, theirs, 0.0)
    error = np.sqrt(2.0 / 2 + 0.5 / 2)
    assert (found.mean, found.seeds) == (1.0, (1, 2))
    np.testing.assert_allclose(found.interval, (1 - 6.3138 * error, 1 + 6.3138 * error), rtol=1e-4)
    assert found.bootstrap[0] >= 0 and found.bootstrap[1] <= 3 and not found.equivalent
    assert abs(found.chance - student_below(1 / error, 1)) < 1e-12
    assert ladder_analysis.tested(ours, {3: ours[3]}, 0.0) is None


def record(arm, seed, bits, text="python", budget=16, **sizes):
    configuration = ladder.case(text, arm, seed=seed, budget=budget, **sizes)
    parts = {
        f"{n} x": {"test_bits": [bits + 0.001 * i for i in range(4)], "validation_bits": [bits]} for n in (1, budget)
    }
    looks = [{"budget": n, "step_s": 0.1 if arm == "learned" else 0.05} for n in (1, budget)]
    return {
        "experiment": "ladder",
        "device": "cpu-x",
        "provenance": {"device_name": "x"},
        "configuration": configuration,
        "repetitions": parts,
        "facts": {"validation": looks},
    }


def test_hypotheses():
    """An arm that is better by .1 with an error of .002 is shown where .05 or no worse is asked for, and one that is
    worse by .1 is not; nothing is shown of what was not measured."""
    spread = partial(np.multiply, 0.002)
    records = [record("learned", seed, 2.0) for seed in (1, 2, 3)]
    records += [record("2 induction + 2 positional", seed, 1.9 + float(spread(seed))) for seed in (1, 2, 3)]
    records += [record("1 learned + 3 positional", seed, 2.1 + float(spread(seed))) for seed in (1, 2, 3)]
    found = judged(records)
    assert {name for name, (_, shown) in found.items() if shown} == {"b: python, 16 x"}
    assert found["a: python, 16 x"][0].mean == pytest.approx(0.104)
    assert found["a: novels, 16 x"] == (None, False)
    same = judged(records[:3] + [record("1 learned + 3 positional", s, 2.0 + float(spread(s)) / 4) for s in (1, 2, 3)])
    assert same["a: python, 16 x"][0].equivalent and same["a: python, 16 x"][1]


def test_each_side_of_a_comparison_has_a_convolution_of_its_own():
    """Learned heads without the convolution by .3 more, and those with the shift, which have none, by .2 less."""
    records = [record("learned", seed, 1.998 + 0.002 * seed) for seed in (1, 2)]  # no spread, no test
    records += [record("learned", seed, 2.301, convolution=0) for seed in (1, 2)]
    records += [record(ladder_analysis.SHIFTED, seed, 1.803 - 0.002 * seed, convolution=0) for seed in (1, 2)]
    compared = partial(ladder_analysis.compared, records, "python", budget=16)
    assert compared(ladder_analysis.SHIFTED, convolution=0).mean == pytest.approx(-0.201)
    assert compared("learned", against=ladder_analysis.SHIFTED, their_convolution=0).mean == pytest.approx(0.201)
    assert compared("learned", against="learned", their_convolution=0).mean == pytest.approx(-0.3)
    assert compared("learned", against=ladder_analysis.SHIFTED) is None
    records += [record(ladder_analysis.BESIDE_SHIFTED, s, 1.701 + 0.001 * s, convolution=0) for s in (1, 2)]
    found, shown = judged(records, SHIFTED_HYPOTHESES)["g: python, 16 x"]
    assert found.mean == pytest.approx(-0.0975) and shown


def test_equal_steps_flop_and_seconds():
    """A straight line in the logarithm of the steps; twice the steps at half the cost."""
    ours, theirs = Curve((1, 4), (3.0, 2.0), 10, 5, 0.5), Curve((1, 2), (3.0, 2.7), 10, 10, 1.0)
    assert at(ours, 20) == 2.5 and np.isnan(at(ours, 50))
    assert at_equal(ours, theirs, 1) == {"steps": 3.0, "FLOPs": 2.5, "seconds": 2.5}
    found = ladder_analysis.curve([record("learned", 1, 2.0)], ("python", "learned", CONVOLUTION))
    assert (found.budgets, found.seconds) == ((1, 16), 0.1) and found.bits[0] == pytest.approx(2.0015)
    assert ladder_analysis.curve([], ("python", "learned", CONVOLUTION)) is None


def test_bits_between_two_budgets():
    """Halfway between two budgets in the logarithm, halfway between their bits; nothing beyond the longest."""
    records = [record("learned", 1, bits, budget=n) for n, bits in ((8, 2.0), (16, 1.0))]
    between = partial(ladder_analysis.blocks_between, records, ("python", "learned", CONVOLUTION))
    np.testing.assert_allclose(between(8 * 2**0.5)[1], 1.5 + 0.001 * np.arange(4))
    assert (between(16)[1] == between(16.0)[1]).all()
    assert between(17) == {}


def test_the_table(outcome):
    said = ladder_analysis.table([record("learned", 1, 2.0), record("2 induction + 2 positional", 1, 1.9)])
    assert "16 x 1.9" in said and "against learned + convolution at 16 x: -0.100 at equal steps" in said
    assert ladder_analysis.line({"configuration": tiny(seed=1), **outcome}).startswith("test 1 x ")


@pytest.mark.bad_input
def test_errors():
    for call, message in (
        (lambda: ladder.case("news", "learned"), "text: expected one of"),
        (lambda: ladder.case("python", "lerned"), "arm: expected one of"),
        (lambda: ladder.case("python", "learned", budget=3), "budget: expected a power of two, got 3"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(TypeError, match="sizes: expected some of B, N"):
        ladder.case("python", "learned", steps=3)


def test_runs_that_count():
    """Those that choose rates do not; of all CPUs each case counts once; a GPU's do where there is no CPU."""
    runs = [
        {"device": device, "configuration": {"seed": seed}}
        for device in ("cuda-a", "cpu-b", "cpu-a")
        for seed in (rates.TUNING, 1, 2)
        if (device, seed) != ("cpu-a", 2)
    ]
    found = [(run["device"], run["configuration"]["seed"]) for run in ladder_analysis.standing(runs)]
    assert found == [("cpu-a", 1), ("cpu-b", 2)]
    assert ladder_analysis.standing(runs[:3]) == runs[1:3] and ladder_analysis.standing([]) == []


def test_lengths(monkeypatch):
    """Every step draws as many bytes and every test has nearly as many; each length is compared on its own, with the
    rival's best rate of those that all seeds have."""
    assert all(case["arm"] in ladder_lengths.ARMS for case in ladder_lengths.cases("cpu"))
    monkeypatch.setattr(rates, "chosen", lambda experiment, case: 0.004)
    found = ladder_lengths.cases("cpu")
    assert {case["N"] for case in found} == set(ladder_lengths.LENGTHS)
    assert {case["B"] * case["N"] for case in found} == {ladder_lengths.BYTES}
    tested = [case["tested"] * case["N"] for case in found]
    assert max(tested) - min(tested) < max(ladder_lengths.LENGTHS)
    means = {(256, "learned"): 2.0, (512, "learned"): 1.9, (256, SELECTIVE): 1.8, (512, SELECTIVE): 1.85}
    sizes = {"budget": ladder_lengths.BUDGET, "H": 4}
    records = [
        record(arm, seed, bits + (arm == SELECTIVE) * 0.001 * (seed - 4), N=N, rate=0.004, **sizes)
        for (N, arm), bits in means.items()
        for seed in (3, 4, 5)
    ]
    records += [record("learned", seed, 2.1, N=512, rate=0.008, **sizes) for seed in (3, 4, 5)]
    records += [record("learned", seed, 1.7, N=256, rate=0.008, **sizes) for seed in (3, 4)]
    for N, wanted in ((256, -0.2), (512, -0.05)):
        assert ladder_lengths.compared(records, "python", N).mean == pytest.approx(wanted)
    records.append(record("learned", 5, 1.7, N=256, rate=0.008, **sizes))
    for N, wanted in ((256, 0.1), (512, -0.05)):
        assert ladder_lengths.compared(records, "python", N).mean == pytest.approx(wanted)
    said = ladder_lengths.table(records)
    assert "python   N = 256   +0.1000" in said and "N = 1024" not in said
    assert ladder_lengths.label(found[0]).endswith("N=2048")
