"""What is read from the records of timings: ratios within repetitions, growth, crossovers, and evidence from them."""

import math

import pytest

from paper import experiments
from paper.experiments.speed import attention as speed
from paper.experiments.speed import attention_analysis as rows
from paper.experiments.speed import decoding, language_models, projections, training_step, value_gradient


def made(case, times, facts=None, *, device="cpu-a", threads=1):
    """A record: arm -> phase -> seconds, by both clocks; the wall clock counts only on several threads."""
    both = {
        arm: {f"{phase}_cpu_s": values for phase, values in phases.items()}
        | {f"{phase}_s": values if threads > 1 else [9.0] * len(values) for phase, values in phases.items()}
        for arm, phases in times.items()
    }
    return {"device": device, "configuration": case, "repetitions": both, "facts": facts or {}, "failures": {}} | {
        "provenance": {"threads": threads, "device_name": "x", "torch": "2"},
    }


def record(N, seconds, *, memory=None, arms="main", **case):
    """A record of attention whose arms take the list `seconds[arm]` forward, and no time backward."""
    times = {arm: {"forward": values, "backward": [0.0] * len(values)} for arm, values in seconds.items()}
    facts = {arm: {"peak_bytes": size, "calls": 1} for arm, size in (memory or {}).items()}
    return made(speed.case(N, arms, **case), times, facts)


def powers(**exponents):
    """Records of N = 1024 to 16384: an arm takes N^exponent of time and memory, the yardstick takes N^2 / 4096."""
    found = []
    for N in (16384, 1024, 2048, 8192, 4096):
        values = {"sdpa": N**2 / 4096} | {arm.replace("_", " "): N**power for arm, power in exponents.items()}
        found.append(record(N, {arm: [value] * 3 for arm, value in values.items()}, memory=values))
    return found


# ------------------------------------------------------------------------------------------------ attention alone


def test_ratios_are_medians_within_repetitions():
    seconds = {"sdpa": [4.0, 2.0, 8.0], "sdpa causal": [2.0, 2.0, 2.0], "linear causal": [1.0, 1.0, 1.0]}
    found = {row["arm"]: row for row in rows.rows([record(512, seconds, memory={"sdpa": 10, "linear causal": 20})])}
    linear = found["linear causal"]
    assert linear["ratio_alike"] == (0.5, 0.5, 0.5)
    assert linear["seconds"][1] == 1.0
    assert (linear["peak_bytes"], linear["bytes_ratio"]) == (20, 2)
    assert found["sdpa causal"]["bytes_ratio"] is None


@pytest.mark.parametrize(
    ("ratios", "crossing", "words"),
    [
        ({512: 1.9, 1024: 0.9, 2048: 0.4}, (512, 1024), "from a length between 512 and 1,024 on"),
        ({512: 0.9, 1024: 0.5}, (0, 512), "at every length measured, from 512 on"),
        ({512: 3.0, 1024: 1.0}, (1024, math.inf), "at no length measured, up to 1,024"),
        ({512: 0.9, 1024: 1.0, 2048: 0.5}, (1024, 2048), "from a length between 1,024 and 2,048 on"),  # for good
    ],
)
def test_a_crossover_is_where_a_mechanism_gets_faster_for_good(ratios, crossing, words):
    assert rows.crossover(ratios) == crossing
    assert rows.in_words(crossing) == words


def test_crossovers_of_the_records():
    (row,) = rows.crossovers(powers(linear=1))  # N against N^2 / 4096
    assert row["alike"] == (4096, 8192)


# -------------------------------------------------------------------------------------------------------- steps


def test_speedups_are_medians_of_ratios_within_repetitions():
    times = {"learned": [3.0, 8.0, 5.0], "frozen": [2.0, 4.0, 5.0], "stopped": [1.0, 1.0, 1.0]}
    phases = {arm: {"forward": v, "backward": [0.0] * 3, "optimiser": [1.0] * 3} for arm, v in times.items()}
    measured = made(training_step.case(), phases)
    frozen, stopped = experiments.speedups([measured])
    assert frozen["speedup"] == (1.25, 1.5, 1.75)
    assert frozen["speedup_with_optimiser"][1] == pytest.approx(4 / 3)
    assert stopped["speedup"] == (4.0, 5.0, 6.5)
    measured["provenance"]["threads"] = 2  # the process's time then adds up threads
    assert experiments.speedups([measured])[0]["speedup"] == (1.0, 1.0, 1.0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_of_the_exchanged_pass(dtype):
    times = {"sdpa": {"forward": [1.0], "backward": [4.0]}, "exchanged": {"forward": [1.0], "backward": [1.0]}}
    measured = made(value_gradient.case(40, 128, dtype=dtype, causal=True), times)
    (row,) = value_gradient.rows([measured])
    assert (row["backward"][1], row["both"][1]) == (4.0, 2.5)
    # Five products of 64 columns against two of 64 columns and 16 bytes more.
    assert row["backward_bound"] == pytest.approx(5 / 2 * 64 / (64 + (4 if dtype == "float32" else 8)))
    assert 1 < row["both_bound"] < row["backward_bound"]


def test_times_of_language_models_are_compared_within_repetitions():
    steps = {"learned": [1.0, 2.0], "frozen": [2.0, 3.0], "linear": [3.0, 3.0]}
    measured = made(language_models.case(), {arm: {"step": values} for arm, values in steps.items()})
    assert language_models.relative(measured) == {"learned": [1, 1], "frozen": [2, 1.5], "linear": [3, 1.5]}
    counts = {"learned": 100, "frozen": 150}
    assert language_models.relative(measured, counts) == {"learned": [1, 1], "frozen": [3, 2.25]}


# ------------------------------------------------------------------------------------- decoding and projections


def test_rows_and_slopes_of_decoding():
    steps = {"softmax 1024": [1.0, 2.0, 4.0], "softmax 4096": [4.0, 8.0, 16.0], "linear 1024": [0.5, 1.0, 2.0]}
    steps["linear 4096"] = steps["linear 1024"]
    held = {"softmax 1024": 100, "softmax 4096": 400, "linear 1024": 7, "linear 4096": 7}
    times = {arm: {"step": values} for arm, values in steps.items()}
    measured = made(decoding.case("recurrent"), times, {arm: {"held_bytes": size} for arm, size in held.items()})
    found = {(row["name"], row["context"]): row for row in decoding.rows([measured])}
    assert found["softmax", 4096]["ratio"] == (4.0, 4.0, 4.0)
    assert found["linear", 4096]["ratio"] == (0.5, 0.5, 0.5)
    assert found["linear", 1024]["tokens_per_s"] == 1.0
    assert found["linear", 1024]["held_bytes"] == 7
    growth = {row["name"]: row for row in decoding.slopes([measured])}
    assert all(math.isclose(x, 1.0) for x in growth["softmax"]["time"])
    assert math.isclose(growth["softmax"]["bytes"], 1.0)
    assert growth["linear"]["time"] == (0.0, 0.0, 0.0)
    assert growth["linear"]["bytes"] == 0.0


def projected(d=128, N=64, device="cpu-x", **seconds):
    """A record whose arms take the given seconds for a step, half of them forward, in three repetitions."""
    times = {arm: {"forward": [s / 2] * 3, "step": [s] * 3} for arm, s in seconds.items()}
    return made(projections.case(d, N=N), times, device=device, threads=2)


def test_the_crossover_of_structured_projections():
    """Widths are read from the widest down to the first that is not faster, whatever narrower ones say."""
    times = {384: 0.5, 512: 1.5, 768: 1.0, 1024: 0.9, 2048: 0.8}
    found = [projected(d, dense=1.0, structured=s) for d, s in times.items()]
    assert projections.crossover(found) == {("cpu-x", 64): 1024}
    slower = projected(1024, N=32, dense=1.0, structured=2.0), projected(512, N=32, dense=1.0, structured=0.5)
    other = projected(512, device="gpu", dense=1.0, structured=0.5)
    expected = {("cpu-x", 64): 1024, ("cpu-x", 32): None, ("gpu", 64): 512}
    assert projections.crossover([*found, *slower, other]) == expected
    narrow = projected(256, dense=1.0, structured=0.5, **{"structured, 2 rounds": 1.2})
    assert projections.crossover([narrow]) == {("cpu-x", 64): None}
    assert projections.crossover([]) == {}
    with pytest.raises(ValueError, match="phase: expected"):
        projections.crossover(found, phase="backward")
