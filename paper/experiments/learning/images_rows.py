"""What the records of `images` say: accuracies over seeds, and each arm against another, pair by pair."""

from collections.abc import Iterable, Sequence

from paper.experiments.engine.records import Record, by_device
from paper.experiments.learning import paired_rows
from paper.experiments.learning.paired_rows import Judged, Measures, Runs

BASELINE = "learned"


def correct(record: Record) -> float:
    """The share of the test's images of which a run says the class."""
    return float(record["repetitions"]["test"]["correct_fraction"][0])


def nats(record: Record) -> float:
    """A run's cross-entropy on the test, nats an image."""
    return float(record["repetitions"]["test"]["loss_nats"][0])


MEASURES: Measures = {"correct": correct, "loss": nats}


def by_arm(records: Iterable[Record], device: str, data: str = "digits") -> dict[str, Runs]:
    """Arm -> its runs that count, with the measures 'correct', a share, and 'loss', nats an image.

    Raises ValueError if an arm's runs differ in more than the seed.
    """
    return paired_rows.by_arm(records, device, MEASURES, data=data)


def judged(arm: Runs, other: Runs) -> Judged | None:
    """The arm against the other by the share of right answers; None with fewer than two seeds in common."""
    return paired_rows.judged(arm, other, "correct")


def line(record: Record) -> str:
    """One run in a line."""
    return f"{correct(record):.3f} right, {nats(record):.3f} nats, {record['facts']['train_s']:.1f} s"


def table(records: Sequence[Record]) -> str:
    """The stored figures, a table per device and data: mean and range over seeds, and what the rule says of each arm
    against the learned one."""
    texts = []
    for device, group in by_device(records).items():
        for data in dict.fromkeys(record["configuration"]["data"] for record in group):
            name = group[0]["provenance"]["device_name"]
            texts.append(f"\n{data} on {device} ({name}): right answers, mean [lowest, highest], and nats")
            found = by_arm(group, device, data)
            for one in sorted(found.values(), key=lambda one: -one.mean("correct")):
                texts.append(
                    f"{one.arm:26}{one.span('correct')}, {one.mean('loss'):.4f} nats, "
                    f"rate {one.configuration['rate']:g}"
                    f"{paired_rows.against(one, found.get(BASELINE), 'correct')}"
                )
        texts.append(paired_rows.closing(group))
    return "\n".join(texts)
