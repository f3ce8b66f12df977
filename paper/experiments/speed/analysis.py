"""Helpers to read the records of every benchmark: times, ratios within repetitions, rows, and a table per device."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from paper.experiments.engine.records import Record
from paper.experiments.speed.benchmark import PASSES, PHASES

Row = dict[str, Any]
Quartiles = tuple[float, float, float]


def quartiles(values: Sequence[float]) -> Quartiles:
    """(first quartile, median, third quartile), linearly interpolated."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def ratio(ones: Sequence[float], others: Sequence[float]) -> Quartiles:
    """The quartiles of the ratios within repetitions, in which the two ran one after the other."""
    return quartiles([one / other for one, other in zip(ones, others, strict=True)])


def seconds(record: Record, arm: str, phase: str) -> list[float]:
    """Seconds of one phase of an arm, per repetition."""
    return clocked(record, record["repetitions"][arm], phase)


def clocked(record: Record, quantities: Mapping[str, Sequence[float]], phase: str) -> list[float]:
    """Seconds of one phase among the measured quantities, per repetition.

    For one thread on a CPU this is the process's own time, which other load does not lengthen; else wall time.
    """
    own = record["provenance"]["threads"] == 1 and f"{phase}_cpu_s" in quantities
    return list(quantities[f"{phase}_cpu_s" if own else f"{phase}_s"])


def step_seconds(record: Record, arm: str, *, optimiser: bool = False) -> list[float]:
    """Seconds of forward and backward, with `optimiser` also of its step, per repetition."""
    columns = [seconds(record, arm, phase) for phase in (PHASES if optimiser else PASSES)]
    return [sum(row) for row in zip(*columns, strict=True)]


def by_arm(record: Record, phase: str = "") -> dict[str, list[float]]:
    """The seconds of each arm, per repetition: of one phase, or by default of forward and backward."""
    arms = record["repetitions"]
    return {arm: seconds(record, arm, phase) if phase else step_seconds(record, arm) for arm in arms}


def speedups(record: Record, arm: str, standard: str) -> dict[str, Quartiles]:
    """How many times as fast an arm is as the standard one, (q1, median, q3) of the ratios within repetitions:
    `speedup` of forward and backward, `speedup_with_optimiser` of the whole step."""
    return {
        name: ratio(*(step_seconds(record, each, optimiser=optimiser) for each in (standard, arm)))
        for name, optimiser in (("speedup", False), ("speedup_with_optimiser", True))
    }


def row_of(record: Record, **figures: Any) -> Row:
    """A row of an analysis: a record's case, its device, and figures."""
    return {**record["configuration"], "device": record["device"], **figures}


def spelt(values: Quartiles, digits: int = 2) -> str:
    """The same for a page: 'median (first quartile to third)'."""
    low, middle, high = (f"{value:z.{digits}f}" for value in values)
    return f"{middle} ({low} to {high})"


def beside_standard(records: Iterable[Record], arm: str, **case: Any) -> dict[bool, tuple[float, int | None]]:
    """By the causal mask: how many times as fast an arm's step is as the standard layer's that was timed in turn with
    it, and the bytes that it keeps for its backward pass (None if not counted).

    `case` picks the records by their configuration.
    """
    found = {}
    for record in records:
        if case.items() <= record["configuration"].items():
            steps = by_arm(record)
            gain = statistics.median(steps["learned"]) / statistics.median(steps[arm])
            found[record["configuration"]["causal"]] = gain, record["facts"][arm].get("saved_bytes")
    return found
