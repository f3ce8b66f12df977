"""What the records of `heads-speed` say: speed-ups beside what the closed forms allow, and memory."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from ortho import cost
from ortho.cost.layers import hybrid
from paper.experiments.engine.records import Record
from paper.experiments.speed import analysis as summary

STANDARD = summary.STANDARD
SPLITS: dict[str, Callable[[int], dict[str, int]]] = {  # of H heads
    "stopped": lambda H: {"stopped": H},
    "structured": lambda H: {"structured-stopped": H},
    "quarter": lambda H: {"learned": H // 4, "structured-stopped": H - H // 4},
    "one": lambda H: {"learned": 1, "positional": H - 1},
}


def declared(case: Mapping[str, Any], arm: str) -> cost.Cost:
    """The closed form of an arm."""
    B, N, d, H = (case[name] for name in ("B", "N", "d", "H"))
    options: dict[str, Any] = {"causal": case["causal"], "itemsize": getattr(torch, case["dtype"]).itemsize}
    kind: dict[str, Any] = {} if arm == STANDARD else {"heads": SPLITS[arm](H)}
    form: Callable[..., cost.Cost] = cost.layer if arm == STANDARD else hybrid
    if case["scope"] == "block":
        return cost.block(B, N, d, H, layer=form, **options, **kind)
    return form(B, N, d, H, input_grad=case["input_grad"], **options, **kind)


def speedups(records: Iterable[Record]) -> list[dict[str, Any]]:
    """One row per record and arm other than the standard, see `summary.speedups`; and the `share` of its bound that an
    arm reaches, of forward and backward."""
    return [row | {"share": row["speedup"][1] / row["bound"]} for row in summary.speedups(records, declared)]


def memory(records: Iterable[Record]) -> list[dict[str, Any]]:
    """One row per record and arm: the bytes, see `summary.memory`."""
    return summary.memory(records, declared)


def line(record: Record) -> str:
    """One case in a line: each arm's speed-up, its quartiles, and the bound."""
    return summary.line(record, declared)


def table(records: Sequence[Record]) -> str:
    """The stored speed-ups, a table per device."""
    return summary.table(records, declared)
