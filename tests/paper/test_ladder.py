"""The ladder of budgets: runs at every budget and after a kill, and how records are judged."""

from functools import partial
from math import log

import numpy as np
import pytest
import torch
from experiment_fakes import made_up

from ortho import cost
from paper.experiments.learning import fitting, ladder, ladder_analysis, ladder_tables, rates
from paper.experiments.learning.ladder_analysis import judged
from paper.experiments.learning.ladder_arms import ARMS
from paper.experiments.statistics import student_below
from paper.tasks import counting, text
from paper.tasks.text import Parts
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


@pytest.fixture(scope="module")
def outcome():
    return ladder.run(tiny(seed=1))


def test_a_run(outcome):
    """Each budget is tested, as a model of its own steps; parts average to the whole; places and sorts too."""
    evaluations = outcome["facts"]["validation"]
    assert [(one["budget"], one["step"]) for one in evaluations] == [(1, 4), (2, 8)]
    for one in evaluations:
        parts = outcome["repetitions"][f"{one['budget']} x"]
        assert len(parts["test_bits"]) == len(parts["validation_bits"]) == 3
        assert abs(np.mean(parts["validation_bits"]) * log(2) - one["loss_nats"]) < 1e-5
        shares, bits = one["repeats_fraction"], one["repeats_bits"]
        assert abs(sum(shares.values()) - 1) < 1e-4
        whole = sum(shares[name] * bits[name] for name in shares)
        blocks = np.average(parts["test_bits"], weights=[3, 3, 2])
        assert abs(whole - blocks) < 1e-3 * blocks


def test_a_run_that_chooses_a_rate_leaves_the_test_alone():
    assert set(ladder.run(tiny(budget=1))["repetitions"]["1 x"]) == {"validation_bits"}


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


def test_a_difference():
    """By hand: means over seeds 0 and 2, over parts 1 and 1; the error of both, and Student's 6.314 of one degree."""
    ours = {1: np.array([1.0, 1.0]), 2: np.array([2.0, 4.0]), 3: np.array([9.0, 9.0])}
    theirs = {1: np.array([1.0, 1.0]), 2: np.array([1.0, 1.0])}
    found = ladder_analysis.tested(ours, theirs, 0.0)
    error = np.sqrt(2.0 / 2 + 0.5 / 2)
    assert (found.mean, found.seeds) == (1.0, (1, 2))
    np.testing.assert_allclose(found.interval, (1 - 6.3138 * error, 1 + 6.3138 * error), rtol=1e-4)
    assert abs(found.chance - student_below(1 / error, 1)) < 1e-12
    assert ladder_analysis.tested(ours, {3: ours[3]}, 0.0) is None


def record(arm, seed, bits, text="python", budget=16, **sizes):
    configuration = ladder.case(text, arm, seed=seed, budget=budget, **sizes)
    parts = {
        f"{n} x": {"test_bits": [bits + 0.001 * i for i in range(4)], "validation_bits": [bits]} for n in (1, budget)
    }
    evaluations = [{"budget": n, "step_s": 0.1 if arm == "learned" else 0.05} for n in (1, budget)]
    return made_up("ladder", configuration, parts, validation=evaluations)


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
    assert same["a: python, 16 x"][1]


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


@pytest.fixture
def short(monkeypatch):
    """A text of 4,000 bytes in place of the longer ones, in windows of 16."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(97, 101, (4000,), generator=generator, dtype=torch.uint8).numpy().tobytes()
    parts = Parts(drawn[:3000], drawn[3000:3500], drawn[3500:])
    monkeypatch.setitem(ladder.TEXTS, "python", lambda: parts)
    monkeypatch.setitem(ladder.SIZES, "python", {"B": 2, "N": 16, "tested": 20})
    monkeypatch.setattr(ladder_tables, "BASE", 5)
    return parts


def test_as_many_windows_as_a_run_draws(short):
    """The stored figures are those of tables counted on B windows for each step."""
    found = ladder_tables.run(ladder_tables.case("python", 4))
    task = text.language_modelling("python", "the next byte", short, 16)
    assert found["repetitions"]["tables"]["test_bits"] == pytest.approx(counting.task_bits(task, 40, 20, 5), abs=1e-6)
