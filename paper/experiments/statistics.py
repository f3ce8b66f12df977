"""Whether arms differ: exact tests and intervals for a handful of runs each, and rules that are fixed before the runs.

Here the runs of two arms are independent; `paper.experiments.resampling` handles runs paired by seed. Outcomes with two
values, such as a task that is learnt or not, are counted as successes. SciPy computes the quantiles; it is imported
only where it is needed, so that experiments run without it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import combinations
from math import inf
from statistics import median
from typing import Any

Interval = tuple[float, float]

LEVEL = 0.05  # the error rate of all comparisons that are shown together
# What an interval says about one arm against another; the first that is true is reported.
OUTCOMES = ("equivalent", "better", "worse", "not worse", "not better", "undecided")


@dataclass(frozen=True)
class Decision:
    """How an interval of the difference of two arms is judged, written down before the runs.

    `margin`: the least difference that matters, in the metric's unit; 0 if every difference does. `level`: the
    probability at which each end of the interval may be wrong. `higher_is_better`: false for losses.
    """

    margin: float
    level: float
    higher_is_better: bool

    def confidence(self, comparisons: int = 1) -> float:
        """The confidence that each of several intervals needs.

        With it, the probability that any of their lower ends is wrong is at most `level`; so it is for the upper ends.
        """
        return 1 - 2 * self.level / comparisons

    def settings(self) -> dict[str, float | bool]:
        """The rule as part of a record's configuration."""
        return {f"decision_{name}": value for name, value in asdict(self).items()}

    @classmethod
    def of(cls, configuration: Mapping[str, Any]) -> "Decision":
        """The rule that a record's configuration holds; KeyError if it holds none."""
        return cls(**{field.name: configuration[f"decision_{field.name}"] for field in fields(cls)})


def decide(interval: Interval, decision: Decision) -> str:
    """Which of `OUTCOMES` holds for the first arm, given an interval of its difference to the second.

    'equivalent': every difference in the interval is smaller than the margin (two one-sided tests, Schuirmann 1987).
    'better', 'worse': all lie on one side of 0. 'not worse' (non-inferior), 'not better': all lie on one side of the
    margin. 'undecided': none of these. An interval that excludes 0 but lies within the margin is 'equivalent': there is
    a difference, but it is too small to matter. The outcome is true of all differences in the interval; it is wrong
    only if the interval misses the true one.
    """
    low, high = interval
    if not decision.higher_is_better:
        low, high = -high, -low
    holds = (
        -decision.margin < low and high < decision.margin,
        low > 0,
        high < 0,
        low > -decision.margin,
        high < decision.margin,
        True,
    )
    return OUTCOMES[holds.index(True)]


def better_by_chance(better: Sequence[float], worse: Sequence[float]) -> float:
    """The probability that, if two arms do not differ, one ranks at least as high as `better` does over `worse`.

    The exact one-sided rank test (Mann & Whitney 1947): if runs are independent and the arms do not differ, every
    choice of the better arm's runs among all runs is equally likely. Equal values share their ranks.
    """
    pooled = [*better, *worse]
    # Twice the midrank, an integer: the values below count twice, the equal ones once.
    ranks = [sum((other < value) * 2 + (other == value) for other in pooled) for value in pooled]
    observed = sum(ranks[: len(better)])
    sums = [sum(chosen) for chosen in combinations(ranks, len(better))]
    return sum(total >= observed for total in sums) / len(sums)


def gain(better: Sequence[float], worse: Sequence[float], chance: float) -> Interval:
    """The interval (low, high) of how much a run of `better` exceeds one of `worse`.

    Each end is wrong with a probability of at most `chance`. The ends are order statistics of all differences between
    two runs, as far from the outside as the exact rank test of `better_by_chance` allows (Hodges & Lehmann 1963); they
    are infinite if there are too few runs. Equal values make the interval wider.
    """
    n, m = len(better), len(worse)
    differences = sorted(one - other for one in better for other in worse)
    # For arms that do not differ, without ties: how many differences are negative, for each choice of better's ranks.
    negative = sorted(sum(ranks) - n * (n - 1) // 2 for ranks in combinations(range(n + m), n))
    cut = negative[int(chance * len(negative))]  # the largest number with at most that share of them below it
    return (differences[cut - 1], differences[-cut]) if cut else (-inf, inf)


def is_better(by_chance: float, comparisons: int) -> bool:
    """Whether the p-value `by_chance` shows that an arm is better, at the level `LEVEL` for all comparisons together.

    Uses Bonferroni's correction, which does not need the other p-values; where all are at hand, `holm` does no worse.
    """
    return by_chance <= LEVEL / comparisons


def holm(p_values: Sequence[float], *, level: float = LEVEL) -> list[bool]:
    """Which of several hypotheses are rejected; the probability of any wrong rejection is at most `level`.

    The step-down procedure of Holm (1979), valid for p-values of any dependence: from the smallest on, each is compared
    with the level divided by the number of those left, until one is above.
    """
    rejected = [False] * len(p_values)
    for done, i in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        if p_values[i] > level / (len(p_values) - done):
            break
        rejected[i] = True
    return rejected


def success_interval(successes: int, runs: int, *, confidence: float = 0.95) -> Interval:
    """The exact interval of a success rate, from the successes in independent runs (Clopper & Pearson 1934).

    Each end is wrong with a probability of at most (1 - confidence) / 2, whatever the rate.
    """
    from scipy.stats import binomtest

    found = binomtest(successes, runs).proportion_ci(confidence, method="exact")
    return float(found.low), float(found.high)


def median_interval(values: Sequence[float], confidence: float) -> tuple[float, float, float]:
    """(low, median, high): a confidence interval of the median from order statistics, valid for any distribution."""
    from scipy.stats import quantile_test

    interval = quantile_test(values, q=0, p=0.5).confidence_interval(confidence)
    return float(interval.low), median(values), float(interval.high)


def fisher(successes_a: int, runs_a: int, successes_b: int, runs_b: int) -> float:
    """The probability that two arms that do not differ share their successes at least as unevenly as here.

    The exact test (Fisher 1934, Statistical Methods for Research Workers, section 21.02): given the total number of
    successes, any set of so many runs is equally likely to be the one that succeeds. The result sums the probabilities
    of all tables that are no likelier than the observed one.
    """
    from scipy.stats import fisher_exact

    table = [[successes_a, runs_a - successes_a], [successes_b, runs_b - successes_b]]
    return float(fisher_exact(table).pvalue)


def student(probability: float, freedom: int) -> float:
    """The t such that Student's variable with `freedom` degrees lies between -t and t with the given probability."""
    from scipy.special import stdtrit

    return float(stdtrit(freedom, (1 + probability) / 2))


def student_below(t: float, freedom: int) -> float:
    """The probability that Student's variable with `freedom` degrees of freedom is at most t."""
    from scipy.special import stdtr

    return float(stdtr(freedom, t))
