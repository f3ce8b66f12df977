"""S2, sections 4.2 and 4.3: the evidence holds its figures to independent ones."""

import pytest
import torch

from ortho import MultiheadAttention
from ortho.cost.big_o import d
from ortho.theory.johnson_lindenstrauss import dimension, failure_bound
from paper.claims.evidence import random_features as projections
from paper.claims.evidence.methods import COSTS


@pytest.mark.parametrize("width", projections.SPACES)
def test_distortions_differ_by_the_factor(width):
    """The least of the changed distances is below k/d, but not by more than the rescaled ones allow."""
    k = dimension(projections.POINTS, projections.EPS)
    raw, rescaled = projections.distortions(width)
    assert k == projections.SPACES[0]
    if width == k:  # W is orthogonal to k times an entry's 4 k eps
        assert raw == rescaled < 8 * k**2 * torch.finfo(torch.float64).eps
    else:
        assert (
            1 - k / width < raw <= 1 - (1 - rescaled) * k / width + 1e-12
        )  # equal but for rounding, if one pair is both
        assert rescaled < projections.EPS


def test_the_limit_is_the_hardest_case():
    """No orthogonal draw is more likely to fail, in any space of these."""
    for n, eps in projections.SIZES:
        k = dimension(n, eps)
        assert all(
            failure_bound(n, width, k, eps) < projections.unlikely(n, eps) for width in (k, k + 1, 4 * k, 64 * k)
        )


def test_no_figure_up_to_089_would_decide_otherwise():
    """The greatest failure bound, over numbers of points and eps, is at five points and small eps."""
    least = {
        (n, eps): 1 - projections.unlikely(n, eps)
        for n in (*range(2, 40), 100, 1000, 10**4, 10**6)
        for eps in (0.01, 0.02, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99)
    }
    assert min(least.values()) > 0.89 > projections.LIKELY[0]
    assert min(least, key=least.get) == (5, 0.01)


def test_what_is_trained():
    """On running layers: FAVOR+ trains the four projections and no feature, ORA two, beside an orthogonal pair."""
    layers = {
        "favor": MultiheadAttention(12, 3, attention="favor"),
        "frozen": MultiheadAttention(12, 3, projection="frozen"),
    }
    names = {name: {key.split(".")[-1] for key, _ in layer.named_parameters()} for name, layer in layers.items()}
    assert names == {"favor": {f"weight_{x}" for x in "qkvo"}, "frozen": {"weight_v", "weight_o"}}
    for name, layer in layers.items():
        assert sum(p.numel() for p in layer.parameters()) == COSTS[name].trained.subs(d, 12)
