"""Retrieval by one random projection, and projected distances and products: limits and bounds known by hand. Pages
compare the laws with draws."""

from math import exp, inf, log

import numpy as np
import pytest
import torch
from scipy import stats
from seeded import generator

from ortho.orthogonal import DRAWS
from ortho.theory import johnson_lindenstrauss as jl
from ortho.theory import retrieval
from ortho.theory.estimates import SIGMAS, estimate


def sample(M, K, d, count, **kind):
    return retrieval.sample_retrieval(M, K, d, count, generator=torch.Generator().manual_seed(1), **{"c": 3.0} | kind)


def test_limits_that_are_known():
    assert retrieval.found_chance(10**9, 8, 8) == 1  # a square orthogonal matrix keeps all
    # In the plane t^2 is Beta(1/2, 1/2) and so is u^2: the right one of two is found if t > u, three times in four.
    # One row has the same direction in both draws.
    assert retrieval.capacity_exponent(4, 4) == inf
    for draw in retrieval.KNOWN:
        assert retrieval.found_chance(1, 1, 2, draw=draw) == pytest.approx(0.75, abs=1e-4)
        assert retrieval.capacity_exponent(8, 10**6, draw=draw) == pytest.approx(4, rel=1e-4)


def test_capacity_is_where_the_chance_is_met_and_grows_as_its_exponent():
    for draw in retrieval.KNOWN:
        M = retrieval.capacity(12, 48, draw=draw)
        below, above = (retrieval.found_chance(int(M) + i, 12, 48, draw=draw) for i in (0, 1))
        assert above < 0.5 <= below
        # Factors beside the exponential are powers of K: their logarithms change little from 96 to 128.
        steps = [log(retrieval.capacity(K, 512, draw=draw)) for K in (96, 128)]
        leading = [retrieval.capacity_exponent(K, 512, draw=draw) for K in (96, 128)]
        assert np.diff(steps) == pytest.approx(np.diff(leading), rel=0.03)
    assert retrieval.capacity(3, 8, chance=0.999) == 0


def test_bounds_by_hand():
    """For d = 3 a coordinate is uniform on [-1, 1], and E exp(s u) = sinh(s) / s; t = 1 for K = d. The sink's score is
    0.5 * 2 * sqrt 3."""
    slope, beside = 2 * 3**0.5, exp(3**0.5)
    others = 7 * np.sinh(slope) / slope
    assert retrieval.weight_bound(7, 3, 3, 2.0) == pytest.approx(1 / (1 + others * exp(-slope)), rel=1e-12)
    assert retrieval.weight_bound(7, 3, 3, 2.0, sink=0.5) == pytest.approx(1 / (1 + (others + beside) * exp(-slope)))
    assert retrieval.unmatched_bound(7, 3, 3, 2.0, sink=0.5) == pytest.approx(others / (others + beside), rel=1e-12)


def test_two_projections_find_nothing():
    """Queries and keys of independent matrices: all tokens are alike, so each has the mean weight 1/(M + 1)."""
    assert abs(estimate(sample(20, 16, 32, 1000, tied=False).weight).deviation(1 / 21)) < SIGMAS


def test_edges():
    """A head as wide as the layer has no errors; in two dimensions the law of a coordinate has no density."""
    assert retrieval.capacity(4, 4) == retrieval.capacity_exponent(4, 4) == inf
    with pytest.raises(ValueError, match="d: expected at least 3 beside a cosine"):
        retrieval.found_chance(3, 1, 2, cosine=0.5)


# ------------------------------------------------------------------------------------- projected distances and products

D, K, COUNT = 16, 8, 1500
FALSE_ALARM = 1e-5  # the chance that a test of a law rejects the right one


def points(n, d, seed=0):
    return torch.randn(n, d, generator=generator(seed), dtype=torch.float64)


def distortions(cloud, k, count, *, draw="haar"):
    """Of these points by each of `count` draws, rescaled."""
    made, d = generator(), cloud.shape[-1]
    images = [cloud @ DRAWS[draw](d, k, generator=made, dtype=torch.float64) for _ in range(count)]
    return torch.tensor([jl.distortion(cloud, (d / k) ** 0.5 * image) for image in images])


@pytest.mark.parametrize("draw", list(DRAWS))
def test_moments(draw):
    """Each draw follows its own law, which has these moments; at half the dimensions it is visibly not the other's."""
    x = points(1, D)
    images = torch.cat([x @ DRAWS[draw](D, K, generator=generator(i), dtype=torch.float64) for i in range(COUNT)])
    shares = images.square().sum(-1).numpy() / float(x.square().sum())
    beta, chi = stats.beta(K / 2, (D - K) / 2), stats.chi2(K, scale=1 / D)
    own, other = (chi, beta) if draw == "gaussian" else (beta, chi)
    assert stats.kstest(shares, own.cdf).pvalue > FALSE_ALARM > stats.kstest(shares, other.cdf).pvalue
    assert jl.share_moments(draw, D, K) == pytest.approx((own.mean(), own.var()))


def test_dimension():
    assert [jl.dimension(1000, eps) for eps in (0.1, 0.2, 0.3, 0.5)] == [5921, 1595, 768, 332]
    assert jl.dimension(1, 0.5) == 1
    for n in (2, 50, 10_000):
        k, rate = jl.dimension(n, 0.4), 0.4**2 / 2 - 0.4**3 / 3
        assert k * rate >= 4 * log(n) > (k - 1) * rate


@pytest.mark.parametrize("draw", ["haar", "gaussian"])
def test_failure_of_one_pair_is_exact(draw):
    """For two points the union bound is an equality: about half of the draws fail, as it says."""
    pair, eps, count = points(2, 24), 0.3, 2000
    failed = int((distortions(pair, 8, count, draw=draw) > eps).sum())
    exact = jl.failure_bound(2, 24, 8, eps, draw=draw)
    assert 0.3 < exact < 0.7
    assert stats.binomtest(failed, count, exact).pvalue > FALSE_ALARM


def test_least_dimension():
    """Dasgupta and Gupta's dimension is too large by a factor 2.25: 341 is enough where they ask for 768."""
    assert jl.least_dimension(1000, 1024, 0.3) == 341
    assert jl.least_dimension(1000, 1024, 0.3, draw="gaussian") == 561
    for options in ({}, {"failure": 0.01}, {"draw": "gaussian"}):
        k = jl.least_dimension(200, 600, 0.4, **options)
        limit = options.get("failure", 1.0)
        only_draw = {name: value for name, value in options.items() if name == "draw"}
        assert (
            jl.failure_bound(200, 600, k, 0.4, **only_draw)
            < limit
            <= jl.failure_bound(200, 600, k - 1, 0.4, **only_draw)
        )
    assert jl.least_dimension(1000, 16, 0.01) == 16
    assert jl.least_dimension(1000, 16, 0.01, draw="gaussian") == 17
    assert jl.least_dimension(1, 16, 0.5) == 1


def test_distortion_by_hand():
    """Squared distances 4, 16, 20 become 4, 4, 8: the worst is a quarter."""
    corners = torch.tensor([[0.0, 0.0], [2.0, 0.0], [0.0, 4.0]]).double()
    assert jl.distortion(corners, corners / torch.tensor([1.0, 2.0])) == pytest.approx(0.75)
    assert jl.distortion(corners, 3 * corners) == pytest.approx(8)


@pytest.mark.parametrize("draw", ["haar", "gaussian"])
def test_measured_dimension(draw):
    """By the definition, column by column, it is one more than the last number of columns that fails."""
    cloud = points(12, 20)
    found = jl.measured_dimension(cloud, 0.4, draw=draw, generator=generator(1))
    w = DRAWS[draw](20, generator=generator(1), dtype=torch.float64)
    failing = [k for k in range(1, 21) if jl.distortion(cloud, cloud @ w[:, :k] * (20 / k) ** 0.5) > 0.4]
    assert found == max(failing) + 1
    assert (found <= 20) == (draw == "haar")


def test_products_by_hand():
    """A line in the plane, at a right angle: sin(2 t) / 2 for a uniform angle t, of variance 1/8."""
    assert jl.product_moments("haar", 2, 1, 0.0, tied=True) == pytest.approx((0, 1 / 8))
    assert jl.product_moments("haar", 6, 6, 0.3, tied=True) == pytest.approx((0.3, 0))
    for draw in ("haar", "gaussian"):
        assert jl.product_moments(draw, 6, 2, 1.0, tied=True) == jl.share_moments(draw, 6, 2)
        assert {jl.product_moments(draw, 6, 2, c, tied=False) for c in (-1.0, 0.0, 0.5)} == {(0, 2 / 36)}
