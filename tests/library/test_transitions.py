"""Products of transitions: bounds, closed forms, limits."""

from math import inf, log, pi, sqrt

import pytest
import torch
from seeded import draw as normal
from seeded import generator

from ortho.theory import transitions
from ortho.theory.estimates import SIGMAS, estimate

EPS = torch.finfo(torch.float64).eps
FACTORS = [0.3, 1.0, 1.9, 2.1, 4.0]  # c = beta |k|^2


def norm(P):
    return float(torch.linalg.matrix_norm(P, 2))


@pytest.mark.parametrize("c", FACTORS)
def test_growth_is_a_walk_with_the_derived_mean_and_spread(c):
    """Mean and variance of 300 sums of 50 steps, two comparisons of error rate 1e-5 each."""
    rate, spread = transitions.growth(c, 8)
    steps = 50
    samples = transitions.sample_growth(c, 8, steps, 300, generator=generator())
    assert abs(estimate(samples).deviation(steps * rate)) < SIGMAS
    assert abs(estimate((samples - steps * rate) ** 2).deviation(steps * spread**2)) < SIGMAS
    assert (rate < 0) == (0 < c < 2)


def test_growth_in_the_plane_by_hand():
    """K = 2, c = 1: u is the squared sine of a uniform angle; the mean of ln |cos| is -ln 2, its variance pi^2/12."""
    rate, spread = transitions.growth(1.0, 2)
    assert rate == pytest.approx(-log(2), rel=1e-9)
    assert spread == pytest.approx(sqrt(pi**2 / 12), rel=1e-9)
    assert transitions.growth(2.0, 5) == transitions.growth(0.0, 5) == (0, 0)


@pytest.mark.parametrize(("beta", "length"), [(0.5, 1), (1, 1), (2, 1), (2.1, 1), (1, 1.5)])
def test_no_product_is_above_the_bound_and_one_key_attains_it(beta, length):
    c, steps = beta * length**2, 40
    rounding = 1 + 100 * steps * EPS
    for seed in range(5):
        P = transitions.product(length * transitions.unit_keys(steps, 6, generator=generator(seed)), beta)
        assert norm(P) <= transitions.norm_bound(c, steps) * rounding
    repeated_key = (length * transitions.unit_keys(1, 6, generator=generator())).repeat(steps, 1)
    assert norm(transitions.product(repeated_key, beta)) == pytest.approx(
        transitions.norm_bound(c, steps), rel=rounding - 1
    )


def test_bound_beyond_the_largest_number():
    assert transitions.norm_bound(4.0, 400) == 3.0**400
    assert transitions.norm_bound(4.0, 4000) == inf


def test_products_are_in_order():
    k = normal(3, 4)
    H = [torch.eye(4, dtype=k.dtype) - 0.7 * torch.outer(key, key) for key in k]
    torch.testing.assert_close(transitions.product(k, 0.7), H[2] @ H[1] @ H[0])


def test_orthogonalising_keeps_products_orthogonal_and_no_nearer_to_the_right_one():
    """Each float32 step is off by a few eps; 1,000 steps in random directions by about 30 times that."""
    plain = transitions.reflection_drift(1000, 8, generator=generator())
    mended = transitions.reflection_drift(1000, 8, orthogonalise_every=10, generator=generator())
    eps = torch.finfo(torch.float32).eps
    assert mended.from_orthogonal < 20 * eps < plain.from_orthogonal
    assert mended.from_exact > plain.from_exact / 4
    wide = transitions.reflection_drift(1000, 8, dtype=torch.float64, generator=generator())
    assert wide.from_orthogonal < 1e-6 * plain.from_orthogonal and wide.from_exact < 1e-6 * plain.from_exact


def test_orthogonalising_a_contraction_undoes_it():
    k = transitions.unit_keys(200, 6, generator=generator())
    assert norm(transitions.product(k, 0.7)) < 1e-3
    mended = transitions.product(k, 0.7, orthogonalise_every=20)
    torch.testing.assert_close(mended.T @ mended, torch.eye(6, dtype=k.dtype))


def test_orthogonalising_a_memory_loses_what_it_holds():
    before, after = transitions.recall_errors(12, generator=generator())
    assert before < 100 * EPS
    assert after > 0.5


def test_nearest_orthogonal():
    """For an orthogonal matrix times a positive one it is the first factor."""
    Q = transitions.nearest_orthogonal(normal(5, 5))
    torch.testing.assert_close(Q @ Q.T, torch.eye(5, dtype=Q.dtype))
    X = normal(5, 5, seed=1)
    torch.testing.assert_close(transitions.nearest_orthogonal(Q @ (X @ X.T)), Q)
