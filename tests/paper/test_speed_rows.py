"""What is read from the records of timings: ratios within repetitions, growth, crossovers, and evidence from them."""

import math

import pytest
import torch

from paper import experiments
from paper.claims import Verdict
from paper.claims.evidence import linear_attention as evidence
from paper.experiments.speed import attention as speed
from paper.experiments.speed import attention_analysis as rows
from paper.experiments.speed import (
    decoding,
    inference,
    language_models,
    projections,
    recomputation,
    training_step,
    value_gradient,
    whole_models,
)


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
    assert found["sdpa"]["ratio"] == (1, 1, 1)
    linear = found["linear causal"]
    assert linear["ratio"] == (0.1875, 0.25, 0.375)
    assert linear["ratio_alike"] == (0.5, 0.5, 0.5)
    assert (linear["seconds"][1], linear["repetitions"]) == (1.0, 3)
    assert (linear["peak_bytes"], linear["bytes_ratio"]) == (20, 2)
    assert found["sdpa causal"]["bytes_ratio"] is None


def test_the_flops_expected():
    """A head of linear attention, whose values have a column of ones beside them, takes six products of 2 N K (K + 1);
    of softmax attention, seven of 2 N^2 K. A compiled twin takes as many FLOPs as its arm."""
    arms = ["sdpa", "linear", "linear recurrent", "linear compiled"]
    row = rows.rows([record(4096, {arm: [1.0] for arm in arms})])
    K, N = 64, 4096
    expected = 12 * (K + 1) / (14 * N)
    assert [r["flops_ratio"] for r in row] == pytest.approx([1, expected, expected, expected])


def test_mechanisms_beside_the_attention_that_sees_the_same_keys():
    """Causal attention takes about half of the FLOPs. An arm whose own yardstick failed is not compared."""
    seconds = {"sdpa": [4.0], "sdpa causal": [2.0], "window": [1.0], "window causal": [1.0]}
    both = rows.beside_alike([record(1024, seconds, arms="patterns")], "patterns")
    assert [(row["arm"], row["ratio_alike"][1]) for row in both] == [("window", 0.25), ("window causal", 0.5)]
    causal, yardstick = (rows.rows([record(1024, {arm: [1.0]})])[0] for arm in ("sdpa causal", "sdpa"))
    for row, base in zip(both, (yardstick, causal), strict=True):
        flops = {arm: rows._flops(row, arm) for arm in (row["arm"], base["arm"])}
        assert row["flops_alike"] == pytest.approx(flops[row["arm"]] / flops[base["arm"]])
    alone = {arm: values for arm, values in seconds.items() if arm != "sdpa causal"}
    found = rows.beside_alike([record(1024, alone, arms="patterns")], "patterns")
    assert [row["arm"] for row in found] == ["window"]
    assert rows.beside_alike([], "patterns") == []


def test_the_cells_of_a_page():
    """A median with its quartiles; no memory where none was recorded."""
    seconds = {"sdpa": [4.0, 2.0, 8.0], "window": [1.0, 1.0, 1.0]}
    kept = record(1024, seconds, arms="patterns", memory={"sdpa": 10, "window": 20})
    for measured, memory in ((kept, "2.00"), (record(1024, seconds, arms="patterns"), None)):
        (row,) = found = rows.beside_alike([measured], "patterns")
        expected = ("`cpu-a`", 1024, "window", "0.250 (0.188 to 0.375)", f"{row['flops_alike']:.3f}", memory)
        assert rows.cells(found) == [expected]
        assert len(rows.HEADERS) == len(expected)


def test_an_exponent_is_that_of_a_power_of_two_positive_values():
    for power in (0.5, 1, 2):
        assert rows.exponent({N: 3 * N**power for N in (512, 1024, 4096)}) == pytest.approx(power)
    for points in ({512: 1.0}, {}, {512: 1.0, 1024: 0.0}):
        with pytest.raises(ValueError, match="points: expected positive values at two sizes or more"):
            rows.exponent(points)


def test_growth_is_fitted_over_the_given_lengths():
    found = {row["arm"]: row for row in rows.growth(powers(linear=1))}
    assert found["linear"]["time"] == pytest.approx(1)
    assert found["sdpa"]["time"] == found["sdpa"]["memory"] == pytest.approx(2)
    assert found["linear"]["lengths"] == [2048, 4096, 8192, 16384]
    assert rows.growth(powers(linear=1), (8192, 16384)) == []  # two lengths are too few
    assert rows.growth([{**r, "facts": {}} for r in powers(linear=1)])[0]["memory"] is None


@pytest.mark.parametrize(
    ("ratios", "crossing"),
    [
        ({512: 1000 / 512, 1024: 1000 / 1024, 2048: 0.4}, (1000, 1000)),  # ratios of 1000 / N
        ({512: 0.9, 1024: 0.5}, (0, 512)),
        ({512: 3.0, 1024: 1.0}, (1024, math.inf)),
        ({512: 0.9, 1024: 1.0, 2048: 0.5}, (1024, 1024)),  # faster for good
    ],
)
def test_a_crossover_is_where_a_mechanism_gets_faster_for_good(ratios, crossing):
    assert rows.crossover(ratios) == pytest.approx(crossing)


def test_a_crossover_needs_ratios():
    with pytest.raises(ValueError, match="ratios: expected at least one length"):
        rows.crossover({})


def test_crossovers_of_the_records_and_the_table():
    (row,) = rows.crossovers(powers(linear=1))  # N against N^2 / 4096
    assert row["yardstick"] == pytest.approx((4096, 4096))
    assert rows.in_words(row["yardstick"]) == "from about 4,100 on"
    assert rows.in_words((0, 512)) == "at every length measured, from 512 on"
    assert rows.in_words((1024, math.inf)) == "at no length measured, up to 1,024"
    shown = rows.table(powers(linear=1))
    assert "\ncpu-a (x, threads 1, torch 2)\narms" in shown
    assert "main float32 linear: N^1.00 in time, N^1.00 in memory, N = 2048 to 16384" in shown
    assert "main float32 linear: faster than sdpa from about 4,100 on" in shown
    assert "1.0000 [1.0000, 1.0000]" in shown


def test_without_a_yardstick_there_is_no_ratio():
    """There is no crossover either, but growth is still fitted."""
    alone = [record(N, {"delta causal": [1.0] * 3}, arms="delta alone") for N in (2048, 4096, 8192)]
    (row,) = rows.rows(alone[:1])
    assert row["ratio"] is row["ratio_alike"] is row["bytes_ratio"] is None
    assert rows.crossovers(alone) == []
    assert len(rows.growth(alone)) == 1
    assert rows.line(alone[0]) == "delta causal -"


def test_doubling_the_length():
    found = {(row["arm"], row["N"]): row["factor"] for row in rows.doubling(powers(linear=1))}
    expected = {"sdpa": 4, "linear": 2}
    assert found == {(arm, N): expected[arm] for arm in expected for N in (1024, 2048, 4096, 8192)}


def test_series_keep_apart_what_was_measured_differently():
    seconds = {"sdpa": [1.0], "linear causal": [1.0]}
    different = [{"arms": "recurrent"}, {"dtype": "float32", "compiled": True}, {}]
    found = rows.series(rows.rows([record(N, seconds, **case) for N in (1024, 512) for case in different]))
    assert len(found) == 6
    assert all([row["N"] for row in group] == [512, 1024] for group in found.values())


def test_curves_are_of_one_set_and_one_precision():
    seconds = {"sdpa": [1.0], "linear causal": [1.0]}
    found = [record(N, seconds, arms=name) for N in (1024, 512) for name in ("main", "recurrent")]
    found += [record(N, seconds, compiled=True) for N in (256, 512)]
    found += [
        record(N, seconds, device="cuda", dtype=dtype) | {"device": "gpu"}
        for N, dtype in ((4096, "bfloat16"), (2048, "float32"))
    ]
    lengths = {
        device: {arm: [row["N"] for row in group] for arm, group in curves.items()}
        for device, curves in rows.curves(found).items()
    }
    assert lengths == {
        "cpu-a": {"sdpa": [512, 1024], "linear causal": [512, 1024]},
        "gpu": {"sdpa": [4096], "linear causal": [4096]},
    }
    assert rows.curves(found, "family") == {}


@pytest.mark.parametrize(("slow", "verdict"), [(3.0, Verdict.CONFIRMED), (0.5, Verdict.REFUTED)])
def test_evidence_of_a_recurrence_that_is_slower_somewhere(stored, slow, verdict):
    def at(N, seconds):
        arms = {"sdpa": 1.0, "sdpa causal": 1.0, "linear causal": 0.1, "linear recurrent": seconds}
        return record(N, {arm: [value] * 3 for arm, value in arms.items()}, arms="recurrent")

    stored(attention_speed=[at(512, slow), at(1024, 0.5)])
    finding = evidence.without_matrix_products()
    assert finding.verdict == verdict
    assert f"$N = 512$ on cpu-a: {slow:g}" in finding.ours.replace("3.0", "3")
    assert f"{slow / 0.1:.0f} times as long on cpu-a" in finding.ours
    stored()
    assert evidence.without_matrix_products().verdict == Verdict.UNTESTABLE


# -------------------------------------------------------------------------------------------------------- steps


def test_speedups_are_medians_of_ratios_within_repetitions():
    times = {"learned": [3.0, 8.0, 5.0], "frozen": [2.0, 4.0, 5.0], "stopped": [1.0, 1.0, 1.0]}
    phases = {arm: {"forward": v, "backward": [0.0] * 3, "optimiser": [1.0] * 3} for arm, v in times.items()}
    measured = made(training_step.case(), phases | {"frozen-compiled": phases["frozen"]})
    frozen, stopped = experiments.speedups([measured])  # a compiled arm without a compiled standard has no row
    assert frozen["speedup"] == (1.25, 1.5, 1.75)
    assert frozen["speedup_with_optimiser"][1] == pytest.approx(4 / 3)
    assert stopped["speedup"] == (4.0, 5.0, 6.5)
    assert "layer    512   768    1  float32" in training_step.table([measured])
    assert "1.500 [1.250, 1.750]" in training_step.table([measured])
    measured["provenance"]["threads"] = 2  # the process's time then adds up threads
    assert experiments.speedups([measured])[0]["speedup"] == (1.0, 1.0, 1.0)


def test_rows_of_whole_models():
    steps = {"learned": (4.0, 2.0), "frozen": (2.0, 1.0), "stopped": (1.0, 1.0)}
    times = {
        arm: {"forward": [s / 2] * 3, "backward": [s / 2] * 3, "optimiser": [optimiser] * 3}
        for arm, (s, optimiser) in steps.items()
    }
    facts = {"learned": {"saved_bytes": 7}, whole_models.MATMUL: {"product_s": [0.5] * 3}}
    case = whole_models.case("BERT-base") | {"edge": 10}
    found = {row["variant"]: row for row in whole_models.rows([made(case, times, facts, threads=2)])}
    assert found["frozen"]["speedup"] == (2.0, 2.0, 2.0)
    assert found["stopped"]["speedup_with_optimiser"] == (3.0, 3.0, 3.0)
    assert found["learned"]["seconds"] == (6.0, 6.0, 6.0)
    assert found["learned"]["saved_bytes"] == 7
    flops = whole_models.declared(case, "learned").step
    assert found["learned"]["rate"] == flops / 4
    assert found["learned"]["of_matmul"] == (flops / 4) / (2 * 10**3 / 0.5)
    assert found["stopped"]["bound"] > found["frozen"]["bound"] > found["learned"]["bound"] == 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_of_the_exchanged_pass(dtype):
    times = {"sdpa": {"forward": [1.0], "backward": [4.0]}, "exchanged": {"forward": [1.0], "backward": [1.0]}}
    measured = made(value_gradient.case(40, 128, dtype=dtype, causal=True), times)
    (row,) = value_gradient.rows([measured])
    assert (row["backward"][1], row["both"][1]) == (4.0, 2.5)
    # Five products of 64 columns against two of 64 columns and 16 bytes more.
    assert row["backward_bound"] == pytest.approx(5 / 2 * 64 / (64 + (4 if dtype == "float32" else 8)))
    assert 1 < row["both_bound"] < row["backward_bound"]
    assert value_gradient.label(row) == f"N=40 d=128 B=1 {dtype} causal"


def test_rows_of_recomputation():
    """An arm is compared with 'kept', or 'materialised' if it materialises; FLOPs only if a closed form has them."""
    case = recomputation.case(L=6)
    arms = recomputation.arms_of(case)
    assert set(arms) == {"kept", "materialised", "attention again", *(f"segments of {n}" for n in (1, 2, 3, 6))}
    times = {arm: {"forward": [1.0], "backward": [float(index)]} for index, arm in enumerate(arms)}
    facts = {arm: {"peak_bytes": 10 + index} for index, arm in enumerate(arms)}
    found = {row["arm"]: row for row in recomputation.rows([made(case, times, facts)])}
    assert found["kept"]["time"] == (1.0, 1.0, 1.0)
    again = found["attention again"]
    assert (again["like"], again["time"][1], again["bytes"]) == ("materialised", 7 / 6, 16 / 15)
    assert again["flops"] is None
    assert 1 < found["segments of 1"]["flops"] < found["segments of 6"]["flops"] < 4 / 3


def test_times_of_language_models_are_compared_within_repetitions():
    steps = {"learned": [1.0, 2.0], "frozen": [2.0, 3.0], "linear": [3.0, 3.0]}
    measured = made(language_models.case(), {arm: {"step": values} for arm, values in steps.items()})
    assert language_models.relative(measured) == {"learned": [1, 1], "frozen": [2, 1.5], "linear": [3, 1.5]}
    counts = {"learned": 100, "frozen": 150}
    assert language_models.relative(measured, counts) == {"learned": [1, 1], "frozen": [3, 2.25]}
    assert language_models.line(measured).startswith("learned 1500.0 ms a step; learned 1.00 times, linear 2.25 times")


def test_gains_are_medians_of_ratios_with_their_intervals():
    seconds = {"learned": [2.0] * 31, "frozen": [2 / (1 + i / 100) for i in range(31)], "learned-again": [2.0] * 31}
    case = training_step.case("layer", 8, 32, H=2, input_grad=False)
    measured = made(case, {arm: {"forward": values} for arm, values in seconds.items()})
    (row,) = experiments.gains([measured])
    assert row["frozen"] == pytest.approx((7, 15, 23))  # the 8th smallest and largest of 31 values
    assert row["control"] == (0, 0, 0)
    assert (row["N"], row["device"], row["repetitions"]) == (8, "cpu-a", 31)
    assert inference.line(measured) == "frozen +15.00 % [+7.00, +23.00], control +0.00 % [+0.00, +0.00]"


@pytest.mark.parametrize("n", [8, 31, 50, 61])
def test_the_interval_has_its_confidence_and_no_shorter_one_has(n):
    low, middle, high = inference.median_interval(list(range(1, n + 1)))
    assert low + high == n + 1 and middle == (n + 1) / 2
    ties = torch.arange(n + 1.0)
    pmf = torch.exp(torch.lgamma(torch.tensor(n + 1.0)) - torch.lgamma(ties + 1) - torch.lgamma(n - ties + 1)) / 2**n
    assert 2 * pmf[:low].sum() <= 0.01 < 2 * pmf[: low + 1].sum()


def test_too_few_repetitions_have_no_interval():
    with pytest.raises(ValueError, match=r"values: expected enough for a confidence of 0\.99, got 7"):
        inference.median_interval([1.0] * 7)


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
    assert decoding.line(measured) == "softmax +1.00, linear +0.00"
    assert "softmax                    2000000   8000000" in decoding.table([measured])


def projected(d=128, N=64, device="cpu-x", **seconds):
    """A record whose arms take the given seconds for a step, half of them forward, in three repetitions."""
    times = {arm: {"forward": [s / 2] * 3, "step": [s] * 3} for arm, s in seconds.items()}
    return made(projections.case(d, N=N), times, device=device, threads=2)


def test_ratios_of_projections():
    (one,) = projections.rows([projected(128, dense=3.0, structured=2.0, merged=1.5)])  # an arm of earlier records
    assert (one["step"], one["forward"]) == ((1.5, 1.5, 1.5), (1.5, 1.5, 1.5))
    assert (one["flops"], one["factors"]) == (128 / 24, (8, 16))


def test_as_many_rounds_as_are_enough():
    """One round is enough if the table's rows are heads."""
    for d, table in {128: (8, 16), 256: (16, 16), 384: (6, 64), 768: (12, 64), 4096: (64, 64)}.items():
        assert projections.factors(d, 64) == table
        assert projections.enough(d) == ("structured" if table[1] == 64 else "structured, 2 rounds")


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
