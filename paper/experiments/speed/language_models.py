"""The time of a training step of the language models of bytes, all arms in turn.

Seconds of whole runs say little where several ran beside each other. Here one process has all arms of `bytes` at its
sizes and trains each for some steps in every repetition, in an order drawn anew.
"""

from functools import partial
from typing import Any

from ortho._checks import one_of, positive_int
from paper.experiments.engine.clock import mean_seconds
from paper.experiments.engine.records import Case, Needs
from paper.experiments.engine.runner import Experiment
from paper.experiments.engine.stopwatch import interleaved
from paper.experiments.learning import fitting, language
from paper.experiments.learning.arms import arms
from paper.experiments.speed import language_models_analysis as language_speed_rows
from paper.tasks import text
from paper.tasks.task import Task
from paper.training import Trainer

SEEDS = {"weights": 0, "training": 1, "checks": 2, "order": 3}
CALLS = {"cpu": 2, "cuda": 8}  # steps in a row
WARM_UP = {"cpu": 1, "cuda": 2}
REPETITIONS = (11, 31)
SECONDS = 120.0  # that the repetitions should take
STEP_SECONDS = 0.03  # about


def case(*, device: str = "cpu", **sizes: int) -> Case:
    """One configuration; `sizes` (B, N, d, H, L) are those of `language.SIZES` where they are not given.

    Raises TypeError or ValueError for an unknown device, and for sizes below 1 or that are none.
    """
    known = language.SIZES[one_of("device", device, language.SIZES)]
    names = ("B", "N", "d", "H", "L")
    if unknown := sizes.keys() - set(names):
        raise TypeError(f"sizes: expected some of {', '.join(names)}, got {', '.join(sorted(unknown))}")
    return {"device": device, **{name: positive_int(name, sizes.get(name, known[name])) for name in names}}


def cases(device: str) -> list[Case]:
    """The one configuration of a device, that of `bytes`."""
    return [case(device=device)]


def run(case: Case, seconds: float | None = None) -> dict[str, Any]:
    """Measure one case: hold each arm to its definition, then train all of them in turn.

    `seconds` bounds the time of the repetitions, of which there are always a few. Raises AssertionError if an arm's
    fast form does not compute what its definition does.
    """
    device = case["device"]
    title = "the next byte of the standard library"
    task = text.language_modelling("python-sources", title, text.python_parts(), case["N"])
    trainers = {name: _trainer(case, name, task) for name in arms(case["H"], case["N"])}
    times, order = interleaved(
        {name: partial(_timed, trainer, CALLS[device]) for name, trainer in trainers.items()},
        warm_up=WARM_UP[device],
        repetitions=REPETITIONS,
        seconds=SECONDS if seconds is None else seconds,
        seed=SEEDS["order"],
    )
    return {"seeds": SEEDS, "repetitions": times, "facts": {"calls": CALLS[device], "order": order}}


def _trainer(case: Case, name: str, task: Task) -> Trainer:
    """The training of an arm, at its beginning."""
    draws = fitting.generators(SEEDS)
    arm = arms(case["H"], case["N"])[name]
    model = arm.build(text.VOCAB_SIZE, case["d"], case["L"], generator=draws["weights"]).to(case["device"])
    fitting.check_forms(model, task, draws["checks"])
    steps = language.SIZES[case["device"]]["steps"]
    plan = fitting.recipe({**case, "steps": steps, "rate": language.TRIED[0]}, weight_decay=fitting.WEIGHT_DECAY)
    return Trainer(model, task.train, plan, draws["training"])


def _timed(trainer: Trainer, calls: int) -> dict[str, float]:
    cuda = trainer.device.type == "cuda"
    return mean_seconds(lambda: trainer.run(trainer.step + calls), calls, cuda=cuda)


def work(case: Case) -> float:
    """Seconds that a case takes, roughly."""
    count = len(arms(case["H"], case["N"]))
    least, most = (n * count * CALLS[case["device"]] * STEP_SECONDS for n in REPETITIONS)
    return float(0.5 * count + max(least, min(most, SECONDS)))


def label(case: Case) -> str:
    """A case in a few words."""
    return f"{len(arms(case['H'], case['N']))} arms, " + " ".join(f"{name}={case[name]}" for name in "BNdHL")


BYTES_SPEED = Experiment(
    name="bytes-speed",
    title="the training step of the language models of bytes, all arms in turn",
    cases=cases,
    run=run,
    work=work,
    label=label,
    line=language_speed_rows.line,
    show=language_speed_rows.table,
    needs=Needs(
        configuration={name: type(value) for name, value in case().items()}, arms=("learned",), quantities=("step_s",)
    ),
    quiet=True,
)
