"""An estimate is a mean and its standard error, normal at the rate that SIGMAS states; orders of products, products of
transitions, reachability; what `ortho.theory` refuses."""

from fractions import Fraction
from math import inf, log, pi, sqrt

import pytest
import torch
from refusals import refusals
from scipy import stats
from seeded import draw as normal
from seeded import generator

from ortho.attention.linear.feature_maps import CosFormer
from ortho.attention.sparse.window import Window
from ortho.cost.counting import flops_of
from ortho.theory import associativity, kernels, retrieval, transitions, unbiasedness, variance
from ortho.theory import johnson_lindenstrauss as jl
from ortho.theory.estimates import SIGMAS, Estimate, estimate
from ortho.theory.reachability import layers_between, layers_to_reach, reached


def test_an_estimate_by_hand():
    """1, 2, 3, 6: mean 3, squared deviations 4 + 1 + 0 + 9 = 14, so that the error is sqrt(14 / 3 / 4)."""
    found = estimate(torch.tensor([1.0, 2.0, 3.0, 6.0]).double())
    assert found == pytest.approx((3.0, (14 / 12) ** 0.5))
    assert found.deviation(3.0) == 0
    assert found.deviation(0.0) == pytest.approx(3 / (14 / 12) ** 0.5)
    assert Estimate(2.0, 0.0).deviation(2.0) == 0
    assert Estimate(2.0, 0.0).deviation(3.0) == -inf


def test_the_error_rate_of_an_estimate():
    assert 2 * stats.norm.sf(SIGMAS) == pytest.approx(1e-5, rel=0.02)
    deviations = [estimate(row).deviation(0.0) for row in normal(300, 400)]
    assert stats.kstest(deviations, "norm").pvalue > 1e-5  # the chance that a right law fails


POINTS = torch.ones(2, 4)
STEEP = variance.dense.isotropic(torch.tensor(0.2).double(), 2)
REFUSED = [
    (lambda: estimate(torch.ones(1)), r"samples: .*count of at least 2, got \(1,\)"),
    (lambda: associativity.product(((1, 2, 3), (4, 5, 6)), ((1,), (2,))), r"got \(2, 3\) and \(2, 1\)"),
    (lambda: associativity.product((), ((1,),)), r"a, b: expected shapes .* got \(0, 0\) and \(1, 1\)"),
    (lambda: associativity.rounding_bound(POINTS[:, :1].bfloat16(), torch.ones(1, 299).bfloat16(),
     torch.ones(299, 2).bfloat16()), "sum to less than 256 in torch.bfloat16, got 300"),
    (lambda: unbiasedness.sign_rows(4, 6), "K: expected a power of two, got 6"),
    (lambda: unbiasedness.structured_fourth_moment(torch.ones(3)), "z: expected a power of two as its length, got 3"),
    (lambda: unbiasedness.structured_mean(torch.ones(9)), "z: expected 1 to 8 entries, got 9"),
    (lambda: variance.moment("rff", 1.0, a=-0.1), "a: expected 0 for rff features, got -0.1"),
    (lambda: variance.moment("positive", -1.0), "square: expected a number of at least 0, got -1.0"),
    (lambda: variance.log_moment(1.0, 4, 0.125), r"a: expected a number below 1/8, got 0.125"),
    (lambda: variance.squared_error_bound(1.0, 5, 4), "m: expected at most K = 4, got 5"),
    (lambda: variance.orthogonal_gain("positive", 0.0, 4), "square: expected .* an error, got 0.0"),
    (lambda: variance.where_orthogonality_helps(0.4, 16), "share: expected .* 0 and 0.2299, .* got 0.4"),
    (lambda: variance.where_gain(0.0, 4), "log_factor: expected a positive number, got 0.0"),
    (lambda: variance.log_gain(0.0, 4), "square: expected a positive number, got 0.0"),
    (lambda: variance.log_moments(POINTS[:, :2], POINTS[:, :2], STEEP), "parameters: .* a below 1/8, got 0.2"),
    (lambda: jl.dimension(9, 1.0), "eps: expected a number between 0 and 1, got 1.0"),
    (lambda: jl.share_moments("haar", 8, 9), "k: expected at most d = 8, got 9"),
    (lambda: jl.least_dimension(9, 8, 0.5, failure=0.0), "failure: expected a probability above 0, got 0.0"),
    (lambda: jl.distortion(POINTS, POINTS), "points: expected no two equal points"),
    (lambda: jl.product_moments("haar", 8, 4, 1.5, tied=True), "cosine: expected .*got 1.5"),
    (lambda: jl.sample_products("haar", 1, 1, 1.0, 2, tied=True), "d: expected .* at least 2, got 1"),
    (lambda: transitions.growth(1.0, 1), "K: expected at least 2, got 1"),
    (lambda: kernels.least_eigenvalue(torch.tensor([[1.0, 0.0], [1.0, 1.0]])), "symmetric, got .* differ by 1"),
    (lambda: kernels.map_gram(CosFormer(), -POINTS), "points: expected a kernel above 0 of each with itself, got 0"),
    (lambda: kernels.copy_error(torch.eye(9), 3), "weights: expected 3 tokens and a multiple of 4, got 9"),
    (lambda: kernels.copy_error(torch.eye(3), 3), "weights: expected 3 tokens and a multiple of 4, got 3"),
    (lambda: kernels.least_error(0, 1), "distance: expected an integer of at least 1, got 0"),
    (lambda: kernels.copying(9, 8, 8), "distance: expected 1 to 7 with 8 features, got 8"),
    (lambda: reached(), "masks: expected one or more, got none"),
    (lambda: retrieval.found_chance(3, 9, 8), "K: expected at most d = 8, got 9"),
    (lambda: retrieval.found_chance(3, 4, 8, cosine=1.5), r"cosine: expected a number in \[-1, 1\], got 1.5"),
    (lambda: retrieval.found_chance(3, 4, 8, draw="gaussian", cosine=0.5), "cosine: expected 1 for a gaussian"),
    (lambda: retrieval.threshold_law(8, 8), "K: expected a width below d = 8"),
    (lambda: retrieval.capacity(4, 8, chance=1.0), r"chance: expected a number in \(0, 1\), got 1"),
    (lambda: retrieval.weight_bound(3, 4, 8, 0.0), "c: expected a positive number, got 0"),
    (lambda: retrieval.weight_bound(3, 4, 8, 1.0, draw="gaussian"), "draw: expected 'haar', got 'gaussian'"),
    (lambda: retrieval.unmatched_bound(3, 4, 8, 1.0, sink=0.0), "sink: expected a positive number, got 0"),
    (lambda: retrieval.sample_retrieval(3, 4, 8, 2, c=1.0, cosine=2.0), "cosine: expected a number"),
]  # fmt: skip


@refusals(REFUSED)
def test_what_is_refused(refused):
    refused()


# ------------------------------------------------------------------------ the two orders of a product of three matrices


def fractions(*shapes, seed=0):
    g = generator(seed)
    return [associativity.rational(*shape, generator=g) for shape in shapes]


def dense(matrix):
    return torch.tensor([[float(entry) for entry in row] for row in matrix], dtype=torch.float64)


def matrices(*shapes, seed=0, dtype=torch.float64):
    g = generator(seed)
    return [torch.randn(shape, generator=g, dtype=torch.float64).to(dtype) for shape in shapes]


@pytest.mark.parametrize(("N", "K", "M", "V"), [(1, 1, 1, 1), (7, 3, 7, 3), (5, 2, 9, 4), (3, 8, 2, 6)])
def test_the_orders_are_equal_over_the_rationals(N, K, M, V):
    a, b, c = fractions((N, K), (K, M), (M, V))
    one, other = associativity.left_first(a, b, c), associativity.right_first(a, b, c)
    assert one == other
    assert all(isinstance(entry, Fraction) for row in one for entry in row)
    a, b, c, one = map(dense, (a, b, c, one))
    # One order errs by half the bound. Four fractions became floats, u each: at most as much again, as K + M >= 2.
    assert ((a @ (b @ c) - one).abs() <= 1.5 * associativity.rounding_bound(a, b, c)).all()


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 10])
def test_causal_forms_are_equal_over_the_rationals(chunk):
    q, k, v = fractions((7, 3), (7, 3), (7, 2))
    expected = associativity.by_sums(q, k, v)
    assert associativity.by_chunks(q, k, v, chunk) == associativity.by_states(q, k, v) == expected
    weights = associativity.product(q, associativity.transpose(k))
    masked = tuple(tuple(w if j <= t else 0 for j, w in enumerate(row)) for t, row in enumerate(weights))
    assert associativity.product(masked, v) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("N", "K", "M", "V"), [(64, 16, 64, 16), (33, 4, 200, 7), (5, 300, 6, 3)])
def test_rounding_is_within_the_bound(dtype, N, K, M, V):
    a, b, c = matrices((N, K), (K, M), (M, V), dtype=dtype)
    found = associativity.reorder(a, b, c)
    assert found.bound / 10**4 < found.difference <= found.bound
    assert found.changed > 0.5  # not associative bit for bit
    one, other, most = (a @ b) @ c, a @ (b @ c), associativity.rounding_bound(a, b, c)
    assert ((one.double() - other.double()).abs() <= most).all()
    # Each order is within half of the bound of the exact result, for which float64 stands in.
    if dtype == torch.float32:
        exact = a.double() @ b.double() @ c.double()
        assert all(((x.double() - exact).abs() <= most / 2 * (1 + 1e-6)).all() for x in (one, other))


@pytest.mark.parametrize(("N", "K", "M", "V"), [(48, 8, 48, 8), (10, 8, 40, 12), (6, 16, 9, 3)])
def test_flops_are_counted(N, K, M, V):
    a, b, c = (torch.zeros(shape) for shape in ((N, K), (K, M), (M, V)))
    left, right = associativity.flops(N, K, M, V)
    assert flops_of(lambda: (a @ b) @ c) == left
    assert flops_of(lambda: a @ (b @ c)) == right
    assert (right < left) == (Fraction(1, N) + Fraction(1, M) < Fraction(1, K) + Fraction(1, V))


# ---------------------------------------------------------------------------------------------- products of transitions

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


# --------------------------------------------------------------------------------- how many layers connect which tokens

LENGTHS = range(1, 31)


def causal(pattern, n):
    return pattern.mask(n, is_causal=True)


def paths(masks, residual):
    """Where (n, n) token i holds what token j had, found by following each path from each token, layer by layer."""
    n = len(masks[0])
    found = torch.zeros(n, n, dtype=torch.bool)
    for token in range(n):
        holders = {token}
        for mask in masks:
            holders = {i for i in range(n) if (residual and i in holders) or any(mask[i, j] for j in holders)}
        found[list(holders), token] = True
    return found


@pytest.mark.parametrize("residual", [False, True])
def test_reached_follows_paths(residual):
    g = torch.Generator().manual_seed(0)
    for layers in (1, 2, 3):
        masks = [torch.rand(9, 9, generator=g) < 0.2 for _ in range(layers)]
        assert torch.equal(reached(*masks, residual=residual), paths(masks, residual))


def test_layers_between_is_the_first_power_that_reaches():
    mask = torch.rand(12, 12, generator=torch.Generator().manual_seed(1)) < 0.12
    layers = layers_between(mask)
    for number in range(13):
        through = reached(*[mask] * number) if number else torch.eye(12, dtype=torch.bool)
        assert torch.equal(through, (layers >= 0) & (layers <= number))
    assert (layers < 0).any() and layers.max() > 2


@pytest.mark.parametrize("w", [1, 2, 3, 5, 12, 40])
def test_windows(w):
    for n in LENGTHS:
        expected = 0 if n == 1 else -(-(n - 1) // (w - 1)) if w > 1 else None
        assert layers_to_reach(causal(Window(w), n)) == expected
        assert layers_to_reach(Window(w).mask(n), is_causal=False) == expected
