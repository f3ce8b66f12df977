"""The evidence on the delta rule: what it computes, and what it would say of other records."""

import pytest
import torch

from paper.claims import Verdict
from paper.claims.evidence import delta_rule as s3


def test_the_printed_formula_by_hand():
    """A key of length 1 written twice, and one of squared length 2 whose error changes its sign."""
    k = torch.tensor([[1.0, 0.0], [1.0, 0.0], [1.0, 1.0]]).double()
    v = torch.tensor([[3.0], [5.0], [7.0]]).double()
    assert s3.as_printed(k, k, v).flatten().tolist() == [3, 5, 9]  # 5 before the last write, and 2 (7 - 5) more


@pytest.mark.parametrize("square", [0.25, 1.0, 1.75, 2.0, 2.5])
def test_each_write_leaves_the_same_share(square):
    for writes in (1, 3, 10):
        assert s3.left_after(square, writes) == pytest.approx(abs(1 - square) ** writes, abs=1e-12)


def test_a_wrong_formula_would_be_seen(monkeypatch):
    assert s3.unlike_printed() < s3.EXACT_STEPS
    printed = s3.as_printed
    monkeypatch.setattr(s3, "as_printed", lambda q, k, v: printed(q, 1.001 * k, v))
    assert s3.unlike_printed() > 1e-5


def test_a_wrong_chunk_would_be_seen(monkeypatch):
    assert s3.unlike_recurrence() < s3.EXACT_STEPS
    fast = s3.delta_rule
    monkeypatch.setattr(s3, "delta_rule", lambda *x, chunk, **options: fast(*x, chunk=chunk, **options) * (1 + 1e-9))
    assert s3.unlike_recurrence() > 100 * s3.EXACT_STEPS


def test_an_operation_of_ones_own_would_be_counted(monkeypatch):
    assert s3.foreign_operations() == 0

    @torch.library.custom_op("ortho_tests::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    fast = s3.delta_rule

    def with_own(q, *others, **options):
        return fast(q, *others, **options) + twice(q.detach())

    monkeypatch.setattr(s3, "delta_rule", with_own)
    assert s3.foreign_operations() == 1


def _row(arm: str, N: int, ratio: float) -> dict:
    return {"arm": arm, "N": N, "ratio_alike": (ratio, ratio, ratio)}


@pytest.mark.parametrize(
    ("ratios", "verdict"),
    [
        ({}, Verdict.UNTESTABLE),
        ({"one": 0.2, "other": 0.5}, Verdict.CONFIRMED),
        ({"one": 0.2, "other": 1.5}, Verdict.CONDITIONAL),
        ({"one": 1.2}, Verdict.REFUTED),
    ],
)
def test_times_are_those_of_the_greatest_length_on_each_device(monkeypatch, ratios, verdict):
    curves = {
        device: {"sdpa": [], "delta causal": [_row("delta causal", 4096, ratio), _row("delta causal", 512, 3.0)]}
        for device, ratio in ratios.items()
    }
    monkeypatch.setattr(s3.attention_rows, "curves", lambda records, arms: curves)
    found = s3.by_the_clock()
    assert found.verdict == verdict
    assert "512" not in found.ours
    assert ("'memory-speed' has no records of delta causal" in found.ours) == (not ratios)


def test_a_step_is_mostly_products():
    """The more so in wider heads: products grow with K^2, the rest with K and the chunk."""
    assert 50 < s3.product_share(K=32) < s3.product_share() < 100
