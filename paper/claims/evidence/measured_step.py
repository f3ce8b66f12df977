"""S0, sections 4.1 and 4.3, measured: the parts of a training step, and inference; read from `results/`.

What counts as near is fixed before any record is read. The source prints 0.5, so "about 0.5" and "unchanged" leave open
half a unit of the last digit, 0.05. The tests of inference are those of the rule `effect`.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

import sympy
import torch

from ortho.cost import layer, of
from ortho.cost.big_o import H, N, d
from ortho.layers.multihead import MultiheadAttention
from paper import experiments
from paper.claims.evidence.frozen_layer import train_once
from paper.claims.figures import numbers
from paper.claims.ledger import evidence
from paper.claims.report import Shown, table
from paper.claims.rules import agrees, all_of, counted, effect, region, untestable
from paper.claims.verdicts import Finding
from paper.experiments import Record
from paper.experiments.speed.analysis import quartiles, seconds
from paper.experiments.speed.training_step import declared

CHAPTER = "05-the-measured-step"

PHASES = ("forward", "backward", "optimiser")
RATIOS = {"forward": 1.0, "backward": 0.5, "optimiser": 0.5}  # the source's, ORA over standard; backward for N >> d
NEAR = 0.05
LONG = 4  # "N >> d": at least this many times d
GAIN = (0.0, 5.0)  # the source's, inference, per cent

NO_TIMES = "There is no record of it yet, so that this page gives no times."


def main_setting(records: Iterable[Record], scope: str, d_model: int = 768) -> list[Record]:
    """Each device's records of one width, eager, with full attention and a gradient for x, by length.

    Only those in the precision that most of the device's records have.
    """
    chosen = []
    for group in experiments.by_device(list(records)).values():
        dtype = Counter(record["configuration"]["dtype"] for record in group).most_common(1)[0][0]
        wanted = {"scope": scope, "d": d_model, "dtype": dtype, "causal": False, "input_grad": True, "compiled": False}
        found = [record for record in group if wanted.items() <= record["configuration"].items()]
        chosen += sorted(found, key=lambda record: record["configuration"]["N"])
    return chosen


def phase_ratio(record: Record, variant: str, phase: str) -> tuple[float, float, float]:
    """(q1, median, q3) of a phase's time over the standard's in the same repetition."""
    pairs = zip(seconds(record, variant, phase), seconds(record, "learned", phase), strict=True)
    return quartiles([other / standard for other, standard in pairs])


def phase_flops(record: Record, variant: str, phase: str) -> float | None:
    """A phase's time over the standard's, as its products' FLOPs allow; None for the optimiser, which has none."""
    if phase == "optimiser":
        return None
    ours, standard = (declared(record["configuration"], p) for p in (variant, "learned"))
    return float(getattr(ours, phase) / getattr(standard, phase))


def saved_time(record: Record, variant: str = "frozen") -> dict[str, float]:
    """What a variant saves of the standard layer's backward pass: FLOPs, seconds, and the share of each.

    Seconds are medians over the repetitions, of the standard's pass and of the difference within a repetition.
    """
    standard, ours = (declared(record["configuration"], p).backward for p in ("learned", variant))
    times = {arm: seconds(record, arm, "backward") for arm in ("learned", variant)}
    whole = median(times["learned"])
    less = median([a - b for a, b in zip(times["learned"], times[variant], strict=True)])
    return {
        "flops": standard - ours,
        "seconds": less,
        "flops_share": (standard - ours) / standard,
        "seconds_share": less / whole,
    }


def provenance(records: Sequence[Record]) -> list[tuple[str, ...]]:
    """(what, one cell a device) for the records of an experiment: where, when and with what they were measured."""
    columns = [_cells(group) for group in experiments.by_device(records).values()]
    return [(what, *(cells[what] for cells in columns)) for what in columns[0]] if columns else []


def provenance_table(records: Sequence[Record], none: str = NO_TIMES) -> Shown:
    """The same as a table, a column for each device; without records, the sentence `none`."""
    if not records:
        return Shown(none, none)
    return table(provenance(records), ("", *(f"`{device}`" for device in experiments.by_device(records))))


def _cells(records: Sequence[Record]) -> dict[str, str]:
    origins = [record["provenance"] for record in records]

    def every(values: Iterable[Any]) -> str:
        return ", ".join(dict.fromkeys(map(str, values)))

    dates = [origin["date_utc"][:10] for origin in origins]
    clean = all(origin["clean"] is not False for origin in origins)
    cases = [record["configuration"] for record in records]
    runs = [len(values) for record in records for arm in record["repetitions"].values() for values in arm.values()]
    return {
        "model": every(origin["device_name"] for origin in origins),
        "threads": every(origin["threads"] for origin in origins),
        "precisions": every(case["dtype"] for case in cases),
        "sequences": every(sorted(case["B"] for case in cases)),
        "heads": every(sorted(case["H"] for case in cases if "H" in case)) or "\u2013",
        "PyTorch": every(origin["torch"] for origin in origins),
        "Python": every(origin["python"] for origin in origins),
        "commit": every(f"`{(origin['commit'] or 'unknown')[:8]}`" for origin in origins)
        + ("" if clean else " and changes"),
        "measured on": numbers(dates),
        "cases": str(len(records)),
        "repetitions": numbers(runs),
    }


def _place(record: Record) -> str:
    return f"$N = {record['configuration']['N']:,}$ on {record['device']}"


def long_limits() -> dict[str, float]:
    """The limit of the backward FLOPs over the standard's as N grows and d is fixed, by variant.

    The last variant is a kernel that PyTorch does not have: it computes the scores once more, and then dV alone.
    """
    fused, kept = (
        {p: layer(1, N, d, H, projection=p, form=form) for p in ("learned", "frozen", "stopped")}
        for form in ("fast", "reference")
    )
    scores = fused["learned"].backward - kept["learned"].backward
    ratios = {
        "frozen": fused["frozen"].backward / fused["learned"].backward,
        "frozen and stopped, weights kept": kept["stopped"].backward / kept["learned"].backward,
        "frozen and stopped, fused for dV alone": (kept["stopped"].backward + scores) / fused["learned"].backward,
    }
    return {name: float(sympy.limit(ratio, N, sympy.oo)) for name, ratio in ratios.items()}


@evidence("S0.4.1b", chapter=CHAPTER)
def parts_of_a_step() -> Finding:
    standard, frozen = (train_once(projection) for projection in ("learned", "frozen"))
    made = (MultiheadAttention(64, 4, projection=one, form="reference") for one in ("learned", "frozen"))
    flops = [of(module, torch.zeros(1, 48, 64, requires_grad=True)).forward for module in made]
    ours = main_setting(experiments.load("training-step"), "layer")

    def measured(phase: str, records: Iterable[Record]) -> list[float]:
        return [round(phase_ratio(record, "frozen", phase)[1], 2) for record in records]

    long = [record for record in ours if record["configuration"]["N"] >= LONG * record["configuration"]["d"]]
    backward = {f"limit of the FLOPs, {name}": limit for name, limit in long_limits().items()}
    backward |= dict(zip((f"{_place(r)}, measured" for r in long), measured("backward", long), strict=True))
    parts = {
        "forward, FLOPs of a run": counted({"": flops[0]}, {"": flops[1]}),
        "backward, $N \\gg d$": region(_near("backward"), backward),
        "weights that an update changes": counted(
            {"": sum(standard.moved.values()) // 2}, {"": sum(frozen.moved.values())}
        ),
    }
    if ours:
        forward: dict[str, float] = {}
        optimiser: dict[str, float] = {}
        for device, group in experiments.by_device(ours).items():
            forward |= {f"least on {device}": min(measured("forward", group))}
            forward |= {f"most on {device}": max(measured("forward", group))}
            optimiser[f"median on {device}"] = round(median(measured("optimiser", group)), 2)
        parts["forward, measured"] = region(_near("forward"), forward)
        parts["optimiser, measured"] = region(_near("optimiser"), optimiser)
    return all_of(parts)


def _near(phase: str) -> tuple[float, float]:
    return round(RATIOS[phase] - NEAR, 2), round(RATIOS[phase] + NEAR, 2)


@evidence("S0.4.3b", chapter=CHAPTER)
def inference() -> Finding:
    rows = sorted(experiments.gains(experiments.load("inference")), key=lambda row: (row["device"], row["N"]))
    if not rows:
        return untestable("inference is 0 to 5 % faster", {"inference": None}, lack="no record times")

    def intervals(name: str) -> dict[str, tuple[float, float]]:
        return {
            f"$N = {row['N']:,}$ on {row['device']}": (round(row[name][0], 1), round(row[name][2], 1)) for row in rows
        }

    return all_of(
        {
            "0 to 5 % faster": agrees(GAIN, intervals("frozen"), unit=" %"),
            "better cached: a gain beyond that of a standard layer timed twice": effect(
                GAIN, intervals("frozen"), intervals("control"), unit=" %"
            ),
        }
    ).noting("Both layers run the same operations on the same shapes")
