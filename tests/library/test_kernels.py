"""Which functions of the score are kernels: those of feature maps; how far back heads with K features copy."""

import pytest
import torch
from seeded import generator, normal

from ortho.attention.linear.dense_features import DenseExponentialFeatures, DenseParameters
from ortho.attention.linear.favor import HyperbolicFeatures, PositiveFeatures, TrigonometricFeatures
from ortho.attention.linear.feature_maps import CosFormer, Cosine, EluPlusOne, Exp, Powers, Relu, Taylor
from ortho.attention.linear.linear_attention import kernel_weights
from ortho.theory.kernels import (
    INDEFINITE,
    KERNELS,
    SHARPNESS,
    causal_weights,
    copy_error,
    copying,
    features_of,
    fitted_error,
    gram,
    least_eigenvalue,
    least_error,
    map_gram,
    rank,
    rounding,
    tokens,
)

# --------------------------------------------------------------------------------------------------------------- Mercer


N, K = 40, 4
MAPS = {
    "elu": EluPlusOne(),
    "relu": Relu(),
    "exp": Exp(),
    "cosformer": CosFormer(64),
    "taylor": Taylor(2),
    "taylor3": Taylor(3),
    "cosine": Cosine(),
    "powers": Powers(2),
    "powers3": Powers(3),
    "positive": PositiveFeatures(count=16),
    "hyperbolic": HyperbolicFeatures(count=8),
    "trigonometric": TrigonometricFeatures(count=8),
    **{fit: DenseExponentialFeatures(fit, count=16) for fit in ("gerf", "saderf", "aderf", "sderf")},
}


def points():
    x = normal(N, K)
    x[:, 0] = x[:, 0].abs()  # or a point whose ReLUs are all 0 has no features
    return x


def line(n):
    return torch.linspace(-3, 3, n, dtype=torch.float64)[:, None]


@pytest.mark.parametrize("name", MAPS)
def test_every_map_has_a_positive_semi_definite_kernel(name):
    m = MAPS[name].width(K)
    matrix = map_gram(MAPS[name], points())
    assert (matrix.diagonal() - 1).abs().max() < rounding(1, m)
    assert least_eigenvalue(matrix) >= -rounding(N, m)
    assert rank(matrix, m) <= m


@pytest.mark.parametrize(("name", "kernel"), [("powers", "powers"), ("cosine", "cosine")])
def test_maps_have_their_closed_forms(name, kernel):
    torch.testing.assert_close(map_gram(MAPS[name], points()), gram(KERNELS[kernel], points()), atol=1e-13, rtol=1e-13)


def test_taylor_is_the_polynomial_of_the_scaled_score():
    scaled = points() / K**0.25
    expected = gram(KERNELS["polynomial"], scaled)
    torch.testing.assert_close(map_gram(MAPS["taylor"], points()), expected, atol=1e-13, rtol=1e-13)


def test_scaled_queries_are_undone():
    """exp(x): from the weights, whose rows are scaled, the kernel sum_l exp(x_l + y_l)."""
    x = points()
    expected = gram(lambda a, b: a.exp() @ b.exp().T, x)
    torch.testing.assert_close(map_gram(MAPS["exp"], x), expected, atol=1e-13, rtol=1e-13)


@pytest.mark.parametrize("kernel", KERNELS)
def test_features_are_found(kernel):
    """Mercer on n points: a matrix without negative eigenvalues is one of inner products."""
    matrix = gram(KERNELS[kernel], points())
    found = features_of(matrix)
    assert (found @ found.T - matrix).abs().max() < rounding(N, N)


@pytest.mark.parametrize("kernel", INDEFINITE)
def test_without_features(kernel):
    matrix = gram(INDEFINITE[kernel], points())
    assert least_eigenvalue(matrix) < -0.1
    with pytest.raises(ValueError, match="matrix: expected no negative eigenvalue, got -"):
        features_of(matrix)


@pytest.mark.parametrize("n", [4, 8, 12])
def test_the_softmax_kernel_needs_as_many_features_as_there_are_points(n):
    matrix = gram(KERNELS["softmax"], line(n))
    assert rank(matrix, 1) == n
    for m in (2, 3):
        estimated = map_gram(PositiveFeatures(count=m), line(n))
        assert rank(estimated, m) <= m < n


def test_a_map_that_treats_keys_otherwise_is_noticed():
    """Queries and keys of a biased fit have different features: the kernel is not symmetric."""
    a = torch.full((K,), -0.1, dtype=torch.float64)
    B = torch.diag(torch.linspace(0.5, 2, K, dtype=torch.float64))
    given = DenseParameters(a, B, 1.4 * B.inverse())
    with pytest.raises(ValueError, match="matrix: expected it symmetric"):
        least_eigenvalue(map_gram(DenseExponentialFeatures("gerf", given, count=16), points()))


# -------------------------------------------------------------------------------------------------------------- copying


@pytest.mark.parametrize(("distance", "features"), [(1, 1), (2, 2), (5, 2), (5, 5), (6, 4), (9, 3)])
def test_no_weights_of_that_rank_are_below(distance, features):
    """Of either sign, divided by their sums or not."""
    length, g = tokens(distance), generator()
    for size in (0.3, 1.0, 4.0):
        q, k = size * torch.randn(2, length, features, generator=g, dtype=torch.float64)
        for feature_map in (EluPlusOne(), Taylor(1)):
            weights = kernel_weights(feature_map, q, k, is_causal=True)
            least = least_error(distance, feature_map.width(features))
            assert copy_error(weights, distance) >= least
            assert copy_error(weights / weights.sum(-1, keepdim=True), distance) >= least


def test_the_bound_is_that_of_the_rank():
    """r + 1 rows of the identity, of whose singular values K can be met."""
    for distance, features in ((1, 1), (5, 2), (9, 3), (3, 8)):
        missed = torch.linalg.svdvals(torch.eye(distance + 1))[features:].square().sum() / (distance + 1)
        assert least_error(distance, features) == pytest.approx(float(missed))


@pytest.mark.parametrize(("distance", "features"), [(1, 2), (1, 8), (4, 8), (7, 8), (15, 16)])
def test_up_to_the_number_of_features_copies_are_built(distance, features):
    """At most K unwanted weights of 2 exp(-SHARPNESS) each, and the sum of their squares twice: row and diagonal."""
    length = tokens(distance, 20)
    error = copy_error(causal_weights(*copying(length, distance, features)), distance)
    assert least_error(distance, features) == 0
    assert error < 2 * (2 * features * torch.tensor(-SHARPNESS).exp()) ** 2


def test_a_slot_too_few():
    """With r features for distance r the wanted token and the own one share a slot, and the own one is louder."""
    length = tokens(8)
    q, k = copying(length, 7, 8)
    assert copy_error(causal_weights(q, k), 8) > 1
    with pytest.raises(ValueError, match="distance: expected 1 to 7 with 8 features, got 8"):
        copying(length, 8, 8)


@pytest.mark.parametrize("distance", [3, 5])
def test_fitted_heads_come_near_the_bound_and_not_below(distance):
    least = least_error(distance, 2)
    assert least < fitted_error(distance, 2, generator=generator()) < least + 0.2


def test_weights_are_those_of_the_features():
    q, k = torch.randn(2, 9, 3, generator=generator(), dtype=torch.float64)
    expected = (q.exp() @ k.exp().T).tril()
    torch.testing.assert_close(causal_weights(q, k), expected / expected.sum(-1, keepdim=True))
