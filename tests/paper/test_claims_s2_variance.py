"""S2.2.2d: each part of the evidence against a computation of its own, and a verdict that follows the figures."""

from math import cosh, exp, log

import pytest
import torch

from ortho.attention.linear.random_features import iid_features
from ortho.theory.estimates import SIGMAS
from ortho.theory.variance import row_estimates, sampled_variance
from paper.claims.evidence import random_features as claim
from paper.claims.verdicts import Verdict


def test_trigonometric_over_positive():
    """By hand at score 1; and drawn, with pairs of shorter vectors, for which the variances can be sampled."""
    by_hand = log(2 * (cosh(2) - 1) / (exp(6) - 1))
    assert claim.trigonometric_over_positive(1.0) == pytest.approx(by_hand)
    signs = [claim.trigonometric_over_positive(score) > 0 for score in claim.SCORES]
    assert signs == [True, True, False, False, False]


def test_trigonometric_over_positive_drawn(monkeypatch):
    monkeypatch.setattr(claim, "LENGTH", 0.25)
    x = torch.tensor([0.5, 0.0], dtype=torch.float64)
    y = torch.tensor([0.2, 0.21**0.5], dtype=torch.float64)  # length 1/2, product 0.1
    omega = iid_features(400_000, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = [sampled_variance(row_estimates(kind, x, y, omega)) for kind in ("trigonometric", "positive")]
    relative = sum((each.standard_error / each.value) ** 2 for each in found) ** 0.5
    off = log(2 * found[0].value / found[1].value) - claim.trigonometric_over_positive(0.1)
    assert abs(off) < SIGMAS * relative


def test_rows_off():
    """Positive weights never; of trigonometric ones none where scores are small, most of them where K is 64 and not."""
    for K in (16, 64):
        for spread in claim.SPREADS:
            assert claim.rows_off("positive", K, spread) == 0
        assert claim.rows_off("trigonometric", K, 0.25) == 0
    assert claim.rows_off("trigonometric", 64, 1.0) > 90


def test_gerf_gains():
    gains = claim.gerf_gains()
    assert len(gains) == len(claim.HEAD_WIDTHS) * len(claim.SQUARES)
    assert gains["(8, 8)"] == pytest.approx(4.26, abs=0.01)
    assert list(gains.values())[: len(claim.SQUARES)] == sorted(list(gains.values())[: len(claim.SQUARES)])


def test_sharp_gains():
    assert claim.sharp_gains("shifted", 64, 1.0) > 10 > claim.sharp_gains("isotropic", 64, 1.0)
    assert claim.sharp_gains("scaled", 64, 0.5) > 10 > claim.sharp_gains("scaled", 8, 0.5)


def test_the_verdict_names_regions():
    finding = claim.variances()
    assert finding.verdict == Verdict.CONDITIONAL
    for part in ("TrigRF", "FAVOR+,", "FAVOR++", "FAVOR#"):
        assert part in finding.ours


AS_CLAIMED = {
    "trigonometric_over_positive": lambda score: 0.1,
    "rows_off": lambda kind, K, spread: 2.0 if kind == "trigonometric" else 0.0,
    "gerf_gains": lambda: {"anywhere": 2.5},
    "sharp_gains": lambda data, K, spread: 10.1,
}


@pytest.mark.parametrize(
    ("name", "otherwise"),
    [
        ("", None),
        ("trigonometric_over_positive", lambda score: -0.1),
        ("rows_off", lambda kind, K, spread: 0.0),
        ("rows_off", lambda kind, K, spread: 2.0),
        ("gerf_gains", lambda: {"anywhere": 1.9}),
        ("gerf_gains", lambda: {"anywhere": 3.1}),
        ("sharp_gains", lambda data, K, spread: 9.9),
    ],
)
def test_the_verdict_follows_the_figures(monkeypatch, name, otherwise):
    """With figures as claimed everywhere the claim stands; with one part of it wrong everywhere it falls."""
    for part, figure in AS_CLAIMED.items():
        monkeypatch.setattr(claim, part, otherwise if part == name else figure)
    assert claim.variances().verdict == (Verdict.REFUTED if name else Verdict.CONFIRMED)
