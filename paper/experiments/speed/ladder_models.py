"""The time of a training step of the ladder's models, all arms of a text in turn.

Arms whose layers lack the short convolution have 'without convolution' after their names; the others have it.
"""

from functools import partial
from typing import Any

from ortho.checks import one_of
from paper.experiments.engine.records import Case
from paper.experiments.learning import fitting, ladder
from paper.experiments.learning.ladder_arms import ARMS, CONVOLUTION
from paper.experiments.speed import benchmark, language_models
from paper.experiments.speed.language_models import BUDGETS, CALLS, SEEDS
from paper.tasks import text
from paper.training import Trainer

SIZES = ("B", "N", "d", "H", "L")


def case(name: str, *, device: str = "cpu", **sizes: int) -> Case:
    """One text; `sizes` (B, N, d, H, L) are by default those of the ladder.

    Raises TypeError or ValueError for an unknown text or device, and for sizes that are not integers above 0.
    """
    known = {**ladder.SIZES[one_of("name", name, ladder.TEXTS)], **ladder.MODEL}
    if unknown := sizes.keys() - set(SIZES):
        raise TypeError(f"sizes: expected some of {', '.join(SIZES)}, got {', '.join(sorted(unknown))}")
    wanted = benchmark.sizes(**{size: sizes.get(size, known[size]) for size in SIZES})
    return {"device": one_of("device", device, BUDGETS), "text": name, **wanted}


def cases(device: str) -> list[Case]:
    """Both texts."""
    return [case(name, device=device) for name in ladder.TEXTS]


def arms(case: Case) -> dict[str, tuple[str, int]]:
    """Name -> the arm and the width of its convolution, for the arms with as many heads as the case."""
    found = {arm: (arm, CONVOLUTION) for arm, heads in ARMS.items() if heads.num_heads == case["H"]}
    return found | {f"{arm} without convolution": (arm, 0) for arm in ladder.WITHOUT if arm in found}


def run(case: Case, seconds: float | None = None) -> dict[str, Any]:
    """Measure one case: check each arm against its definition, then train all of them in turn.

    `seconds` bounds the time of the repetitions, but there are always a few. Raises AssertionError if an arm's fast
    form does not compute what its definition does.
    """
    calls = CALLS[case["device"]]
    task = text.language_modelling(case["text"], "the next byte", ladder.TEXTS[case["text"]](), case["N"])
    timings = {}
    for name, (arm, width) in arms(case).items():
        draws = fitting.generators(SEEDS)
        sizes = {key: case[key] for key in SIZES}
        own = ladder.case(case["text"], arm, convolution=width, device=case["device"], **sizes)
        model = ARMS[arm].build(own, draws["weights"]).to(case["device"])
        fitting.check_forms(model, task, draws["checks"])
        plan = fitting.recipe({**own, "steps": ladder.BASE})
        trainer = Trainer(model, task.train, plan, draws["training"])
        timings[name] = partial(language_models.timed, trainer, calls)
    return benchmark.compare(timings, BUDGETS[case["device"]], SEEDS, seconds, facts={"calls": calls})


def label(case: Case) -> str:
    """A case in a few words."""
    return f"{case['text']}, {len(arms(case))} arms, " + " ".join(f"{name}={case[name]}" for name in SIZES)
