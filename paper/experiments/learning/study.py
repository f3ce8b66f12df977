"""A study: models trained on a synthetic task, arm by arm and seed by seed, and tested on what they never saw.

A case is one model: one arm, one seed. Every arm of a study has the same width, depth, batches, steps and schedule,
unless the study says otherwise, and its learning rate is chosen from those `tried` (`rates`). Runs share no random
numbers, so that those of two arms are independent samples.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ortho.checks import one_of
from ortho.models.language_model import LanguageModel
from paper.experiments.engine.records import Case
from paper.experiments.engine.runner import Experiment
from paper.experiments.learning import fitting, rates
from paper.experiments.learning.rates import TUNING
from paper.tasks.task import Task

RATES = (3e-3, 1e-2)
SEEDS = (1, 2, 3, 4, 5)


@dataclass(frozen=True)
class Study:
    """A task, the arms that are to learn it, and their common budget.

    `arms` are `LanguageModel`'s arguments besides the sizes d, H, L; an arm may set `num_heads` for another H. `tried`
    are the learning rates to choose from. Tests have `tested` examples. There are `looks` evenly spaced looks at the
    validation part, each at as many examples.
    """

    name: str
    title: str
    task: Task
    arms: Mapping[str, Mapping[str, Any]]
    tried: tuple[float, ...] = RATES
    d: int = 32
    H: int = 2
    L: int = 1
    B: int = 32
    steps: int = 1000
    tested: int = 256  # sequences a test
    looks: int = 0
    seeds: tuple[int, ...] = SEEDS  # of the runs that count


def case(
    study: Study,
    arm: str,
    seed: int = TUNING,
    rate: float | None = None,
    *,
    device: str = "cpu",
    **sizes: int,
) -> Case:
    """One run of a study: an arm, a seed, a learning rate; `sizes` (steps, B, tested) are the study's by default.

    Raises TypeError or ValueError for unknown names, and for sizes that are not integers above 0.
    """
    size = fitting.sizes({"steps": study.steps, "B": study.B, "tested": study.tested}, sizes)
    return {
        "device": one_of("device", device, fitting.DEVICES),
        "arm": one_of("arm", arm, study.arms),
        "seed": seed,
        "rate": study.tried[0] if rate is None else rate,
        "steps": size["steps"],
        "B": size["B"],
        "N": study.task.longest,
        "d": study.d,
        "H": study.arms[arm].get("num_heads", study.H),
        "L": study.L,
        "tested": size["tested"],
    }


def chosen_rate(study: Study, arm: str) -> float | None:
    """The rate that was chosen for an arm at the study's sizes; None if none was chosen yet."""
    return rates.chosen(study.name, case(study, arm))


def cases(study: Study, device: str) -> list[Case]:
    """The runs that choose the rates; then those that count for arms whose rate is chosen, seed after seed."""
    options = [{"arm": arm, "device": device} for arm in study.arms]
    return fitting.cases(study.name, partial(case, study), options, lambda _: study.tried, study.seeds)


def run(study: Study, case: Case, *, checkpoint: Path | None = None) -> dict[str, Any]:
    """Train and test one model (`fitting.run`); a run that was killed goes on from its `checkpoint`."""
    return fitting.run(
        case,
        seeds_of(study, case),
        study.task,
        partial(build, study, case),
        weight_decay=0.0,
        looks=study.looks,
        checkpoint=checkpoint,
        facts={"arm": plain(study.arms[case["arm"]])},
    )


def seeds_of(study: Study, case: Case) -> dict[str, int]:
    """Seeds of a run: hashes of what is drawn and of the run's study, arm, seed and rate."""
    own = (study.name, case["arm"], case["seed"], case["rate"])
    return fitting.seeds_of(dict.fromkeys(("weights", "training", "tests", "checks", "dropout"), own))


def build(study: Study, case: Case, generator: torch.Generator) -> LanguageModel:
    """The untrained model of a case, on the CPU."""
    arguments = dict(study.arms[case["arm"]])
    arguments.pop("num_heads", None)
    return LanguageModel(study.task.vocab_size, case["d"], case["H"], case["L"], generator=generator, **arguments)


def plain(arm: Mapping[str, Any]) -> Any:
    """An arm's arguments as JSON, classes by their names."""
    return json.loads(json.dumps(arm, default=lambda made: getattr(made, "__name__", repr(made))))


def experiment(study: Study) -> Experiment:
    """The experiment of a study."""
    return Experiment(
        study.name,
        study.title,
        cases=partial(cases, study),
        run=partial(run, study),
        label=fitting.label,
        smoke_case=fitting.smoke_case,
    )
