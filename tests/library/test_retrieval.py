"""Retrieval by one random projection: the exact law compared with draws, limits known by hand, and bad input."""

from math import exp, inf, log

import numpy as np
import pytest
import torch
from extent import some

from ortho.theory import retrieval
from ortho.theory.estimates import SIGMAS, estimate

CASES = [("haar", 1.0), ("gaussian", 1.0), ("haar", 0.8)]


def sample(M, K, d, count, **kind):
    return retrieval.sample_retrieval(M, K, d, count, generator=torch.Generator().manual_seed(1), **{"c": 3.0} | kind)


@pytest.mark.parametrize(("draw", "cosine"), CASES)
def test_the_chance_is_that_of_draws(draw, cosine):
    """Draws differ by more than `SIGMAS` standard errors with probability 1e-5."""
    for M, K, d in some([(30, 8, 32), (5, 3, 7), (200, 16, 64)], 2):
        found = estimate(sample(M, K, d, 800, draw=draw, cosine=cosine).found.double())
        chance = retrieval.found_chance(M, K, d, draw=draw, cosine=cosine)
        assert abs(found.deviation(chance)) < SIGMAS
        assert 0.05 < chance < 0.99  # draws would show a wrong law


def test_limits_that_are_known():
    assert retrieval.found_chance(10**9, 8, 8) == 1  # a square orthogonal matrix keeps all
    # In the plane t^2 is Beta(1/2, 1/2) and so is u^2: the right one of two is found if t > u, three times in four.
    assert retrieval.found_chance(1, 1, 2) == pytest.approx(0.75, abs=1e-4)
    assert retrieval.capacity_exponent(4, 4) == inf
    for draw in retrieval.KNOWN:
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


def test_the_bound_is_below_the_weight_and_near_it_for_small_c():
    for c in (1.0, 3.0, 8.0):
        found = estimate(sample(60, 12, 48, 600, c=c).weight)
        bound = retrieval.weight_bound(60, 12, 48, c)
        assert found.deviation(bound) > -SIGMAS
        assert c > 1 or found.value < 1.1 * bound
    # By hand: for d = 3 a coordinate is uniform on [-1, 1], and E exp(s u) = sinh(s) / s; t = 1 for K = d.
    slope = 2 * 3**0.5
    others = 7 * np.sinh(slope) / slope * exp(-slope)
    assert retrieval.weight_bound(7, 3, 3, 2.0) == pytest.approx(1 / (1 + others), rel=1e-12)


def test_with_a_sink_both_bounds_hold():
    """The right token's weight is above its bound. If no token is the right one, as the query is at a right angle to
    the first, what is read is below its own bound. Wide heads keep the two apart, narrow heads cannot."""
    for K, sink in ((16, 0.7), (32, 0.7), (64, 0.7), (32, 0.9)):
        own = {"M": 100, "K": K, "d": 64, "count": 300, "c": 4.0, "sink": sink}
        right, none = (estimate(x) for x in (sample(**own).weight, sample(**own, cosine=0.0).read))
        found = (
            retrieval.weight_bound(100, K, 64, 4.0, sink=sink),
            retrieval.unmatched_bound(101, K, 64, 4.0, sink=sink),
        )
        assert right.deviation(found[0]) > -SIGMAS and none.deviation(found[1]) < SIGMAS
        if K == 64:
            assert found[0] > 0.99 and found[1] < 0.01
    # By hand, as above: t = 1 for K = d, and the sink's score is 0.5 * 2 * sqrt 3.
    slope, beside = 2 * 3**0.5, exp(3**0.5)
    others = 7 * np.sinh(slope) / slope
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
