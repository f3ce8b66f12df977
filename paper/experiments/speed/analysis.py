"""What the records of `training-step` say: speed-ups and memory, beside what the closed forms allow."""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from ortho import cost
from paper.experiments.engine.benchmark import PHASES
from paper.experiments.engine.records import Record, by_device

STANDARD = "learned"


def declared(case: Mapping[str, Any], variant: str) -> cost.Cost:
    """The closed forms of one variant of a case, for its fast form."""
    sizes = [case[name] for name in ("B", "N", "d", "H")]
    options = {
        "projection": variant,
        "form": "fast",
        "causal": case["causal"],
        "itemsize": getattr(torch, case["dtype"]).itemsize,
    }
    if case["scope"] == "block":
        return cost.block(*sizes, **options)
    return cost.layer(*sizes, input_grad=case["input_grad"], **options)


Declared = Callable[[Mapping[str, Any], str], cost.Cost]


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """(first quartile, median, third quartile), linearly interpolated."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def seconds(record: Record, arm: str, phase: str) -> list[float]:
    """Seconds of one phase of an arm, per repetition."""
    return clocked(record, record["repetitions"][arm], phase)


def clocked(record: Record, quantities: Mapping[str, Sequence[float]], phase: str) -> list[float]:
    """Seconds of one phase among what was measured, per repetition.

    The process's own time where one thread was timed on a CPU, which other load does not lengthen; else the clock's.
    """
    own = record["provenance"]["threads"] == 1 and f"{phase}_cpu_s" in quantities
    return list(quantities[f"{phase}_cpu_s" if own else f"{phase}_s"])


def step_seconds(record: Record, arm: str, *, optimiser: bool = False) -> list[float]:
    """Seconds of forward and backward, and with `optimiser` of its step, per repetition."""
    columns = [seconds(record, arm, phase) for phase in (PHASES if optimiser else PHASES[:2])]
    return [sum(row) for row in zip(*columns, strict=True)]


def _counterpart(arm: str) -> tuple[str, str]:
    """(variant, standard arm to compare with): 'frozen-compiled' -> ('frozen', 'learned-compiled')."""
    variant, dash, kind = arm.partition("-")
    return variant, f"{STANDARD}{dash}{kind}"


def speedups(records: Iterable[Record], declared: Declared = declared) -> list[dict[str, Any]]:
    """One row per record and arm other than the standard: how many times as fast as the standard arm it is.

    `speedup` (q1, median, q3) is of forward and backward, `speedup_with_optimiser` of the whole step; each is taken
    over the ratios within the repetitions, in which the arms ran one after the other. `bound` is the ratio of the
    matrix products' FLOPs of forward and backward. An eager arm is compared with the eager standard, a compiled one
    with the compiled.
    """
    rows = []
    for record in records:
        case = record["configuration"]
        for arm in record["repetitions"]:
            variant, standard = _counterpart(arm)
            if variant == STANDARD or standard not in record["repetitions"]:
                continue
            measured = {
                name: quartiles(
                    [
                        s / v
                        for s, v in zip(
                            step_seconds(record, standard, optimiser=with_optimiser),
                            step_seconds(record, arm, optimiser=with_optimiser),
                            strict=True,
                        )
                    ]
                )
                for name, with_optimiser in (("speedup", False), ("speedup_with_optimiser", True))
            }
            bound = declared(case, STANDARD).step / declared(case, variant).step
            repetitions = len(record["repetitions"][arm]["forward_s"])
            rows.append(
                {**case, "device": record["device"], "arm": arm, "variant": variant}
                | {"repetitions": repetitions, **measured, "bound": bound}
            )
    return rows


def memory(records: Iterable[Record], declared: Declared = declared) -> list[dict[str, Any]]:
    """One row per record and arm: the bytes measured, and `declared_saved_bytes` of the closed form.

    Measured: `saved_bytes` on a CPU, counted from autograd's graph; `peak_bytes` and `activation_bytes` on CUDA. Each
    has its ratio to the standard arm's beside it (`peak_bytes_ratio`).
    """
    rows = []
    for record in records:
        case = record["configuration"]
        for arm in record["repetitions"]:
            variant, like = _counterpart(arm)
            facts, standard = record["facts"][arm], record["facts"].get(like, {})
            measured = {name: value for name, value in facts.items() if name.endswith("_bytes")}
            ratios = {f"{name}_ratio": value / standard[name] for name, value in measured.items() if standard.get(name)}
            rows.append(
                {**case, "device": record["device"], "arm": arm, "variant": variant, **measured, **ratios}
                | {"declared_saved_bytes": declared(case, variant).saved_bytes}
            )
    return rows


def line(record: Record, declared: Declared = declared) -> str:
    """One case in a line: each arm's speed-up, its quartiles, and the bound."""
    parts = [
        f"{row['arm']} {_spread(row['speedup'])}, with optimiser {_spread(row['speedup_with_optimiser'])}, "
        f"FLOP bound {row['bound']:.3f}"
        for row in speedups([record], declared)
    ]
    parts += [f"{arm} failed: {reason}" for arm, reason in record["failures"].items()]
    return "; ".join(parts)


def table(records: Sequence[Record], declared: Declared = declared) -> str:
    """The stored speed-ups, a table per device."""
    texts = []
    for device, group in by_device(records).items():
        origin = group[0]["provenance"]
        title = f"\n{device} ({origin['device_name']}, threads {origin['threads']}, torch {origin['torch']})"
        head = (
            f"{'scope':6}{'N':>6}{'d':>6}{'B':>5}  {'setting':27}{'variant':18}{'n':>3}"
            f"  {'speed-up [q1, q3]':22}{'with optimiser':22}{'FLOP bound':>10}"
        )
        texts += [title, head, "-" * len(head)]
        order = sorted(group, key=lambda r: (_setting(r["configuration"]), *_size(r["configuration"])))
        for row in speedups(order, declared):
            texts.append(
                f"{row['scope']:6}{row['N']:6}{row['d']:6}{row['B']:5}  {_setting(row):27}{row['arm']:18}"
                f"{row['repetitions']:3}  {_spread(row['speedup']):22}{_spread(row['speedup_with_optimiser']):22}"
                f"{row['bound']:10.3f}"
            )
        texts += [
            f"{_setting(r['configuration'])} N={r['configuration']['N']}: {arm} failed: {reason}"
            for r in order
            for arm, reason in r["failures"].items()
        ]
    return "\n".join(texts)


def _size(case: Mapping[str, Any]) -> tuple[str, int, int]:
    return case["scope"], case["d"], case["N"]


def _setting(case: Mapping[str, Any]) -> str:
    words = [case["dtype"], "causal" if case["causal"] else "", "" if case["input_grad"] else "x without gradient"]
    return " ".join(word for word in words if word)


def _spread(values: tuple[float, float, float]) -> str:
    low, middle, high = values
    return f"{middle:.3f} [{low:.3f}, {high:.3f}]"
