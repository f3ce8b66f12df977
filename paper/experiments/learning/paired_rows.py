"""Runs of arms that are paired by seed, read from records: what was measured of each, and one arm against another."""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from paper.experiments.engine.records import Record
from paper.experiments.learning import rates
from paper.experiments.resampling import Difference, paired_difference
from paper.experiments.statistics import Decision, decide

Measures = Mapping[str, Callable[[Record], float]]
Flop = Callable[[Record], int]


class Runs(NamedTuple):
    """An arm's runs that differ in the seed alone, in the order of the seeds.

    `values`: measure -> a number a run; `curves` on the validation part, a list of (step, nats) a run; `parameters`
    that are trained, `flop` of a run's training, 0 where no closed form is given; `configuration` of all, without the
    seed.
    """

    arm: str
    configuration: dict[str, Any]
    seeds: tuple[int, ...]
    values: dict[str, tuple[float, ...]]
    curves: tuple[tuple[tuple[int, float], ...], ...]
    parameters: int
    flop: int

    def mean(self, measure: str) -> float:
        """The mean over seeds."""
        return statistics.fmean(self.values[measure])

    def span(self, measure: str) -> str:
        """Mean and range over seeds, and their number."""
        values = self.values[measure]
        return f"{self.mean(measure):.4f} [{min(values):.4f}, {max(values):.4f}]  {len(values)} seeds"


class Judged(NamedTuple):
    """One arm against another at the same seeds: what it has more, and what its rule says of that."""

    difference: Difference
    outcome: str
    pairs: int


def runs(
    records: Iterable[Record], device: str, measures: Measures, *, flop: Flop | None = None, **wanted: Any
) -> list[Runs]:
    """The runs of one device that count, put together where they differ in the seed alone, in the order of the records;
    of these only those whose configuration holds what is `wanted`. `flop` says what a run's training takes."""
    found: dict[str, list[Record]] = {}
    for record in records:
        case = record["configuration"]
        if record["device"] == device and rates.counts(record) and all(case[k] == v for k, v in wanted.items()):
            found.setdefault(repr(_shared(case)), []).append(record)
    return [_runs(group, measures, flop) for group in found.values()]


def by_arm(
    records: Iterable[Record], device: str, measures: Measures, *, flop: Flop | None = None, **wanted: Any
) -> dict[str, Runs]:
    """The same by arm. Raises ValueError if an arm's runs differ in more than the seed: `wanted` is to say more."""
    found: dict[str, Runs] = {}
    for one in runs(records, device, measures, flop=flop, **wanted):
        if one.arm in found:
            raise ValueError(f"wanted: expected runs of {one.arm!r} that differ in the seed alone, got {wanted}")
        found[one.arm] = one
    return found


def paired(one: Runs, other: Runs, measure: str, confidence: float) -> Difference | None:
    """What one arm has more than the other at the seeds that both have; None if they have fewer than two in common.

    Raises KeyError for what was not measured.
    """
    ours, theirs = (dict(zip(each.seeds, each.values[measure], strict=True)) for each in (one, other))
    seeds = sorted(ours.keys() & theirs.keys())
    if len(seeds) < 2:
        return None
    return paired_difference([ours[s] for s in seeds], [theirs[s] for s in seeds], confidence=confidence)


def judged(arm: Runs, other: Runs, measure: str) -> Judged | None:
    """The arm against the other at the seeds that both have, by its rule; None if they have fewer than two in common.

    Raises KeyError for what was not measured.
    """
    rule = Decision.of(arm.configuration)
    found = paired(arm, other, measure, rule.confidence())
    if found is None:
        return None
    return Judged(found, decide(found.interval, rule), len(set(arm.seeds) & set(other.seeds)))


def against(arm: Runs, other: Runs | None, measure: str) -> str:
    """What the rule says of an arm against another, in words; nothing where there is nothing to say."""
    found = None if other is None or arm.arm == other.arm else judged(arm, other, measure)
    if other is None or found is None:
        return ""
    low, high = found.difference.interval
    return f", {found.difference.mean:+.4f} [{low:+.4f}, {high:+.4f}] against {other.arm!r}: {found.outcome}"


def closing(records: Sequence[Record]) -> str:
    """What is said below a table of records: how many rates they choose."""
    return f"rates chosen: {len(rates.choose(records))}"


def _shared(case: Mapping[str, Any]) -> dict[str, Any]:
    """What a case has in common with those of other seeds."""
    return {name: value for name, value in case.items() if name != "seed"}


def _runs(group: Sequence[Record], measures: Measures, flop: Flop | None) -> Runs:
    group = sorted(group, key=lambda record: int(record["configuration"]["seed"]))
    return Runs(
        arm=group[0]["configuration"]["arm"],
        configuration=_shared(group[0]["configuration"]),
        seeds=tuple(int(record["configuration"]["seed"]) for record in group),
        values={name: tuple(map(measure, group)) for name, measure in measures.items()},
        curves=tuple(
            tuple((int(look["step"]), float(look["loss_nats"])) for look in record["facts"]["validation"])
            for record in group
        ),
        parameters=int(group[0]["facts"]["parameters"]),
        flop=0 if flop is None else flop(group[0]),
    )
