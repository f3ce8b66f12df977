"""The time of a training step of small language models of bytes, all arms in turn: those of `bytes`, or of the ladder.

The seconds of whole runs say little if several ran at once. Here one process holds all arms at their sizes and trains
each for some steps in every repetition, in an order drawn anew. Arms of the ladder that lack the short convolution have
'without convolution' after their names; its others have it.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch

from ortho.checks import one_of
from ortho.models.language_model import LanguageModel
from paper.experiments.devices import on_cpu
from paper.experiments.engine.records import Case, Record
from paper.experiments.learning import fitting, ladder, ladder_arms, language
from paper.experiments.learning.arms import Arm, arms
from paper.experiments.learning.ladder_arms import CONVOLUTION
from paper.experiments.speed import benchmark
from paper.experiments.speed.analysis import by_arm
from paper.experiments.speed.benchmark import Budget
from paper.tasks import text
from paper.training import Trainer

BASELINE = "learned"
SIZES = ("B", "N", "d", "H", "L")
SEEDS = {"weights": 0, "training": 1, "checks": 2, "order": 3}
CALLS = {"cpu": 2, "cuda": 8}  # steps in a row
BUDGETS = {"cpu": Budget(120.0, 11, 31, warm_up=1), "cuda": Budget(120.0, 11, 31, warm_up=2)}

Build = Callable[[torch.Generator], LanguageModel]


def case(name: str = "", *, device: str = "cpu", **sizes: int) -> Case:
    """One configuration: the models of `bytes`, or with the name of a text those of the ladder on it; `sizes` (B, N, d,
    H, L) are by default theirs.

    Raises TypeError or ValueError for unknown names, and for sizes that are not integers above 0.
    """
    known = language.SIZES[one_of("device", device, BUDGETS)]
    if name:
        known = {**ladder.SIZES[one_of("name", name, ladder.TEXTS)], **ladder.MODEL}
    size = fitting.sizes({one: known[one] for one in SIZES}, sizes)
    return {"device": device, **({"text": name} if name else {}), **size}


def cases(device: str) -> list[Case]:
    """The one configuration of a device, that of `bytes`."""
    return [case(device=device)]


def ladder_cases(device: str) -> list[Case]:
    """Both texts of the ladder."""
    return [case(name, device=device) for name in ladder.TEXTS]


def builders(case: Case) -> dict[str, Build]:
    """Arm -> what makes its model; of the ladder the arms with as many heads as the case."""
    if "text" not in case:
        return {name: _of_bytes(case, arm) for name, arm in arms(case["H"], case["N"]).items()}
    own = {name: arm for name, arm in ladder_arms.ARMS.items() if arm.num_heads == case["H"]}
    found = {name: _of_ladder(case, arm, CONVOLUTION) for name, arm in own.items()}
    without = [name for name in ladder.WITHOUT if name in own]
    return found | {f"{name} without convolution": _of_ladder(case, own[name], 0) for name in without}


def _of_bytes(case: Case, arm: Arm) -> Build:
    return lambda weights: arm.build(text.VOCAB_SIZE, case["d"], case["L"], generator=weights)


def _of_ladder(case: Case, arm: ladder_arms.Arm, convolution: int) -> Build:
    return partial(arm.build, {**case, "d_ff": 4 * case["d"], "convolution": convolution})


def run(case: Case, seconds: float | None = None) -> dict[str, Any]:
    """Measure one case: check each arm against its definition, then train all of them in turn.

    `seconds` bounds the time of the repetitions, but there are always a few. Raises AssertionError if an arm's fast
    form does not compute what its definition does.
    """
    calls, of_ladder = CALLS[case["device"]], "text" in case
    parts = ladder.TEXTS[case["text"]]() if of_ladder else text.python_parts()
    task = text.language_modelling(case.get("text", "python-sources"), "the next byte", parts, case["N"])
    steps = ladder.BASE if of_ladder else language.SIZES[case["device"]]["steps"]
    rate = (ladder if of_ladder else language).TRIED[0]
    plan = fitting.recipe({**case, "steps": steps, "rate": rate})
    timings = {}
    for name, build in builders(case).items():
        draws = fitting.generators(SEEDS)
        model = build(draws["weights"]).to(case["device"])
        fitting.check_forms(model, task, draws["checks"])
        timings[name] = partial(timed, Trainer(model, task.train, plan, draws["training"]), calls)
    return benchmark.compare(timings, BUDGETS[case["device"]], SEEDS, seconds, facts={"calls": calls})


def timed(trainer: Trainer, calls: int) -> dict[str, float]:
    """Mean seconds of a step, over `calls` steps in a row."""
    cuda = trainer.device.type == "cuda"
    return benchmark.mean_seconds(lambda: trainer.run(trainer.step + calls), calls, cuda=cuda)


def label(case: Case) -> str:
    """A case in a few words."""
    words = f"{len(builders(case))} arms, " + " ".join(f"{name}={case[name]}" for name in SIZES)
    return f"{case['text']}, {words}" if "text" in case else words


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
