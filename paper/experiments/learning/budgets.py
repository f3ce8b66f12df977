"""One run that serves all budgets up to its own, each a power of two.

A model is trained at a constant rate (after a warm-up). For each budget a copy of it goes on for the last fifth of that
budget's steps, while the rate falls to 0. So the model that is tested at a budget had its whole training planned for
that budget (warm-up, stable, decay: Hu et al. 2024, arXiv:2404.06395; as good as a cosine of that length: Hägele et al.
2024, arXiv:2405.18392).
"""

import copy
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ortho.checks import positive_int
from paper.experiments.engine import records
from paper.experiments.engine.records import Case
from paper.experiments.learning import fitting
from paper.tasks.task import Task
from paper.training import Recipe, Trainer

WARM_UP = 60  # steps
COOLING = 0.2  # of a budget's steps


@dataclass(frozen=True)
class Stable(Recipe):
    """A rate that rises for `WARM_UP` steps and stays."""

    def share_of_rate(self, step: int) -> float:
        return min(1.0, (step + 1) / WARM_UP)


@dataclass(frozen=True)
class Cooling(Recipe):
    """A rate that falls to 0 in a straight line."""

    def share_of_rate(self, step: int) -> float:
        return 1 - step / self.steps


def checked_budget(budget: int) -> int:
    """The budget, if it is a power of two, else TypeError or ValueError."""
    if positive_int("budget", budget) & (budget - 1):
        raise ValueError(f"budget: expected a power of two, got {budget}")
    return budget


def steps(case: Mapping[str, Any], budget: int) -> tuple[int, int]:
    """After how many steps a budget's copy is taken, and for how many steps it goes on."""
    whole = case["base"] * budget
    cooling = max(1, round(COOLING * whole))
    return whole - cooling, cooling


def fit(
    model: nn.Module,
    task: Task,
    case: Case,
    draws: Mapping[str, torch.Generator],
    examined: Callable[[nn.Module], dict[str, Any]],
    *,
    looks: Collection[int] = (),
    looked: Callable[[nn.Module], dict[str, Any]] | None = None,
    checkpoint: Path | None = None,
) -> dict[str, Any]:
    """Train a model up to the budget of its case; returns `fitting.facts`, with a look for each budget. A look is what
    `examined` returns for the copy, with its `budget`, its number of steps, `step`, and `step_s`, the processor time of
    a step in seconds.

    With `looked` the facts have `looks`, too: what it returns, and `step`, for the model that has not been cooled,
    after each of the steps `looks` that come before the last copy is taken.

    A run that was killed goes on from its `checkpoint`; the work of a copy that was not yet tested is lost. Raises
    AssertionError if the last copy's fast form does not compute what its definition does.
    """
    branches = {steps(case, 2**i)[0]: 2**i for i in range(case["budget"].bit_length())}
    kind: dict[str, Any] = {
        "weight_decay": fitting.WEIGHT_DECAY,
        "smoothing": case.get("smoothing", 0.0),
        "precision": fitting.PRECISION[case["device"]],
    }

    def watch(step: int) -> list[dict[str, Any]]:
        found = [{"step": step} | looked(model)] if looked is not None and step in looks else []
        return [*found, cooled(step)] if step in branches else found

    def cooled(step: int) -> dict[str, Any]:
        budget = branches[step]
        last = steps(case, budget)[1]
        own = torch.Generator().manual_seed(0)
        own.set_state(trunk.generator.get_state())  # the batches that come next
        branch = Trainer(copy.deepcopy(model), task.train, Cooling(last, case["rate"], case["B"], **kind), own)
        branch.optimiser.load_state_dict(trunk.optimiser.state_dict())
        began = time.process_time()
        branch.run()
        seconds = (time.process_time() - began) / last
        found = {"budget": budget, "step": step + last, "step_s": round(seconds, 6)}
        if budget == case["budget"]:
            fitting.check_forms(branch.model, task, draws["checks"])
        return found | examined(branch.model)

    device = next(model.parameters()).device
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(draws["dropout"].initial_seed())
        trunk = Trainer(
            model,
            task.train,
            Stable(max(branches), case["rate"], case["B"], **kind),
            draws["training"],
            at=sorted({*branches, *looks}),
            watch=watch,
            checkpoint=checkpoint,
            identity=records.key(case),
        )
        trunk.run()
    found = [look for at_step in trunk.watched for look in at_step]
    facts = fitting.facts(trunk) | {"validation": [look for look in found if "budget" in look]}
    return facts if looked is None else facts | {"looks": [look for look in found if "budget" not in look]}
