"""Pairs are resampled exactly, and intervals contain the mean as often as they say."""

import itertools
import math
from collections import Counter

import numpy as np
import pytest
import torch
from refusals import refusals
from scipy import optimize
from seeded import SIGMAS, generator

from paper.experiments import resampling
from paper.experiments.resampling import expanded_tail, paired_difference, resamples, student_difference
from paper.experiments.statistics import student


def drawn(kind, *sizes, seed=0):
    """Differences of mean 0."""
    values = torch.empty(*sizes, dtype=torch.float64)
    if kind == "normal":
        return values.normal_(generator=generator(seed)).numpy()
    return (values.exponential_(generator=generator(seed)) - 1).numpy()


@pytest.mark.parametrize("n", range(2, 7))
def test_all_resamples_are_there_as_often_as_they_would_be_drawn(n):
    counts, shares = resamples(n)
    found = dict(zip(map(tuple, counts.astype(int).tolist()), shares * n**n, strict=True))
    expected = Counter(tuple(map(r.count, range(n))) for r in itertools.product(range(n), repeat=n))
    assert len(counts) == len(found) == math.comb(2 * n - 1, n)
    assert found == pytest.approx(expected, rel=1e-14)


def test_many_pairs_are_resampled_by_the_generator():
    """A resample takes each value once on average, with variance 1 - 1/n; the mean of `DRAWN` resamples is tested."""
    counts, shares = resamples(20)
    assert counts.shape == (resampling.DRAWN, 20) and (counts.sum(1) == 20).all() and shares.sum() == pytest.approx(1)
    error = math.sqrt((1 - 1 / 20) / resampling.DRAWN)
    assert np.abs(shares @ counts - 1).max() < SIGMAS * error  # error rate 20 times 1e-5
    assert (resamples(20, generator(0))[0] == counts).all()
    assert (resamples(20, generator(1))[0] != counts).any()
    pairs = drawn("normal", 20).tolist(), [0] * 20
    assert paired_difference(*pairs) == paired_difference(*pairs)
    assert paired_difference(*pairs) != paired_difference(*pairs, generator=generator(1))


@pytest.mark.parametrize(
    ("n", "confidence", "t"),
    [
        (2, 0.5, 1),  # tan(pi c / 2)
        (3, 0.95, 0.95 * math.sqrt(2 / (1 - 0.95**2))),
        (5, 0.95, 2.776445),  # from the printed tables
        (10, 0.95, 2.262157),
    ],
)
def test_the_tail_of_the_expanded_interval(n, confidence, t):
    """For normal means with variance over n, where Student's is over n - 1, the interval ends where Student's does."""
    distance = t * math.sqrt(n / (n - 1))
    assert expanded_tail(n, confidence) == pytest.approx(math.erfc(distance / math.sqrt(2)) / 2, rel=1e-5)


def test_an_interval_by_hand():
    """The differences are 0, 0, 1 and 4. At this confidence a tail holds 2 % of the 256 resamples, which is 5.12.

    Four times 4: 1 resample, mean 4. Three times 4, and 1: 4 resamples, mean 3.25, so 5 in all. Three times 4, and 0: 8
    resamples, mean 3, so the tail ends here. At the other end the 16 resamples of zeros alone exceed 5.12.
    """
    confidence = optimize.brentq(lambda tried: expanded_tail(4, tried) - 0.02, 0.6, 0.9)
    found = paired_difference([1, 2, 3, 8], [1, 2, 2, 4], confidence=confidence)
    assert found == (1.25, (0, 3))
    assert paired_difference([1, 2, 2, 4], [1, 2, 3, 8], confidence=confidence) == (-1.25, (-3, 0))


def test_where_the_bootstrap_is_normal_the_interval_is_students():
    """The means of 200 differences are so nearly normal that the interval's half-width is t s / sqrt(n), up to the
    noise of 100,000 draws. A quantile at the tail p has the standard error sqrt(p / draws) over the density. This is
    below 1 % of the half-width here, and 4.42 standard errors are allowed."""
    n, confidence = 200, 0.95
    d = drawn("normal", n)
    mean, (low, high) = paired_difference(d.tolist(), [0] * n, confidence=confidence)
    half = student(confidence, n - 1) * d.std(ddof=1) / math.sqrt(n)
    z = half * math.sqrt(n) / d.std()
    density = math.exp(-z * z / 2) / math.sqrt(2 * math.pi)
    error = math.sqrt(expanded_tail(n, confidence) / resampling.DRAWN) / density * d.std() / math.sqrt(n)
    assert error < 0.01 * half
    assert (low, high) == pytest.approx((mean - half, mean + half), abs=SIGMAS * error)


def misses(kind, n, tail, samples):
    """Draw samples of n differences of mean 0; return the shares whose interval lies above 0, and below 0.

    Nothing is sorted: an interval lies above 0 if the resamples with a mean of 0 or less have a share below the tail.
    """
    counts, shares = resamples(n)
    above = below = 0
    for part in drawn(kind, samples, n).reshape(-1, 50, n):
        sums = counts @ part.T
        above += (shares @ (sums <= 0) < tail).sum()
        below += (shares @ (sums >= 0) < tail).sum()
    return above / samples, below / samples


def test_the_intervals_that_miss_are_counted_without_sorting():
    n, samples = 5, 200
    tail = expanded_tail(n, 0.95)
    counts, shares = resamples(n)
    for shift in (0, 1):
        for d in drawn("normal", samples, n) + shift:
            low, high = paired_difference(d.tolist(), [0] * n).interval
            sums = counts @ d
            assert (low > 0) == (shares @ (sums <= 0) < tail)
            assert (high < 0) == (shares @ (sums >= 0) < tail)


@pytest.mark.parametrize(
    ("kind", "n", "samples", "least"),
    [
        ("normal", 5, 40_000, 9 / 10),
        ("normal", 10, 2_000, 9 / 10),
        ("exponential", 5, 40_000, 17 / 20),
        ("exponential", 10, 2_000, 17 / 20),
    ],
)
def test_how_often_the_interval_holds_the_mean(kind, n, samples, least):
    """As often as the docstring says, with an error rate of 1e-5; with five pairs, less often than is asked for."""
    above, below = misses(kind, n, expanded_tail(n, 0.95), samples)
    covers = 1 - above - below
    error = math.sqrt(covers * (1 - covers) / samples)
    assert covers - SIGMAS * error > least
    if n == 5:
        assert covers + SIGMAS * error < 15 / 16
    if kind == "exponential":
        assert below > 5 * above  # the long tail is above


def test_too_few_pairs_have_infinite_ends():
    """Of five pairs, 1 resample in 3125 has the least mean: less than the tail at 95 %, more than the one at 99 %."""
    five, four = [0.1, 0.2, 0.3, 0.4, 0.5], [0.1, 0.2, 0.3, 0.4]
    assert expanded_tail(5, 0.95) > 1 / 3125 > expanded_tail(5, 0.99)
    low, high = paired_difference(five, [0] * 5).interval
    assert 0.1 < low < 0.3 < high < 0.5
    assert paired_difference(five, [0] * 5, confidence=0.99).interval == (-math.inf, math.inf)
    assert paired_difference(four, [0] * 4).interval == (-math.inf, math.inf)


def test_students_interval_by_hand():
    """Differences 1, 2 and 3: mean 2 and variance 1, so the error is 1 / sqrt(3). The jackknife's variance of a mean is
    the variance of the values over their number."""
    alone = student_difference([2, 4, 6], [1, 2, 3], confidence=0.9)
    assert alone.mean == 2
    assert alone.interval == pytest.approx([2 - student(0.9, 2) / 3**0.5, 2 + student(0.9, 2) / 3**0.5])
    parts = np.array([0.0, 3.0, 1.0, 4.0])
    left_out = (parts.sum() - parts) / 3
    both = student_difference([2, 4, 6], [1, 2, 3], confidence=0.9, left_out=left_out)
    reach = student(0.9, 2) * math.sqrt(1 / 3 + parts.var(ddof=1) / 4)
    assert both.interval == pytest.approx([2 - reach, 2 + reach])


@pytest.mark.parametrize("of_parts", [0.0, 3.0])
def test_how_often_students_interval_of_three_seeds_holds_the_mean(of_parts):
    """Seeds and 36 parts of a test add normal errors to a mean of 0. An interval at 90 % misses it 1 time in 10 at
    most. An interval without the parts' error does so only where the parts add none. The count is random, so it may lie
    `SIGMAS` standard deviations above its mean."""
    seeds, parts, samples, level = 3, 36, 4000, 0.1
    random = np.random.default_rng(1)
    of_seeds, of_test = random.normal(size=(samples, seeds, 1)), random.normal(size=(samples, 1, parts))
    tables = of_seeds + math.sqrt(parts) * of_parts * of_test  # the error of the mean over parts is `of_parts`
    misses = {"both": 0, "seeds": 0}
    for table in tables:
        values, left_out = table.mean(1), (table.sum(1, keepdims=True) - table).mean(0) / (parts - 1)
        for name, own in (("both", left_out), ("seeds", ())):
            low, high = student_difference(values.tolist(), [0] * seeds, confidence=1 - level, left_out=own).interval
            misses[name] += not low <= 0 <= high
    most = level + SIGMAS * math.sqrt(level * (1 - level) / samples)
    assert misses["both"] / samples <= most
    assert (misses["seeds"] / samples <= most) == (of_parts == 0)


def test_equal_differences_have_no_width():
    assert paired_difference([0.5, 0.25, 1], [0.25, 0, 0.75], confidence=0.5) == (0.25, (0.25, 0.25))


def test_a_seed_that_changes_both_arms_changes_nothing():
    """Nothing is rounded, as the numbers need only a few bits."""
    a, b = np.array([3, 5, 4, 7, 6.0]), np.array([1, 4, 4, 2, 5.0])
    seeds = np.array([0, 100, -50, 7, 3.0])
    assert paired_difference(list(a + seeds), list(b + seeds)) == paired_difference(list(a), list(b))


@refusals(
    [
        (lambda: paired_difference([1, 2], [1]), r"a, b: expected the same shape \(seeds,\) .*, got \(2,\), \(1,\)"),
        (lambda: paired_difference([1], [1]), r"two seeds at least, got \(1,\), \(1,\)"),
        (lambda: paired_difference([1, math.nan], [1, 2]), "a, b: expected finite numbers, got NaN or infinite ones"),
        (
            lambda: student_difference([1, 2], [1, 3], left_out=[1.0]),
            r"left_out: expected no parts or several finite ones, got \[1",
        ),
        (lambda: paired_difference([1, 2], [1, math.inf]), "a, b: expected finite numbers, got NaN or infinite ones"),
        (lambda: paired_difference([1, 2], [1, 2], confidence=1), r"confidence: .* in \(0, 1\), got 1"),
        (lambda: expanded_tail(1, 0.95), "n: expected at least 2 values, got 1"),
        (lambda: resamples(1), "n: expected at least 2 values, got 1"),
        (lambda: resamples(0), "n: expected an integer of at least 1, got 0"),
    ],
)
def test_bad_input_is_named(refused):
    refused()
