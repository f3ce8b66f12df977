"""The records of a run on their way to its results folder. What cannot be stored is kept, and tried again."""

import errno
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from paper._files import remove
from paper.experiments.engine import records
from paper.experiments.engine.records import Case, Needs, Record, RecordError

MAY_PASS = (errno.ENOSPC, errno.EDQUOT)  # somebody else may free space while the next case is measured


@dataclass(eq=False)
class Measured:
    """A record of this run, how to store it (see `records.put`), and, while it is not stored, the reason."""

    label: str
    record: Record
    needs: Needs
    order: Sequence[Case]
    reason: str = "not tried"
    may_pass: bool = False

    @property
    def stored(self) -> bool:
        return not self.reason

    @property
    def experiment(self) -> str:
        return str(self.record["experiment"])


class Store:
    """Stores the records of a run; none is dropped before the run ends.

    `held` raises RecordError when `results` is no longer the folder that the run holds (see `records.lock`).
    """

    def __init__(self, results: Path, held: Callable[[], None]) -> None:
        self.results = results
        self.measured: list[Measured] = []
        self._held = held

    @property
    def pending(self) -> list[Measured]:
        """The records that are measured and not stored."""
        return [one for one in self.measured if not one.stored]

    def check(self, file: Path | None = None) -> None:
        """Raise RecordError if nothing can be stored in this file, or anywhere in the folder."""
        self._held()
        records.probe(file or self.results / "probe")

    def add(self, one: Measured) -> None:
        """Keep a record, and try to store it and what is pending."""
        self.measured.append(one)
        self._flush()

    def takes_more(self, experiment: str) -> bool:
        """Try again to store what is pending, and say whether another case of the experiment may be measured.

        It may if none of its records is left pending, or only one, because of an error that may pass.
        """
        self._flush()
        pending = [one for one in self.pending if one.experiment == experiment]
        return not pending or (len(pending) == 1 and pending[0].may_pass)

    def close(self) -> list[Measured]:
        """Store what is pending, or was stored and has vanished; returns what is lost."""
        files = {one: records.path(self.results, one.experiment, one.record["device"]) for one in self.measured}
        there = {file: self._cases(file) for file in set(files.values())}
        for one, file in files.items():
            if one.stored and records.key(one.record["configuration"]) not in there[file]:
                one.reason = "it has vanished"
        self._flush()
        return self.pending

    def _flush(self) -> None:
        for one in self.pending:
            one.reason, one.may_pass = self._put(one)

    def _put(self, one: Measured) -> tuple[str, bool]:
        """Store a record; returns why it could not be stored, '' if it was, and whether that may pass."""
        try:
            self._held()
            records.put(self.results, one.record, one.needs, one.order)
            code = one.record["provenance"]["code"]
            remove(records.checkpoint(self.results, one.experiment, one.record["configuration"], code))
        except RecordError as error:
            return str(error), False
        except OSError as error:
            return error.strerror or str(error), error.errno in MAY_PASS
        return "", False

    def _cases(self, file: Path) -> set[str]:
        """The cases of a file, by their keys; none if it cannot be read."""
        try:
            self._held()
            return set(records.by_case(records.read(file)))
        except RecordError:
            return set()
