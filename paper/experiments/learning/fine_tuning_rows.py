"""What the records of `fine-tuning` say: bits a byte of both texts over seeds, and each arm against another."""

from collections.abc import Iterable, Sequence

from paper.experiments.engine.records import Record, by_device
from paper.experiments.learning import paired_rows
from paper.experiments.learning.language_rows import BITS
from paper.experiments.learning.paired_rows import Judged, Measures, Runs

BASELINE = "all trained"


def new(record: Record) -> float:
    """Bits a byte of the second text, after the second stage."""
    return _bits(record, "new")


def new_before(record: Record) -> float:
    """Bits a byte of the second text, after the first stage."""
    return _bits(record, "new, before")


def old(record: Record) -> float:
    """Bits a byte of the first text, after the second stage."""
    return _bits(record, "old")


def forgotten(record: Record) -> float:
    """Bits a byte that the first text takes more after the second stage than after the first."""
    return _bits(record, "old") - _bits(record, "old, before")


MEASURES: Measures = {"new": new, "new, before": new_before, "old": old, "forgotten": forgotten}


def by_arm(records: Iterable[Record], device: str) -> dict[str, Runs]:
    """Arm -> its runs that count, with the measures of `MEASURES`, in bits a byte.

    Raises ValueError if an arm's runs differ in more than the seed.
    """
    return paired_rows.by_arm(records, device, MEASURES)


def judged(arm: Runs, other: Runs, measure: str = "new") -> Judged | None:
    """The arm against the other by the bits of the new text; None with fewer than two seeds in common. All measures
    are the better the lower they are."""
    return paired_rows.judged(arm, other, measure)


def line(record: Record) -> str:
    """One run in a line."""
    return (
        f"new text {new_before(record):.4f} -> {new(record):.4f} bits a byte, old {old(record):.4f} "
        f"({forgotten(record):+.4f}), {record['facts']['train_s']:.0f} s"
    )


def table(records: Sequence[Record]) -> str:
    """The stored figures, a table per device: means over seeds, and what the rule says of each arm against the one of
    which all is trained."""
    texts = []
    for device, group in by_device(records).items():
        name = group[0]["provenance"]["device_name"]
        texts.append(f"\n{device} ({name}): bits a byte of the new text, mean [lowest, highest], and of the old")
        found = by_arm(group, device)
        for one in sorted(found.values(), key=lambda one: one.mean("new")):
            texts.append(
                f"{one.arm:16}{one.span('new')}, old {one.mean('old'):.4f} "
                f"({one.mean('forgotten'):+.4f}), {one.parameters:,} trained, "
                f"rate {one.configuration['rate']:g}{paired_rows.against(one, found.get(BASELINE), 'new')}"
            )
        texts.append(paired_rows.closing(group))
    return "\n".join(texts)


def _bits(record: Record, test: str) -> float:
    return float(record["repetitions"][test]["loss_nats"][0]) * BITS
