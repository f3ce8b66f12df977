"""Which functions of the score are kernels: those of feature maps; how far back heads with K features copy."""

import pytest
import torch
from refusals import refuses
from seeded import draw as normal
from seeded import generator

from ortho.attention.linear.dense_features import DenseExponentialFeatures, DenseParameters
from ortho.attention.linear.favor import PositiveFeatures, RandomFourierFeatures
from ortho.attention.linear.feature_map import EluPlusOne
from ortho.attention.linear.feature_maps import CosFormer, Cosine, Exp, Powers, Relu, Taylor
from ortho.attention.linear.linear_attention import kernel_weights
from ortho.theory import kernels

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
    "positive": PositiveFeatures(m=16),
    "rff": RandomFourierFeatures(m=16),
    **{fit: DenseExponentialFeatures(fit, m=16) for fit in ("gerf", "saderf", "aderf", "sderf")},
}


def points():
    x = normal(N, K)
    x[:, 0] = x[:, 0].abs()  # otherwise a point whose ReLUs are all 0 would have no features
    return x


def line(n):
    return torch.linspace(-3, 3, n, dtype=torch.float64)[:, None]


@pytest.mark.parametrize("name", MAPS)
def test_every_map_has_a_positive_semi_definite_kernel(name):
    m = MAPS[name].width(K)
    matrix = kernels.map_gram(MAPS[name], points())
    assert (matrix.diagonal() - 1).abs().max() < kernels.rounding(1, m)
    assert kernels.least_eigenvalue(matrix) >= -kernels.rounding(N, m)
    assert kernels.rank(matrix, m) <= m


@pytest.mark.parametrize("kernel", kernels.KERNELS)
def test_features_are_found(kernel):
    """Mercer on n points: a matrix without negative eigenvalues is one of inner products."""
    matrix = kernels.gram(kernels.KERNELS[kernel], points())
    found = kernels.features_of(matrix)
    assert (found @ found.T - matrix).abs().max() < kernels.rounding(N, N)


@pytest.mark.parametrize("kernel", kernels.INDEFINITE)
def test_without_features(kernel):
    matrix = kernels.gram(kernels.INDEFINITE[kernel], points())
    assert kernels.least_eigenvalue(matrix) < -0.1
    refuses("matrix: expected no negative eigenvalue, got -", kernels.features_of, matrix)


@pytest.mark.parametrize("n", [4, 8, 12])
def test_the_softmax_kernel_needs_as_many_features_as_there_are_points(n):
    matrix = kernels.gram(kernels.KERNELS["softmax"], line(n))
    assert kernels.rank(matrix, 1) == n
    for m in (2, 3):
        estimated = kernels.map_gram(PositiveFeatures(m=m), line(n))
        assert kernels.rank(estimated, m) <= m < n


def test_a_map_that_treats_keys_otherwise_is_noticed():
    """Queries and keys of a biased fit have different features: the kernel is not symmetric."""
    a = torch.full((K,), -0.1, dtype=torch.float64)
    B = torch.diag(torch.linspace(0.5, 2, K, dtype=torch.float64))
    given = DenseParameters(a, B, 1.4 * B.inverse())
    with pytest.raises(ValueError, match="matrix: expected it symmetric"):
        kernels.least_eigenvalue(kernels.map_gram(DenseExponentialFeatures("gerf", given, m=16), points()))


# -------------------------------------------------------------------------------------------------------------- copying


@pytest.mark.parametrize(("distance", "features"), [(1, 1), (2, 2), (5, 2), (5, 5), (6, 4), (9, 3)])
def test_no_weights_of_that_rank_are_below(distance, features):
    """Weights of either sign, divided by their sums or not."""
    length, g = kernels.tokens(distance), generator()
    for size in (0.3, 1.0, 4.0):
        q, k = size * torch.randn(2, length, features, generator=g, dtype=torch.float64)
        for feature_map in (EluPlusOne(), Taylor(1)):
            weights = kernel_weights(feature_map, q, k, is_causal=True)
            least = kernels.least_error(distance, feature_map.width(features))
            assert kernels.copy_error(weights, distance) >= least
            assert kernels.copy_error(weights / weights.sum(-1, keepdim=True), distance) >= least


def test_the_bound_is_that_of_the_rank():
    """The bound is for r + 1 rows of the identity: K of their singular values can be matched."""
    for distance, features in ((1, 1), (5, 2), (9, 3), (3, 8)):
        missed = torch.linalg.svdvals(torch.eye(distance + 1))[features:].square().sum() / (distance + 1)
        assert kernels.least_error(distance, features) == pytest.approx(float(missed))


@pytest.mark.parametrize(("distance", "features"), [(1, 2), (1, 8), (4, 8), (7, 8), (15, 16)])
def test_up_to_the_number_of_features_copies_are_built(distance, features):
    """A row's unwanted weights sum to at most 2 K exp(-SHARPNESS). The wanted weight is less than 1 by that sum, whose
    square therefore counts twice."""
    length = kernels.tokens(distance, 20)
    error = kernels.copy_error(kernels.causal_weights(*kernels.copying(length, distance, features)), distance)
    assert kernels.least_error(distance, features) == 0
    assert error < 2 * (2 * features * torch.tensor(-kernels.SHARPNESS).exp()) ** 2


def test_a_slot_too_few():
    """With r features for distance r the wanted token and the own one share a slot, and the own one is louder."""
    length = kernels.tokens(8)
    q, k = kernels.copying(length, 7, 8)
    assert kernels.copy_error(kernels.causal_weights(q, k), 8) > 1
    refuses("distance: expected 1 to 7 with 8 features, got 8", kernels.copying, length, 8, 8)


@pytest.mark.parametrize("distance", [3, 5])
def test_fitted_heads_come_near_the_bound_and_not_below(distance):
    least = kernels.least_error(distance, 2)
    assert least < kernels.fitted_error(distance, 2, generator=generator()) < least + 0.2
