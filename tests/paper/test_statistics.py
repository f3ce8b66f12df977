"""The exact tests and intervals are as exact as they say; pairs are resampled exactly."""

import itertools
import math
import random
from collections import Counter

import numpy as np
import pytest
from scipy import optimize, stats
from seeded import SIGMAS

from paper.experiments.resampling import expanded_tail, paired_difference, resamples, student_difference
from paper.experiments.statistics import (
    OUTCOMES,
    Decision,
    better_by_chance,
    decide,
    fisher,
    gain,
    holm,
    is_better,
    student,
    student_below,
    success_interval,
)

# ---------------------------------------------------------------------------- exact tests, and how intervals are judged


@pytest.mark.parametrize(
    ("better", "worse", "chance"),
    [
        ([1.0] * 5, [0.5] * 5, 1 / 252),
        ([0.9, 0.8, 0.7, 0.6, 0.4], [0.5, 0.3, 0.2, 0.1, 0.0], 2 / 252),
        ([0.5] * 5, [0.5] * 5, 1),
        ([0.1], [0.2], 1),
        ([0.2], [0.1], 1 / 2),
        ([2, 3], [1, 1], 1 / 6),
        ([2, 1], [1, 1], 1 / 2),  # the 2 is in the better arm
        ([0.0, 0.1], [0.2, 0.3], 1),
        ([0, 2], [1, 1], 4 / 6),  # equal values share the middle rank: 2.5 each
    ],
)
def test_the_probability_of_ranking_as_high_by_chance(better, worse, chance):
    assert better_by_chance(better, worse) == pytest.approx(chance, abs=1e-12)


def test_it_is_right_as_often_as_it_says():
    """Of all ways to deal the same values to two arms, a share of at most p has a probability of at most p."""
    draw = random.Random(0)
    for _ in range(20):
        values = [draw.randrange(6) for _ in range(8)]
        found = [
            better_by_chance([values[i] for i in chosen], [v for i, v in enumerate(values) if i not in chosen])
            for chosen in itertools.combinations(range(8), 4)
        ]
        for p in set(found):
            assert sum(other <= p for other in found) <= p * len(found) + 1e-9


def test_the_interval_is_the_exact_test():
    """Without equal values, the interval lies above 0 exactly if the test's probability is at most the chance; with
    equal values, it does so no more often than that."""
    draw = random.Random(1)
    for values in ([*range(9)], [draw.randrange(5) for _ in range(9)]):
        for chance in (0.01, 0.05, 0.2):
            above = 0
            deals = list(itertools.combinations(range(9), 4))
            for chosen in deals:
                arms = [values[i] for i in chosen], [v for i, v in enumerate(values) if i not in chosen]
                shown = gain(*arms, chance)[0] > 0
                above += shown
                if len(set(values)) == len(values):
                    assert shown == (better_by_chance(*arms) <= chance)
            assert above <= chance * len(deals) + 1e-9


def test_holm_rejects_wrongly_no_more_often_than_its_level():
    """By the definition of closed testing (Marcus, Peritz & Gabriel 1976), a hypothesis is rejected if every set of
    hypotheses that contains it has a member whose probability is at most the level over the size of the set. All that
    Bonferroni's correction rejects is rejected too."""
    draw = random.Random(2)
    for _ in range(200):
        p = [draw.choice([0.001, 0.01, 0.012, 0.02, 0.03, 0.06, 0.5]) for _ in range(4)]
        sets = [chosen for size in range(1, 5) for chosen in itertools.combinations(range(4), size)]
        falls = [all(min(p[j] for j in s) <= 0.05 / len(s) for s in sets if i in s) for i in range(4)]
        assert holm(p, level=0.05) == falls
        assert all(holds or not is_better(value, 4) for holds, value in zip(falls, p, strict=True))


def test_the_quantiles_are_scipys():
    """The exact interval agrees with its definition and, without failures, with a closed form: at a rate r, n runs have
    n successes with probability r^n. Student's distribution with one degree of freedom is 1/2 + arctan(t) / pi."""
    for runs in (1, 5, 10, 57):
        for successes in {0, 1, runs // 2, runs}:
            exact = stats.binomtest(successes, runs).proportion_ci(0.9, method="exact")
            assert success_interval(successes, runs, confidence=0.9) == pytest.approx(tuple(exact), abs=1e-10)
        assert success_interval(runs, runs) == (pytest.approx(0.025 ** (1 / runs), rel=1e-14), 1)
    for n, m in ((1, 1), (5, 5), (6, 9)):
        for a, b in itertools.product(range(n + 1), range(m + 1)):
            expected = stats.fisher_exact([[a, n - a], [b, m - b]]).pvalue
            assert fisher(a, n, b, m) == pytest.approx(expected, rel=1e-10)
    assert student(0.95, 4) == pytest.approx(2.776445, rel=1e-6)  # from the printed tables
    for t in (-3.0, -0.5, 0.5, 3.0):
        assert student_below(t, 1) == pytest.approx(0.5 + math.atan(t) / math.pi, abs=1e-12)
        assert student(2 * student_below(abs(t), 5) - 1, 5) == pytest.approx(abs(t), rel=1e-9)


def test_an_outcome_is_true_of_every_difference_in_the_interval():
    """The outcome is the strongest that is true of all of them, with a margin of 1."""
    true = {
        "equivalent": lambda difference: abs(difference) < 1,
        "better": lambda difference: difference > 0,
        "worse": lambda difference: difference < 0,
        "not worse": lambda difference: difference > -1,
        "not better": lambda difference: difference < 1,
        "undecided": lambda difference: True,
    }
    assert tuple(true) == OUTCOMES
    decision = Decision(margin=1, level=0.025, higher_is_better=True)
    reached = set()
    # Ends below, at and above the margins and 0, in order.
    ends = (-math.inf, -2, -1, -0.5, 0, 0.5, 1, 2, math.inf)
    for low, high in itertools.combinations_with_replacement(ends, 2):
        # Each outcome holds on a convex set: if it holds at both ends, it holds between them.
        outcomes = [name for name, holds in true.items() if holds(low) and holds(high)]
        assert decide((low, high), decision) == outcomes[0], (low, high)
        reached.add(outcomes[0])
    assert reached == set(OUTCOMES)


# -------------------------------------------------------------------------------------- intervals of paired differences


@pytest.mark.parametrize("n", range(2, 7))
def test_all_resamples_are_there_as_often_as_they_would_be_drawn(n):
    counts, shares = resamples(n)
    found = dict(zip(map(tuple, counts.astype(int).tolist()), shares * n**n, strict=True))
    expected = Counter(tuple(map(r.count, range(n))) for r in itertools.product(range(n), repeat=n))
    assert len(counts) == len(found) == math.comb(2 * n - 1, n)
    assert found == pytest.approx(expected, rel=1e-14)


def test_an_interval_by_hand():
    """The differences are 0, 0, 1 and 4. At this confidence a tail holds 2 % of the 256 resamples, which is 5.12.

    Four times 4: 1 resample, mean 4. Three times 4, and 1: 4 resamples, mean 3.25, so 5 in all. Three times 4, and 0: 8
    resamples, mean 3, so the tail ends here. At the other end the 16 resamples of zeros alone exceed 5.12.
    """
    confidence = optimize.brentq(lambda tried: expanded_tail(4, tried) - 0.02, 0.6, 0.9)
    found = paired_difference([1, 2, 3, 8], [1, 2, 2, 4], confidence=confidence)
    assert found == (1.25, (0, 3))
    assert paired_difference([1, 2, 2, 4], [1, 2, 3, 8], confidence=confidence) == (-1.25, (-3, 0))


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
