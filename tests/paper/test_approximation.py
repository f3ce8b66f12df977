"""The error of attention weights from random features: by hand, by kind and number of features, and as predicted."""

from math import log2, sqrt

import pytest
import torch
from seeded import generator

from ortho.attention.linear.favor import orthogonal_features
from ortho.attention.linear.random_features import iid_features
from ortho.theory.estimates import SIGMAS, estimate
from ortho.theory.variance import sample_data
from paper.theory import approximation as approx
from paper.theory.approximation import FEATURES, attention_errors, choose_m, crossing, drawn_errors, uniform_error

F64 = torch.float64


def test_by_hand():
    """Rows (3, 1) and (1, 1) against (1/2, 1/2) and (1, 0): 1/4 + 1/4, and 1/2 + 1/2."""
    found = approx.weights(torch.tensor([[3.0, 1.0], [1.0, 1.0]]))
    assert torch.equal(found, torch.tensor([[0.75, 0.25], [0.5, 0.5]]))
    exact = torch.tensor([[0.5, 0.5], [1.0, 0.0]])
    assert approx.row_errors(found, exact).tolist() == [0.5, 1.0]
    assert approx.row_errors(torch.eye(2).flip(0), torch.eye(2)).tolist() == [approx.MOST] * 2


@pytest.mark.parametrize("kind", FEATURES)
def test_kernels_are_unbiased(kind):
    """The mean of 400 draws is within SIGMAS standard errors of the exact kernel, for each of the 12 entries."""
    x, y = sample_data("scaled", 4, 3, 0.3, generator=generator())
    y = y[:3]
    g = generator(1)
    drawn = [approx.kernel_estimates(kind, x, y, orthogonal_features(6, 3, generator=g, dtype=F64)) for _ in range(400)]
    entries = torch.stack(drawn).flatten(1).unbind(-1)
    for found, exact in zip(entries, torch.exp(x @ y.mT).flatten(), strict=True):
        assert abs(estimate(found).deviation(float(exact))) < SIGMAS


@pytest.mark.parametrize("kind", FEATURES)
def test_errors_of_draws(kind):
    """The errors are those of one draw made here; all kinds have the same data; the mean caps the error of each row."""
    K, m = 8, 16
    rows = m // 2 if kind == "rff" else m
    g = generator(6)
    x, y = sample_data("isotropic", 20, K, 1.0, generator=g)
    omega = iid_features(rows, K, generator=g, dtype=F64)
    expected = approx.row_errors(
        approx.weights(approx.kernel_estimates(kind, x, y, omega)), torch.softmax(x @ y.mT, -1)
    )
    found = drawn_errors(kind, "iid", m, K, 1.0, tokens=20, draws=3, seed=5)
    assert found.shape == (3, 20)
    assert torch.equal(found[1], expected)
    mean = attention_errors(kind, "iid", m, K, 1.0, tokens=20, draws=3, seed=5)
    assert mean == estimate(found.clamp(max=2).mean(-1))
    assert (float(found.max()) > 2) == (kind == "rff")


def test_error_falls_like_the_root():
    """From m = 256 to 4096 the error falls to a quarter, within SIGMAS, at scores small enough for this law."""
    for kind in ("rff", "positive", "gerf"):
        few, many = (attention_errors(kind, "iid", m, 8, 0.125, tokens=64) for m in (256, 4096))
        spread = few.value / 4 * sqrt((few.standard_error / few.value) ** 2 + (many.standard_error / many.value) ** 2)
        assert abs(many.value - few.value / 4) < SIGMAS * spread


@pytest.mark.parametrize("spread", [0.125, 0.5, 1.0])
def test_uniform(spread):
    """The closed form is for infinitely many keys, all rows of one variance: K = 256 and 512 keys are within 2 %."""
    found = approx.uniform_errors(256, spread, tokens=512, draws=4)
    assert found.value == pytest.approx(uniform_error(spread), rel=0.02)
    x, y = sample_data("isotropic", 512, 256, spread, generator=generator(0))
    exact = torch.softmax(x @ y.mT, -1)
    first = float((exact - 1 / 512).abs().sum(-1).mean())
    assert abs(found.value - first) < 6 * found.standard_error  # which is that of 4 draws


def test_typical_square():
    """The mean of |x + y|^2 over pairs weighted by attention, over 8 draws of many tokens. With N keys the weights are
    off by about e^(variance of the scores) / N, far below 1 %."""
    K, spread = 16, 0.5
    found = []
    for seed in range(8):
        x, y = sample_data("isotropic", 800, K, spread, generator=generator(seed))
        squares = (x[:, None] + y).square().sum(-1)
        found.append((torch.softmax(x @ y.mT, -1) * squares).sum(-1).mean())
    mean = estimate(torch.stack(found))
    assert abs(mean.value - approx.typical_square(K, spread)) < SIGMAS * mean.standard_error + 0.01 * mean.value
    assert abs(mean.deviation(2 * spread * sqrt(K))) > 2 * SIGMAS  # the plain mean


def test_crossing():
    """Errors at powers of two on either side of the crossing are above and below the level; the crossing comes sooner
    for the kinds for which the closed forms say so."""
    found = {kind: crossing(kind, "orthogonal", 16, 0.25) for kind in ("positive", "gerf")}
    for kind, where in found.items():
        low, high = 2 ** int(where.value - 3), 2 ** int(where.value + 4)
        level = approx.uniform_errors(16, 0.25).value
        assert attention_errors(kind, "orthogonal", low, 16, 0.25).value > level
        assert attention_errors(kind, "orthogonal", high, 16, 0.25).value < level
        assert 0 < where.standard_error < 0.5
    assert found["gerf"].value < found["positive"].value


def test_crossing_is_interpolated(monkeypatch):
    """Errors 8 / m cross a level of 1/3 at m = 24, a level of 3 at the first m, and a level of 1e-6 never."""

    def errors(kind, draw, m, K, spread, *, tokens, draws, seed):
        return torch.full((draws, tokens), 8.0 / m, dtype=F64)

    for level, expected in ((1 / 3, log2(24)), (3.0, 2.0), (1e-6, None)):
        monkeypatch.setattr(approx, "drawn_errors", errors)
        monkeypatch.setattr(approx, "_uniform", lambda *_, level=level: torch.full((3,), level, dtype=F64))
        where = crossing("positive", "iid", 4, 1.0, draws=3)
        assert where == (None if expected is None else pytest.approx((expected, 0), abs=1e-9))


@pytest.mark.parametrize("kind", ["positive", "gerf"])
def test_choice_is_sufficient(kind):
    """For all settings of a grid, the measured error is below the error asked for and above a fifth of it."""
    for K in (8, 64):
        for spread in (0.125, 0.25, 0.5, 1.0):
            for error in (0.1, 0.4):
                m = choose_m(error, K, spread, kind=kind)
                if m > 8192:
                    continue
                for draw in ("iid", "orthogonal"):
                    found = attention_errors(kind, draw, m, K, spread, draws=4)
                    assert error / 5 < found.value < error, (kind, K, spread, error, m, draw)


def test_choice_by_hand():
    """K = 4, spread 1: tau = 1/2, |x + y|^2 = 2 (9/4 + 1) = 6.5, and (e^6.5 - 1) / 0.25."""
    assert approx.typical_square(4, 1.0) == 6.5
    assert choose_m(0.5, 4, 1.0) == 2657
    assert choose_m(0.5, 4, 1.0, kind="gerf") < 200
    assert choose_m(0.25, 4, 1.0) == pytest.approx(4 * 2657, abs=4)
