"""Measured records on disk: one JSON file per experiment and device, written whole or not at all.

`results/<experiment>/<device>.json` holds a list of records, one line each, one record per case of the experiment.
A record is complete on its own. Its keys:

- `schema` (the version of this layout), `experiment`, `device` (the slug that is also the file's name);
- `configuration`: the case, a flat mapping of names to scalars; it identifies the record within its file;
- `seeds`: name -> integer;
- `repetitions`: arm -> quantity -> one number per repetition. A quantity's name ends in its unit (`forward_s`);
- `facts`: what is not repeated (bytes, orders, sizes), any JSON, may be empty;
- `failures`: arm -> why it could not be measured (a compiler that gave up); empty as a rule;
- `elapsed_s`: what the whole case took; `provenance`: where, when and with what (see `provenance.py`).
"""

import hashlib
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ortho._files import written_whole

Record = dict[str, Any]
Case = dict[str, Any]

SCHEMA = 1
UNITS = ("s", "bytes", "flop", "fraction", "nats", "bits", "steps", "count")

_FIELDS: dict[str, type | tuple[type, ...]] = {
    "schema": int,
    "experiment": str,
    "device": str,
    "configuration": dict,
    "seeds": dict,
    "repetitions": dict,
    "facts": dict,
    "failures": dict,
    "elapsed_s": (int, float),
    "provenance": dict,
}
_PROVENANCE: dict[str, type | tuple[type, ...]] = {
    "device_name": str,
    "threads": int,
    "python": str,
    "torch": str,
    "numpy": str,
    "cuda": (str, type(None)),
    "environment": dict,
    "commit": (str, type(None)),
    "clean": (bool, type(None)),
    "sources": list,
    "digest": str,
    "date_utc": str,
}


@dataclass(frozen=True)
class Needs:
    """What the readers of an experiment's records rely on, beyond what every record has.

    `configuration` and `facts`: name -> type; `arms` that are in every record; `quantities` that are in every arm.
    """

    configuration: Mapping[str, type] = field(default_factory=dict)
    arms: tuple[str, ...] = ()
    quantities: tuple[str, ...] = ()
    facts: Mapping[str, type] = field(default_factory=dict)


NOTHING = Needs()


class RecordError(ValueError):
    """A file of records that cannot be trusted, or one that somebody else is writing."""


def key(case: Mapping[str, Any]) -> str:
    """The identity of a case: its configuration in canonical JSON."""
    return json.dumps(case, sort_keys=True, allow_nan=False)


def path(results: Path, experiment: str, device: str) -> Path:
    """Where the records of one experiment on one device lie."""
    return results / experiment / f"{device}.json"


def checkpoint(results: Path, experiment: str, case: Case) -> Path:
    """Where a case may keep what it needs to go on after a kill; not among the records."""
    name = hashlib.sha256(key(case).encode()).hexdigest()[:16]
    return results.absolute() / ".checkpoints" / experiment / f"{name}.pt"


def read(file: Path, needs: Needs = NOTHING) -> list[Record]:
    """The checked records of a file, with what their experiment needs; none if there is no such file.

    Raises RecordError, naming the file and the reason, if it is damaged. The file is left as it is.
    """
    try:
        text = file.read_text(encoding="utf-8")
        content = json.loads(text, parse_constant=_refuse_constant)
        return _check_file(content, needs, experiment=file.parent.name, device=file.stem)
    except FileNotFoundError:
        return []
    except (ValueError, OSError) as error:  # ValueError covers JSON, encoding and every check below
        raise RecordError(
            f"{file}: damaged or not a file of records: {error}. It was left as it is; "
            "repair it, or move it away to measure anew."
        ) from error


def read_all(results: Path, experiment: str, needs: Needs = NOTHING) -> list[Record]:
    """The checked records of an experiment on every device, devices in alphabetical order."""
    return [record for file in sorted((results / experiment).glob("*.json")) for record in read(file, needs)]


def write(file: Path, records: Sequence[Record]) -> None:
    """Replace a file of records in one step: a kill at any moment leaves the old file or the new one.

    Raises RecordError if a record is ill-formed (see `check`).
    """
    try:
        _check_file(list(records), NOTHING, experiment=file.parent.name, device=file.stem)
    except ValueError as error:
        raise RecordError(f"{file}: refused to write: {error}") from error
    lines = ",\n".join(json.dumps(record, allow_nan=False, ensure_ascii=False) for record in records)
    with written_whole(file) as stream:
        stream.write(f"[\n{lines}\n]\n".encode())


def put(results: Path, record: Record, needs: Needs = NOTHING, order: Sequence[Case] = ()) -> None:
    """Add a record to those of its experiment on the device that it names, in place of an earlier one of its case.

    They lie in the `order` of these cases, whichever was measured first, and others behind them. Raises RecordError if
    the file or the record is damaged.
    """
    file = path(results, record["experiment"], record["device"])
    stored = {key(one["configuration"]): one for one in (*read(file, needs), record)}
    places = {key(case): place for place, case in enumerate(order)}
    write(file, [stored[case] for case in sorted(stored, key=lambda case: places.get(case, len(places)))])


@contextmanager
def lock(results: Path) -> Iterator[None]:
    """Hold a results folder for one writer; the kernel lets go of it however the process ends.

    Raises RecordError at once if another process holds it, as two runs would also disturb each other's timing, and if
    there can be no such folder, or none that can be locked.
    """
    import fcntl  # not on every system; reading records does not need it

    try:
        results.mkdir(parents=True, exist_ok=True)
        folder = os.open(results, os.O_RDONLY)
    except OSError as error:
        raise RecordError(f"{results}: expected a folder for the results ({error.strerror})") from error
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RecordError(f"{results}: another run is measuring into this folder; wait for it to end") from None
        except OSError as error:
            raise RecordError(
                f"{results}: cannot be locked ({error.strerror}); expected a file system with locks"
            ) from error
        yield
    finally:
        os.close(folder)


def by_device(records: Sequence[Record]) -> dict[str, list[Record]]:
    """Records grouped by device, in their order."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(record["device"], []).append(record)
    return groups


def judged_device(records: Iterable[Record]) -> str:
    """The device by whose records claims are judged: of those there are a CPU, if possible; '' without records."""
    names = {record["device"] for record in records}
    return min(names, key=lambda name: (not name.startswith("cpu-"), name), default="")


def latest(records: Sequence[Record]) -> dict[str, Record]:
    """The most recently measured record of each device."""
    return {
        device: max(group, key=lambda record: record["provenance"]["date_utc"])
        for device, group in by_device(records).items()
    }


def check(record: Any, needs: Needs = NOTHING) -> Record:
    """`record` if it has every needed key, of the right type, with finite numbers; else ValueError."""
    if not isinstance(record, dict):
        raise ValueError(f"expected a record (a mapping), got {type(record).__name__}")
    _check_fields(record, _FIELDS, "")
    if record["schema"] != SCHEMA:
        raise ValueError(f"schema: expected {SCHEMA}, got {record['schema']}")
    _check_provenance(record["provenance"])
    _check_finite(record, "record")
    for name, value in record["configuration"].items():
        if isinstance(value, dict | list):
            raise ValueError(f"configuration.{name}: expected a scalar, got {type(value).__name__}")
    for name, value in record["seeds"].items():
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(f"seeds.{name}: expected an integer, got {value!r}")
    for arm, reason in record["failures"].items():
        if not isinstance(reason, str) or not reason:
            raise ValueError(f"failures.{arm}: expected a reason in words, got {reason!r}")
    if not record["repetitions"] and not record["failures"]:
        raise ValueError("repetitions: expected at least one arm, got none")
    for arm, quantities in record["repetitions"].items():
        _check_repetitions(quantities, f"repetitions.{arm}")
    _check_needs(record, needs)
    return record


def _check_file(content: Any, needs: Needs, *, experiment: str, device: str) -> list[Record]:
    if not isinstance(content, list):
        raise ValueError(f"expected a list of records, got {type(content).__name__}")
    seen: dict[str, int] = {}
    for index, record in enumerate(content):
        try:
            check(record, needs)
            for name, expected in (("experiment", experiment), ("device", device)):
                if record[name] != expected:
                    raise ValueError(f"{name}: expected {expected!r} as in the file's path, got {record[name]!r}")
            case = key(record["configuration"])
            if case in seen:
                raise ValueError(f"configuration: the same case as record {seen[case]}")
            seen[case] = index
        except ValueError as error:
            raise ValueError(f"record {index}: {error}") from error
    return content


def _check_provenance(origin: Mapping[str, Any]) -> None:
    _check_fields(origin, _PROVENANCE, "provenance.")
    for name in origin["sources"]:
        if not isinstance(name, str):
            raise ValueError(f"provenance.sources: expected names of files, got {name!r:.60}")


def _check_needs(record: Record, needs: Needs) -> None:
    _check_fields(record["configuration"], needs.configuration, "configuration.")
    _check_fields(record["facts"], needs.facts, "facts.")
    _check_fields(record["repetitions"], dict.fromkeys(needs.arms, dict), "repetitions.")
    for arm, quantities in record["repetitions"].items():
        _check_fields(quantities, dict.fromkeys(needs.quantities, list), f"repetitions.{arm}.")


def _check_fields(record: Mapping[str, Any], fields: Mapping[str, Any], prefix: str) -> None:
    for name, kind in fields.items():
        if name not in record:
            raise ValueError(f"{prefix}{name}: missing")
        value = record[name]
        # bool is an int to isinstance; a count that is True is a slip.
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is int):
            raise ValueError(f"{prefix}{name}: expected {_kinds(kind)}, got {type(value).__name__} {value!r:.60}")


def _check_repetitions(quantities: Any, where: str) -> None:
    if not isinstance(quantities, dict) or not quantities:
        raise ValueError(f"{where}: expected quantities with their repetitions, got {quantities!r:.60}")
    lengths = set()
    for name, values in quantities.items():
        if name.rpartition("_")[2] not in UNITS:
            raise ValueError(f"{where}.{name}: expected a name that ends in its unit, one of {', '.join(UNITS)}")
        if not isinstance(values, list) or not values:
            raise ValueError(f"{where}.{name}: expected a list of at least one repetition, got {values!r:.60}")
        for value in values:
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ValueError(f"{where}.{name}: expected numbers, got {value!r:.60}")
        lengths.add(len(values))
    if len(lengths) > 1:
        raise ValueError(f"{where}: expected as many repetitions of each quantity, got {sorted(lengths)}")


def _check_finite(value: Any, where: str) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{where}: expected a finite number, got {value}")
    if isinstance(value, dict):
        for name, item in value.items():
            _check_finite(item, f"{where}.{name}")
    elif isinstance(value, list):
        for item in value:
            _check_finite(item, where)


def _kinds(kind: Any) -> str:
    kinds = kind if isinstance(kind, tuple) else (kind,)
    return " or ".join("null" if k is type(None) else k.__name__ for k in kinds)


def _refuse_constant(name: str) -> float:
    raise ValueError(f"expected finite numbers, got {name}")
