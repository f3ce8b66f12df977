"""Small models of some arms on synthetic tasks: retrieval, copying, arithmetic, from easy ones to those that separate
the arms.

A case is one model on one task. Outcomes have two humps, as a task is either learnt within the steps or not. So runs
are judged by the share of right answers, and count as a success if it is at least `SUCCESS`. The arms of a seed see the
same batches. All arms have learned embeddings of positions, since linear heads know the order from nothing else.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ortho.checks import one_of
from ortho.models.language_model import LanguageModel
from paper.experiments.engine.records import Case, Record
from paper.experiments.learning import fitting
from paper.experiments.learning.analysis import grouped, seed, tested
from paper.experiments.learning.arms import arms
from paper.experiments.learning.rates import TUNING
from paper.experiments.statistics import Interval, success_interval
from paper.tasks import copying, induction, modular_addition, mqar, needle
from paper.tasks.task import Task

SEEDS = tuple(range(1, 11))
TRIED = (1e-3, 3e-3)
LOOKS = 20
SUCCESS = 0.9  # of the right answers
MARGIN = 0.1  # a difference of success rates that matters


@dataclass(frozen=True)
class Setting:
    """A task, and the batches and steps that all arms have for it."""

    make: Callable[[], Task]
    B: int
    steps: int


SETTINGS: Mapping[str, Setting] = {
    "induction": Setting(lambda: induction.task(length=32, symbols=8), 32, 500),
    "copying": Setting(copying.task, 32, 600),
    "modular addition": Setting(lambda: modular_addition.task(modulus=59, trained=0.8), 256, 400),
    "needle": Setting(lambda: needle.task(needles=2, length=32, symbols=16), 64, 600),
    "mqar": Setting(lambda: mqar.task(pairs=4, length=16, vocab_size=32), 128, 1000),
}
ARMS = ("learned", "frozen", "stopped", "1 learned + 3 positional", "linear", "delta")
SIZES = {"cpu": {"d": 64, "H": 4, "L": 2, "tested": 256}, "cuda": {"d": 128, "H": 4, "L": 2, "tested": 1024}}
LONGER = {"cpu": 1, "cuda": 4}  # times the steps


@cache
def task(name: str) -> Task:
    """The task of that name. Raises ValueError for an unknown one."""
    return SETTINGS[one_of("task", name, SETTINGS)].make()


def case(name: str, arm: str, seed: int = TUNING, rate: float = TRIED[0], *, device: str = "cpu", **sizes: int) -> Case:
    """One run; `sizes` (steps, B, d, H, L, tested) are by default the setting's.

    Raises TypeError or ValueError for unknown names, and for sizes that are not integers above 0.
    """
    own, setting = SIZES[one_of("device", device, SIZES)], SETTINGS[one_of("task", name, SETTINGS)]
    size = fitting.sizes({"steps": setting.steps * LONGER[device], "B": setting.B, **own}, sizes)
    return {
        "device": device,
        "task": name,
        "arm": one_of("arm", arm, arms(size["H"], task(name).longest)),
        "seed": seed,
        "rate": rate,
        "N": task(name).longest,
        **size,
        "success_fraction": SUCCESS,
        "margin_fraction": MARGIN,
    }


def cases(device: str) -> list[Case]:
    """The runs that choose the rates; then those that count for arms whose rate is chosen, task by task."""
    options = [{"name": name, "arm": arm, "device": device} for name in SETTINGS for arm in ARMS]
    return fitting.cases("synthetic", case, options, lambda _: TRIED, SEEDS)


def run(case: Case, *, checkpoint: Path | None = None) -> dict[str, Any]:
    """Train and test one model (`fitting.run`); a run that was killed goes on from its `checkpoint`."""
    own = task(case["task"])
    arm = replace(arms(case["H"], case["N"])[case["arm"]], embeddings="learned")

    def build(generator: torch.Generator) -> LanguageModel:
        return arm.build(own.vocab_size, case["d"], case["L"], generator=generator)

    facts = {"kinds": arm.describe(), "title": own.title}
    return fitting.run(case, seeds_of(case), own, build, looks=LOOKS, checkpoint=checkpoint, facts=facts)


def seeds_of(case: Case) -> dict[str, int]:
    """Seeds of a run: hashes of what is drawn, its task and its seed; the arms of a seed share all but the weights."""
    return fitting.paired_seeds(case["arm"], "synthetic", case["task"], case["seed"])


label = "{task}: {arm}, seed={seed}, rate={rate:g}".format_map


class Learnt(NamedTuple):
    """An arm's runs on a task, in the order of their seeds.

    `correct`: the share of right answers of each; `steps`: after how many steps it was seen to be a success, None for a
    run that was not a success when it was tested.
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
    own = (record for record in records if record["device"] == device)
    groups = grouped(own, lambda record: (record["configuration"]["task"], record["configuration"]["arm"]))
    found: dict[str, dict[str, Learnt]] = {}
    for (task, arm), group in groups.items():
        correct, steps = tuple(map(_correct, group)), tuple(map(_steps, group))
        found.setdefault(task, {})[arm] = Learnt(task, arm, tuple(map(seed, group)), correct, steps)
    return found


def _correct(record: Record) -> float:
    """The share of right answers in the one test that a task has."""
    return tested(record, next(iter(record["repetitions"])), "correct_fraction")


def _steps(record: Record) -> int | None:
    case = record["configuration"]
    if _correct(record) < case["success_fraction"]:
        return None
    looks = record["facts"]["validation"]
    found = [int(look["step"]) for look in looks if look["correct_fraction"] >= case["success_fraction"]]
    return min(found, default=int(case["steps"]))
