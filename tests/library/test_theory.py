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
from ortho.cost.counting import flops_of
from ortho.theory import associativity, kernels, retrieval, transitions, unbiasedness, variance
from ortho.theory import johnson_lindenstrauss as jl
from ortho.theory.estimates import SIGMAS, Estimate, estimate
from ortho.theory.reachability import layers_between, reached


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
    (lambda: kernels.features_of(-torch.eye(2)), "matrix: expected no negative eigenvalue, got -"),
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


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 10])
def test_causal_forms_are_equal_over_the_rationals(chunk):
    g = generator()
    q, k, v = (associativity.rational(7, width, generator=g) for width in (3, 3, 2))
    expected = associativity.by_sums(q, k, v)
    assert associativity.by_chunks(q, k, v, chunk) == associativity.by_states(q, k, v) == expected
    weights = associativity.product(q, associativity.transpose(k))
    masked = tuple(tuple(w if j <= t else 0 for j, w in enumerate(row)) for t, row in enumerate(weights))
    assert associativity.product(masked, v) == expected


@pytest.mark.parametrize(("N", "K", "M", "V"), [(48, 8, 48, 8), (10, 8, 40, 12), (6, 16, 9, 3)])
def test_flops_are_counted(N, K, M, V):
    a, b, c = (torch.zeros(shape) for shape in ((N, K), (K, M), (M, V)))
    left, right = associativity.flops(N, K, M, V)
    assert flops_of(lambda: (a @ b) @ c) == left
    assert flops_of(lambda: a @ (b @ c)) == right
    assert (right < left) == (Fraction(1, N) + Fraction(1, M) < Fraction(1, K) + Fraction(1, V))


# ---------------------------------------------------------------------------------------------- products of transitions

EPS = torch.finfo(torch.float64).eps


def norm(P):
    return float(torch.linalg.matrix_norm(P, 2))


def test_growth_in_the_plane_by_hand():
    """K = 2, c = 1: u is the squared sine of a uniform angle; the mean of ln |cos| is -ln 2, its variance pi^2/12."""
    rate, spread = transitions.growth(1.0, 2)
    assert rate == pytest.approx(-log(2), rel=1e-9)
    assert spread == pytest.approx(sqrt(pi**2 / 12), rel=1e-9)
    assert transitions.growth(2.0, 5) == transitions.growth(0.0, 5) == (0, 0)


@pytest.mark.parametrize(("beta", "length"), [(0.5, 1), (1, 1), (2, 1), (2.1, 1), (1, 1.5)])
def test_one_key_attains_the_bound(beta, length):
    steps = 40
    repeated_key = (length * transitions.unit_keys(1, 6, generator=generator())).repeat(steps, 1)
    bound = transitions.norm_bound(beta * length**2, steps)
    assert norm(transitions.product(repeated_key, beta)) == pytest.approx(bound, rel=100 * steps * EPS)


def test_products_are_in_order():
    k = normal(3, 4)
    H = [torch.eye(4, dtype=k.dtype) - 0.7 * torch.outer(key, key) for key in k]
    torch.testing.assert_close(transitions.product(k, 0.7), H[2] @ H[1] @ H[0])


# --------------------------------------------------------------------------------- how many layers connect which tokens


def test_layers_between_is_the_first_power_that_reaches():
    mask = torch.rand(12, 12, generator=torch.Generator().manual_seed(1)) < 0.12
    layers = layers_between(mask)
    for number in range(13):
        through = reached(*[mask] * number) if number else torch.eye(12, dtype=torch.bool)
        assert torch.equal(through, (layers >= 0) & (layers <= number))
    assert (layers < 0).any() and layers.max() > 2
    assert torch.equal(reached(mask, mask, residual=False), mask.float() @ mask.float() > 0)
