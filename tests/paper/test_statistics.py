"""The exact tests and intervals are as exact as they say, and every interval is judged in the same way."""

import itertools
import math
import random

import pytest
from refusals import refusals
from scipy import stats

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


@pytest.mark.parametrize(
    ("better", "worse", "chance", "ends"),
    [
        ([6, 7, 8], [1, 2, 3], 1 / 20, (3, 7)),  # one choice of 20 separates the arms
        ([6, 7, 8], [1, 2, 3], 2 / 20, (4, 6)),  # of 3, 4, 4, 5, 5, 5, 6, 6, 7 the second and the last but one
        ([6, 7, 8], [1, 2, 3], 0.049, (-math.inf, math.inf)),
        ([1, 2, 3], [1, 2, 3], 1 / 20, (-2, 2)),
        ([1], [0], 0.4, (-math.inf, math.inf)),
    ],
)
def test_the_interval_of_a_gain(better, worse, chance, ends):
    assert gain(better, worse, chance) == ends
    assert gain(worse, better, chance) == (-ends[1], -ends[0])


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


def test_better_needs_more_the_more_is_compared():
    """1 / 252, the least probability of five runs against five, is enough for twelve comparisons."""
    assert [is_better(1 / 252, comparisons) for comparisons in (1, 12, 13)] == [True, True, False]
    assert is_better(1 / 20, 1) and not is_better(1 / 19, 1)


@pytest.mark.parametrize(
    ("p_values", "rejected"),
    [
        ([], []),
        ([0.05], [True]),
        ([0.01, 0.04, 0.03, 0.005], [True, False, False, True]),  # against 1/80, 1/60; 0.03 is above 1/40
        ([0.02, 0.04], [True, True]),  # the second has the whole level once the first is rejected
        ([0.026, 0.001, 0.026], [False, True, False]),  # both 0.026 (1/38) are above 1/40
        ([0.03, 0.03], [False, False]),  # each is below 0.05, but the least is above 0.025
    ],
)
def test_holm_steps_down(p_values, rejected):
    assert holm(p_values, level=0.05) == rejected


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


@pytest.mark.parametrize(
    ("counts", "chance"),
    [
        ((5, 5, 0, 5), 2 / 252),  # of the ways to choose the 5 that succeed among 10, two are as uneven
        ((0, 5, 5, 5), 2 / 252),
        ((5, 5, 1, 5), 10 / 210),
        ((3, 5, 3, 5), 1),
        ((0, 5, 0, 5), 1),
        ((3, 3, 1, 6), 6 / 126),  # 15, 60, 45 and 6 of the ways give the first arm 0, 1, 2 and 3
        ((0, 3, 4, 6), 21 / 126),
    ],
)
def test_the_probability_of_successes_as_uneven_by_chance(counts, chance):
    assert fisher(*counts) == pytest.approx(chance, rel=1e-14)


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


def intervals():
    """Intervals with ends below, at and above the margins and 0, in order."""
    return itertools.combinations_with_replacement((-math.inf, -2, -1, -0.5, 0, 0.5, 1, 2, math.inf), 2)


def test_what_is_said_is_true_of_every_difference_in_the_interval():
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
    said = set()
    for low, high in intervals():
        # Each outcome holds on a convex set: if it holds at both ends, it holds between them.
        outcomes = [name for name, holds in true.items() if holds(low) and holds(high)]
        assert decide((low, high), decision) == outcomes[0], (low, high)
        said.add(outcomes[0])
    assert said == set(OUTCOMES)


def test_losses_are_judged_the_other_way_round():
    scores, losses = (Decision(margin=1, level=0.025, higher_is_better=higher) for higher in (True, False))
    for low, high in intervals():
        assert decide((low, high), losses) == decide((-high, -low), scores)


def test_without_a_margin_nothing_is_equivalent():
    decision = Decision(margin=0, level=0.025, higher_is_better=True)
    assert {decide(interval, decision) for interval in intervals()} == {"better", "worse", "undecided"}


def test_a_decision_is_kept_in_a_records_configuration():
    decision = Decision(margin=0.01, level=0.025, higher_is_better=False)
    settings = decision.settings()
    assert settings == {"decision_margin": 0.01, "decision_level": 0.025, "decision_higher_is_better": False}
    assert Decision.of({"arm": "learned", "seed": 1, **settings}) == decision
    with pytest.raises(KeyError):
        Decision.of({"arm": "learned"})
    assert decision.confidence() == pytest.approx(0.95) and decision.confidence(5) == pytest.approx(0.99)


@refusals(
    [
        (lambda: better_by_chance([], [1.0]), "at least one value each, got 0 and 1"),
        (lambda: gain([1.0], [], 0.1), "at least one value each, got 1 and 0"),
        (lambda: gain([1.0], [1.0], 0.5), r"chance: expected a probability in \(0, 1/2\), got 0.5"),
        (lambda: is_better(0.1, 0), "comparisons: expected an integer of at least 1, got 0"),
        (lambda: holm([0.1, math.nan]), r"p_values: expected probabilities in \[0, 1\], got \[0.1, nan\]"),
        (lambda: holm([0.01], level=5), r"level: expected a probability in \(0, 1\), got 5"),
        (lambda: student(0.95, 0), "freedom: expected an integer of at least 1, got 0"),
        (lambda: student(0.95, 2.0), "freedom: expected an integer of at least 1, got float 2.0", TypeError),
        (lambda: student(1.5, 3), r"probability: expected a probability in \(0, 1\), got 1.5"),
        (lambda: student(math.nan, 3), r"probability: expected a probability in \(0, 1\), got nan"),
        (lambda: success_interval(6, 5), "successes: expected 0 to runs = 5, got 6"),
        (lambda: success_interval(1.0, 5), "successes: expected an integer, got float 1.0", TypeError),
        (lambda: success_interval(0, 0), "runs: expected an integer of at least 1, got 0"),
        (lambda: success_interval(1, 5, confidence=1), r"confidence: .* in \(0, 1\), got 1"),
        (lambda: fisher(1, 5, -1, 5), "successes_b: expected 0 to runs_b = 5, got -1"),
        (lambda: Decision(-0.1, 0.05, True), "margin: expected a finite number of at least 0, got -0.1"),
        (lambda: Decision("1", 0.05, True), "margin: expected a number, got str '1'", TypeError),
        (lambda: Decision(0.1, 0.95, True), r"level: expected a probability in \(0, 1/2\), got 0.95"),
        (lambda: Decision(0.1, 0.05, 1), "higher_is_better: expected True or False, got int 1", TypeError),
        (lambda: decide((1, 0), Decision(0, 0.05, True)), r"interval: expected ends in order, got \(1, 0\)"),
        (lambda: decide((math.nan, 0), Decision(0, 0.05, True)), "interval: expected ends in order"),
    ],
)
def test_bad_input_is_named(refused):
    refused()
