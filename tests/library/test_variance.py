"""Random features: the variance in closed form compared with quadrature and tables; fitted features; errors of wrong
draws. (Pages favor-variance and favor-plus compare draws with the closed forms, and catch the wrong ones.)"""

import math
from math import log, pi, sqrt

import numpy as np
import pytest
import torch
from scipy import optimize, stats
from seeded import generator

from ortho.attention.linear.dense_features import DenseParameters, isotropic
from ortho.attention.linear.random_features import structured_features
from ortho.theory import unbiasedness as laws
from ortho.theory import variance
from ortho.theory.estimates import Estimate, estimate
from ortho.theory.variance import FITS, KINDS, mean_log_moment

F64 = torch.float64


def pair(K, square, kind="positive", seed=0):
    """Random x and y (K,) with the kind's square as given."""
    x, y = torch.randn(2, K, generator=generator(seed), dtype=F64)
    change = x - y if kind == "rff" else x + y
    return x * sqrt(square) / change.norm(), y * sqrt(square) / change.norm()


def gerf(a, K):
    return isotropic(torch.tensor(a, dtype=F64), K)


def hermite(K, count):
    """Rows (count^K, K) and weights of Gauss-Hermite quadrature: E g(w) for w normal is their sum, for smooth g."""
    nodes, masses = np.polynomial.hermite_e.hermegauss(count)
    rows = torch.cartesian_prod(*[torch.from_numpy(nodes)] * K).reshape(-1, K)
    weights = torch.cartesian_prod(*[torch.from_numpy(masses) / sqrt(2 * pi)] * K).reshape(-1, K).prod(-1)
    return rows, weights


def a_plane(seed=3):
    """Asymmetric dense parameters for K = 2 with different a, and x and y for which they are unbiased."""
    g = generator(seed)
    a = torch.tensor([-0.3, 0.02], dtype=F64)
    B_q = torch.eye(2, dtype=F64) + torch.randn(2, 2, generator=g, dtype=F64) / 4
    return DenseParameters(a, B_q, (1 - 4 * a)[:, None] * torch.linalg.inv(B_q).mT), *torch.randn(
        2, 2, generator=g, dtype=F64
    )


# The integrands are entire functions, so quadrature with this many nodes is exact except for rounding: sums of positive
# terms, which are exponentials of about 50, off by 50 units in the last place, times e^8 for the sines.
ROUNDING = 1e-9


@pytest.mark.parametrize("order", [1, 2, 3, 4])
@pytest.mark.parametrize("square", [0.0, 0.5, 4.0])
def test_moments_are_integrals(order, square):
    rows, weights = hermite(1, 180)
    for kind in KINDS:
        f = variance.row_estimates(kind, *pair(1, square, kind), rows)
        assert float(weights @ f**order) == pytest.approx(variance.moment(kind, square, order), rel=ROUNDING)
    for a in (-0.4, 0.03):
        f = variance.row_estimates(gerf(a, 1), *pair(1, square), rows)
        expected = variance.moment("positive", square, order, K=1, a=a)
        assert float(weights @ f**order) == pytest.approx(expected, rel=ROUNDING)
        assert log(expected) == pytest.approx(variance.log_moment(square, 1, a, order), abs=ROUNDING)


@pytest.mark.parametrize("order", [1, 2, 3])
def test_dense_moments_are_integrals(order):
    parameters, x, y = a_plane()
    rows, weights = hermite(2, 70)
    f = variance.row_estimates(parameters, x, y, rows)
    expected = variance.log_moments(x[None], y[None], parameters, order)
    assert float(weights @ f**order) == pytest.approx(float(expected.exp()), rel=ROUNDING)


def test_dense_moments_of_all_pairs():
    """Those of single pairs, along leading axes too; with equal a, those of the scalar formula, also for wide x."""
    parameters, *_ = a_plane()
    x, y = torch.randn(3, 9, 2, generator=generator(), dtype=F64).split([4, 5], dim=1)
    batched = DenseParameters(*(each.expand(3, *each.shape) for each in parameters[:3]))
    found = variance.log_moments(x, y, batched)
    assert found.shape == (3, 4, 5)
    for b, i, j in ((0, 0, 0), (2, 3, 4), (1, 2, 0)):
        one = variance.log_moments(x[b, i][None], y[b, j][None], parameters)
        assert float(found[b, i, j]) == pytest.approx(float(one), abs=1e-12)
    x, y = pair(64, 9.0)
    dense = variance.log_moments(x[None], y[None], gerf(-0.1, 64))
    assert float(dense) == pytest.approx(variance.log_moment(9.0, 64, -0.1), abs=1e-11)  # 64 terms of about 1


def test_gain():
    """Ratios for |z|^2 = 1, 2, 4, 8, once computed in another way, to three digits; and the limit."""
    table = {16: (0.782, 0.791, 0.922, 0.997), 64: (0.731, 0.722, 0.879, 0.993), 128: (0.721, 0.705, 0.866, 0.992)}
    for K, ratios in table.items():
        found = [1 - variance.orthogonal_gain("positive", square, K) for square in (1.0, 2.0, 4.0, 8.0)]
        assert found == pytest.approx(ratios, abs=1e-3)
    for square in (0.5, 2.0, 6.0):
        assert variance.orthogonal_gain("positive", square, 20_000) == pytest.approx(
            variance.gain_limit(square), rel=100 / 20_000
        )  # the next term of the expansion is about t^2 / K
        whole = variance.orthogonal_gain("positive", square, 8)
        assert variance.orthogonal_gain("positive", square, 8, m=24) == pytest.approx(whole, rel=1e-12)
        assert variance.orthogonal_gain("positive", square, 8, m=4) < whole


def test_where_orthogonality_helps():
    for share in (0.01, 0.1):
        where = variance.where_orthogonality_helps(share, 32)
        assert variance.orthogonal_gain("positive", where, 32) == pytest.approx(share, rel=1e-6)
        assert variance.orthogonal_gain("positive", where + 0.1, 32) < share


def test_performers_bound():
    """It is exact to the leading order in |z|^2 for m = K."""
    square, K = 1e-3, 16
    exact, bound, plain = (
        variance.squared_error("positive", square, K, K, draw="orthogonal"),
        variance.squared_error_bound(square, K, K),
        variance.squared_error("positive", square, K, K),
    )
    assert (plain - bound) / (plain - exact) == pytest.approx(1, rel=2 * square)


def test_log_gain():
    """From an independent computation, to its two digits; 2 |z|^4 / K to leading order; and the inverse."""
    table = {8: (0.29, 0.67, 1.67, 4.26, 10.5, 24.4), 64: (0.05, 0.13, 0.42, 1.39, 4.39, 12.7)}
    for K, values in table.items():
        found = [variance.log_gain(square, K) for square in (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)]
        assert found == pytest.approx(values, abs=0.05)
        assert variance.where_gain(3.0, K) == pytest.approx(
            optimize.brentq(lambda t, K=K: variance.log_gain(t, K) - 3, 1, 20), rel=1e-6
        )
    # second moments, 4 |z|^2 / K beyond the leading order
    gain = variance.log_moment(1.0, 4000) - variance.log_moment(1.0, 4000, variance.pair_optimum(1.0, 4000))
    assert gain == pytest.approx(2 / 4000, rel=4 / 1000)
    assert variance.log_gain(900.0, 8) > 800  # out of the range of the variances themselves


# ------------------------------------------------------------------------------------------------------ fitted features


WIDTH, TOKENS = 5, 40
SLACK = 1e-7  # what the ridge costs: at a minimum, the order of its square


def skewed(seed):
    """Queries and keys with means, correlations and different scales: nothing that a family could rely on."""
    g = generator(seed)
    mixes = torch.randn(2, WIDTH, WIDTH, generator=g, dtype=F64) / 3
    return (
        torch.randn(2, TOKENS, WIDTH, generator=g, dtype=F64) @ mixes
        + torch.randn(2, 1, WIDTH, generator=g, dtype=F64) / 3
    )


def unbiased(a, R):
    """The parameters with B_q = (I - 4A)^1/2 R and the B_k that belongs to it."""
    root = (1 - 4 * a).sqrt()[:, None]
    return DenseParameters(a, root * R, root * torch.linalg.inv(R).mT)


def lowered(a, g, size):
    """a, changed at random, and still below 1/8."""
    return a - size * torch.randn(a.shape, generator=g, dtype=F64) * (1 / 8 - a)


def neighbour(family, parameters, g, size):
    """Other parameters of the family, near these, that leave the estimate unbiased."""
    a, B_q = parameters.a, parameters.B_q
    R = B_q / (1 - 4 * a).sqrt()[:, None]
    same = lowered(a[:1], g, size).expand(WIDTH)
    if family == "gerf":
        return unbiased(same, torch.eye(WIDTH, dtype=F64))
    if family == "saderf":
        return unbiased(same, R * (1 + size * torch.randn(WIDTH, generator=g, dtype=F64)))
    if family == "aderf":
        return unbiased(same, R + size * torch.randn(WIDTH, WIDTH, generator=g, dtype=F64) * R.norm() / WIDTH)
    skew = size * torch.randn(WIDTH, WIDTH, generator=g, dtype=F64)
    return unbiased(lowered(a, g, size), torch.linalg.matrix_exp(skew - skew.mT) @ R)


@pytest.mark.parametrize("family", FITS)
@pytest.mark.parametrize("seed", range(3))
def test_no_neighbour_is_better(family, seed):
    """At any distance, also the smallest one, at which the objective still changes by far more than by rounding."""
    x, y = skewed(seed)
    best = FITS[family](x, y)
    least = float(mean_log_moment(x, y, best))
    g = generator(10 + seed)
    for size in (1e-3, 1e-2, 0.1):
        for _ in range(50):
            assert float(mean_log_moment(x, y, neighbour(family, best, g, size))) > least - SLACK
    # The search is not blind: from other parameters of the family it finds better ones.
    other = neighbour(family, best, g, 0.3)
    value = float(mean_log_moment(x, y, other))
    found = [float(mean_log_moment(x, y, neighbour(family, other, g, 0.05))) for _ in range(50)]
    assert min(found) < value


# ------------------------------------------------------------------------------------------- wrong and structured draws


def along(direction, square):
    """x = y with |x + y|^2 = square, both (1, K)."""
    direction = torch.as_tensor(direction, dtype=torch.float64)
    half = direction / direction.norm() * math.sqrt(square) / 2
    return half[None], half[None]


@pytest.mark.parametrize(("draw", "length"), [(laws.unit_norm_rows, 1.0), (laws.root_norm_rows, math.sqrt(6))])
@pytest.mark.parametrize("m", [1, 4, 14])
def test_errors_of_fixed_lengths(draw, length, m):
    """The squared error with one row, within a block, and with two blocks and a part of one."""
    x, y = along([1, 2, 0, 0, 1, 3], 2.25)
    omega = laws.omegas(draw, m, 6, 2000, generator=generator())
    squared_errors = (laws.ratios("positive", omega, x, y) - 1).square()
    assert not laws.rejects(estimate(squared_errors), laws.fixed_length_error(m, 6, length, 2.25))


def test_correlation_of_fixed_lengths():
    """In the plane it is large. The error of a correlation r of 4,000 pairs is about (1 - r^2) / sqrt(4000)."""
    x, y = along([1, 2], 2.25)
    omega = laws.omegas(laws.root_norm_rows, 2, 2, 4000, generator=generator())
    single = torch.stack([laws.ratios("positive", omega[:, [row]], x, y) for row in range(2)])
    found = Estimate(float(torch.corrcoef(single)[0, 1]), 1 / math.sqrt(4000))
    assert laws.rejects(found, 0.0)
    assert not laws.rejects(found, laws.fixed_length_correlation(2, math.sqrt(2), 2.25))


def test_the_mean_of_the_first_raw_row():
    """Its first number w is normal given that it is negative: E exp(w - 1/2) is twice the chance of a w below -1."""
    assert laws.raw_qr_mean(torch.ones(1)) == pytest.approx(2 * stats.norm.cdf(-1))


@pytest.mark.parametrize(
    ("direction", "mean"),
    [
        ([1, 0], 0.8633),
        ([1, 1], 1.1390),
        ([1, 0, 0, 0], 0.9785),
        ([1, 1, 1, 1], 1.0629),
        ([1, 0, 0], 0.9785),
        ([1] * 8, 1.0086),
    ],
)
def test_structured_bias_is_the_known_one(direction, mean):
    """The bias comes from enumerating the signs, for |z|^2 = 2.25; the draw agrees, and is caught at K = 2, 14 % off.

    Each row is taken with its opposite, as likely, which lowers the variance.
    """
    x, y = along(direction, 2.25)
    exact = laws.structured_mean((x + y)[0])
    assert exact == pytest.approx(mean, abs=5e-5)
    omega = laws.omegas(structured_features, 8, len(direction), 1000, generator=generator(1))
    found = estimate(laws.ratios("positive", torch.cat([omega, -omega], -2), x, y))
    assert not laws.rejects(found, exact)
    assert laws.rejects(found) is (len(direction) == 2)
