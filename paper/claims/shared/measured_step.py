"""S0, sections 4.1 and 4.3, measured: the parts of a training step, and inference; read from `results/`.

What counts as near is fixed before any record is read. The source prints 0.5, so "about 0.5" and "unchanged" leave open
half a unit of the last digit, 0.05. The tests of inference are those of the rule `effect`.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from paper import experiments
from paper.claims.figures import numbers
from paper.claims.report import Shown, table
from paper.experiments import Record

NO_TIMES = "There is no record of it yet, so that this page gives no times."


def provenance(records: Sequence[Record]) -> list[tuple[str, ...]]:
    """(what, one cell a device) for the records of an experiment: where, when and with what they were measured."""
    columns = [_cells(group) for group in experiments.by_device(records).values()]
    return [(what, *(cells[what] for cells in columns)) for what in columns[0]] if columns else []


def provenance_table(records: Sequence[Record], none: str = NO_TIMES) -> Shown:
    """The same as a table, a column for each device; without records, the sentence `none`."""
    if not records:
        return Shown(none, none)
    return table(provenance(records), ("", *map(experiments.shown_name, experiments.by_device(records))))


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
