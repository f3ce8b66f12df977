"""A language model is trained further on another text, while parts of its attention stay as they were.

The strong baseline is trained on the Python standard library's sources, and then on its help texts: English prose that
`paper.tasks.text.python_parts` leaves out. An arm says which matrices the second stage trains. A case is one second
stage; the arms of a seed begin with the same model and see the same batches, so that they are compared pair by pair.
For every arm the best look at the new text's validation part counts. The model is tested on both texts, after the first
stage and after the second: this shows what is learnt, and what is forgotten.
"""

import re
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ortho.adapters.conversion import freeze_qk
from ortho.checks import one_of
from ortho.layers.multihead import MultiheadAttention
from ortho.models.language_model import LanguageModel
from paper.experiments.engine.records import Case, Record
from paper.experiments.learning import analysis, fitting, rates
from paper.experiments.learning.analysis import Measures
from paper.experiments.learning.arms import baseline
from paper.experiments.learning.language import BITS
from paper.experiments.learning.rates import TUNING
from paper.experiments.statistics import Decision
from paper.tasks import text
from paper.tasks.task import Task

SIZES: dict[str, dict[str, int]] = {
    "cpu": {"B": 8, "N": 128, "d": 64, "H": 4, "L": 2, "first_steps": 600, "steps": 300, "tested": 128},
    "cuda": {"B": 64, "N": 256, "d": 128, "H": 4, "L": 4, "first_steps": 1500, "steps": 500, "tested": 64},
}
SEEDS = (1, 2, 3, 4, 5)
FIRST_RATE = 5e-3  # of the first stage, for d = 64: the better of those that `bytes` tries for this model
TRIED = (3e-3, 1e-2)  # of the second; a model that is n times as wide has rates an n-th as high
LOOKS = 8
SCRATCH = "from scratch"  # the arm without a first stage
DECISION = Decision(margin=0.05, level=0.05, higher_is_better=False)  # bits a byte, as for the models of bytes


def _kept(model: nn.Module, _: torch.Generator) -> None:
    """Freeze nothing: all is trained."""


def _values_frozen(model: nn.Module, _: torch.Generator) -> None:
    """Freeze W_V and W_O, which have as many parameters as W_Q and W_K."""
    for layer in model.modules():
        if isinstance(layer, MultiheadAttention):
            layer.weight_v.requires_grad_(False)
            layer.weight_o.requires_grad_(False)


def _frozen(model: nn.Module, generator: torch.Generator, **how: Any) -> None:
    freeze_qk(model, generator=generator, **how)


# Arm -> what is done to the model before the second stage. 'redrawn' is orthogonal, as in orthogonal random attention.
ARMS: Mapping[str, Callable[[nn.Module, torch.Generator], None]] = {
    "all trained": _kept,
    "QK frozen": partial(_frozen, draw=None),
    "QK stopped": partial(_frozen, draw=None, stop_gradient=True),
    "VO frozen": _values_frozen,
    "QK redrawn": partial(_frozen, draw="haar"),
    SCRATCH: _kept,
}


def case(arm: str, seed: int = TUNING, rate: float | None = None, *, device: str = "cpu", **sizes: int) -> Case:
    """One second stage; `sizes` are by default those of `SIZES`, `first_steps` those of the first stage.

    Raises TypeError or ValueError for unknown names, and for sizes that are not integers above 0.
    """
    size = fitting.sizes(SIZES[one_of("device", device, SIZES)], sizes)
    return {
        "device": device,
        "arm": one_of("arm", arm, ARMS),
        "seed": seed,
        "rate": rates.tried(TRIED, size["d"])[0] if rate is None else rate,
        "first_rate": rates.tried((FIRST_RATE,), size["d"])[0],
        **size,
        **DECISION.settings(),
    }


def cases(device: str) -> list[Case]:
    """The runs that choose the rates; then all seeds of arms whose rate is chosen, one seed after the other."""
    options = [{"arm": arm, "device": device} for arm in ARMS]
    return fitting.cases("fine-tuning", case, options, partial(rates.tried, TRIED), SEEDS)


def run(case: Case, *, checkpoint: Path | None = None) -> dict[str, Any]:
    """Train a model on the first text, then on the second, and test it. A run that was killed goes on from its
    `checkpoint` of the second stage; the first one is made again.

    Raises AssertionError if the trained model's fast form does not compute what its definition does.
    """
    seeds = seeds_of(case)
    draws = fitting.generators(seeds)
    old, new = tasks(case["N"])
    model = build(case, draws["scratch" if case["arm"] == SCRATCH else "weights"])
    if case["arm"] != SCRATCH:
        pretrain(model, old, case, draws["first training"])
    found = {f"{name}, before": values for name, values in tested(model, case, draws["tests"]).items()}
    ARMS[case["arm"]](model, draws["redrawn"])
    recipe = fitting.recipe(case)
    learnt = fitting.fit(model, new, recipe, case, draws, looks=LOOKS, keep_best=True, checkpoint=checkpoint)
    found |= tested(model, case, draws["tests"])
    fitting.check_forms(model, new, draws["tests"])
    texts = {"old": text.python_parts().facts(), "new": help_parts().facts()}
    return {"seeds": seeds, "repetitions": found, "facts": {**learnt, "texts": texts}}


def pretrain(model: LanguageModel, task: Task, case: Case, generator: torch.Generator) -> None:
    """The first stage, which is the same for all arms of a seed: the model is trained in place."""
    first = {**case, "steps": case["first_steps"], "rate": case["first_rate"]}
    fitting.fit(model, task, fitting.recipe(first), first, {"training": generator, "dropout": generator})
    model.zero_grad()  # else gradients of what the second stage does not train would stay, and count in clipping


def build(case: Case, generator: torch.Generator) -> LanguageModel:
    """The untrained baseline. Weights are drawn on the CPU, so that every device has the same."""
    arm = baseline(case["H"], case["N"])
    return arm.build(text.VOCAB_SIZE, case["d"], case["L"], generator=generator).to(case["device"])


def tested(model: nn.Module, case: Case, generator: torch.Generator) -> dict[str, dict[str, list[float]]]:
    """The model's results on the test parts of both texts."""
    names = ("old", "new")
    return {
        name: fitting.evaluate(model, task.tests["test"], case, generator)
        for name, task in zip(names, tasks(case["N"]), strict=True)
    }


@cache
def tasks(N: int) -> tuple[Task, Task]:
    """The text of the first stage and that of the second, in windows of N bytes."""
    return (
        text.language_modelling("python-sources", "the next byte of the standard library", text.python_parts(), N),
        text.language_modelling("python-help", "the next byte of Python's help", help_parts(), N),
    )


@cache
def help_parts() -> text.Parts:
    """The topics of Python's `help`, in the order of their names, the first 90 % to train on and two times 5 % after
    them. Some topics contain others, or parts of them. Only the first of equal paragraphs is kept, so that no part has
    paragraphs of another.

    Raises ImportError, with a reason, for a Python that is installed without them.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise ImportError("pydoc_data: expected the texts of Python's help, as a whole standard library has") from error
    paragraphs = (paragraph.strip("\n") for name in sorted(topics) for paragraph in re.split(r"\n\s*\n", topics[name]))
    whole = "\n\n".join(dict.fromkeys(one for one in paragraphs if one.strip())).encode()
    first, second = (len(whole) * share // 100 for share in (text.TRAIN, text.TRAIN + text.VALIDATION))
    return text.Parts(whole[:first], whole[first:second], whole[second:])


def seeds_of(case: Case) -> dict[str, int]:
    """Seeds of a run: hashes of what is drawn and of its seed; the arms of a seed share all of them."""
    names = ("weights", "first training", "training", "tests", "dropout", "redrawn", "scratch")
    return fitting.seeds_of(dict.fromkeys(names, ("fine-tuning", case["seed"])))


label = fitting.label


def _bits(record: Record, test: str) -> float:
    return analysis.tested(record, test, "loss_nats") * BITS


def _forgotten(record: Record) -> float:
    """How many more bits a byte the first text takes after the second stage than after the first."""
    return _bits(record, "old") - _bits(record, "old, before")


# Bits a byte, lower is better: of the second text after the second stage and after the first, of the first text after
# the second stage, and what is forgotten.
MEASURES: Measures = {
    **{name: partial(_bits, test=name) for name in ("new", "new, before", "old")},
    "forgotten": _forgotten,
}
by_arm = partial(analysis.by_arm, measures=MEASURES)
