"""What the records of `positional-heads` say: a row for each head of each run, and how many have a property.

Heads have no order that means anything from one run to the next: those of an arm's runs are taken together.
"""

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from paper.experiments.engine.records import Record, by_device

Row = dict[str, Any]


def rows(records: Iterable[Record]) -> list[Row]:
    """One row per device, run, stage and head: the configuration, `stage`, `name` of layer and head, `nearest` pattern
    (None where the record does not say), and the figures by their names without `_fraction`."""
    return [
        {**record["configuration"], "device": record["device"], "stage": stage, "name": name}
        | {"nearest": record["facts"].get("nearest", {}).get(arm)}
        | {figure.removesuffix("_fraction"): float(values[0]) for figure, values in figures.items()}
        for record in records
        for arm, figures in record["repetitions"].items()
        for stage, _, name in (arm.partition(", "),)
    ]


def arms(records: Iterable[Record], device: str) -> dict[tuple[str, str], dict[str, list[Row]]]:
    """(task, arm) -> stage -> the rows of all runs' heads, on one device."""
    found: dict[tuple[str, str], dict[str, list[Row]]] = {}
    for row in rows(record for record in records if record["device"] == device):
        found.setdefault((row["task"], row["arm"]), {}).setdefault(row["stage"], []).append(row)
    return found


def positional(rows: Sequence[Row], by: str = "absolute", share: float = 0.5) -> int:
    """In how many of the heads positions explain more than this share of the weights' variation."""
    return sum(row[by] > share for row in rows)


def line(record: Record) -> str:
    """One run in a line: how positional each head became."""
    return "; ".join(
        f"{row['name']} {row['absolute']:.3f} ± {row['absolute_error']:.3f}, near {row['nearest']!r}"
        for row in rows([record])
        if row["stage"] == "trained"
    )


def table(records: Sequence[Record]) -> str:
    """The stored figures, a table per device: medians over all heads of an arm's runs, and ranges."""
    texts = []
    for device, group in by_device(records).items():
        texts.append(f"\n{device} ({group[0]['provenance']['device_name']}): medians [lowest, highest] over heads")
        for (task, arm), stages in arms(group, device).items():
            for stage, found in stages.items():
                spreads = []
                for name in ("absolute", "relative", "peak"):
                    values = [row[name] for row in found]
                    spreads.append(f"{name} {statistics.median(values):.3f} [{min(values):.3f}, {max(values):.3f}]")
                texts.append(f"{task:14}{arm:10}{stage:11}{len(found):3} heads  {', '.join(spreads)}")
    return "\n".join(texts)
