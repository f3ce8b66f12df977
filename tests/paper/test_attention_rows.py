"""What is read from the records of attention-speed: ratios, growth, crossovers, and the evidence that rests on them."""

import math

import pytest

from paper import experiments
from paper.claims import Verdict
from paper.claims.evidence import linear_attention as evidence
from paper.experiments.speed import attention as speed
from paper.experiments.speed import attention_analysis as rows


def record(N, seconds, *, memory=None, arms="main", **case):
    """A record of arms that take `seconds[arm]`, a list, forward, and nothing backward."""
    times = {arm: {"forward_s": values, "backward_s": [0.0] * len(values)} for arm, values in seconds.items()}
    facts = {arm: {"peak_bytes": size, "calls": 1} for arm, size in (memory or {}).items()}
    return {"device": "cpu-a", "configuration": speed.case(N, arms, **case), "repetitions": times, "facts": facts} | {
        "provenance": {"threads": 1},
        "failures": {},
    }


def powers(**exponents):
    """Records of N = 1024 to 16384 in which an arm takes N^exponent of time and memory; the yardstick N^2 / 4096."""
    found = []
    for N in (16384, 1024, 2048, 8192, 4096):
        values = {"sdpa": N**2 / 4096} | {arm.replace("_", " "): N**power for arm, power in exponents.items()}
        found.append(record(N, {arm: [value] * 3 for arm, value in values.items()}, memory=values))
    return found


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
    """A head of linear attention: six products of 2 N K^2, and totals; of softmax attention: seven of 2 N^2 K."""
    row = rows.rows([record(4096, {"sdpa": [1.0], "linear": [1.0], "linear recurrent": [1.0]})])
    K, N = 64, 4096
    expected = (12 * K + 4) / (14 * N)
    assert [r["flops_ratio"] for r in row] == pytest.approx([1, expected, expected])


def test_mechanisms_beside_the_attention_that_sees_the_same_keys():
    """Causal attention has about half of the FLOPs; an arm whose own yardstick failed has nothing beside it."""
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


@pytest.mark.parametrize("power", [0.5, 1, 2])
def test_an_exponent_is_that_of_a_power(power):
    assert rows.exponent({N: 3 * N**power for N in (512, 1024, 4096)}) == pytest.approx(power)


@pytest.mark.parametrize("points", [{512: 1.0}, {}, {512: 1.0, 1024: 0.0}])
def test_an_exponent_needs_two_positive_values(points):
    with pytest.raises(ValueError, match="points: expected positive values at two sizes or more"):
        rows.exponent(points)


def test_growth_is_fitted_over_the_given_lengths():
    found = {row["arm"]: row for row in rows.growth(powers(linear=1))}
    assert found["linear"]["time"] == pytest.approx(1)
    assert found["sdpa"]["time"] == found["sdpa"]["memory"] == pytest.approx(2)
    assert found["linear"]["lengths"] == [2048, 4096, 8192, 16384]
    assert rows.growth(powers(linear=1), (8192, 16384)) == []  # of two lengths nothing is said
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


def test_crossovers_of_the_records():
    (row,) = rows.crossovers(powers(linear=1))  # N against N^2 / 4096
    assert row["yardstick"] == pytest.approx((4096, 4096))
    assert rows.in_words(row["yardstick"]) == "from about 4,100 on"
    assert rows.in_words((0, 512)) == "at every length measured, from 512 on"
    assert rows.in_words((1024, math.inf)) == "at no length measured, up to 1,024"


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
    other = record(4096, seconds, device="cuda", dtype="bfloat16") | {"device": "gpu"}
    found += [other, record(2048, seconds, device="cuda", dtype="float32") | {"device": "gpu"}]
    lengths = {
        device: {arm: [row["N"] for row in group] for arm, group in curves.items()}
        for device, curves in rows.curves(found).items()
    }
    assert lengths == {
        "cpu-a": {"sdpa": [512, 1024], "linear causal": [512, 1024]},
        "gpu": {"sdpa": [4096], "linear causal": [4096]},
    }
    assert rows.curves(found, "family") == {}


# ------------------------------------------------------------------------------------------------ evidence: S4.3a


@pytest.mark.parametrize(("slow", "verdict"), [(3.0, Verdict.CONFIRMED), (0.5, Verdict.REFUTED)])
def test_a_recurrence_that_is_slower_somewhere(monkeypatch, slow, verdict):
    def at(N, seconds, **kwargs):
        arms = {"sdpa": 1.0, "sdpa causal": 1.0, "linear causal": 0.1, "linear recurrent": seconds}
        return record(N, {arm: [value] * 3 for arm, value in arms.items()}, arms="recurrent", **kwargs)

    stored = [at(512, slow), at(1024, 0.5)]
    monkeypatch.setattr(experiments, "load", lambda name: stored if name == "attention-speed" else [])
    finding = evidence.without_matrix_products()
    assert finding.verdict == verdict
    assert f"$N = 512$ on cpu-a: {slow:g}" in finding.ours.replace("3.0", "3")
    assert f"{slow / 0.1:.0f} times as long on cpu-a" in finding.ours


def test_without_records_nothing_is_said_of_speed(monkeypatch):
    monkeypatch.setattr(experiments, "load", lambda _: [])
    assert evidence.without_matrix_products().verdict == Verdict.UNTESTABLE
