"""A figure from simulation, with its standard error."""

from math import copysign, inf, sqrt
from typing import NamedTuple

from ortho._typing import Float, Tensor
from ortho.checks import expect

SIGMAS = 4.42  # standard errors: a normal deviation exceeds them, on either side, with probability 1e-5


class Estimate(NamedTuple):
    """A mean over draws and its standard error."""

    value: float
    standard_error: float

    def deviation(self, expected: float) -> float:
        """How many standard errors the value lies above `expected`: N(0, 1) over many draws if that is the mean."""
        off = self.value - expected
        return off / self.standard_error if self.standard_error else copysign(inf, off) if off else 0.0


def estimate(samples: Float[Tensor, "count"]) -> Estimate:
    """The mean of independent samples (count,), with its standard error; ValueError for fewer than two."""
    expect(len(samples) >= 2, "samples", "shape (count,) with count of at least 2", tuple(samples.shape))
    return Estimate(float(samples.double().mean()), float(samples.double().std()) / sqrt(len(samples)))
