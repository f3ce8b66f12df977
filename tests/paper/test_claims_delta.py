"""Evidence on the delta rule, its gates and positions: its figures against others found independently."""

import math

import pytest
import torch

from paper.claims import Verdict
from paper.claims.evidence import delta_rule as delta
from paper.claims.evidence import gates_and_losses as forms
from paper.claims.evidence import positions

CONFIRMED, REFUTED = Verdict.CONFIRMED, Verdict.REFUTED
CONDITIONAL, UNTESTABLE, INCONSISTENT = Verdict.CONDITIONAL, Verdict.UNTESTABLE, Verdict.INCONSISTENT

# --------------------------------------------------------------------------------------- The evidence on the delta rule


@pytest.mark.parametrize("square", [0.25, 1.0, 1.75, 2.0, 2.5])
def test_each_write_leaves_the_same_share(square):
    for writes in (1, 3, 10):
        assert delta.left_after(square, writes) == pytest.approx(abs(1 - square) ** writes, abs=1e-12)


def test_an_operation_of_ones_own_would_be_counted(monkeypatch):
    assert delta.foreign_operations() == 0

    @torch.library.custom_op("ortho_tests::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    fast = delta.delta_rule

    def with_own(q, *others, **options):
        return fast(q, *others, **options) + twice(q.detach())

    monkeypatch.setattr(delta, "delta_rule", with_own)
    assert delta.foreign_operations() == 1


def _row(arm: str, N: int, ratio: float) -> dict:
    return {"arm": arm, "N": N, "ratio_alike": (ratio, ratio, ratio)}


@pytest.mark.parametrize(
    ("ratios", "verdict"),
    [
        ({}, UNTESTABLE),
        ({"cpu-one": 0.2}, UNTESTABLE),  # says nothing of kernels in CUDA
        ({"cpu-one": 0.2, "gpu-one": 1.5, "gpu-other": 1.2}, CONFIRMED),
        ({"gpu-one": 0.2, "gpu-other": 1.5}, CONDITIONAL),
        ({"gpu-one": 0.2}, REFUTED),
    ],
)
def test_times_are_those_of_the_greatest_length_on_each_device(monkeypatch, ratios, verdict):
    curves = {
        device: {"sdpa": [], "delta causal": [_row("delta causal", 4096, ratio), _row("delta causal", 512, 3.0)]}
        for device, ratio in ratios.items()
    }
    monkeypatch.setattr(delta.attention_rows, "curves", lambda records, arms: curves)
    assert delta.by_the_clock() == {f"delta, $N = 4,096$ on {device}": ratio for device, ratio in ratios.items()}
    assert delta.without_kernels().verdict == delta.kernels().verdict == verdict
    assert ("Time over that of fused" in delta.matrix_form().ours) == bool(ratios)


def test_products_are_sorted_by_their_sides():
    """A product of 2 x 3 x 4, one with a vector, and two of 20 x 16 x 17."""
    with delta._Operations() as seen:
        torch.zeros(2, 3) @ torch.zeros(3, 4)
        torch.zeros(5, 3) @ torch.zeros(3)
        torch.zeros(2, 20, 16) @ torch.zeros(2, 16, 17)
    assert (seen.flops, seen.tiled) == (48 + 30 + 2 * 2 * 20 * 16 * 17, 2 * 2 * 20 * 16 * 17)


# ----------------------------------------------------------------------------------------------- Gains in the records


BEYOND = ("tokens 17 to 32", "tokens 33 to 64", "tokens 65 to 128")


def records(product, one, device="cpu-x"):
    """Records with given shares of right answers by arm, as the experiment stores them, the longest test first."""
    for arm, shares in (("delta-product", product), ("delta, beta to 2", one)):
        for seed, share in enumerate(shares, 1):
            answered = {**dict.fromkeys(reversed(BEYOND), share), "tokens 1 to 16": 1.0}
            tests = {t: {"correct_fraction": [x], "faultless_fraction": [x]} for t, x in answered.items()}
            case = {"arm": arm, "seed": seed, "rate": 1e-2}
            yield {"experiment": "permutations", "device": device, "configuration": case, "repetitions": tests}


HIGH, LOW = (0.9, 0.92, 0.94, 0.96, 0.98), (0.3, 0.31, 0.32, 0.33, 0.34)
ARMS = ("permutations", "delta-product", "delta, beta to 2", BEYOND)


def test_the_interval_of_a_gain_by_hand(stored):
    """With three tests, each end may leave out two of the 25 differences: 4 of 252 choices have fewer than three."""
    stored(permutations=list(records(HIGH, LOW)))
    gains = forms.gained(*ARMS)
    assert list(gains) == [f"{test} on cpu-x" for test in BEYOND]
    assert set(gains.values()) == {(58.0, 66.0)}  # of the differences 56, 57, 58, ... 66, 67, 68
    stored(permutations=[*records(HIGH, LOW), *records(HIGH, LOW, "cuda-y")])
    assert set(forms.gained(*ARMS).values()) == {(57.0, 67.0)}


def test_stability_can_be_helped_or_not(monkeypatch):
    """If one remedy helps, that part is conditional, else refuted; errors unlike the derived ones refute it, too."""
    monkeypatch.setattr(delta, "nearer", lambda: {"orthogonalised": 0})
    assert delta.unstable().verdict == REFUTED
    monkeypatch.setattr(delta, "smaller", lambda: {"started elsewhere": 1})
    assert delta.unstable().verdict == CONDITIONAL
    monkeypatch.setattr(delta, "unlike_derived", lambda: 0.7)
    assert delta.unstable().verdict == REFUTED


# ------------------------------------------------------------------------------------ The evidence on position DeltaNet


def test_the_bias_by_loops():
    gates = positions.gates(positions.normal(9, positions.INPUT, seed=2))
    u, u_keys, w, beta = (gates[name] for name in ("bias_queries", "bias_keys", "directions", "beta"))
    expected = torch.zeros(9, 9, dtype=torch.float64)
    for i in range(9):
        for j in range(i + 1):
            x = u[i]
            for t in range(i, j, -1):
                # It has length 1, up to the 1e-6 that is added to the squared length.
                direction = w[t] / torch.sqrt(w[t] @ w[t] + 1e-6)
                x = x - beta[t] * (direction @ x) * direction
            expected[i, j] = u_keys[j] @ x / math.sqrt(positions.WIDTH)
    torch.testing.assert_close(positions.bias(**gates), expected, atol=1e-13, rtol=1e-13)


def test_verdict_without_and_with_records(monkeypatch):
    """The measured gains add their verdict; without records the finding says that nothing was measured."""

    def found(gains):
        monkeypatch.setattr(forms, "gained", lambda *arms: gains)
        return positions.position_delta_net()

    without = found({})
    assert without.verdict == UNTESTABLE
    assert "'flip-flop' has no records of 5 runs each of 'position-delta' and 'softmax'" in without.ours
    better = found({"far": (30, 45)})
    assert better.verdict == CONDITIONAL  # by the positions that gates are made of
    assert "far: 30 to 45 % (confirmed)" in better.ours
    assert found({"far": (-5, 0)}).verdict == REFUTED
    assert found({"far": (-20, 90)}).verdict == UNTESTABLE
