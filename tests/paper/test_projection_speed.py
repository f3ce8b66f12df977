"""The experiment projection-speed: arms that are what they stand for are timed in turn; what a reader gets."""

import pytest
import torch
from experiment_fakes import within

from ortho.cost.counting import count_forward
from ortho.cost.layers import projection_cost
from paper.experiments import measure
from paper.experiments.speed import projections as speed
from paper.experiments.speed.projections import ARMS, DENSE, MERGED, case

TINY = {"d": 128, "N": 8}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setitem(speed.REPETITIONS, "cpu", (2, 2))
    monkeypatch.setattr(speed, "CALL_SECONDS", 1e-6)


def made(d=128, N=64, device="cpu-x", **seconds):
    """A record whose arms take so many seconds a step, and half of it forward, in three repetitions."""
    repetitions = {arm: {"forward_s": [s / 2] * 3, "step_s": [s] * 3} for arm, s in seconds.items()}
    origin = {"threads": 2, "device_name": "x"}
    return {
        "configuration": case(d, N=N),
        "device": device,
        "repetitions": repetitions,
        "provenance": origin,
    }


def test_every_arm_runs_once_a_repetition():
    record = measure(speed.PROJECTION_SPEED, case(**TINY), "cpu", seconds=0.01)
    assert tuple(record["repetitions"]) == ARMS
    assert all(sorted(order) == sorted(ARMS) for order in record["facts"]["order"])
    for arm, quantities in record["repetitions"].items():
        assert set(quantities) == {f"{phase}{clock}_s" for phase in speed.PHASES for clock in ("", "_cpu")}
        assert all(count >= 1 for count in record["facts"][arm]["calls"].values())
    assert [row["arm"] for row in speed.rows([record])] == list(ARMS[1:])
    assert "structured: forward" in speed.line(record)
    assert "N=8: structured ones, forward and backward, are faster from d = " in speed.table([record])
    assert speed.work(case(**TINY)) > 0


def test_ratios():
    (one, merged) = speed.rows([made(128, dense=3.0, structured=2.0, merged=1.5)])
    assert (one["step"], one["forward"]) == ((1.5, 1.5, 1.5), (1.5, 1.5, 1.5))
    assert (one["flops"], one["factors"]) == (128 / 24, (8, 16))
    assert (merged["flops"], merged["factors"]) == (2, None)


def test_as_many_rounds_as_are_enough():
    """One where the table's rows are heads."""
    for d, table in {128: (8, 16), 256: (16, 16), 384: (6, 64), 768: (12, 64), 4096: (64, 64)}.items():
        assert speed.factors(d, 64) == table
        assert speed.enough(d) == ("structured" if table[1] == 64 else "structured, 2 rounds")


def test_crossover():
    """From the widest down to the first at which it is not faster, whatever narrower ones say."""
    times = {384: 0.5, 512: 1.5, 768: 1.0, 1024: 0.9, 2048: 0.8}
    records = [made(d, dense=1.0, structured=s) for d, s in times.items()]
    assert speed.crossover(records) == {("cpu-x", 64): 1024}
    slower = made(1024, N=32, dense=1.0, structured=2.0), made(512, N=32, dense=1.0, structured=0.5)
    other = made(512, device="gpu", dense=1.0, structured=0.5)
    assert speed.crossover([*records, *slower, other]) == {("cpu-x", 64): 1024, ("cpu-x", 32): None, ("gpu", 64): 512}
    narrow = made(256, dense=1.0, structured=0.5, **{"structured, 2 rounds": 1.2})
    assert speed.crossover([narrow]) == {("cpu-x", 64): None}
    assert speed.crossover([]) == {}
    with pytest.raises(ValueError, match="phase: expected"):
        speed.crossover(records, phase="backward")


@pytest.mark.parametrize("d", [128, 384, 768])
def test_flops_are_counted(d):
    sizes = case(d, N=4)
    x = torch.randn(1, 4, d, dtype=torch.float64)
    for arm, projection in speed.build(sizes).items():
        assert count_forward(projection, x)[0] == speed.flops(sizes, arm)
    kinds = {"frozen": DENSE} | ({"structured": "structured"} if speed.enough(d) == "structured" else {})
    for name, arm in kinds.items():
        assert projection_cost(name, 1, 4, d, d // 64, 64, d // 64).forward == speed.flops(sizes, arm)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("d", [192, 768])  # 3 x 64 and 12 x 64, whose transforms are rounded
def test_arms_are_their_matrices(d, dtype):
    outcome = speed.run(case(d, N=8, dtype=dtype), seconds=0.01)
    assert tuple(outcome["repetitions"]) == ARMS


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("part", ["forward", "backward"])
def test_an_arm_that_is_off_is_not_timed(monkeypatch, arm, part):
    right = speed.build

    def off(case):
        arms = right(case)
        if part == "forward":
            arms[arm].register_forward_hook(lambda _, args, out: (out[0], out[1] * 1.001))
        else:  # the values stay, a little gradient is lost
            arms[arm].register_forward_hook(lambda _, args, out: (0.999 * out[0] + 0.001 * out[0].detach(), out[1]))
        return arms

    monkeypatch.setattr(speed, "build", off)
    what = "k" if part == "forward" else "gradient of x"
    with pytest.raises(AssertionError, match=f"{arm}, {what}: expected a relative error of at most"):
        speed.run(case(**TINY), seconds=0.01)


def test_the_sources_are_all_that_a_timed_call_runs():
    operands = speed.draw(case(**TINY), 8)
    for projection in speed.build(case(**TINY)).values():
        passes = speed._passes(projection.float(), *operands)
        with within(speed.PROJECTION_SPEED):
            speed._timed(passes, dict.fromkeys(passes, 1), cuda=False)


def test_cases():
    for device in speed.RATES:
        found = speed.cases(device)
        assert len({speed.label(one) for one in found}) == len(found)
        assert {one["B"] * one["N"] for one in found} == ({32768} if device == "cuda" else {2048, 512})
        assert all(speed.flops(one, MERGED) * 2 == speed.flops(one, DENSE) for one in found)


@pytest.mark.bad_input
def test_errors():
    with pytest.raises(ValueError, match="d: expected a multiple of 64, the width of a head, got 100"):
        case(100)
    with pytest.raises(ValueError, match="N: expected an integer of at least 1, got 0"):
        case(N=0)
    with pytest.raises(ValueError, match="device: expected"):
        case(device="tpu")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_case_runs_on_cuda():
    record = measure(speed.PROJECTION_SPEED, case(device="cuda", dtype="bfloat16", **TINY), "cuda", seconds=0.1)
    assert tuple(record["repetitions"]) == ARMS
