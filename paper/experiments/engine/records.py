"""Records: what a case gave. Each is a JSON file, `results/<experiment>/<device>/<label>-<mark>.json`, written whole.

A missing file is a missing case. The mark is taken from the configuration, so that a case has one file, whatever its
label becomes. The keys of a record:

- `experiment`, `device`: as in the path; `version`: of the study (`Experiment.version`) when the case was run;
- `configuration`: the case, a flat mapping of names to scalars;
- `seeds`: name -> integer;
- `repetitions`: variant -> quantity -> one number per repetition. A quantity's name ends in its unit (`forward_s`);
- `facts`: what is not repeated (bytes, orders, sizes), any JSON, may be empty;
- `failures`: variant -> why it could not be measured (a compiler that gave up); empty as a rule;
- `elapsed_s`: what the whole case took; `provenance`: where, when and with what (see `provenance.py`).
"""

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from paper._files import written_whole

Record = dict[str, Any]
Case = dict[str, Any]

_FIELDS: dict[str, Any] = {
    **dict.fromkeys(("experiment", "device"), str),
    "version": int,
    **dict.fromkeys(("configuration", "seeds", "repetitions", "facts", "failures"), dict),
    "elapsed_s": (int, float),
    "provenance": dict,
}


class RecordError(ValueError):
    """A file that is a damaged record, or not a record, or not the record that its place says."""


class NoRecordsError(RecordError):
    """There is no record of any experiment where records should be."""


def key(case: Mapping[str, Any]) -> str:
    """The identity of a case: its configuration in canonical JSON."""
    return json.dumps(case, sort_keys=True, allow_nan=False)


def mark(case: Mapping[str, Any]) -> str:
    """The identity of a case in eight letters, at the end of its file's name."""
    return hashlib.sha256(key(case).encode()).hexdigest()[:8]


def path(results: Path, experiment: str, device: str, case: Case, label: str = "") -> Path:
    """Where the record of a case lies, or is to lie: under the label with which it was first stored."""
    folder, words = results / experiment / device, re.sub(r"[^\w.+]+", "-", label).strip("-")[:100]
    stored = sorted(folder.glob(f"*{mark(case)}.json"))
    return stored[0] if stored else folder / f"{words}-{mark(case)}.json".lstrip("-")


def write(file: Path, record: Record) -> None:
    """Replace a record's file in one step: a kill at any moment leaves the old file or the new one.

    Raises ValueError if the record is ill-formed, and OSError if it cannot be written.
    """
    lines = ",\n".join(f"{json.dumps(name)}: {_dumped(value)}" for name, value in check(record).items())
    with written_whole(file) as stream:
        stream.write(f"{{\n{lines}\n}}\n".encode())


def read(file: Path) -> Record:
    """A record. Raises RecordError, naming file and reason, if it is damaged or foreign; the file is left as it is."""
    try:
        record = check(json.loads(file.read_text(encoding="utf-8")))
        own = (record["experiment"], record["device"], mark(record["configuration"]))
        there = (file.parent.parent.name, file.parent.name, file.stem[-8:])
        if own != there:
            raise ValueError(f"expected the record of {'/'.join(there)}, as in its path, got that of {'/'.join(own)}")
    except (ValueError, OSError, RecursionError) as error:  # ValueError covers JSON, encoding and the checks
        raise RecordError(
            f"{file}: damaged or not a record: {error}. It was left as it is; repair it, or move it away."
        ) from error
    return record


def read_all(results: Path, experiment: str, cases: Iterable[Case] = ()) -> list[Record]:
    """The records of an experiment on every device, devices in alphabetical order, and each device's in the order of
    these cases; others come last. Raises RecordError for a file that is damaged or foreign."""
    files = sorted(file for file in (results / experiment).rglob("*") if file.suffix != ".part" and file.is_file())
    places = {key(case): place for place, case in enumerate(cases)}
    found = [(record, key(record["configuration"])) for record in map(read, files)]
    found.sort(key=lambda pair: (pair[0]["device"], places.get(pair[1], len(places))))
    return [record for record, _ in found]


def check(record: Any) -> Record:
    """`record` if it has every needed field, of the right type, and finite repetitions; else ValueError."""
    if not isinstance(record, dict) or record.keys() != _FIELDS.keys():
        raise ValueError(f"expected a mapping with the fields {', '.join(_FIELDS)}")
    for name, kind in _FIELDS.items():
        if not isinstance(record[name], kind) or isinstance(record[name], bool):
            raise ValueError(f"{name}: expected another type, got {type(record[name]).__name__} {record[name]!r:.60}")
    for variant, quantities in record["repetitions"].items():
        for name, values in quantities.items():
            if not (isinstance(values, list) and values and all(map(_is_finite, values))):
                raise ValueError(f"repetitions.{variant}.{name}: expected finite numbers, got {values!r:.60}")
    if not record["repetitions"] and not record["failures"]:
        raise ValueError("repetitions: expected at least one variant, got none")
    return record


def line(record: Record) -> str:
    """A record in a line: the medians of what was measured of each variant, and what failed."""
    found = []
    for variant, quantities in record["repetitions"].items():
        named = {name: values for name, values in quantities.items() if not name.endswith("_cpu_s")}
        found.append(f"{variant} " + ", ".join(f"{name} {median(values):.4g}" for name, values in named.items()))
    return "; ".join([*found, *(f"{variant} failed: {why}" for variant, why in record["failures"].items())])


def differences(one: Record, other: Record) -> dict[str, float]:
    """By how much two records of a case differ, as a share of the larger number: for each quantity and fact the largest
    difference, infinite for what is not a number; nothing for what is equal to the bit. Times do not count."""
    parts = ("seeds", "repetitions", "facts", "failures")
    found: dict[str, float] = {}
    for part in parts:
        _differ(part, one[part], other[part], found)
    return found


def _differ(name: str, one: Any, other: Any, found: dict[str, float]) -> None:
    if name.endswith("_s") or one == other:
        return
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        for part in one:
            _differ(f"{name}.{part}", one[part], other[part], found)
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for a, b in zip(one, other, strict=True):
            _differ(name, a, b, found)
    else:
        numbers = _is_finite(one) and _is_finite(other)
        share = abs(one - other) / max(abs(one), abs(other)) if numbers else math.inf
        found[name] = max(found.get(name, 0.0), share)


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _dumped(value: Any) -> str:
    return json.dumps(value, allow_nan=False, ensure_ascii=False)
