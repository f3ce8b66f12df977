"""The experiment on trained heads: its runs are those of the learning experiments; what it measures and stores."""

import dataclasses

import pytest
import torch
from experiment_fakes import SLUG

from paper.experiments import EXPERIMENTS, load, measure
from paper.experiments.learning import positional_heads as heads
from paper.experiments.learning import study as learning
from paper.theory.positionalness import head_weights

TINY = {"steps": 2, "B": 2, "tested": 4, "inputs": 4}
ARMS = [(name, arm) for name, measured in heads.MEASURED.items() for arm in measured.arms]
EXPERIMENT = EXPERIMENTS["positional-heads"]


def built(name="recall", arm="softmax", count=5):
    """An untrained model, its weights on `count` inputs (count, H, N, N), and these inputs (count, N)."""
    case = heads.case(name, arm, 1)
    study, _, test = heads.MEASURED[name]
    model = learning.build(study, case, torch.Generator().manual_seed(0))
    (tokens,), _ = study.task.tests[test](count, torch.Generator().manual_seed(1))
    (block,) = heads.blocks(model)
    x = block.norm_attention(heads.embed(model, tokens))
    return model, head_weights(block.attention, x, is_causal=True), tokens


@pytest.mark.parametrize(("name", "arm"), [("recall", "softmax"), ("flip-flop", "fox")])
def test_the_models_are_those_of_the_learning_experiments(name, arm):
    study = heads.MEASURED[name].study
    case = heads.case(name, arm, 2, **TINY)
    ours, theirs = (
        heads.run(case),
        learning.run(study, {key: case[key] for key in case if key not in ("task", "inputs")}),
    )
    assert ours["facts"]["loss"] == theirs["facts"]["loss"]
    assert {part: seed for part, seed in ours["seeds"].items() if part != "heads"} == theirs["seeds"]


def test_the_sizes_are_those_of_the_learning_experiments():
    for case in heads.cases("cpu"):
        study, _, test = heads.MEASURED[case["task"]]
        theirs = learning.cases(study, "cpu")
        assert {key: value for key, value in case.items() if key not in ("task", "inputs")} in theirs
        assert test in study.task.tests
    assert len(heads.cases("cpu")) == len(learning.SEEDS) * len(ARMS)


def test_no_two_runs_share_inputs():
    seeds = [heads.run(heads.case(name, arm, seed, **TINY))["seeds"] for name, arm in ARMS[-2:] for seed in (1, 2)]
    every = [number for run in seeds for number in run.values()]
    assert len(set(every)) == len(every)


@pytest.mark.parametrize(("name", "arm"), [("recall", "softmax"), ("flip-flop", "rotary"), ("flip-flop", "path")])
def test_a_head_with_its_own_weights_changes_nothing(name, arm):
    """For the input that the weights come from, to the rounding of float32 results of size 1; other results change."""
    model, weights, tokens = built(name, arm)
    for which in (1, slice(None)):
        other = heads.replaced(model, 0, which, weights[0, which])
        assert (other(tokens) - model(tokens))[0].abs().max() < 1e-5
        assert (other(tokens) - model(tokens))[1:].abs().max() > 1e-2


def test_no_weights_are_no_values():
    """A head whose weights are 0 equals one whose values are 0; the model itself stays as it was."""
    model, weights, tokens = built()
    before = model(tokens)
    other = heads.replaced(model, 0, 2, torch.zeros_like(weights[0, 2]))
    width = model.blocks[0].attention.weight_v.shape[0] // 4
    with torch.no_grad():
        got = other(tokens)
        assert torch.equal(model(tokens), before)
        model.blocks[0].attention.weight_v[2 * width : 3 * width] = 0
        torch.testing.assert_close(got, model(tokens), rtol=0, atol=1e-5)


def test_the_means_are_of_other_inputs_than_the_answers(monkeypatch):
    drawn = []
    study, arms, name = heads.MEASURED["parity"]
    draw = study.task.tests[name]

    def watched(count, generator):
        drawn.append(draw(count, generator))
        return drawn[-1]

    task = dataclasses.replace(study.task, tests={**study.task.tests, name: watched})
    monkeypatch.setitem(heads.MEASURED, "parity", heads.Measured(dataclasses.replace(study, task=task), arms, name))
    heads.run(heads.case("parity", "softmax", 1, **TINY))
    (inputs,), (asked,) = (batch.inputs for batch in drawn[-2:])
    assert len(inputs) == len(asked) == 4
    assert not torch.equal(inputs, asked)


def test_peaks():
    n = 7
    even = torch.ones(n, n).tril() / torch.arange(1, n + 1)[:, None]
    assert heads.peak(even.expand(3, n, n)) == pytest.approx(0, abs=1e-7)
    assert heads.peak(torch.eye(n).expand(3, n, n)) == pytest.approx(1)
    halves = torch.diag(torch.ones(1)).expand(1, 2, 2).clone()
    halves[0, 1] = torch.tensor([0.75, 0.25])
    assert heads.peak(halves) == pytest.approx(2 * (0.75**2 + 0.25**2) - 1)


def test_what_is_not_the_models_is_not_stored(monkeypatch):
    study, arms, test = heads.MEASURED["parity"]
    wrong = dataclasses.replace(study.task, solve=lambda tokens: study.task.solve(tokens)[::-1])
    with monkeypatch.context() as patch:
        patch.setitem(heads.MEASURED, "parity", heads.Measured(dataclasses.replace(study, task=wrong), arms, test))
        with pytest.raises(AssertionError, match="parity, training: expected the answers"):
            heads.run(heads.case("parity", "softmax", 1, **TINY))
    monkeypatch.setattr(heads, "head_weights", lambda *x, **o: head_weights(*x, **o).roll(1, dims=1))
    with pytest.raises(AssertionError, match="weights: expected a relative error of at most"):
        heads.run(heads.case("recall", "softmax", 1, **TINY))


def test_rows():
    record = measure(EXPERIMENT, heads.case("flip-flop", "alibi", 1, **TINY), "cpu")
    of = [f"layer 1, head {head + 1}" for head in range(2)]
    assert list(record["repetitions"]) == [f"{stage}, {head}" for stage in heads.STAGES for head in of]
    for figures in record["repetitions"].values():
        assert set(figures) == {f"{name}_fraction" for name in heads.FIGURES}
        assert all(0 <= figures[f"{kind}_fraction"][0] <= 1 for kind in ("correct", "correct_means", "peak"))
    assert EXPERIMENT.line(record).count("±") == 2
    assert f"{'flip-flop':14}{'alibi':10}trained" in EXPERIMENT.show([record])
    rows = heads.rows([record])
    assert [(row["stage"], row["name"]) for row in rows] == [
        (stage, f"layer 1, head {head}") for stage in heads.STAGES for head in (1, 2)
    ]
    for row in rows:
        arm = f"{row['stage']}, {row['name']}"
        assert row["absolute_error"] == record["repetitions"][arm]["absolute_error_fraction"][0]
        assert (row["nearest"], row["seed"]) == (record["facts"]["nearest"][arm], 1)
    arms = heads.arms([record], SLUG)
    assert arms == {("flip-flop", "alibi"): {"untrained": rows[:2], "trained": rows[2:]}}
    assert heads.arms([record], "abacus") == {}
    shares = [{"absolute": share, "relative": 1 - share} for share in (0.1, 0.5, 0.6, 0.7)]
    assert (heads.positional(shares), heads.positional(shares, by="relative")) == (2, 1)


def test_the_stored_runs_are_those_of_the_learning_records():
    """Training losses of the same run on the same device agree, up to the rounding of other thread counts."""
    found = 0
    for record in load("positional-heads"):
        case = record["configuration"]
        for other in load(case["task"]):
            theirs = other["configuration"]
            if record["device"] == other["device"] and all(case[key] == theirs[key] for key in ("arm", "seed", "rate")):
                assert record["facts"]["loss"][0] == pytest.approx(other["facts"]["loss"][0], abs=1e-3)
                found += 1
    assert found == len(load("positional-heads"))
