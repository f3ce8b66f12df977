"""Tables of records, one for each device."""

from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Any

from paper.experiments.engine.records import Record, by_device

Lines = Callable[..., Iterable[str]]  # of the records of one device


def by_devices(*, head: str = "", note: str = "", versions: bool = False) -> Callable[[Lines], Callable[..., str]]:
    """Makes the text of all records, a table per device, of a function that gives the lines of one device's records.

    A table begins with the device's name, with a `note` or the `versions` that it ran with, and a `head`.
    """

    def decorated(lines: Lines) -> Callable[..., str]:
        @wraps(lines)
        def table(records: Sequence[Record], **options: Any) -> str:
            texts = []
            for device, group in by_device(records).items():
                origin = group[0]["provenance"]
                ran = f", threads {origin['threads']}, torch {origin['torch']}" if versions else ""
                texts.append(f"\n{device} ({origin['device_name']}{ran}){note}")
                texts += [head, "-" * len(head)] if head else []
                texts += lines(group, **options)
            return "\n".join(texts)

        return table

    return decorated
