"""The experiment recomputation-speed: arms that agree are timed in turn; what a reader gets."""

import pytest
import torch
from experiment_fakes import within

from paper.experiments import measure
from paper.experiments.speed import recomputation as speed
from paper.experiments.speed.attention import timed

TINY = {"N": 8, "L": 2}


@pytest.fixture(autouse=True)
def narrow(monkeypatch):
    """Blocks of width 16 in place of 768."""
    right = speed.case
    monkeypatch.setattr(speed, "case", lambda **sizes: right(**sizes) | {"d": 16, "H": 2})
    monkeypatch.setitem(speed.REPETITIONS, "cpu", (2, 2))


def test_every_arm_runs_once_a_repetition():
    case = speed.case(N=40, L=6)
    record = measure(speed.RECOMPUTATION_SPEED, case, "cpu", seconds=0.01)
    arms = speed.arms_of(case)
    assert (
        set(record["repetitions"])
        == set(arms)
        == {"kept", "materialised", "attention again"} | {f"segments of {length}" for length in (1, 2, 3, 6)}
    )
    assert all(sorted(order) == sorted(arms) for order in record["facts"]["order"])
    found = {row["arm"]: row for row in speed.rows([record])}
    assert found["kept"]["time"] == (1.0, 1.0, 1.0)
    assert found["segments of 1"]["bytes"] < 1
    assert found["attention again"]["bytes"] < 1
    assert 1 < found["segments of 1"]["flops"] < found["segments of 6"]["flops"] < 4 / 3
    assert found["attention again"]["like"] == "materialised"
    assert all(f"  {arm} " in speed.table([record]) for arm in arms)
    assert "segments of 1 x" in speed.line(record)
    assert speed.work(case) > 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_arms_agree(dtype):
    outcome = speed.run(speed.case(dtype=dtype, **TINY), seconds=0.01)
    assert set(outcome["repetitions"]) == set(speed.arms_of(speed.case(**TINY)))


def test_an_arm_that_is_off_is_not_timed(monkeypatch):
    right = speed.build

    def off(case):
        modules = right(case)
        with torch.no_grad():
            modules[speed.SELECTIVE][0].attention.weight_v.mul_(1.01)
        return modules

    monkeypatch.setattr(speed, "build", off)
    with pytest.raises(AssertionError, match="attention again: expected a relative error of at most"):
        speed.run(speed.case(**TINY), seconds=0.01)


def test_the_sources_are_all_that_a_timed_step_runs():
    x = torch.randn(1, 8, 16, requires_grad=True)
    for module in speed.build(speed.case(**TINY)).values():
        operands = (x, *module.parameters())
        with within(speed.RECOMPUTATION_SPEED):
            timed(lambda x, *_, module=module: module(x), operands, torch.randn(1, 8, 16), 1)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_case_runs_on_cuda():
    record = measure(speed.RECOMPUTATION_SPEED, speed.case(device="cuda", dtype="bfloat16", **TINY), "cuda")
    assert all(record["facts"][arm]["peak_bytes"] > 0 for arm in record["repetitions"])
