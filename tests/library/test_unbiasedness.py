"""Every map estimates exp(x.y) without bias under the right draws; the wrong ones are caught, each by its own mean."""

import math
from functools import cache

import pytest
import torch
from scipy import stats
from seeded import generator

from ortho.attention.linear.favor import orthogonal_features
from ortho.attention.linear.random_features import iid_features, structured_features
from ortho.theory import unbiasedness as laws
from ortho.theory.estimates import Estimate, estimate

RIGHT = {"iid": iid_features, "orthogonal": orthogonal_features}


def along(direction, square):
    """x = y with |x + y|^2 = square, both (1, K)."""
    direction = torch.as_tensor(direction, dtype=torch.float64)
    half = direction / direction.norm() * math.sqrt(square) / 2
    return half[None], half[None]


# ---------------------------------------------------------------------------------------------------------- the test


@pytest.fixture(scope="module")
def drawn():
    """200 repetitions of 125 draws of each right law, 8 rows of width 8."""
    return {name: laws.omegas(law, 8, 8, 200 * 125, generator=generator(5)) for name, law in RIGHT.items()}


@pytest.mark.parametrize("features", laws.MAPS)
@pytest.mark.parametrize("law", RIGHT)
def test_calibrated(drawn, law, features):
    """Unbiased, and rejected as often as stated: p-values are uniform, by tests with a false alarm of 1e-5 each."""
    x, y = laws.pairs(24, 8, 2.0, generator=generator(1))
    samples = laws.ratios(features, drawn[law], x, y)
    assert not laws.rejects(estimate(samples))
    p_values = [math.erfc(abs(estimate(row).deviation(1)) / math.sqrt(2)) for row in samples.reshape(200, 125)]
    assert stats.kstest(p_values, "uniform").pvalue > 1e-5
    for level in (0.1, 0.05, 0.01):
        assert stats.binomtest(sum(p < level for p in p_values), 200, level).pvalue > 1e-5


# -------------------------------------------------------------------------------------------------------- wrong draws

DIRECTIONS = {"axis": [1] + 15 * [0], "diagonal": 16 * [1]}


@cache
def rows_of(draw):
    """4,000 draws of 16 rows of width 16."""
    return laws.omegas(draw, 16, 16, 4000, generator=generator())


def both_ways(omega, x, y):
    """Ratios of positive features with the rows and their opposites."""
    return laws.ratios("positive", torch.cat([omega, -omega], -2), x, y)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("features", ["positive", "rff"])
@pytest.mark.parametrize(("draw", "length"), [(laws.unit_norm_rows, 1.0), (laws.root_norm_rows, 4.0)])
def test_fixed_lengths_are_caught(draw, length, features, direction):
    """Their mean is the closed form instead; for sines at x - y, with the other sign."""
    sign = -1 if features == "rff" else 1
    x, y = along(DIRECTIONS[direction], 2.25)
    y = sign * y
    found = estimate(laws.ratios(features, rows_of(draw), x, y))
    assert laws.rejects(found)
    assert not laws.rejects(found, laws.fixed_length_mean(16, length, sign * 2.25))


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


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_signs_are_caught(direction):
    """With each row beside its opposite, the variance is lower: along the diagonal the bias is only 3.5 %."""
    x, y = along(DIRECTIONS[direction], 2.25)
    found = estimate(both_ways(rows_of(laws.sign_rows), x, y))
    assert laws.rejects(found)
    assert not laws.rejects(found, laws.sign_mean((x + y)[0]))


def test_raw_signs_are_caught():
    """Caught along the diagonal and against it, where Haar's are right; the first row alone has its closed form."""
    omega = rows_of(laws.raw_qr_rows)
    for sign in (1, -1):
        x, y = along([sign] * 16, 2.25)
        found = estimate(laws.ratios("positive", omega, x, y))
        assert laws.rejects(found) and not laws.rejects(
            estimate(laws.ratios("positive", rows_of(orthogonal_features), x, y))
        )
        assert (found.value < 1) is (sign > 0)
        first = estimate(laws.ratios("positive", omega[:, :1], x, y))
        assert laws.rejects(first) and not laws.rejects(first, laws.raw_qr_mean((x + y)[0]))
    assert (omega[:, 0, 0] < 0).all()


# ---------------------------------------------------------------------------------------- the structured draw's bias


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
    found = estimate(both_ways(omega, x, y))
    assert not laws.rejects(found, exact)
    assert laws.rejects(found) is (len(direction) == 2)


@pytest.mark.parametrize("K", [2, 4, 8])
def test_structured_fourth_moment(K):
    """The leading term of the bias equals the enumeration at small z, where the next term is smaller by |z|^2."""
    for direction in ([1] + [0] * (K - 1), [1] * K, [*range(1, K + 1)]):
        x, y = along(direction, 0.01)
        leading = laws.structured_fourth_moment((x + y)[0]) / 24 * math.exp(-0.01 / 2)
        assert laws.structured_mean((x + y)[0]) - 1 == pytest.approx(leading, rel=0.05, abs=1e-11)
