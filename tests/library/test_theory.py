"""The law of a head's score: exact moments against simulation, and the test's power against a wrong law."""

import pytest
import torch
from scipy import stats

from ortho.orthogonal import DRAWS
from ortho.theory.scores import head_spectrum, moment_deviation, sample_scores, score_moment

FALSE_ALARM = 1e-4  # chance that the right law fails one comparison
LIMIT = stats.norm.isf(FALSE_ALARM / 2)  # standard errors


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("draw", list(DRAWS))
def test_moments(draw):
    scores = sample_scores(draw, 6, 3, 4000, generator=generator())
    for order in (1, 2, 3, 4):
        assert abs(moment_deviation(scores, draw, 6, 3, order)) < LIMIT


def test_the_laws_are_told_apart():
    """At d = 4 the fourth moments differ by (1 + 2/d)^2 = 2.25, which the comparison above does not let pass."""
    scores = sample_scores("haar", 4, 4, 4000, generator=generator())
    assert abs(moment_deviation(scores, "gaussian", 4, 4, 4)) > LIMIT


def test_closed_forms():
    assert score_moment("haar", 8, 2, 2) == score_moment("gaussian", 8, 2, 2) == 2 / 64
    assert score_moment("gaussian", 8, 2, 4) == pytest.approx(score_moment("haar", 8, 2, 4) * (1 + 2 / 8) ** 2)
    # One head: W_Q W_K^T is itself Haar, and s is a coordinate of a uniform unit vector, of fourth moment 3/(d(d+2)).
    assert score_moment("haar", 8, 8, 4) == pytest.approx(3 / 8 / 10)


def test_spectrum():
    torch.testing.assert_close(head_spectrum("haar", 12, 12, generator=generator()), torch.ones(12).double())
    gaussian = head_spectrum("gaussian", 12, 4, generator=generator())
    assert gaussian.shape == (4,) and gaussian.diff().le(0).all() and gaussian.std() > 0.1


@pytest.mark.bad_input
def test_errors():
    with pytest.raises(ValueError, match="draw: expected one of 'haar'.*got 'uniform'"):
        score_moment("uniform", 8, 2, 4)
