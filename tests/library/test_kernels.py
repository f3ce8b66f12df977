"""Which functions of the score are kernels: those of feature maps; how far back heads with K features copy."""

import pytest
import torch
from refusals import refuses
from seeded import draw as normal
from seeded import generator

from ortho.attention.linear.dense_features import DenseExponentialFeatures
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


@pytest.mark.parametrize("distance", [3, 5])
def test_fitted_heads_come_near_the_bound_and_not_below(distance):
    least = kernels.least_error(distance, 2)
    assert least < kernels.fitted_error(distance, 2, generator=generator()) < least + 0.2
