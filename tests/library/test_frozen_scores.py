"""Which scores drawn matrices can make: closed forms by hand, by draws, and what is refused."""

import pytest
import torch

from ortho.orthogonal import haar
from ortho.theory.estimates import SIGMAS, estimate
from ortho.theory.frozen_scores import carrying, drawn_missed, expected_missed, freedoms, missed, rank_at


def generator():
    return torch.Generator().manual_seed(0)


def normal(*sizes, g):
    return torch.randn(*sizes, generator=g, dtype=torch.float64)


def test_what_a_multiple_misses_by_hand():
    target = torch.tensor([[3.0, 0.0], [0.0, 4.0]], dtype=torch.float64)
    assert missed(target, -2 * target) == pytest.approx(0, abs=1e-15)
    assert missed(target, torch.tensor([[1.0, 0.0], [0.0, 0.0]]).double()) == pytest.approx(16 / 25)
    assert missed(target, torch.tensor([[0.0, 1.0], [5.0, 0.0]]).double()) == 1


@pytest.mark.parametrize("draw", ["haar", "gaussian"])
@pytest.mark.parametrize(("d", "K"), [(2, 1), (2, 2), (6, 2), (6, 3)])
def test_the_mean_is_that_of_the_draws(draw, d, K):
    """Wrong with probability 1e-5 each, of eight that are fixed by their seed; the target has rank 1."""
    target = torch.zeros(d, d, dtype=torch.float64)
    target[0, -1] = 5.0
    found = estimate(drawn_missed(target, K, 400, draw=draw, generator=generator()))
    assert abs(found.deviation(expected_missed(d))) < SIGMAS
    assert found.standard_error < 0.3 / d**2 + 0.01


def test_a_map_before_carries_the_scores():
    g = generator()
    q, k = (haar(12, 5, generator=g, dtype=torch.float64) for _ in "qk")
    wanted_q, wanted_k = (normal(12, 5, g=g) for _ in "qk")
    P = carrying(q, k, wanted_q, wanted_k)
    x, y = normal(2, 12, g=g)
    expected = x @ wanted_q @ wanted_k.T @ y
    torch.testing.assert_close((P @ x) @ q @ k.T @ (P @ y), expected, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(P.T @ q, wanted_q, rtol=0, atol=1e-12)


@pytest.mark.bad_input
def test_more_columns_than_there_are_places_are_refused():
    g = generator()
    q, k = (haar(8, 5, generator=g, dtype=torch.float64) for _ in "qk")
    with pytest.raises(ValueError, match="q, k: expected 10 independent columns, got rank 8"):
        carrying(q, k, q, k)
    with pytest.raises(ValueError, match="q, k: expected 10 independent columns, got rank 5"):
        carrying(q, q, q, q)


@pytest.mark.bad_input
def test_sizes_are_checked():
    for d, K in ((8, 3), (8, 8), (8, 16)):
        with pytest.raises(ValueError, match=f"K: expected a divisor of d = 8 that is less, got {K}"):
            freedoms(d, K)
    with pytest.raises(ValueError, match="K"):
        freedoms(8, 0)
    with pytest.raises(ValueError, match="d: "):
        expected_missed(0)
    with pytest.raises(ValueError, match="draw: "):
        drawn_missed(torch.eye(2), 1, 1, draw="dice", generator=generator())


@pytest.mark.parametrize(("d", "K"), [(2, 1), (4, 1), (6, 3)])
def test_freedoms_are_those_that_are_counted(d, K):
    g = generator()
    both = torch.stack([haar(d, d, generator=g, dtype=torch.float64) for _ in "qk"])

    def maps(pair):
        return torch.stack([q @ k.T for q, k in zip(pair[0].split(K, 1), pair[1].split(K, 1), strict=True)])

    learned = rank_at(maps, both)
    carried = rank_at(lambda P: maps(torch.stack([P.T @ one for one in both])), normal(d, d, g=g))
    assert (learned, carried) == freedoms(d, K) == ((2 * d - K) * d, d * d)
