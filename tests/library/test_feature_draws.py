"""The draws of the rows that random features project on: reproducible, of the right law, orthogonal where claimed."""

from math import sqrt

import pytest
import torch
from scipy import stats
from seeded import generator

from ortho.attention.linear.favor import orthogonal_features
from ortho.attention.linear.random_features import FEATURE_DRAWS, iid_features, structured_features
from ortho.theory.estimates import SIGMAS, estimate
from ortho.theory.unbiasedness import WRONG_DRAWS

F64 = torch.float64


@pytest.mark.parametrize("draw", [*FEATURE_DRAWS.values(), *WRONG_DRAWS.values()])
def test_draws_are_reproducible(draw):
    """Draws depend on the generator alone, with the dtype and device asked for; the global one is the default."""
    options = {"dtype": F64, "device": "cpu"}
    first = draw(10, 8, generator=generator(1), **options)
    state = torch.random.get_rng_state()
    assert torch.equal(first, draw(10, 8, generator=generator(1), **options))
    assert torch.equal(state, torch.random.get_rng_state())
    assert not torch.equal(first, draw(10, 8, generator=generator(2), **options))
    assert first.shape == (10, 8) and first.dtype == F64
    assert draw(10, 8, generator=generator(1)).dtype == torch.get_default_dtype()
    with torch.random.fork_rng():
        torch.manual_seed(1)
        drawn = draw(10, 8)
        torch.manual_seed(1)
        assert torch.equal(drawn, draw(10, 8))


@pytest.mark.parametrize(("m", "K"), [(8, 8), (3, 8), (20, 8), (5, 1), (128, 64)])
@pytest.mark.parametrize("draw", [orthogonal_features, structured_features])
def test_rows_of_a_block_are_orthogonal(draw, m, K):
    omega = draw(m, K, generator=generator(), dtype=F64)
    for block in omega.split(K):
        directions = block / block.norm(dim=-1, keepdim=True)
        torch.testing.assert_close(directions @ directions.mT, torch.eye(len(block)).double(), atol=1e-13, rtol=0)


def test_structured_blocks_by_hand():
    """Two rows of the 2 x 2 Hadamard matrix with one factor: their directions are (1, ±1) / sqrt 2, up to signs."""
    omega = structured_features(2, 2, generator=generator(), dtype=F64, factors=1)
    directions = omega / omega.norm(dim=-1, keepdim=True)
    torch.testing.assert_close(directions.abs(), torch.full((2, 2), sqrt(0.5), dtype=F64))
    assert float(directions.prod(-1).prod()) == pytest.approx(-1 / 4)


@pytest.mark.parametrize("K", [4, 6, 16])
@pytest.mark.parametrize("draw", FEATURE_DRAWS.values())
def test_second_moments(draw, K):
    """Each row has those of N(0, I): every entry of the mean of w w^T, over one row a block, is within SIGMAS of I."""
    width = 1 << (K - 1).bit_length()
    rows = draw(3000 * width, K, generator=generator(3), dtype=F64).reshape(3000, width, K)[:, 0]
    for i in range(K):
        for j in range(i + 1):
            assert abs(estimate(rows[:, i] * rows[:, j]).deviation(float(i == j))) < SIGMAS


@pytest.mark.parametrize("K", [4, 16])
@pytest.mark.parametrize("draw", FEATURE_DRAWS.values())
def test_lengths(draw, K):
    """Squared lengths are chi^2(K), uncorrelated within a block (Kolmogorov-Smirnov and normal, error rates 1e-5)."""
    squares = draw(1000 * K, K, generator=generator(4), dtype=F64).square().sum(-1)
    assert stats.kstest(squares.numpy(), stats.chi2(K).cdf).pvalue > 1e-5
    first, second = squares.reshape(1000, K)[:, :2].mT
    assert abs(estimate((first - K) * (second - K)).deviation(0.0)) < SIGMAS


def test_structured_rows_are_cut_from_wider_ones():
    """For K = 5, blocks have 8 rows and keep the first five columns; rows are orthogonal on average over draws."""
    draws = structured_features(2000 * 8, 5, generator=generator(), dtype=F64).reshape(2000, 8, 5)
    products = (draws[:, 0] * draws[:, 1]).sum(-1)
    assert products.abs().max() > 0.1
    assert abs(estimate(products).deviation(0.0)) < SIGMAS


def test_iid_rows_are_independent():
    """Their squared products have the mean K, like those of independent normal rows; orthogonal rows have 0."""
    omega = iid_features(8000, 8, generator=generator(), dtype=F64).reshape(4000, 2, 8)
    assert abs(estimate(omega.prod(1).sum(-1).square()).deviation(8.0)) < SIGMAS
