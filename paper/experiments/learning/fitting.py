"""The common parts of all experiments with training: cases, runs that train a model on a task and test it, seeds."""

import copy
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ortho.checks import positive_int
from paper.experiments.engine import records
from paper.experiments.engine.records import Case
from paper.experiments.learning import rates
from paper.experiments.learning.rates import TUNING
from paper.experiments.speed.benchmark import assert_close, defined
from paper.tasks.task import NONE, Batch, Draw, Task, check_answers
from paper.training import Recipe, Trainer

DEVICES = ("cpu", "cuda")
PRECISION = {"cpu": "float32", "cuda": "bfloat16"}
WEIGHT_DECAY = 0.1
POINTS = 20  # of the stored loss curve
CHECKED = 2  # examples on which fast form and definition are compared
CHECKED_LENGTH = 192  # tokens of such an example: several chunks and tiles
# In float64 each of the model's results is rounded to 1e-16; the factor is for the growth of the errors in the layers.
TOLERANCE = 1e6 * torch.finfo(torch.float64).eps
TOKENS = 2**15  # of a test batch
QUANTITIES = ("correct_fraction", "faultless_fraction", "loss_nats")
# The sizes of the shortest case in which each part still happens: training with its looks, and tests.
SHORT = {"steps": 50, "first_steps": 50, "tested": 32, "looked": 16, "inputs": 8}


def sizes(known: Mapping[str, int], given: Mapping[str, int]) -> dict[str, int]:
    """The known sizes, replaced by those that are given. Raises TypeError for an unknown name, and TypeError or
    ValueError for a number that is not a positive integer."""
    if unknown := set(given) - set(known):
        raise TypeError(f"sizes: expected some of {', '.join(known)}, got {', '.join(sorted(unknown))}")
    return {name: positive_int(name, number) for name, number in {**known, **given}.items()}


def cases(
    experiment: str,
    case: Callable[..., Case],
    options: Iterable[Mapping[str, Any]],
    tried: Callable[[int], Iterable[float]],
    seeds: Sequence[int],
) -> list[Case]:
    """The runs that choose the rates; then those that count, if their rate is chosen, one seed after the other.

    `options` are arguments of `case`, all but seed and rate; `tried` says which rates to try at a width d.
    """
    options = list(options)
    tuning = [case(**one, seed=TUNING, rate=rate) for one in options for rate in tried(case(**one)["d"])]
    return [*tuning, *rates.with_chosen(experiment, [case(**one, seed=seed) for seed in seeds for one in options])]


def smoke_case(case: Case) -> Case:
    """The case with as few steps and examples as `SHORT` has, for golden runs."""
    return case | {name: min(case[name], most) for name, most in SHORT.items() if name in case}


label = "{arm} seed={seed} rate={rate:g}".format_map  # a case in a few words


def seeds_of(parts: Mapping[str, tuple[Any, ...]]) -> dict[str, int]:
    """Seeds of a run: hashes of what is drawn and of the words that it depends on."""
    return {part: zlib.crc32(repr((part, *words)).encode()) for part, words in parts.items()}


def paired_seeds(arm: str, *shared: Any) -> dict[str, int]:
    """Seeds of a run: hashes of what is drawn and of what the run shares with other arms; that of the weights is also
    one of the arm. So the arms of a seed see the same batches and are tested on the same examples."""
    return seeds_of({"weights": (*shared, arm), **dict.fromkeys(("training", "tests", "checks", "dropout"), shared)})


def generators(seeds: Mapping[str, int]) -> dict[str, torch.Generator]:
    """A generator for each seed, by its name."""
    return {name: torch.Generator().manual_seed(seed) for name, seed in seeds.items()}


def recipe(case: Case, *, weight_decay: float = WEIGHT_DECAY) -> Recipe:
    """How a case is trained."""
    return Recipe(
        case["steps"],
        case["rate"],
        case["B"],
        weight_decay=weight_decay,
        smoothing=case.get("smoothing", 0.0),
        precision=PRECISION[case["device"]],
    )


def run(
    case: Case,
    seeds: dict[str, int],
    task: Task,
    build: Callable[[torch.Generator], nn.Module],
    *,
    weight_decay: float = WEIGHT_DECAY,
    looks: int = 0,
    keep_best: bool = False,
    checkpoint: Path | None = None,
    facts: Mapping[str, Any],
) -> dict[str, Any]:
    """Train and test the model that `build` makes; returns what a record stores, with some `facts` about the case. The
    other arguments are those of `fit`. Weights are drawn on the CPU, so that every device has the same.

    Raises AssertionError if a drawn answer is not what the task's solver says, or if the trained model's fast form does
    not compute what its definition does.
    """
    draws = generators(seeds)
    check_answers(task, draws["checks"])
    model = build(draws["weights"]).to(case["device"])
    how = recipe(case, weight_decay=weight_decay)
    learnt = fit(model, task, how, case, draws, looks=looks, keep_best=keep_best, checkpoint=checkpoint)
    return {"seeds": seeds, "repetitions": examine(model, task, case, draws), "facts": {**learnt, **facts}}


def fit(
    model: nn.Module,
    task: Task,
    recipe: Recipe,
    case: Case,
    draws: dict[str, torch.Generator],
    *,
    looks: int = 0,
    keep_best: bool = False,
    checkpoint: Path | None = None,
) -> dict[str, Any]:
    """Train a model in place; returns the `facts` about the training.

    Batches are drawn from `draws["training"]`, dropout from `draws["dropout"]`. There are `looks` evenly spaced looks
    at the validation part, the last one after the last step; with `keep_best` the final weights are those of the best
    look. A run that was killed goes on from its `checkpoint`.
    """

    def watch(step: int) -> dict[str, Any]:
        found = evaluate(model, task.validation, case, torch.Generator().manual_seed(0))
        return {"step": step, **{name: values[0] for name, values in found.items()}}

    device = next(model.parameters()).device
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(draws["dropout"].initial_seed())
        trainer = Trainer(
            model,
            task.train,
            recipe,
            draws["training"],
            at=[round(recipe.steps * (i + 1) / looks) for i in range(looks)],
            watch=watch,
            keep_best="loss_nats" if keep_best else None,
            checkpoint=checkpoint,
            identity=records.key(case),
        )
        trainer.run()
    return facts(trainer)


def facts(trainer: Trainer) -> dict[str, Any]:
    """What is recorded of a training run, besides its tests: the number of trained parameters; the curve of its losses
    in nats, as means over `POINTS` equal parts of the steps; the looks at the validation part; and the seconds that the
    steps took."""
    parts = torch.tensor(trainer.losses).tensor_split(min(POINTS, trainer.recipe.steps))
    return {
        "parameters": sum(p.numel() for p in trainer.model.parameters() if p.requires_grad),
        "loss": [round(float(part.mean()), 5) for part in parts],
        "validation": trainer.watched,
        "train_s": round(trainer.seconds, 3),
    }


def examine(model: nn.Module, task: Task, case: Case, draws: dict[str, torch.Generator]) -> dict[str, Any]:
    """The results of a trained model in the task's tests (see `evaluate`), with examples drawn from `draws["tests"]`.

    Raises AssertionError if its fast form does not compute what its definition does, on examples drawn from
    `draws["checks"]`.
    """
    found = {name: evaluate(model, draw, case, draws["tests"]) for name, draw in task.tests.items()}
    check_forms(model, task, draws["checks"])
    return found


@torch.no_grad()
def evaluate(
    model: Callable[..., Tensor], draw: Draw, case: Case, generator: torch.Generator
) -> dict[str, list[float]]:
    """The share of right answers; the share of examples without a wrong answer, among those that ask for any; and the
    mean cross-entropy of the answers, in nats."""
    whole = draw(case["tested"], generator)
    right, nats = [], 0.0
    rows = max(1, TOKENS // max(1, whole.answers[0].numel()))
    for start in range(0, case["tested"], rows):
        part = Batch(tuple(x[start : start + rows] for x in whole.inputs), whole.answers[start : start + rows])
        logits = model(*part.to(case["device"]).inputs).cpu()
        right.append((logits.argmax(-1) == part.answers) | ~part.asked)
        flat = logits.flatten(0, -2).double(), part.answers.flatten()
        nats += float(cross_entropy(*flat, ignore_index=NONE, reduction="sum"))
    correct, asked = torch.cat(right).reshape(len(whole.answers), -1), whole.asked.reshape(len(whole.answers), -1)
    shares = correct[asked], correct.all(-1)[asked.any(-1)]
    values = (*(float(share.double().mean()) for share in shares), nats / int(asked.sum()))
    return {name: [round(value, 6)] for name, value in zip(QUANTITIES, values, strict=True)}


@torch.no_grad()
def check_forms(model: nn.Module, task: Task, generator: torch.Generator) -> None:
    """Raise AssertionError unless, in float64, the model's fast form computes what its attention's definition does, on
    examples from the test with the longest examples."""
    drawn = [draw(CHECKED, generator).inputs for draw in task.tests.values()]
    longest = max(drawn, key=lambda inputs: inputs[0][0].numel())
    inputs = [x.double() if x.is_floating_point() else x for x in longest]
    if len(inputs) == 1 and inputs[0].dim() == 2:
        inputs = [inputs[0][:, :CHECKED_LENGTH]]
    fast = copy.deepcopy(model).cpu().double()
    exact = defined(fast)
    assert_close("fast form", fast(*inputs), exact(*inputs), TOLERANCE)
