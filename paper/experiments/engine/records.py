"""Measured records on disk: one JSON file per experiment and device, written whole or not at all.

`results/<experiment>/<device>.json` holds one record per case of the experiment, each on a line, and each version of
the code that they were measured with, once. In the file each record has its own checksum. A record's keys:

- `experiment`, `device` (the slug that is also the file's name);
- `configuration`: the case, a flat mapping of names to scalars; it identifies the record within its file;
- `seeds`: name -> integer;
- `repetitions`: arm -> quantity -> one number per repetition. A quantity's name ends in its unit (`forward_s`);
- `facts`: what is not repeated (bytes, orders, sizes), any JSON, may be empty;
- `failures`: arm -> why it could not be measured (a compiler that gave up); empty as a rule;
- `elapsed_s`: what the whole case took; `provenance`: where, when and with what (see `provenance.py`);
- `carried`, optional: the record holds for later code, too, as a short case of its kind gave the same results with both
  codes, to the bit. It says how many kinds were `reproduced` of how many, with which code, and when.
"""

import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from paper import _files

Record = dict[str, Any]
Case = dict[str, Any]

SCHEMA = 2
ROOM = 2**18  # bytes that a record may need with its code, about twice the largest so far
COUNTED = ("s", "bytes", "flop", "steps", "count")  # units of quantities that are never negative
UNITS = (*COUNTED, "fraction", "nats", "bits")

_Kinds = dict[str, type | tuple[type, ...]]
_TEXT, _FLAG = (str, type(None)), (bool, type(None))
_FIELDS: _Kinds = {
    **dict.fromkeys(("experiment", "device"), str),
    **dict.fromkeys(("configuration", "seeds", "repetitions", "facts", "failures"), dict),
    "elapsed_s": (int, float),
    "provenance": dict,
}
_CODE_OF: _Kinds = {"commit": _TEXT, "clean": _FLAG, "code": dict, "date_utc": str}
_PROVENANCE: _Kinds = {
    **dict.fromkeys(("device_name", "python", "torch", "numpy"), str),
    "threads": int,
    "cuda": _TEXT,
    "environment": dict,
    **_CODE_OF,
}
_CARRIED: _Kinds = {**_CODE_OF, "reproduced": int, "of": int}
# A definition of the project, or a value that a test or a notebook has bound to its own function.
_CODE = re.compile(r"[a-z_]\w*(\.\w+)*:.+|run.*", re.DOTALL)
_DIGEST = re.compile(r"[0-9a-f]{16}")


@dataclass(frozen=True)
class Needs:
    """What the readers of an experiment's records rely on, beyond what every record has.

    `configuration` and `facts`: name -> type; `arms` that are in every record; `quantities` that are in every arm.
    """

    configuration: Mapping[str, type] = field(default_factory=dict)
    arms: tuple[str, ...] = ()
    quantities: tuple[str, ...] = ()
    facts: Mapping[str, type] = field(default_factory=dict)

    @classmethod
    def like(cls, case: Case, **others: Any) -> "Needs":
        """The needs for cases with the names and types of this one; `others` are the other fields."""
        return cls({name: type(value) for name, value in case.items()}, **others)


NOTHING = Needs()
_ORIGINS = {"provenance", "carried"}
_SOUND: set[tuple[str, str, str, bytes]] = set()  # what this process has read and checked


class RecordError(ValueError):
    """A file of records that cannot be trusted, or one that somebody else is writing."""


class NoRecordsError(RecordError):
    """There is no record of any experiment where records should be."""


def key(case: Mapping[str, Any]) -> str:
    """The identity of a case: its configuration in canonical JSON."""
    return json.dumps(case, sort_keys=True, allow_nan=False)


def path(results: Path, experiment: str, device: str) -> Path:
    """Where the records of one experiment on one device lie."""
    return results / experiment / f"{device}.json"


def checkpoint(results: Path, experiment: str, case: Case, code: Mapping[str, str]) -> Path:
    """The file where a case may keep what it needs to go on after a kill; outside the records, for this code alone."""
    name = hashlib.sha256(key(case).encode()).hexdigest()[:16]
    return results.absolute() / ".checkpoints" / experiment / _version(code) / f"{name}.pt"


def read(file: Path, needs: Needs = NOTHING) -> list[Record]:
    """The checked records of a file, with what their experiment needs; [] if there is no such file.

    Raises RecordError, naming the file and the reason, if it is damaged. The file is left as it is.
    """
    try:
        text = file.read_text(encoding="utf-8")
        # Chapters read a file dozens of times: the same content need not be checked again for the same readers.
        seen = (file.parent.name, file.stem, repr(needs), hashlib.sha256(text.encode()).digest())
        if seen in _SOUND:
            return _unpacked(json.loads(text))
        content = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_without_repeats)
        _check_layout(content)
        found = _check_file(_unpacked(content), needs, experiment=file.parent.name, device=file.stem)
        _SOUND.add(seen)
        return found
    except FileNotFoundError:
        return []
    except (ValueError, OSError, RecursionError) as error:  # ValueError covers JSON, encoding and every check below
        reason = "nested too deeply" if isinstance(error, RecursionError) else error
        raise RecordError(
            f"{file}: damaged or not a file of records: {reason}. It was left as it is; "
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
    with _files.written_whole(file) as stream:
        stream.write(_packed(records).encode())


def put(results: Path, record: Record, needs: Needs = NOTHING, order: Sequence[Case] = ()) -> None:
    """Add a record to those of its experiment and device; it replaces an earlier one of the same case.

    The file keeps the `order` of these cases, whichever was measured first; others come after them. Raises RecordError
    if the file or the record is damaged.
    """
    file = path(results, record["experiment"], record["device"])
    stored = by_case([*read(file, needs), record])
    places = {key(case): place for place, case in enumerate(order)}
    write(file, [stored[case] for case in sorted(stored, key=lambda case: places.get(case, len(places)))])


def probe(file: Path) -> None:
    """Raise RecordError unless a file of records can be written with its present size plus `ROOM`."""
    size = ROOM
    try:
        size += file.stat().st_size if file.exists() else 0
        _files.probe(file, size)
    except OSError as error:
        raise RecordError(f"{file.parent}: expected to write {size:,} bytes there ({error.strerror})") from error


@contextmanager
def lock(results: Path) -> Iterator[Callable[[], None]]:
    """Hold a results folder for one writer; the kernel releases it however the process ends.

    Yields a function that raises RecordError if the folder has been removed or replaced and so is no longer held.
    Raises RecordError at once if another process holds it, as two runs would also disturb each other's timing, and if
    the folder cannot be created, locked or written into.
    """
    import fcntl  # not on every system; reading records does not need it

    try:
        results.mkdir(parents=True, exist_ok=True)
        folder = os.open(results, os.O_RDONLY)
    except OSError as error:
        raise RecordError(f"{results}: expected a folder for the results ({error.strerror})") from error

    def held() -> None:
        try:
            same = os.path.samestat(results.stat(), os.fstat(folder))
        except OSError:
            same = False
        if not same:
            raise RecordError(f"{results}: the folder was removed or replaced during the run")

    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RecordError(f"{results}: another run is measuring into this folder; wait for it to end") from None
        except OSError as error:
            raise RecordError(
                f"{results}: cannot be locked ({error.strerror}); expected a file system with locks"
            ) from error
        probe(results / "probe")
        yield held
    finally:
        os.close(folder)


def by_case(records: Iterable[Record]) -> dict[str, Record]:
    """Records by the keys of their cases."""
    return {key(record["configuration"]): record for record in records}


def on_cpu(device: str) -> bool:
    """Whether a device's name is that of a CPU, or of all of them together ('cpu')."""
    return device.partition("-")[0] == "cpu"


def by_device(records: Sequence[Record]) -> dict[str, list[Record]]:
    """Records grouped by device, in their order."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(record["device"], []).append(record)
    return groups


def judged_device(records: Iterable[Record]) -> str:
    """The device whose records claims are judged by: a CPU if there is one; '' without records."""
    names = {record["device"] for record in records}
    return min(names, key=lambda name: (not on_cpu(name), name), default="")


def pooled(records: Iterable[Record]) -> dict[str, list[Record]]:
    """Training runs by device; those of all CPUs are put together as 'cpu', which comes first. If several CPUs ran a
    case, the one whose name comes first counts.

    Processors round differently, which changes what a run learns only as much as another seed does.
    """
    found: dict[str, dict[str, Record]] = {"cpu": {}}
    for record in sorted(records, key=lambda record: str(record["device"])):
        name = "cpu" if on_cpu(record["device"]) else record["device"]
        found.setdefault(name, {}).setdefault(key(record["configuration"]), record)
    return {name: list(group.values()) for name, group in found.items() if group}


def of_judged_devices(records: Iterable[Record]) -> list[Record]:
    """The training runs by which claims are judged: those of all CPUs, or else of the first device."""
    return next(iter(pooled(records).values()), [])


def latest(records: Sequence[Record]) -> dict[str, Record]:
    """The most recently measured record of each device."""
    return {
        device: max(group, key=lambda record: record["provenance"]["date_utc"])
        for device, group in by_device(records).items()
    }


def standing(record: Record) -> Mapping[str, Any]:
    """The code and the commit that a record holds for: its own, or those that it was carried over to."""
    found: Mapping[str, Any] = record["carried" if "carried" in record else "provenance"]
    return found


def is_clean(record: Record) -> bool:
    """Whether a record's code is that of its commit; true if nobody knows, for want of git: then its digest counts."""
    return standing(record)["clean"] is not False


def check(record: Any, needs: Needs = NOTHING, sound: set[int] | None = None) -> Record:
    """`record` if it has every needed key, of the right type, with finite numbers; else ValueError.

    `sound` are the ids of code that was checked before: the records of a file share their code, and it is checked
    once.
    """
    sound = set() if sound is None else sound
    if not isinstance(record, dict):
        raise ValueError(f"expected a record (a mapping), got {type(record).__name__}")
    _check_fields(record, _FIELDS, "")
    _check_origin(record["provenance"], _PROVENANCE, "provenance.", sound)
    if "carried" in record:
        _check_fields(record, {"carried": dict}, "")
        _check_origin(record["carried"], _CARRIED, "carried.", sound)
    origins = {name: {k: v for k, v in record[name].items() if k != "code"} for name in _ORIGINS & record.keys()}
    _check_values(record | origins, "record")
    if record["elapsed_s"] < 0:
        raise ValueError(f"elapsed_s: expected seconds, got {record['elapsed_s']}")
    for name, value in record["configuration"].items():
        if isinstance(value, dict | list):
            raise ValueError(f"configuration.{name}: expected a scalar, got {type(value).__name__}")
    _check_fields(record["seeds"], dict.fromkeys(record["seeds"], int), "seeds.")
    for arm, reason in record["failures"].items():
        if not isinstance(reason, str) or not reason:
            raise ValueError(f"failures.{arm}: expected a reason in words, got {reason!r}")
    if not record["repetitions"] and not record["failures"]:
        raise ValueError("repetitions: expected at least one arm, got none")
    for arm, quantities in record["repetitions"].items():
        _check_repetitions(quantities, f"repetitions.{arm}")
    _check_needs(record, needs)
    return record


def _packed(records: Sequence[Record]) -> str:
    """The text of a file: the code of all records, each version once, and a line for each record with its checksum."""
    versions: dict[str, Mapping[str, str]] = {}
    lines = []
    for record in records:
        line = dict(record)
        for name in _ORIGINS & record.keys():
            version = _version(record[name]["code"])
            versions[version] = record[name]["code"]
            line[name] = record[name] | {"code": version}
        lines.append(_line(line | {"checksum": _checksum(line)}))
    code = ",\n".join(f"{_line(version)}: {_line(versions[version])}" for version in sorted(versions))
    body = ",\n".join(lines)
    return f'{{"schema": {SCHEMA}, "code": {{\n{code}\n}}, "records": [\n{body}\n]}}\n'


def _unpacked(content: dict[str, Any]) -> list[Record]:
    """The records of a parsed file, each with its code."""
    for record in content["records"]:
        del record["checksum"]
        for name in _ORIGINS & record.keys():
            record[name]["code"] = content["code"][record[name]["code"]]
    return list(content["records"])


def _check_layout(content: Any) -> None:
    """ValueError unless the records of a parsed file can be trusted: each has its checksum, and its code is there."""
    if not isinstance(content, dict) or content.keys() != {"schema", "code", "records"}:
        raise ValueError("expected a mapping of schema, code and records")
    if content["schema"] != SCHEMA:
        raise ValueError(f"schema: expected {SCHEMA}, got {content['schema']!r:.60}")
    _check_fields(content, {"code": dict, "records": list}, "")
    for version, code in content["code"].items():
        if not isinstance(code, dict) or version != _version(code):
            raise ValueError(f"code.{version}: expected definitions with this digest")
    for index, record in enumerate(content["records"]):
        if not isinstance(record, dict):
            raise ValueError(f"record {index}: expected a mapping, got {type(record).__name__}")
        sound = {name: value for name, value in record.items() if name != "checksum"}
        if record.get("checksum") != _checksum(sound):
            raise ValueError(f"record {index}: its checksum is wrong: something in it was changed")
        for name in _ORIGINS & record.keys():
            if not isinstance(record[name], dict) or record[name].get("code") not in content["code"]:
                raise ValueError(f"record {index}: {name}.code: expected a version of the code in this file")


def _line(value: Any) -> str:
    return json.dumps(value, allow_nan=False, ensure_ascii=False)


def _checksum(record: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def _version(code: Mapping[str, str]) -> str:
    return _checksum(code)[:16]


def _check_file(content: list[Any], needs: Needs, *, experiment: str, device: str) -> list[Record]:
    seen: dict[str, int] = {}
    sound: set[int] = set()
    for index, record in enumerate(content):
        try:
            check(record, needs, sound)
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


def _check_origin(origin: Mapping[str, Any], expected: Mapping[str, Any], prefix: str, sound: set[int]) -> None:
    _check_fields(origin, expected, prefix)
    code = origin["code"]
    if id(code) not in sound:
        for name, digest in code.items():
            if not _CODE.fullmatch(name) or not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
                told = f"{name!r:.60}: {digest!r:.60}"
                raise ValueError(f"{prefix}code: expected definitions and their digests, got {told}")
        _check_values(code, f"{prefix}code")
        sound.add(id(code))
    try:
        zone = datetime.fromisoformat(origin["date_utc"]).utcoffset()
    except ValueError:
        zone = None
    if zone != timedelta(0):
        raise ValueError(f"{prefix}date_utc: expected a date and time in UTC, ISO 8601, got {origin['date_utc']!r:.60}")


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
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if not isinstance(value, kind) or (isinstance(value, bool) and bool not in kinds):
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
            if value < 0 and name.rpartition("_")[2] in COUNTED:
                raise ValueError(f"{where}.{name}: expected numbers of at least 0, got {value}")
        lengths.add(len(values))
    if len(lengths) > 1:
        raise ValueError(f"{where}: expected as many repetitions of each quantity, got {sorted(lengths)}")


def _check_values(value: Any, where: str) -> None:
    """ValueError for a number that is not finite, and for text that no file can hold."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{where}: expected a finite number, got {value}")
    if isinstance(value, str) and not value.isascii() and any("\ud800" <= letter <= "\udfff" for letter in value):
        raise ValueError(f"{where}: expected Unicode text, got {value!a:.60}")
    if isinstance(value, dict):
        for name, item in value.items():
            _check_values(name, where)
            _check_values(item, f"{where}.{name}")
    elif isinstance(value, list):
        for item in value:
            _check_values(item, where)


def _kinds(kind: Any) -> str:
    kinds = kind if isinstance(kind, tuple) else (kind,)
    return " or ".join("null" if k is type(None) else k.__name__ for k in kinds)


def _refuse_constant(name: str) -> float:
    raise ValueError(f"expected finite numbers, got {name}")


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)}: expected once, got it twice")
    return found
