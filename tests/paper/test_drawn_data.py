"""Queries and keys of several distributions: their scores, and which fitted features gain on which."""

from math import sqrt

import pytest
import torch
from seeded import generator

from ortho.theory.estimates import SIGMAS
from ortho.theory.variance import FITS
from paper.theory.drawn_data import DATA, reductions, sample_data

F64 = torch.float64


@pytest.mark.parametrize("name", DATA)
def test_scores_of_the_data(name):
    """Scores have the standard deviation `spread` by design, over scales too. It is estimated from 60 draws of 40 x 40
    scores, to about 60^-1/2 of its variation from draw to draw."""
    g, spread = generator(1), 0.7
    squares = []
    for _ in range(60):
        x, y = sample_data(name, 40, 16, spread, generator=g)
        assert x.shape == y.shape == (40, 16) and x.dtype == F64
        if name == "shifted":
            assert float((x.mean(0) @ y.mean(0)).sqrt() / sqrt(spread * 4)) == pytest.approx(1, abs=0.5)
            x, y = x - x.mean(0), y - y.mean(0)
        squares.append((x @ y.mT).square().mean())
    squares = torch.stack(squares) / (1 - 1 / 40 if name == "shifted" else 1) ** 2
    error = float(squares.std()) / sqrt(60)
    assert abs(float(squares.mean()) - spread**2) < SIGMAS * error
    assert error < spread**2 / 20


def test_reductions():
    """Each family gains on the data it is made for; the comparison is paired, so the sign of the mean decides."""
    found = {name: reductions(name, 8, 0.5, tokens=256) for name in DATA}
    for by_fit in found.values():
        assert list(by_fit) == list(FITS)
        assert all(one.value > SIGMAS * one.standard_error > 0 for one in by_fit.values())
    gain = {(name, fit): found[name][fit].value for name in DATA for fit in FITS}
    # many tokens and nothing to adapt to: all alike
    assert max(found["isotropic"].values()).value < 1.1 * gain["isotropic", "gerf"]
    assert gain["scaled", "saderf"] > 1.3 * gain["scaled", "gerf"] and gain["scaled", "aderf"] > gain["scaled", "sderf"]
    assert gain["shifted", "sderf"] > 1.2 * gain["shifted", "aderf"]
    assert gain["correlated", "sderf"] > 1.2 * gain["correlated", "aderf"]
    assert reductions("scaled", 8, 0.5, draws=3, seed=4) == reductions("scaled", 8, 0.5, draws=3, seed=4)
    assert reductions("scaled", 8, 0.5, draws=3, seed=4) != reductions("scaled", 8, 0.5, draws=3, seed=5)


def test_a_spread_of_nothing():
    with pytest.raises(ValueError, match="spread: expected a positive number, got 0"):
        sample_data("scaled", 4, 4, 0)
