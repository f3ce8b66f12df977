"""Learning rates: tried alike for every arm, chosen by the validation part, and kept in a table beside this file.

The seed `TUNING` tries each rate once, and its runs do not count among the results. `tools/rates.py` writes the table
from the records; the runs that count are listed once their rate is in it. Records do not depend on the table, as their
configuration holds the rate: a record with another rate than the table's is just no longer asked for.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from paper._files import written_whole
from paper.experiments.devices import on_cpu
from paper.experiments.engine.records import Case, Record

TUNING = 0  # the seed whose runs choose the rates
WIDTH = 64  # for which rates are listed
# Relative: losses this near count as equal. Rounding differs from one processor to another, and must not choose.
TIE = 0.005
TABLE = Path(__file__).with_name("rates.json")


def tried(rates: Sequence[float], d: int) -> tuple[float, ...]:
    """The rates to try at width d: those for width 64, in inverse proportion to it (Yang et al. 2022, arXiv:2203.03466,
    table 8, for matrices and Adam)."""
    return tuple(float(f"{rate * WIDTH / d:.3g}") for rate in rates)


def chosen(experiment: str, case: Case) -> float | None:
    """The rate chosen for all seeds of a case's arm; None if none was chosen yet."""
    return table().get(experiment, {}).get(_key(case))


def with_chosen(experiment: str, cases: Iterable[Case]) -> list[Case]:
    """The cases, each with the rate chosen for it; cases for which none was chosen yet are left out."""
    found = [(case, chosen(experiment, case)) for case in cases]
    return [{**case, "rate": rate} for case, rate in found if rate is not None]


def counts(record: Record) -> bool:
    """Whether a run is a result: it does not choose a rate, and has the rate that was chosen, if one was."""
    case = record["configuration"]
    return case["seed"] != TUNING and chosen(record["experiment"], case) in (None, case["rate"])


@cache
def table() -> dict[str, dict[str, float]]:
    """Experiment -> arm with all its settings -> rate."""
    found: dict[str, dict[str, float]] = json.loads(TABLE.read_text(encoding="utf-8")) if TABLE.exists() else {}
    return found


def choose(records: Iterable[Record]) -> dict[str, float]:
    """Arm with all its settings -> the rate of the lowest loss at the tuning seed, if a device tried two or more.

    Losses of different devices are not compared. The choice of a CPU goes before that of other devices.
    """
    losses: dict[tuple[str, str], dict[float, float]] = {}
    for record in sorted(records, key=lambda record: on_cpu(record["device"])):  # the last one stays
        case = record["configuration"]
        if case["seed"] == TUNING:
            losses.setdefault((record["device"], _key(case)), {})[case["rate"]] = loss(record)
    return {key: best(found) for (_, key), found in losses.items() if len(found) > 1}


def best(losses: Mapping[float, float]) -> float:
    """The lowest rate of those whose loss is within `TIE` of the lowest."""
    bound = (1 + TIE) * min(losses.values())
    return min(rate for rate, value in losses.items() if value <= bound)


def loss(record: Record) -> float:
    """The loss that a rate is chosen by, in nats: the lowest one on the validation part; if that was not looked at, the
    loss in the last part of the training, whose batches are drawn anew and were never seen before."""
    looks = record["facts"].get("validation", [])
    return min((float(look["loss_nats"]) for look in looks), default=float(record["facts"]["loss"][-1]))


def _key(case: Mapping[str, Any]) -> str:
    """What a rate is chosen for: a case without its seed, its rate, its device and its rule of judgement."""
    left_out = ("seed", "rate", "device")
    words = [f"{k}={v}" for k, v in case.items() if k not in left_out and not k.startswith("decision_")]
    return " ".join(words)


def write(records: Mapping[str, Iterable[Record]]) -> None:
    """Write the rates that the records of these experiments choose to the table.

    An arm for which they choose nothing keeps the rate that it had: records may be few, after a run that was stopped.
    """
    old = table()
    found = {**old, **{name: {**old.get(name, {}), **choose(some)} for name, some in records.items()}}
    text = json.dumps({name: rates for name, rates in found.items() if rates}, indent=1, sort_keys=True)
    with written_whole(TABLE) as stream:
        stream.write(f"{text}\n".encode())
    table.cache_clear()
