"""Tables of records, one for each device or group of devices."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from typing import Any

from paper.experiments.engine.records import Record, by_device

Lines = Callable[..., Iterable[str]]  # of the records of one device


def by_devices(
    *,
    head: str = "",
    note: str = "",
    versions: bool = False,
    groups: Callable[[Sequence[Record]], Mapping[str, list[Record]]] = by_device,
) -> Callable[[Lines], Callable[..., str]]:
    """Turns a function that gives the lines of one device's records into one that gives a table for each device.

    A table begins with the device's name, with a `note` or the `versions` that it ran with, and a `head`. If `groups`
    puts several devices together, the table names all of them.
    """

    def decorated(lines: Lines) -> Callable[..., str]:
        @wraps(lines)
        def table(records: Sequence[Record], **options: Any) -> str:
            texts = []
            for group in groups(records).values():
                origin = group[0]["provenance"]
                ran = f", threads {origin['threads']}, torch {origin['torch']}" if versions else ""
                names = {f"{one['device']} ({one['provenance']['device_name']}{ran})" for one in group}
                texts.append(f"\n{', '.join(sorted(names))}{note}")
                texts += [head, "-" * len(head)] if head else []
                texts += lines(group, **options)
            return "\n".join(texts)

        return table

    return decorated
