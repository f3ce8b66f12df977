"""The law of a head's score, exact and drawn, and its test's power; which scores drawn matrices can make."""

import pytest
import torch
from scipy import stats
from seeded import draw as normal
from seeded import generator

from ortho.orthogonal import DRAWS, haar
from ortho.theory.estimates import SIGMAS, estimate
from paper.theory import scores as laws

FALSE_ALARM = 1e-4  # chance that the right law fails one comparison
LIMIT = stats.norm.isf(FALSE_ALARM / 2)  # standard errors


@pytest.mark.parametrize("draw", list(DRAWS))
def test_moments(draw):
    scores = laws.sample_scores(draw, 6, 3, 2000, generator=generator())
    for order in (1, 2, 3, 4):
        assert abs(laws.moment_deviation(scores, draw, 6, 3, order)) < LIMIT


def test_the_laws_are_told_apart():
    """At d = 4 the fourth moments differ by (1 + 2/d)^2 = 2.25, which the comparison above detects."""
    scores = laws.sample_scores("haar", 4, 4, 4000, generator=generator())
    assert abs(laws.moment_deviation(scores, "gaussian", 4, 4, 4)) > LIMIT


def test_closed_forms():
    assert laws.score_moment("haar", 8, 2, 2) == laws.score_moment("gaussian", 8, 2, 2) == 2 / 64
    assert laws.score_moment("gaussian", 8, 2, 4) == pytest.approx(
        laws.score_moment("haar", 8, 2, 4) * (1 + 2 / 8) ** 2
    )
    # One head: W_Q W_K^T is itself Haar, and s is a coordinate of a uniform unit vector, of fourth moment 3/(d(d+2)).
    assert laws.score_moment("haar", 8, 8, 4) == pytest.approx(3 / 8 / 10)


def test_spectrum():
    torch.testing.assert_close(laws.head_spectrum("haar", 12, 12, generator=generator()), torch.ones(12).double())
    gaussian = laws.head_spectrum("gaussian", 12, 4, generator=generator())
    assert gaussian.shape == (4,) and gaussian.diff().le(0).all() and gaussian.std() > 0.1


def test_what_a_multiple_misses_by_hand():
    target = torch.tensor([[3.0, 0.0], [0.0, 4.0]], dtype=torch.float64)
    assert laws.missed(target, -2 * target) == pytest.approx(0, abs=1e-15)
    assert laws.missed(target, torch.tensor([[1.0, 0.0], [0.0, 0.0]]).double()) == pytest.approx(16 / 25)
    assert laws.missed(target, torch.tensor([[0.0, 1.0], [5.0, 0.0]]).double()) == 1


@pytest.mark.parametrize("draw", ["haar", "gaussian"])
@pytest.mark.parametrize(("d", "K"), [(2, 1), (2, 2), (6, 2), (6, 3)])
def test_the_mean_is_that_of_the_draws(draw, d, K):
    """Each of eight comparisons, with fixed seeds, is wrong with probability 1e-5; the target has rank 1."""
    target = torch.zeros(d, d, dtype=torch.float64)
    target[0, -1] = 5.0
    found = estimate(laws.drawn_missed(target, K, 400, draw=draw, generator=generator()))
    assert abs(found.deviation(laws.expected_missed(d))) < SIGMAS
    assert found.standard_error < 0.3 / d**2 + 0.01


def test_a_map_before_carries_the_scores():
    g = generator()
    q, k = (haar(12, 5, generator=g, dtype=torch.float64) for _ in "qk")
    wanted_q, wanted_k = normal(2, 12, 5, seed=1)
    P = laws.carrying(q, k, wanted_q, wanted_k)
    x, y = normal(2, 12, seed=2)
    expected = x @ wanted_q @ wanted_k.T @ y
    torch.testing.assert_close((P @ x) @ q @ k.T @ (P @ y), expected, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(P.T @ q, wanted_q, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("d", "K"), [(2, 1), (4, 1), (6, 3)])
def test_freedoms_are_those_that_are_counted(d, K):
    g = generator()
    both = torch.stack([haar(d, d, generator=g, dtype=torch.float64) for _ in "qk"])

    def maps(pair):
        return torch.stack([q @ k.T for q, k in zip(pair[0].split(K, 1), pair[1].split(K, 1), strict=True)])

    learned = laws.rank_at(maps, both)
    carried = laws.rank_at(lambda P: maps(torch.stack([P.T @ one for one in both])), normal(d, d, seed=1))
    assert (learned, carried) == laws.freedoms(d, K) == ((2 * d - K) * d, d * d)


def test_heads_wider_than_the_layer_are_refused():
    with pytest.raises(ValueError, match="K: expected at most d = 2, got 4"):
        laws.score_moment("haar", 2, 4, 2)
