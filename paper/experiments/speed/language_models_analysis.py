"""What the records of `bytes-speed` say: the time of each arm's training beside the baseline's."""

from collections.abc import Mapping, Sequence

from paper.experiments.engine.records import Record, by_device
from paper.experiments.speed import analysis as summary

BASELINE = "learned"


def relative(record: Record, steps: Mapping[str, int] | None = None) -> dict[str, list[float]]:
    """The seconds of each arm's step over those of the baseline's, a number a repetition, in which all ran in turn.

    With `steps`, those of so many steps of each arm over those of the baseline's steps; arms of which it says nothing
    are left out.
    """
    base = summary.seconds(record, BASELINE, "step")
    found = {}
    for arm in record["repetitions"]:
        if steps is None or arm in steps:
            times = 1.0 if steps is None else steps[arm] / steps[BASELINE]
            pairs = zip(summary.seconds(record, arm, "step"), base, strict=True)
            found[arm] = [times * own / other for own, other in pairs]
    return found


def line(record: Record) -> str:
    """One case in a line."""
    middle = {arm: summary.quartiles(ratios)[1] for arm, ratios in relative(record).items()}
    least, most = min(middle, key=middle.__getitem__), max(middle, key=middle.__getitem__)
    step = summary.quartiles(summary.seconds(record, BASELINE, "step"))[1]
    ends = ", ".join(f"{arm} {middle[arm]:.2f} times" for arm in (least, most))
    return f"{BASELINE} {1e3 * step:.1f} ms a step; {ends} as long"


def table(records: Sequence[Record]) -> str:
    """The stored ratios, a table per device, the quickest arm first."""
    texts = []
    for device, group in by_device(records).items():
        texts.append(f"\n{device} ({group[0]['provenance']['device_name']}): a step over the baseline's, quartiles")
        for record in group:
            found = {arm: summary.quartiles(ratios) for arm, ratios in relative(record).items()}
            for arm, (low, middle, high) in sorted(found.items(), key=lambda item: item[1][1]):
                texts.append(f"{arm:28}{middle:6.2f} [{low:.2f}, {high:.2f}]")
    return "\n".join(texts)
