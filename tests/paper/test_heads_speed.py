"""The experiments heads-speed and exchanged-speed: arms that agree are timed in turn; what a reader gets."""

import pytest
import torch
from experiment_fakes import within

from ortho.cost.counting import count_step
from paper.experiments import measure
from paper.experiments.speed import heads as speed
from paper.experiments.speed import (
    heads_analysis as heads_rows,
)
from paper.experiments.speed import (
    training_step,
)
from paper.experiments.speed import (
    value_gradient as exchanged_speed,
)
from paper.experiments.speed.attention import timed

TINY = {"N": 24, "d": 64, "H": 4}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scope", ["layer", "block"])
def test_every_arm_runs_once_a_repetition(scope, causal):
    case = training_step.case(scope, causal=causal, **TINY)
    record = measure(speed.HEADS_SPEED, case, "cpu", seconds=0.01)
    assert set(record["repetitions"]) == {"learned", "stopped", "structured", "quarter", "one"}
    assert all(sorted(order) == sorted(speed.ARMS) for order in record["facts"]["order"])
    rows = {row["arm"]: row for row in heads_rows.speedups([record])}
    assert set(rows) == set(heads_rows.SPLITS)
    for row in rows.values():
        assert row["bound"] > 1
        assert row["share"] == row["speedup"][1] / row["bound"]
    assert rows["structured"]["bound"] > rows["stopped"]["bound"]
    for row in heads_rows.memory([record]):  # counted = closed form, of every arm
        assert row["saved_bytes"] == row["declared_saved_bytes"]
    assert all(f" {arm} " in heads_rows.table([record]) for arm in heads_rows.SPLITS)
    assert "structured " in heads_rows.line(record)


@pytest.mark.parametrize("arm", speed.ARMS)
@pytest.mark.parametrize("scope", ["layer", "block"])
def test_bounds_are_of_what_runs(scope, arm):
    case = training_step.case(scope, causal=True, **TINY)
    x = torch.zeros(1, case["N"], case["d"], requires_grad=True)
    counts, declared = count_step(speed.build(case, arm), x, is_causal=True), heads_rows.declared(case, arm)
    assert (counts.forward, counts.backward) == (declared.forward, declared.backward)
    assert (counts.trained, counts.frozen) == (declared.trained, declared.frozen)


@pytest.mark.parametrize("arm", ["stopped", "one"])
def test_an_arm_that_is_off_is_not_timed(monkeypatch, arm):
    right = torch.nn.functional.linear
    case = training_step.case(**TINY)
    module = speed.build(case, arm)
    monkeypatch.setattr(
        "ortho.layers.stop_gradient.linear" if arm == "stopped" else "ortho.layers.positional.linear",
        lambda x, w, *b: right(x, w, *b) * (1 + 1e-3 * (x.dtype == torch.float32)),
    )
    with pytest.raises(AssertionError, match=f"{arm}, .*expected a relative error of at most"):
        training_step.check(case, arm, module, heads_rows.declared)


def test_what_is_trained_is_checked():
    case = training_step.case(**TINY)
    with pytest.raises(AssertionError, match="one: expected .* trained weights, got"):
        training_step.check(case, "one", speed.build(case, "stopped"), heads_rows.declared)


def test_the_sources_are_all_that_a_timed_step_runs():
    case, x = training_step.case(causal=True, **TINY), torch.randn(1, 24, 64, requires_grad=True)
    for arm in speed.ARMS:
        module = speed.build(case, arm)
        with within(speed.HEADS_SPEED):
            module(x, is_causal=True).sum().backward()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_exchanged_pass_is_timed_beside_pytorchs_kernel(dtype):
    case = exchanged_speed.case(40, 128, dtype=dtype, causal=True)
    record = measure(exchanged_speed.EXCHANGED_SPEED, case, "cpu", seconds=0.01)
    (row,) = exchanged_speed.rows([record])
    assert set(record["repetitions"]) == {"sdpa", "exchanged"}
    assert row["backward"][0] <= row["backward"][1] <= row["backward"][2]
    # Five products of 64 columns against two of as many and 16 bytes more.
    assert row["backward_bound"] == pytest.approx(5 / 2 * 64 / (64 + (4 if dtype == "float32" else 8)))
    assert 1 < row["both_bound"] < row["backward_bound"]
    assert "N=40 " in exchanged_speed.table([record])
    assert "backward " in exchanged_speed.line(record)
    assert exchanged_speed.label(case) == f"N=40 d=128 B=1 {dtype} causal"


def test_an_exchanged_pass_that_is_off_is_not_timed(monkeypatch):
    right = exchanged_speed.value_gradient_attention
    monkeypatch.setattr(exchanged_speed, "value_gradient_attention", lambda *a, **k: right(*a, **k) * 1.001)
    with pytest.raises(AssertionError, match="exchanged, output: expected a relative error of at most"):
        exchanged_speed.run(exchanged_speed.case(24, 128), seconds=0.01)


def test_the_sources_are_all_that_a_timed_call_runs():
    case = exchanged_speed.case(24, 128, causal=True)
    operands, upstream = exchanged_speed.draw(case)
    for arm in exchanged_speed.ARMS:
        call = exchanged_speed.call(case, arm, operands)
        with within(exchanged_speed.EXCHANGED_SPEED):
            timed(*call, upstream, 1)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("causal", [False, True])
def test_cases_run_on_cuda(causal):
    kind = {"device": "cuda", "dtype": "bfloat16", "causal": causal}
    record = measure(speed.HEADS_SPEED, training_step.case(compiled=True, **kind, **TINY), "cuda")
    assert {f"{arm}-compiled" for arm in speed.ARMS} <= set(record["repetitions"]), record["failures"]
    measure(exchanged_speed.EXCHANGED_SPEED, exchanged_speed.case(256, 128, **kind), "cuda")
