"""What the records of the synthetic tasks say: how often an arm learns a task, how well, and after how many steps."""

import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from paper.experiments.engine.records import Record, by_device
from paper.experiments.learning import rates
from paper.experiments.statistics import Interval, success_interval


class Learnt(NamedTuple):
    """An arm's runs on a task, in the order of their seeds.

    `correct`: the share of right answers of each; `steps`: after how many it was seen to be a success, None for a run
    that was not one when it was tested.
    """

    task: str
    arm: str
    seeds: tuple[int, ...]
    correct: tuple[float, ...]
    steps: tuple[int | None, ...]

    @property
    def successes(self) -> int:
        """The runs that learnt the task."""
        return sum(step is not None for step in self.steps)

    @property
    def rate(self) -> Interval:
        """The exact interval of the rate of successes, at 95 %."""
        return success_interval(self.successes, len(self.seeds))


def learnt(records: Iterable[Record], device: str) -> dict[str, dict[str, Learnt]]:
    """Task -> arm -> its runs that count, of one device."""
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        case = record["configuration"]
        if record["device"] == device and rates.counts(record):
            groups.setdefault((case["task"], case["arm"]), []).append(record)
    found: dict[str, dict[str, Learnt]] = {}
    for (task, arm), group in groups.items():
        group.sort(key=lambda record: int(record["configuration"]["seed"]))
        found.setdefault(task, {})[arm] = Learnt(
            task,
            arm,
            tuple(int(record["configuration"]["seed"]) for record in group),
            tuple(map(_correct, group)),
            tuple(map(_steps, group)),
        )
    return found


def _correct(record: Record) -> float:
    """The share of right answers in the one test that a task has."""
    (test,) = record["repetitions"].values()
    return float(test["correct_fraction"][0])


def _steps(record: Record) -> int | None:
    case = record["configuration"]
    if _correct(record) < case["success_fraction"]:
        return None
    looks = record["facts"]["validation"]
    found = [int(look["step"]) for look in looks if look["correct_fraction"] >= case["success_fraction"]]
    return min(found, default=int(case["steps"]))


def line(record: Record) -> str:
    """One run in a line."""
    steps = _steps(record)
    seen = "not learnt" if steps is None else f"learnt after {steps} steps"
    return f"{_correct(record):.3f} of the answers right, {seen}, {record['facts']['train_s']:.0f} s"


def table(records: Sequence[Record]) -> str:
    """The stored figures, a table per device: successes with their exact interval, and right answers over seeds."""
    texts = []
    for device, group in by_device(records).items():
        texts.append(f"\n{device} ({group[0]['provenance']['device_name']}): runs that learnt a task, interval at 95 %")
        for task, arms in learnt(group, device).items():
            for arm, runs in arms.items():
                low, high = runs.rate
                middle = statistics.median(runs.correct)
                texts.append(
                    f"{task:18}{arm:26}{runs.successes:3} of {len(runs.seeds):2} [{low:.2f}, {high:.2f}]"
                    f"  right answers: median {middle:.3f} [{min(runs.correct):.3f}, {max(runs.correct):.3f}]"
                )
    return "\n".join(texts)
