"""Analysis of the records of `attention-speed`: ratios to fused softmax attention, growth with N, and crossovers."""

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from ortho.checks import expect
from paper.experiments.devices import by_device, shown_name
from paper.experiments.engine.records import Record
from paper.experiments.speed.analysis import Row, by_arm, quartiles, ratio, row_of, spelt
from paper.experiments.speed.attention_variants import YARDSTICK, alike, declared, known

SERIES = ("device", "dtype", "arms", "compiled", "arm")  # what rows that differ only in N share
FEWEST = 3  # lengths that are needed to say how a time grows, or where it crosses another


def rows(records: Iterable[Record]) -> list[Row]:
    """One row per record and arm, the yardstick among them.

    `seconds` of forward and backward, and `ratio_alike` to the softmax attention that sees the same keys are (q1,
    median, q3). The ratios are taken within repetitions, and None if there is nothing to compare with. `flops_alike` is
    the `ratio_alike` to be expected from the matrix products. `peak_bytes` is the most that a call takes, and
    `bytes_ratio` its ratio to the yardstick's.
    """
    found = []
    for record in records:
        case, facts, times = record["configuration"], record["facts"], by_arm(record)
        for arm, own in times.items():
            if not known(arm):
                continue
            row, like = row_of(record, arm=arm, seconds=quartiles(own)), alike(arm)
            row["ratio_alike"] = ratio(own, times[like]) if like in times else None
            row["flops_alike"] = _flops(case, arm) / _flops(case, like)
            row["peak_bytes"], whole = (facts.get(name, {}).get("peak_bytes") for name in (arm, YARDSTICK))
            row["bytes_ratio"] = row["peak_bytes"] / whole if row["peak_bytes"] and whole else None
            found.append(row)
    return found


def series(found: Iterable[Row]) -> dict[tuple[Any, ...], list[Row]]:
    """Groups of rows that share `SERIES`, in the order of N."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in sorted(found, key=lambda row: int(row["N"])):
        groups.setdefault(tuple(row[name] for name in SERIES), []).append(row)
    return groups


def curves(records: Iterable[Record], arms: str = "main") -> dict[str, dict[str, list[Row]]]:
    """Device -> arm -> rows in the order of N: one set of arms, without compiled twins, in one precision per device.

    It is the precision of most of the device's records, the first one if several have the same number.
    """
    found = {}
    for device, group in by_device(list(records)).items():
        dtype = Counter(record["configuration"]["dtype"] for record in group).most_common(1)[0][0]
        chosen = {arm: lines for (_, *kind, arm), lines in series(rows(group)).items() if kind == [dtype, arms, False]}
        if chosen:
            found[device] = chosen
    return found


def beside_alike(records: Iterable[Record], arms: str) -> list[Row]:
    """The rows of a set's mechanisms that ran beside the softmax attention that sees the same keys, without the rows of
    that attention."""
    every = [row for lines in curves(records, arms).values() for group in lines.values() for row in group]
    return [row for row in every if row["ratio_alike"] and row["arm"] != alike(row["arm"])]


# The headers of `cells`, in this order.
HEADERS = (
    "device",
    "$N$",
    "",
    "time over the fused kernel's (quartiles)",
    "FLOPs over the fused kernel's",
    "peak memory over the fused kernel's",
)


def cells(found: Iterable[Row]) -> list[tuple[Any, ...]]:
    """Table cells for a page from rows of `beside_alike`: times as a median with its quartiles."""
    shown = []
    for row in found:
        times, flops = spelt(row["ratio_alike"], 3), f"{row['flops_alike']:.3f}"
        memory = row["bytes_ratio"] and f"{row['bytes_ratio']:.2f}"
        shown.append((shown_name(row["device"]), row["N"], row["arm"], times, flops, memory))
    return shown


def exponent(points: Mapping[int, float]) -> float:
    """The exponent with which a value grows with the size: the least-squares slope of log value on log size.

    Raises ValueError for fewer than two sizes, and for values that are not positive.
    """
    fits = len(points) > 1 and min(points.values()) > 0
    expect(fits, "points", "positive values at two sizes or more", dict(points))
    slope: float = statistics.linear_regression(list(map(math.log, points)), list(map(math.log, points.values()))).slope
    return slope


def crossover(ratios: Mapping[int, float]) -> tuple[float, float]:
    """Between which measured lengths ratios fall below 1 for good: the last with a ratio of at least 1, and the next.

    (0, the shortest length) if all ratios are below 1, and (the longest, infinity) if the last one is not. Raises
    ValueError without ratios.
    """
    expect(ratios, "ratios", "at least one length", "none")
    lengths = sorted(ratios)
    slower = max((N for N in lengths if ratios[N] >= 1), default=0)
    return slower, min((N for N in lengths if slower < N), default=math.inf)


def crossovers(records: Iterable[Record]) -> list[Row]:
    """One row per series of a mechanism with `FEWEST` lengths or more: `alike`, the `crossover` with the softmax
    attention that sees the same keys, from which on the mechanism is faster for good."""
    found = []
    for key, group in series(rows(records)).items():
        like = {row["N"]: row["ratio_alike"][1] for row in group if row["ratio_alike"]}
        if len(like) >= FEWEST and not key[-1].startswith(YARDSTICK):
            found.append({**dict(zip(SERIES, key, strict=True)), "alike": crossover(like)})
    return found


def in_words(crossing: tuple[float, float]) -> str:
    """From which length on a mechanism is faster: between which two measured ones, where its time crosses the other."""
    slower, faster = crossing
    if slower == 0:
        return f"at every length measured, from {faster:,} on"
    if faster == math.inf:
        return f"at no length measured, up to {slower:,}"
    return f"from a length between {slower:,} and {faster:,} on"


def _flops(case: Mapping[str, Any], arm: str) -> float:
    cost = declared(dict(case), arm)
    return float(cost.forward + cost.backward)
