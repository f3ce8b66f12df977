"""The experiment decode-speed: right before it is timed, in turn, what cannot be read is recorded; what readers get."""

import math

import pytest
import torch
from experiment_fakes import within

from ortho.attention.linear.feature_maps import HORIZON
from paper.experiments import measure
from paper.experiments.engine import benchmark as stopped
from paper.experiments.speed import decoding as speed
from paper.experiments.speed import decoding_analysis as rows

TINY = {"H": 2, "K": 8, "N": 1024}


def measured(family, **kwargs):
    return measure(speed.DECODE_SPEED, speed.case(family, **TINY | kwargs), "cpu", seconds=0.01)


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setitem(speed.CALL_SECONDS, "cpu", 1e-3)
    monkeypatch.setitem(speed.REPETITIONS, "cpu", (2, 2))


@pytest.mark.parametrize("family", speed.FAMILIES)
def test_every_arm_runs_once_a_repetition(family):
    record = measured(family)
    arms = speed.arms_of(record["configuration"])
    assert speed.YARDSTICK in arms
    assert not record["failures"]
    assert set(record["repetitions"]) == set(arms)
    for order in record["facts"]["order"]:
        assert sorted(order) == sorted(arms)
    for arm in arms:
        name, context = speed.parts_of(arm)  # its state holds the context, or memory for what is timed besides
        held = {speed.declared(record["configuration"], f"{name} {n - 1}").nbytes for n in (1024, 1024 + 32)}
        assert context == 1024
        assert record["facts"][arm]["held_bytes"] in held
        assert {len(values) for values in record["repetitions"][arm].values()} == {2}
    assert all(f"{name} " in rows.table([record]) for name in {speed.parts_of(arm)[0] for arm in arms})


@pytest.mark.parametrize("device", speed.CONTEXTS)
def test_the_yardstick_is_in_every_case(device):
    for case in speed.DECODE_SPEED.cases(device):
        assert speed.YARDSTICK in speed.arms_of(case)
        assert speed.work(case) > 0


def test_a_wrong_cache_is_not_timed(monkeypatch):
    """A cache that forgets one token of 320 is off by some 1/320 of a softmax's output, 1e4 times the bound."""
    right = speed.new_cache

    def forgetful(name, capacity):
        cache = right(name, capacity)
        attend = cache.attend

        def late(**tokens):
            if cache.length == 0:
                attend(**{key: 0 * x[:, :, :1] for key, x in tokens.items()})
            return attend(**tokens)

        cache.attend = late
        cache.capacity += 1
        return cache

    monkeypatch.setattr(speed, "new_cache", forgetful)
    with pytest.raises(AssertionError, match="linear: expected a relative error of at most"):
        speed.check(speed.case("recurrent", **TINY), "linear")


def test_what_cannot_be_read_is_a_failure(monkeypatch):
    """Beyond cosFormer's horizon; the other arms are timed."""
    monkeypatch.setitem(speed.CONTEXTS, "cpu", (1024, 2 * HORIZON))
    monkeypatch.setitem(speed.READ_FLOPS, "cpu", 2e9)
    record = measured("recurrent", N=2 * HORIZON)
    assert list(record["failures"]) == [f"cosformer {2 * HORIZON}"]
    assert "horizon: expected positions within" in record["failures"][f"cosformer {2 * HORIZON}"]
    assert f"linear {2 * HORIZON}" in record["repetitions"]


def test_another_error_is_the_case_s(monkeypatch):
    def refuses(*_):
        raise ValueError("k: expected something else")

    monkeypatch.setattr(speed, "_read", refuses)
    with pytest.raises(ValueError, match="k: expected something else"):
        speed.run(speed.case("recurrent", **TINY), seconds=0.01)


def test_what_is_too_long_to_read_is_left_out():
    """But softmax attention, with which the others are compared, at every context."""
    case = speed.case("softmax")
    arms = speed.arms_of(case)
    assert all(f"softmax {context}" in arms for context in speed.CONTEXTS["cpu"])
    assert "path 65536" not in arms
    assert "path 4096" in arms


def test_a_timing_is_the_mean_of_its_tokens_and_leaves_the_cache_as_it_was(monkeypatch):
    clock = iter(range(1000))
    monkeypatch.setattr(stopped.time, "perf_counter", lambda: float(next(clock)))
    monkeypatch.setattr(stopped.time, "process_time", lambda: 0.0)
    cache, tokens = speed._read(speed.case("recurrent", **TINY), "softmax", 20, 8)
    assert speed.timed(cache, tokens, 4) == {"step_s": 0.25, "step_cpu_s": 0.0}
    assert cache.length == 20


def record_of(steps, held):
    """A record with the given seconds of steps and bytes held, by arm."""
    return {
        "configuration": speed.case("recurrent"),
        "device": "cpu-test",
        "repetitions": {arm: {"step_s": values, "step_cpu_s": values} for arm, values in steps.items()},
        "facts": {arm: {"held_bytes": nbytes} for arm, nbytes in held.items()},
        "provenance": {"threads": 1, "device_name": "test"},
    }


def test_rows_and_slopes():
    steps = {"softmax 1024": [1.0, 2.0, 4.0], "softmax 4096": [4.0, 8.0, 16.0], "linear 1024": [0.5, 1.0, 2.0]}
    steps["linear 4096"] = steps["linear 1024"]
    held = {"softmax 1024": 100, "softmax 4096": 400, "linear 1024": 7, "linear 4096": 7}
    record = record_of(steps, held)
    found = {(row["name"], row["context"]): row for row in rows.rows([record])}
    assert found["softmax", 4096]["ratio"] == (4.0, 4.0, 4.0)
    assert found["linear", 4096]["ratio"] == (0.5, 0.5, 0.5)
    assert found["linear", 1024]["tokens_per_s"] == 1.0
    assert found["linear", 1024]["held_bytes"] == 7
    growth = {row["name"]: row for row in rows.slopes([record])}
    assert all(math.isclose(x, 1.0) for x in growth["softmax"]["time"])
    assert math.isclose(growth["softmax"]["bytes"], 1.0)
    assert growth["linear"]["time"] == (0.0, 0.0, 0.0)
    assert growth["linear"]["bytes"] == 0.0
    assert rows.line(record) == "softmax +1.00, linear +0.00"


def test_the_sources_are_all_that_a_timed_step_runs():
    for family in speed.FAMILIES:
        case = speed.case(family, **TINY)
        for name in {speed.parts_of(arm)[0] for arm in speed.arms_of(case)}:
            cache, tokens = speed._read(case, name, 300, 2)
            with within(speed.DECODE_SPEED):
                speed.timed(cache, tokens, 2)


def test_errors():
    with pytest.raises(ValueError, match="family: expected one of"):
        speed.case("conv")
    with pytest.raises(ValueError, match="B: expected an integer of at least 1"):
        speed.case("softmax", B=0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("family", speed.FAMILIES)
def test_a_case_runs_on_cuda(family):
    case = speed.case(family, device="cuda", dtype="bfloat16", **TINY)
    record = measure(speed.DECODE_SPEED, case, "cuda", seconds=0.05)
    assert not record["failures"]
    assert all(values["step_s"] for values in record["repetitions"].values())
