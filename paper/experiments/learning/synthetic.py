"""Synthetic tasks by small models of some arms: retrieval, copying, arithmetic, from easy to what separates them.

A case is one model on one task. Outcomes have two humps, as a task is learnt or not within the steps: beside the share
of right answers a run counts as a success where that is at least `SUCCESS`. The arms of a seed see the same batches.
Places have learned embeddings in all of them, since linear heads know of order from nothing else.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from ortho._checks import one_of, positive_int
from paper.experiments.engine.records import Case
from paper.experiments.learning import fitting, rates, synthetic_rows
from paper.experiments.learning.arms import arms
from paper.experiments.learning.rates import TUNING
from paper.tasks import copying, induction, modular_addition, mqar, needle
from paper.tasks.task import Task, check_answers

SEEDS = tuple(range(1, 11))
TRIED = (1e-3, 3e-3)
WEIGHT_DECAY = 0.1
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
    """One run; `sizes` (steps, B, d, H, L, tested) are the setting's where they are not given.

    Raises TypeError or ValueError for unknown names, and for sizes below 1 or that are none.
    """
    own, setting = SIZES[one_of("device", device, SIZES)], SETTINGS[one_of("task", name, SETTINGS)]
    size = {"steps": setting.steps * LONGER[device], "B": setting.B, **own}
    if unknown := set(sizes) - set(size):
        raise TypeError(f"sizes: expected some of {', '.join(size)}, got {', '.join(sorted(unknown))}")
    size = {key: positive_int(key, value) for key, value in {**size, **sizes}.items()}
    return {
        "device": device,
        "task": name,
        "arm": one_of("arm", arm, arms(size["H"], task(name).longest)),
        "seed": fitting.not_negative("seed", seed),
        "rate": rate,
        "N": task(name).longest,
        **size,
        "success_fraction": SUCCESS,
        "margin_fraction": MARGIN,
    }


def cases(device: str) -> list[Case]:
    """The runs that choose the rates, and of arms whose rate is chosen those that count, task by task."""
    names = [(name, arm) for name in SETTINGS for arm in ARMS]
    tuning = [case(name, arm, TUNING, rate, device=device) for name, arm in names for rate in TRIED]
    own = [case(name, arm, seed, device=device) for seed in SEEDS for name, arm in names]
    return [*tuning, *rates.with_chosen("synthetic", own)]


def run(case: Case, *, checkpoint: Path | None = None) -> dict[str, Any]:
    """Train and test one model; a run that was killed goes on from its `checkpoint`.

    Raises AssertionError if a drawn answer is not what the task's solver says, or if the trained model's fast form does
    not compute what its definition does.
    """
    seeds = seeds_of(case)
    draws = fitting.generators(seeds)
    own = task(case["task"])
    check_answers(own, draws["checks"])
    arm = replace(arms(case["H"], case["N"])[case["arm"]], embeddings="learned")
    model = arm.build(own.vocab_size, case["d"], case["L"], generator=draws["weights"]).to(case["device"])
    recipe = fitting.recipe(case, weight_decay=WEIGHT_DECAY)
    learnt = fitting.fit(model, own, recipe, case, draws, looks=LOOKS, checkpoint=checkpoint)
    facts = {**learnt, "kinds": arm.describe(), "title": own.title}
    return {"seeds": seeds, "repetitions": fitting.examine(model, own, case, draws), "facts": facts}


def seeds_of(case: Case) -> dict[str, int]:
    """Seeds of a run: hashes of what is drawn, its task and its seed; the arms of a seed share all but the weights."""
    return fitting.paired_seeds(case["arm"], "synthetic", case["task"], case["seed"])


def work(case: Case) -> float:
    """Seconds that a case takes, roughly."""
    rate, seconds = {"cpu": (1e10, 3e-3), "cuda": (1e13, 2e-3)}[case["device"]]
    products = 6 * 12 * case["d"] ** 2 * case["L"] * case["B"] * case["N"]
    return 3.0 + case["steps"] * (products / rate + seconds * case["L"])


def label(case: Case) -> str:
    """A case in a few words."""
    return f"{case['task']}: {case['arm']}, seed={case['seed']}, rate={case['rate']:g}"


SYNTHETIC = fitting.experiment(
    "synthetic",
    "small models on synthetic tasks: which arms learn which",
    case("induction", "learned"),
    synthetic_rows,
    cases=cases,
    run=run,
    work=work,
    label=label,
)
