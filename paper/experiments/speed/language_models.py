"""The time of a training step of the language models of bytes, all arms in turn.

The seconds of whole runs say little if several ran at once. Here one process holds all arms of `bytes` at their sizes
and trains each for some steps in every repetition, in an order drawn anew.
"""

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from ortho.checks import one_of
from paper.experiments.devices import on_cpu
from paper.experiments.engine.records import Case, Record
from paper.experiments.learning import fitting, language
from paper.experiments.learning.arms import arms
from paper.experiments.speed import benchmark
from paper.experiments.speed.analysis import by_arm
from paper.experiments.speed.benchmark import Budget
from paper.tasks import text
from paper.tasks.task import Task
from paper.training import Trainer

BASELINE = "learned"
SEEDS = {"weights": 0, "training": 1, "checks": 2, "order": 3}
CALLS = {"cpu": 2, "cuda": 8}  # steps in a row
BUDGETS = {"cpu": Budget(120.0, 11, 31, warm_up=1), "cuda": Budget(120.0, 11, 31, warm_up=2)}


def case(*, device: str = "cpu", **sizes: int) -> Case:
    """One configuration; `sizes` (B, N, d, H, L) are by default those of `language.SIZES`.

    Raises TypeError or ValueError for an unknown device, and for sizes that are not integers above 0.
    """
    known = language.SIZES[one_of("device", device, language.SIZES)]
    names = ("B", "N", "d", "H", "L")
    if unknown := sizes.keys() - set(names):
        raise TypeError(f"sizes: expected some of {', '.join(names)}, got {', '.join(sorted(unknown))}")
    return {"device": device, **benchmark.sizes(**{name: sizes.get(name, known[name]) for name in names})}


def cases(device: str) -> list[Case]:
    """The one configuration of a device, that of `bytes`."""
    return [case(device=device)]


def run(case: Case, seconds: float | None = None) -> dict[str, Any]:
    """Measure one case: check each arm against its definition, then train all of them in turn.

    `seconds` bounds the time of the repetitions, but there are always a few. Raises AssertionError if an arm's fast
    form does not compute what its definition does.
    """
    device = case["device"]
    title = "the next byte of the standard library"
    task = text.language_modelling("python-sources", title, text.python_parts(), case["N"])
    trainers = {name: _trainer(case, name, task) for name in arms(case["H"], case["N"])}
    timings = {name: partial(timed, trainer, CALLS[device]) for name, trainer in trainers.items()}
    return benchmark.compare(timings, BUDGETS[device], SEEDS, seconds, facts={"calls": CALLS[device]})


def _trainer(case: Case, name: str, task: Task) -> Trainer:
    """The trainer of an arm, before its first step."""
    draws = fitting.generators(SEEDS)
    arm = arms(case["H"], case["N"])[name]
    model = arm.build(text.VOCAB_SIZE, case["d"], case["L"], generator=draws["weights"]).to(case["device"])
    fitting.check_forms(model, task, draws["checks"])
    steps = language.SIZES[case["device"]]["steps"]
    plan = fitting.recipe({**case, "steps": steps, "rate": language.TRIED[0]}, weight_decay=fitting.WEIGHT_DECAY)
    return Trainer(model, task.train, plan, draws["training"])


def timed(trainer: Trainer, calls: int) -> dict[str, float]:
    """Mean seconds of a step, over `calls` steps in a row."""
    cuda = trainer.device.type == "cuda"
    return benchmark.mean_seconds(lambda: trainer.run(trainer.step + calls), calls, cuda=cuda)


def label(case: Case) -> str:
    """A case in a few words."""
    return f"{len(arms(case['H'], case['N']))} arms, " + " ".join(f"{name}={case[name]}" for name in "BNdHL")


def relative(record: Record, steps: Mapping[str, int] | None = None) -> dict[str, list[float]]:
    """The seconds of each arm's step over those of the baseline's step, one ratio for each repetition.

    With `steps`, which maps arms to numbers of steps, the seconds of these steps over those of the baseline's; arms
    that are not in it are left out.
    """
    times, found = by_arm(record, "step"), {}
    for arm, seconds in times.items():
        if steps is None or arm in steps:
            factor = 1.0 if steps is None else steps[arm] / steps[BASELINE]
            found[arm] = [factor * own / other for own, other in zip(seconds, times[BASELINE], strict=True)]
    return found


def beside(device: str, records: Iterable[Record]) -> Record | None:
    """The timings to compare with models that were trained on a device: its own, else those of another device of its
    kind, where the models make the same steps; None if there are none."""
    alike = [record for record in records if on_cpu(device) == (record["configuration"]["device"] == "cpu")]
    return min(alike, key=lambda record: (record["device"] != device, record["device"]), default=None)
