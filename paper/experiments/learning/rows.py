"""What the records of the learning experiments say: accuracies over seeds, the rates chosen, and which arm is better.

A record holds one run, so that all functions take many. The runs of the tuning seed count for the choice of the rates
alone.
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from paper.experiments.engine.records import Record, by_device
from paper.experiments.learning import rates
from paper.experiments.learning.rates import TUNING, loss
from paper.experiments.statistics import better_by_chance

Row = dict[str, Any]


def rows(records: Iterable[Record]) -> list[Row]:
    """One row per device, arm and test, in the order of the records: `seeds`, `rate`, and of the right answers' share
    `correct`, one number a seed, with `low`, `median` and `high`; `faultless` the share of sequences without a mistake.

    Raises ValueError if an arm's runs differ in more than their seed.
    """
    groups: dict[tuple[str, str, str], list[Record]] = {}
    for record in records:
        case = record["configuration"]
        if rates.counts(record):
            for test in record["repetitions"]:
                groups.setdefault((record["device"], case["arm"], test), []).append(record)
    found = []
    for (device, arm, test), group in groups.items():
        group = sorted(group, key=lambda record: int(record["configuration"]["seed"]))
        settings = [{k: v for k, v in record["configuration"].items() if k != "seed"} for record in group]
        if any(other != settings[0] for other in settings):
            raise ValueError(f"records: expected runs of {arm!r} on {device} that differ in the seed alone")
        shares = {
            name: [float(record["repetitions"][test][f"{name}_fraction"][0]) for record in group]
            for name in ("correct", "faultless")
        }
        correct = shares["correct"]
        found.append(
            {**settings[0], "device": device, "arm": arm, "test": test}
            | {"seeds": [record["configuration"]["seed"] for record in group], **shares}
            | {"low": min(correct), "median": statistics.median(correct), "high": max(correct)}
        )
    return found


def results(records: Iterable[Record], device: str) -> dict[str, dict[str, Row]]:
    """Arm -> test -> row, of one device."""
    found: dict[str, dict[str, Row]] = {}
    for row in rows(record for record in records if record["device"] == device):
        found.setdefault(row["arm"], {})[row["test"]] = row
    return found


def per_cent(row: Row) -> str:
    """A row's right answers in per cent: the median (and the least to the most), or one figure where these agree."""
    low, median, high = (f"{100 * row[name]:.0f}" for name in ("low", "median", "high"))
    return median if low == high else f"{median} ({low}\xa0to\xa0{high})"


def curves(records: Iterable[Record], device: str) -> dict[str, list[list[float]]]:
    """Arm -> the training losses in nats, a curve a seed, each the means of equal parts of the steps."""
    found: dict[str, list[list[float]]] = {}
    for record in records:
        case = record["configuration"]
        if record["device"] == device and rates.counts(record):
            found.setdefault(case["arm"], []).append(list(record["facts"]["loss"]))
    return found


def tuning(records: Iterable[Record], device: str) -> dict[str, dict[float, float]]:
    """Arm -> rate -> the loss at the tuning seed by which the arm's rate is chosen, in nats (`rates.loss`)."""
    found: dict[str, dict[float, float]] = {}
    for record in records:
        case = record["configuration"]
        if record["device"] == device and case["seed"] == TUNING:
            found.setdefault(case["arm"], {})[case["rate"]] = loss(record)
    return found


def compare(results: Mapping[str, Mapping[str, Row]], test: str, better: str, worse: str) -> Row:
    """Two arms in one test: the difference of the medians, and the probability that like arms do as well by chance.

    Raises ValueError for an arm or test that was not measured.
    """
    values = []
    for arm in (better, worse):
        if arm not in results or test not in results[arm]:
            raise ValueError(f"results: expected {arm!r} with the test {test!r}, which was not measured")
        values.append(results[arm][test]["correct"])
    difference = statistics.median(values[0]) - statistics.median(values[1])
    return {"difference": difference, "by_chance": better_by_chance(*values)}


def line(record: Record) -> str:
    """One run in a line: the share of right answers in each test."""
    shares = {test: statistics.median(values["correct_fraction"]) for test, values in record["repetitions"].items()}
    return ", ".join(f"{test} {share:.3f}" for test, share in shares.items())


def table(records: Sequence[Record]) -> str:
    """The stored accuracies, a table per device: the median over seeds, and the range."""
    texts = []
    for device, group in by_device(records).items():
        texts.append(f"\n{device} ({group[0]['provenance']['device_name']}): right answers, median [lowest, highest]")
        texts += [
            f"{row['arm']:24}{row['test']:32}{row['median']:.3f} [{row['low']:.3f}, {row['high']:.3f}]"
            f"  {len(row['seeds'])} seeds, rate {row['rate']:g}"
            for row in rows(group)
        ]
        for arm, losses in tuning(group, device).items():
            each = ", ".join(f"{loss:.4f} at {rate:g}" for rate, loss in sorted(losses.items()))
            texts.append(f"{arm:24}loss at the tuning seed: {each}")
    return "\n".join(texts)
