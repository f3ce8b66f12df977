"""Features fitted to data: none of its family has a smaller mean log moment; what each gains by distribution."""

from math import sqrt

import pytest
import torch

from ortho.attention.linear.dense_features import DenseParameters
from ortho.orthogonal import haar
from ortho.theory.estimates import SIGMAS
from ortho.theory.fitted_features import DATA, FITS, mean_log_moment, reductions, sample_data, unfitted

F64 = torch.float64
K, TOKENS = 5, 40
SLACK = 1e-7  # what the ridge costs: at a minimum, the order of its square


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def skewed(seed):
    """Queries and keys with means, correlations and different scales: nothing that a family could rely on."""
    g = generator(seed)
    mixes = torch.randn(2, K, K, generator=g, dtype=F64) / 3
    return torch.randn(2, TOKENS, K, generator=g, dtype=F64) @ mixes + torch.randn(2, 1, K, generator=g, dtype=F64) / 3


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
    same = lowered(a[:1], g, size).expand(K)
    if family == "gerf":
        return unbiased(same, torch.eye(K, dtype=F64))
    if family == "saderf":
        return unbiased(same, R * (1 + size * torch.randn(K, generator=g, dtype=F64)))
    if family == "aderf":
        return unbiased(same, R + size * torch.randn(K, K, generator=g, dtype=F64) * R.norm() / K)
    skew = size * torch.randn(K, K, generator=g, dtype=F64)
    return unbiased(lowered(a, g, size), torch.linalg.matrix_exp(skew - skew.mT) @ R)


@pytest.mark.parametrize("family", FITS)
@pytest.mark.parametrize("seed", range(3))
def test_no_neighbour_is_better(family, seed):
    """At any distance, the nearest included, at which the objective still changes by far more than rounding does."""
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


@pytest.mark.parametrize("seed", range(3))
def test_families_contain_each_other(seed):
    x, y = skewed(seed)
    found = {name: float(mean_log_moment(x, y, fit(x, y))) for name, fit in FITS.items()}
    plain = float(mean_log_moment(x, y, unfitted(K)))
    assert found["aderf"] <= found["saderf"] <= found["gerf"] < plain
    assert found["sderf"] <= found["gerf"]


def test_unfitted_is_positive_features():
    a, B_q, B_k, axes = unfitted(3)
    assert axes is None
    assert torch.equal(a, torch.zeros(3).double())
    assert torch.equal(B_q, torch.eye(3).double()) and torch.equal(B_k, B_q)


@pytest.mark.parametrize("name", DATA)
def test_scores_of_the_data(name):
    """Standard deviation `spread` by design, over scales too: 60 draws of 40 x 40 scores, whose deviation is estimated
    to some 60^-1/2 of what it varies by from draw to draw."""
    g, spread = generator(1), 0.7
    squares = []
    for _ in range(60):
        x, y = sample_data(name, 40, 16, spread, generator=g)
        assert x.shape == y.shape == (40, 16) and x.dtype == F64
        if name == "shifted":
            assert float((x.mean(0) @ y.mean(0)).sqrt() / sqrt(spread * 4)) == pytest.approx(1, abs=0.5)
            x, y = x - x.mean(0), y - y.mean(0)
        squares.append((x @ y.mT).square().mean())
    squares = torch.stack(squares) / (1 - 1 / 40 if name == "shifted" else 1) ** 2
    error = float(squares.std()) / sqrt(60)
    assert abs(float(squares.mean()) - spread**2) < SIGMAS * error
    assert error < spread**2 / 20


def test_reductions():
    """What each family is made for, it gains on; the comparison is paired, so the mean over draws tells by its sign."""
    found = {name: reductions(name, 8, 0.5, tokens=256) for name in DATA}
    for by_fit in found.values():
        assert list(by_fit) == list(FITS)
        assert all(one.value > SIGMAS * one.standard_error > 0 for one in by_fit.values())
    gain = {(name, fit): found[name][fit].value for name in DATA for fit in FITS}
    # many tokens and nothing to adapt to: all alike
    assert max(found["isotropic"].values()).value < 1.1 * gain["isotropic", "gerf"]
    assert gain["scaled", "saderf"] > 1.3 * gain["scaled", "gerf"] and gain["scaled", "aderf"] > gain["scaled", "sderf"]
    assert gain["shifted", "sderf"] > 1.2 * gain["shifted", "aderf"]
    assert gain["correlated", "sderf"] > 1.2 * gain["correlated", "aderf"]
    assert reductions("scaled", 8, 0.5, draws=3, seed=4) == reductions("scaled", 8, 0.5, draws=3, seed=4)
    assert reductions("scaled", 8, 0.5, draws=3, seed=4) != reductions("scaled", 8, 0.5, draws=3, seed=5)


def test_invariance():
    """A change of basis of x and its inverse transpose of y leave ADERF's objective as it is, a rotation SDERF's."""
    x, y = skewed(0)
    change = torch.eye(K, dtype=F64) + torch.randn(K, K, generator=generator(4), dtype=F64) / 4
    turn = haar(K, generator=generator(5), dtype=F64)
    for family, to_x, to_y in (("aderf", change, torch.linalg.inv(change).mT), ("sderf", turn, turn)):
        fit = FITS[family]
        moved = x @ to_x.mT, y @ to_y.mT
        expected = float(mean_log_moment(x, y, fit(x, y)))
        # the ridge, 1e-6 of the mean eigenvalue, is not invariant
        assert float(mean_log_moment(*moved, fit(*moved))) == pytest.approx(expected, rel=1e-4)


@pytest.mark.bad_input
def test_errors():
    with pytest.raises(ValueError, match="name: expected one of 'isotropic', .* got 'normal'"):
        sample_data("normal", 4, 4, 1.0)
    with pytest.raises(ValueError, match="spread: expected a positive number, got 0"):
        sample_data("scaled", 4, 4, 0)
    with pytest.raises(ValueError, match="K: expected an integer of at least 1, got 0"):
        sample_data("scaled", 4, 0, 1.0)
    with pytest.raises(ValueError, match="count of at least 2"):
        reductions("scaled", 4, 1.0, draws=1)
