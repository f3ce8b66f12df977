"""Analysis of the records of the learning experiments: accuracies over seeds, rates chosen, and which arm is better.

A record holds one run, so all functions take many records. The runs of the tuning seed count only for the choice of the
rates. Runs of two arms are either independent, and compared by their ranks, or paired by seed, and compared by the
differences of the measured values.
"""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import isinf
from typing import Any, NamedTuple

import numpy as np

from paper.experiments.engine.records import Record
from paper.experiments.learning import rates
from paper.experiments.learning.rates import TUNING, loss
from paper.experiments.resampling import Difference, paired_difference, student_difference
from paper.experiments.statistics import Decision, better_by_chance, decide

Row = dict[str, Any]
Measures = Mapping[str, Callable[[Record], float]]
Flop = Callable[[Record], int]


def grouped(
    records: Iterable[Record], key: Callable[[Record], Any], counts: Callable[[Record], bool] = rates.counts
) -> dict[Any, list[Record]]:
    """The runs that count, by a key, in the order of their seeds."""
    groups: dict[Any, list[Record]] = {}
    for record in filter(counts, records):
        groups.setdefault(key(record), []).append(record)
    return {key: sorted(group, key=seed) for key, group in groups.items()}


def seed(record: Record) -> int:
    """The seed of a run."""
    return int(record["configuration"]["seed"])


def rows(records: Iterable[Record]) -> list[Row]:
    """One row per device, arm and test, in the order of the records: `seeds`; `rate`; `correct`, the share of right
    answers, one number a seed, with its `low`, `median` and `high`.

    Raises ValueError if an arm's runs differ in more than their seed.
    """
    found = []
    for (device, arm), group in grouped(records, lambda one: (one["device"], one["configuration"]["arm"])).items():
        settings = _shared(group[0]["configuration"])
        if any(_shared(record["configuration"]) != settings for record in group):
            raise ValueError(f"records: expected runs of {arm!r} on {device} that differ in the seed alone")
        for test in group[0]["repetitions"]:
            correct = [tested(record, test, "correct_fraction") for record in group]
            found.append(
                {**settings, "device": device, "arm": arm, "test": test, "seeds": list(map(seed, group))}
                | {"correct": correct, "low": min(correct), "median": statistics.median(correct), "high": max(correct)}
            )
    return found


def results(records: Iterable[Record], device: str) -> dict[str, dict[str, Row]]:
    """Arm -> test -> row, of one device."""
    found: dict[str, dict[str, Row]] = {}
    for row in rows(record for record in records if record["device"] == device):
        found.setdefault(row["arm"], {})[row["test"]] = row
    return found


def per_cent(row: Row) -> str:
    """A row's right answers in per cent: the median (the least to the most), or one figure if these agree."""
    low, median, high = (f"{100 * row[name]:.0f}" for name in ("low", "median", "high"))
    return median if low == high else f"{median} ({low}\xa0to\xa0{high})"


def tuning(records: Iterable[Record], device: str) -> dict[str, dict[float, float]]:
    """Arm -> rate -> the loss at the tuning seed by which the arm's rate is chosen, in nats (`rates.loss`)."""
    found: dict[str, dict[float, float]] = {}
    for record in records:
        case = record["configuration"]
        if record["device"] == device and case["seed"] == TUNING:
            found.setdefault(case["arm"], {})[case["rate"]] = loss(record)
    return found


def compare(results: Mapping[str, Mapping[str, Row]], test: str, better: str, worse: str) -> Row:
    """Two arms in one test: the difference of the medians, and the probability of the result if arms do not differ."""
    ones, others = (results[arm][test]["correct"] for arm in (better, worse))
    difference = statistics.median(ones) - statistics.median(others)
    return {"difference": difference, "by_chance": better_by_chance(ones, others)}


def tested(record: Record, test: str, quantity: str) -> float:
    """A quantity of a run's test."""
    return float(record["repetitions"][test][quantity][0])


class Runs(NamedTuple):
    """An arm's runs that differ in the seed alone, in the order of the seeds.

    `values`: measure -> one number per run; `parameters`: how many are trained; `flop`: FLOPs of a run's training, 0 if
    no closed form is given; `configuration`: that of all runs, without the seed; `left_out`: measure -> for each run,
    its value on the test without each of the test's parts, if that was taken.
    """

    arm: str
    configuration: dict[str, Any]
    seeds: tuple[int, ...]
    values: dict[str, tuple[float, ...]]
    parameters: int
    flop: int
    left_out: Mapping[str, tuple[tuple[float, ...], ...]] = {}

    def mean(self, measure: str) -> float:
        """The mean over seeds."""
        return statistics.fmean(self.values[measure])


class Judged(NamedTuple):
    """One arm against another at the same seeds: the difference, the outcome by the arm's rule, the number of pairs."""

    difference: Difference
    outcome: str
    pairs: int


def runs(
    records: Iterable[Record], device: str, measures: Measures, *, flop: Flop | None = None, **wanted: Any
) -> list[Runs]:
    """The runs of one device that count, in the order of the records; runs that differ only in the seed are put
    together. Only runs whose configuration has the `wanted` values are taken. `flop` gives the FLOPs of a run's
    training."""
    here = (record for record in records if record["device"] == device)
    own = (record for record in here if all(record["configuration"][k] == v for k, v in wanted.items()))
    groups = grouped(own, lambda one: repr(_shared(one["configuration"])))
    return [joined(group, measures, flop) for group in groups.values()]


def by_arm(
    records: Iterable[Record], device: str, measures: Measures, *, flop: Flop | None = None, **wanted: Any
) -> dict[str, Runs]:
    """Arm -> its `runs`. Raises ValueError if they differ in more than the seed: then `wanted` must say more."""
    found: dict[str, Runs] = {}
    for one in runs(records, device, measures, flop=flop, **wanted):
        if one.arm in found:
            raise ValueError(f"wanted: expected runs of {one.arm!r} that differ in the seed alone, got {wanted}")
        found[one.arm] = one
    return found


def paired(one: Runs, other: Runs, measure: str, confidence: float) -> Difference | None:
    """One arm minus the other at the seeds that both have; None if they have fewer than two in common.

    The interval is that of `paired_difference`; if there are too few seeds for it, that of `student_difference`, as for
    a measure that was also taken without each part of the test: then the interval has the test's error too. Raises
    KeyError for a measure that was not taken.
    """
    seeds = sorted(set(one.seeds) & set(other.seeds))
    if len(seeds) < 2:
        return None
    ours, theirs = (_at(each, seeds, each.values[measure]) for each in (one, other))
    if measure in one.left_out and measure in other.left_out:
        without = [np.mean(_at(each, seeds, each.left_out[measure]), axis=0) for each in (one, other)]
        return student_difference(ours, theirs, confidence=confidence, left_out=without[0] - without[1])
    found = paired_difference(ours, theirs, confidence=confidence)
    if isinf(found.interval[0]):
        return student_difference(ours, theirs, confidence=confidence)
    return found


def judged(arm: Runs, other: Runs, measure: str) -> Judged | None:
    """The arm against the other at the seeds that both have, by its rule; None if they have fewer than two in common.

    Raises KeyError for a measure that was not taken.
    """
    rule = Decision.of(arm.configuration)
    found = paired(arm, other, measure, rule.confidence())
    if found is None:
        return None
    return Judged(found, decide(found.interval, rule), len(set(arm.seeds) & set(other.seeds)))


def _at(one: Runs, seeds: Sequence[int], values: Sequence[Any]) -> list[Any]:
    """The values, one for each run, of the runs with these seeds."""
    return [values[one.seeds.index(seed)] for seed in seeds]


def _shared(case: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a case that it has in common with cases of other seeds."""
    return {name: value for name, value in case.items() if name != "seed"}


def joined(group: Sequence[Record], measures: Measures, flop: Flop | None = None) -> Runs:
    """The runs of one arm, which differ in the seed alone."""
    return Runs(
        arm=group[0]["configuration"]["arm"],
        configuration=_shared(group[0]["configuration"]),
        seeds=tuple(map(seed, group)),
        values={name: tuple(map(measure, group)) for name, measure in measures.items()},
        parameters=int(group[0]["facts"]["parameters"]),
        flop=0 if flop is None else flop(group[0]),
    )
