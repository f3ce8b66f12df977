"""Copying from r tokens back: the bound by rank, and heads that come near it."""

import pytest
import torch

from ortho.attention.linear.feature_maps import EluPlusOne, Taylor
from ortho.attention.linear.linear_attention import kernel_weights
from ortho.theory.recall import SHARPNESS, causal_weights, copy_error, copying, fitted_error, least_error, tokens


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize(("distance", "features"), [(1, 1), (2, 2), (5, 2), (5, 5), (6, 4), (9, 3)])
def test_no_weights_of_that_rank_are_below(distance, features):
    """Of either sign, divided by their sums or not."""
    N, g = tokens(distance), generator()
    for size in (0.3, 1.0, 4.0):
        q, k = size * torch.randn(2, N, features, generator=g, dtype=torch.float64)
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
    N = tokens(distance, 20)
    error = copy_error(causal_weights(*copying(N, distance, features)), distance)
    assert least_error(distance, features) == 0
    assert error < 2 * (2 * features * torch.tensor(-SHARPNESS).exp()) ** 2


def test_a_slot_too_few():
    """With r features for distance r the wanted token and the own one share a slot, and the own one is louder."""
    N = tokens(8)
    q, k = copying(N, 7, 8)
    assert copy_error(causal_weights(q, k), 8) > 1
    with pytest.raises(ValueError, match="distance: expected 1 to 7 with 8 features, got 8"):
        copying(N, 8, 8)


@pytest.mark.parametrize("distance", [3, 5])
def test_fitted_heads_come_near_the_bound_and_not_below(distance):
    least = least_error(distance, 2)
    error = fitted_error(distance, 2, generator=generator())
    assert least < error < least + 0.2
    assert error == fitted_error(distance, 2, generator=generator())


def test_weights_are_those_of_the_features():
    q, k = torch.randn(2, 9, 3, generator=generator(), dtype=torch.float64)
    expected = (q.exp() @ k.exp().T).tril()
    torch.testing.assert_close(causal_weights(q, k), expected / expected.sum(-1, keepdim=True))


@pytest.mark.bad_input
def test_errors():
    with pytest.raises(ValueError, match="weights: expected 3 tokens and a multiple of 4, got 9"):
        copy_error(torch.eye(9), 3)
    with pytest.raises(ValueError, match="weights: expected 3 tokens and a multiple of 4, got 3"):
        copy_error(torch.eye(3), 3)
    for distance, features, name in ((0, 1, "distance"), (1, 0, "features")):
        with pytest.raises(ValueError, match=f"{name}: expected an integer of at least 1, got 0"):
            least_error(distance, features)
