"""The mean difference between two arms whose runs are paired by seed.

Nothing is drawn at random: all resamples of a bootstrap are enumerated, and each is weighted by how often it would be
drawn. For three pairs, too few for that, there is Student's interval.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import combinations
from math import factorial, inf, sqrt
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np

from ortho.checks import expect
from paper.experiments.statistics import Interval, student

Array = np.ndarray[Any, np.dtype[np.float64]]

MOST = 10  # pairs, which have 92,378 distinct resamples


class Difference(NamedTuple):
    """By how much the runs of one arm exceed those of another in the mean, and a confidence interval for it."""

    mean: float
    interval: Interval


def paired_difference(a: Sequence[float], b: Sequence[float], *, confidence: float = 0.95) -> Difference:
    """The mean of a - b, for runs paired by seed, with its expanded percentile interval over resampled pairs.

    The quantiles of the bootstrap's means are taken so far out that the interval equals Student's if the means are
    normal (the expanded percentile interval: Hesterberg 2015, doi 10.1080/00031305.2015.1089789). Each resample is
    weighted by how often it occurs among the n^n.

    At a confidence of 95 %, with five pairs or with ten, the interval covers the mean at least 9 times in 10 for normal
    differences, and 17 times in 20 for exponential ones; when it misses the latter, it mostly ends too early towards
    their long tail. The mean of a resample never lies outside the range of the differences. With five pairs, a finite
    interval therefore covers at most 15 times in 16, even for symmetric differences. If the quantile is rarer than the
    rarest resample, both ends are infinite. Raises ValueError unless a and b hold the same number of finite values, 2
    to `MOST`.
    """
    differences = _differences(a, b)
    counts, shares = resamples(len(differences))
    tail = expanded_tail(len(differences), confidence)
    mean = float(differences.mean())
    if tail < shares.min():
        return Difference(mean, (-inf, inf))
    means = counts @ differences / len(differences)
    return Difference(mean, (_quantile(means, shares, tail), -_quantile(-means, shares, tail)))


def student_difference(
    a: Sequence[float], b: Sequence[float], *, confidence: float = 0.95, left_out: Sequence[float] | Array = ()
) -> Difference:
    """The mean of a - b, for runs paired by seed, with Student's interval, whose error also has that of the test.

    For fewer seeds than `paired_difference` can resample, if the differences are normal. `left_out` holds the mean of
    a - b on the test without each of its parts, (parts,). Its jackknife variance is added to that of the seeds. As the
    variance of the seeds' differences has a share of the test's error already, the interval is rather too wide. Raises
    ValueError for what `paired_difference` refuses, and for a single part.
    """
    differences = _differences(a, b)
    n, parts = len(differences), np.asarray(left_out, dtype=np.float64)
    expect(parts.shape != (1,) and np.isfinite(parts).all(), "left_out", "no parts or several finite ones", parts)
    of_seeds = float(differences.var(ddof=1)) / n
    of_parts = (len(parts) - 1) * float(parts.var()) if len(parts) else 0.0
    mean, reach = float(differences.mean()), student(confidence, n - 1) * sqrt(of_seeds + of_parts)
    return Difference(mean, (mean - reach, mean + reach))


def expanded_tail(n: int, confidence: float) -> float:
    """The share of the bootstrap's means of n values that lies beyond each end of the expanded percentile interval."""
    return NormalDist().cdf(-sqrt(n / (n - 1)) * student(confidence, n - 1))


@lru_cache
def resamples(n: int) -> tuple[Array, Array]:
    """How often each distinct resample holds each of n values, (S, n), and its share among the n^n resamples, (S,)."""
    expect(n <= MOST, "a, b", f"at most {MOST} pairs", n)
    # n stars between n - 1 bars; the stars between two bars count how often one value is drawn.
    bars = np.array(list(combinations(range(2 * n - 1), n - 1)))
    edges = np.pad(bars, ((0, 0), (1, 1)), constant_values=((0, 0), (-1, 2 * n - 1)))
    counts = np.diff(edges, axis=1) - 1
    factorials = np.array([factorial(k) for k in range(n + 1)], dtype=np.float64)
    shares = factorials[n] / factorials[counts].prod(axis=1) / float(n) ** n
    found = counts.astype(np.float64), shares
    for array in found:
        array.setflags(write=False)  # the cache hands out the same arrays
    return found


def _differences(a: Any, b: Any) -> Array:
    one, other = (np.asarray(values, dtype=np.float64) for values in (a, b))
    fits = one.ndim == 1 and one.shape == other.shape and len(one) > 1
    expect(fits, "a, b", "the same shape (seeds,) of two seeds at least", f"{one.shape}, {other.shape}")
    expect(np.isfinite([one, other]).all(), "a, b", "finite numbers", "NaN or infinite ones")
    return one - other


def _quantile(values: Array, shares: Array, tail: float) -> float:
    """The smallest value that, together with all values below it, has a share of at least `tail`."""
    order = np.argsort(values, kind="stable")
    return float(values[order[np.searchsorted(shares[order].cumsum(), tail)]])
