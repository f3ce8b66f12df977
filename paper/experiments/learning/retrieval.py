"""Where content matters: how long may a sequence be for one head, learned or untrained, to find what is asked for?

A run climbs. A small model is trained on a task at the shortest length until it is right in `ENOUGH` of the places that
ask, for at most `steps`. If it is then right in `SUCCESS` of the places that ask in the test, it goes on at the next
length with what it has learnt; else the run ends. So a run that ends at the shortest length did not find out how the
task is done, and one that ends later knows how, but cannot tell so many keys apart. The models are those of the ladder,
with 256 tokens and four heads a layer. Runs are short, and begin anew after a kill.

For each task, an arm takes the one of the rates `TRIED` that has the lower loss at the shortest length, with the seed
`rates.TUNING`.

The rule, written before the runs that count. An arm's boundary on a task is the longest length that more than half of
its seeds learn (`Climbs.boundary`). One untrained and one learned head, each with the same positional heads, are
compared: one goes further if the exact rank test of the lengths that their seeds reach says so, at a level that holds
for all of `PAIRS` and both directions together (`retrieval_analysis.judged`; Holm 1979). For an untrained head there is
a prediction without free parameters (`retrieval_analysis.predicted_boundary`), for tokens that are independent and
uniform on a sphere, one exact match and a hard choice. A head falls short of it if embeddings, trained for other ends,
become alike, and if its weights are soft.
"""

from typing import Any

import torch
from torch import nn

from ortho.checks import one_of
from paper.experiments.engine.records import Case
from paper.experiments.learning import fitting, rates
from paper.experiments.learning.ladder_arms import CONVOLUTION
from paper.experiments.learning.rates import TUNING
from paper.experiments.learning.retrieval_tasks import (
    ARMS,
    GROUPS,
    LENGTHS,
    ONE,
    SETTINGS,
    SUCCESS,
    WIDE,
    H,
    is_learnt,
    part,
    task,
)
from paper.tasks.task import Task, check_answers
from paper.training import Trainer

SEEDS = (1, 2, 3, 4, 5, 6)
SOME = SEEDS[:3]  # seeds of the arms other than `ONE`
TRIED = (3e-3, 1e-2)
ENOUGH = 0.9  # at which training stops: well above what counts, so that chance does not decide
EVERY, LOOKED = 50, 64  # steps between looks, and the sequences of a look
SIZES = {"N": LENGTHS[-1], "d": WIDE, "H": H, "L": 2, "steps": 800, "tokens": 2048, "tested": 256}


def case(
    name: str,
    arm: str,
    *,
    convolution: int = CONVOLUTION,
    seed: int = TUNING,
    rate: float | None = None,
    device: str = "cpu",
    **sizes: int,
) -> Case:
    """One run on the lengths up to N; `sizes` (N, d, L, steps, tokens, tested) are those of `SIZES` by default.

    Raises TypeError or ValueError for unknown names, and for sizes that are not integers above 0.
    """
    size = fitting.sizes(SIZES, sizes)
    if size["N"] not in LENGTHS:
        raise ValueError(f"N: expected one of {', '.join(map(str, LENGTHS))}, got {size['N']}")
    return {
        "device": one_of("device", device, fitting.DEVICES),
        "task": one_of("task", name, SETTINGS),
        "arm": one_of("arm", arm, ARMS),
        "convolution": convolution,
        "seed": seed,
        "rate": rates.tried(TRIED, size["d"])[0] if rate is None else rate,
        **size,
        "d_ff": 4 * size["d"],
        "success_fraction": SUCCESS,
        "enough_fraction": ENOUGH,
    }


def cases(device: str) -> list[Case]:
    """The runs that choose the rates, which do not climb; then those that count, seed by seed, more for `ONE`."""
    options: list[dict[str, Any]] = [
        {"name": name, "arm": arm, "convolution": width, "device": device, "d": d}
        for width, d, names, arms in GROUPS
        for arm in arms
        for name in names
    ]
    tuning = [case(**one, N=LENGTHS[0], rate=rate) for one in options for rate in rates.tried(TRIED, one["d"])]
    known = {repr(one): rates.chosen("retrieval", case(**one, N=LENGTHS[0])) for one in options}
    counted = [
        case(**one, seed=seed, rate=known[repr(one)])
        for seed in SEEDS
        for one in options
        if known[repr(one)] is not None and (seed in SOME or one["arm"] in ONE)
    ]
    return [*tuning, *counted]


smoke_case = fitting.smoke_case


def run(case: Case) -> dict[str, Any]:
    """Train and test one model at one length after the other, until a length is not learnt."""
    seeds = seeds_of(case)
    draws = fitting.generators(seeds)
    model = ARMS[case["arm"]].build(case, draws["weights"]).to(case["device"])
    found: dict[str, Any] = {}
    looks: list[dict[str, Any]] = []
    seconds = 0.0
    for N in (N for N in LENGTHS if case["N"] >= N):
        own = task(case["task"], N)
        check_answers(own, draws["checks"])
        trainer = _trained(model, own, {**case, "N": N}, draws, looks)
        found[part(N)] = fitting.evaluate(model, own.validation, case, draws["tests"])
        seconds += trainer.seconds
        if not is_learnt(found[part(N)], case):
            break
    fitting.check_forms(model, own, draws["checks"])
    learnt = {**fitting.facts(trainer), "validation": looks, "train_s": round(seconds, 3)}
    return {"seeds": seeds, "repetitions": found, "facts": learnt}


def seeds_of(case: Case) -> dict[str, int]:
    """Seeds of a run: hashes of what is drawn and of all that distinguishes runs, as they are independent samples."""
    words = tuple(case[name] for name in ("task", "arm", "convolution", "d", "seed", "rate"))
    return fitting.seeds_of(dict.fromkeys(("weights", "training", "tests", "checks"), ("retrieval", *words)))


def _trained(
    model: nn.Module, task: Task, case: Case, draws: dict[str, torch.Generator], looks: list[dict[str, Any]]
) -> Trainer:
    """Train at one length; each look adds to `looks` how many answers were right, on sequences that were never seen."""
    recipe = fitting.recipe({**case, "B": max(1, case["tokens"] // case["N"])})
    trainer = Trainer(model, task.train, recipe, draws["training"])
    for step in range(EVERY, case["steps"] + EVERY, EVERY):
        trainer.run(step)
        seen = fitting.evaluate(model, task.validation, {**case, "tested": LOOKED}, draws["tests"])
        looks.append({"N": case["N"], "step": trainer.step, **{name: values[0] for name, values in seen.items()}})
        if looks[-1]["correct_fraction"] >= case["enough_fraction"]:
            break
    return trainer


label = "{task}: {arm}, convolution={convolution}, d={d}, seed={seed}, rate={rate:g}".format_map
