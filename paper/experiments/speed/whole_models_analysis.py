"""What the records of `whole-models` say: speed-ups beside their bounds, memory, and the rate that is reached."""

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ortho.cost import Cost
from ortho.cost.configurations import CONFIGURATIONS
from ortho.cost.models import step_memory
from paper.experiments.engine.records import Case, Record, by_device
from paper.experiments.speed.analysis import clocked, quartiles, step_seconds

Row = dict[str, Any]

STANDARD, MATMUL = "learned", "matmul"


def declared(case: Case, variant: str) -> Cost:
    """The closed form of a variant's step."""
    itemsize = getattr(torch, case["dtype"]).itemsize
    return CONFIGURATIONS[case["model"]].cost(case["B"], projection=variant, itemsize=itemsize)


def rows(records: Iterable[Record]) -> list[Row]:
    """One row per record and variant.

    `speedup` of forward and backward and `speedup_with_optimiser`, over the standard model within repetitions, and the
    `seconds` of a whole step are (q1, median, q3); `bound` is the ratio of the matrix products' FLOPs. `rate` is that
    of the step's products in FLOPs a second, the optimiser's time left aside, and `of_matmul` what share it is of that
    of the square product timed beside. Bytes as measured, and as `declared_…` by the closed form: of activations, and
    of all that a step holds.
    """
    found = []
    for record in records:
        case = record["configuration"]
        reached = _matmul_rate(record)
        times = {arm: step_seconds(record, arm) for arm in record["repetitions"]}
        whole = {arm: step_seconds(record, arm, optimiser=True) for arm in times}
        for arm, own in times.items():
            cost = declared(case, arm)
            row = {**case, "device": record["device"], "variant": arm, "repetitions": len(own)}
            row["speedup"] = quartiles([a / b for a, b in zip(times[STANDARD], own, strict=True)])
            row["speedup_with_optimiser"] = quartiles([a / b for a, b in zip(whole[STANDARD], whole[arm], strict=True)])
            row["bound"] = declared(case, STANDARD).step / cost.step
            row["seconds"] = quartiles(whole[arm])
            row["rate"] = cost.step / statistics.median(own)
            row["of_matmul"] = row["rate"] / reached if reached else None
            facts = record["facts"].get(arm, {})
            row |= {name: value for name, value in facts.items() if name.endswith("_bytes")}
            row["declared_saved_bytes"] = cost.saved_bytes
            row["declared_bytes"] = sum(step_memory(cost).values())
            found.append(row)
    return found


def _matmul_rate(record: Record) -> float | None:
    """FLOPs a second of the square product."""
    times = record["facts"].get(MATMUL)
    if not times:
        return None
    edge: int = record["configuration"]["edge"]
    return 2 * edge**3 / statistics.median(clocked(record, times, "product"))


def line(record: Record) -> str:
    """One case in a line: each variant's speed-up and its bound, and the share of the square product's rate."""
    found = rows([record])
    texts = [
        f"{r['variant']} x{r['speedup'][1]:.3f} (bound {r['bound']:.3f})" for r in found if r["variant"] != STANDARD
    ]
    return ", ".join([*texts, f"{_percent(found[0]['of_matmul'])} of the matmul rate"])


def _percent(share: float | None) -> str:
    return "?" if share is None else f"{100 * share:.0f} %"


def table(records: Sequence[Record]) -> str:
    """The stored steps, a table per device."""
    texts = []
    for device, group in by_device(records).items():
        head = f"{'model':14}{'B':>5}  {'variant':10}{'step, ms':>10}{'speed-up':>10}{'bound':>8}{'of matmul':>11}"
        texts += [f"\n{device} ({group[0]['provenance']['device_name']})", head, "-" * len(head)]
        texts += [
            f"{row['model']:14}{row['B']:5}  {row['variant']:10}{1e3 * row['seconds'][1]:10.1f}"
            f"{row['speedup'][1]:10.3f}{row['bound']:8.3f}{_percent(row['of_matmul']):>11}"
            for row in rows(group)
        ]
    return "\n".join(texts)
