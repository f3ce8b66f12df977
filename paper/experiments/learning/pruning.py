"""How many heads of a trained encoder can be removed (Voita et al. 2019, arXiv:1905.09418; Michel et al. 2019,
arXiv:1905.10650).

The model is the one of `translating` with only learned heads, trained longer on the made-up language, until it writes
most sentences without a mistake. The importance of each of the encoder's heads is the rise of the loss on the
validation part without that head; it is measured once. Heads are then removed, without further training, the least
needed first; and, to compare, the most needed first. One head stays in each layer. A head is removed by zeros in its
columns of W_O: what the layer then computes is what it would without the head.
"""

import copy
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, cast

import torch

from ortho.layers.block import TransformerBlock
from ortho.models.encoder_decoder import EncoderDecoder
from paper.experiments.engine.records import Case, Record
from paper.experiments.learning import fitting, rates, translating

TASK, ARM = "transduction", "8 learned"
SEEDS = (1, 2, 3, 4, 5)
LONGER = 2  # times the steps of `translating`, after which some seeds have not yet learnt the language
FIRST = ("least", "most")  # which heads go first: those that are needed least, or most
QUANTITIES = fitting.QUANTITIES
Head = tuple[int, int]  # a layer's index in the encoder, and the head's in it


def case(seed: int = SEEDS[0], rate: float | None = None, *, device: str = "cpu", **sizes: int) -> Case:
    """One run; `sizes` and errors are those of `translating.case`. The default rate is the one chosen there."""
    known = translating.case(TASK, ARM, seed, rate, pairs=0, device=device)
    if rate is None:
        rate = rates.chosen(TASK, known) or known["rate"]
    sizes = {"steps": LONGER * known["steps"], **sizes}
    whole = translating.case(TASK, ARM, seed, rate, pairs=0, device=device, **sizes)
    return {name: value for name, value in whole.items() if not name.startswith("decision_")}


def cases(device: str) -> list[Case]:
    """A run for each seed, if the rate is chosen."""
    known = translating.case(TASK, ARM, pairs=0, device=device)
    return [case(seed, device=device) for seed in SEEDS] if rates.chosen(TASK, known) is not None else []


smoke_case = fitting.smoke_case


def run(case: Case, *, checkpoint: Path | None = None) -> dict[str, Any]:
    """Train one model, and test it with fewer and fewer heads.

    Raises AssertionError if the trained model's fast form does not compute what its definition does.
    """
    seeds = translating.seeds_of(case)
    draws = fitting.generators(seeds)
    _, task = translating.subject(case)
    model = translating.model_of(case, task, draws)
    looked, looks = {**case, "tested": case["looked"]}, translating.LOOKS
    recipe = fitting.recipe(case)
    learnt = fitting.fit(model, task, recipe, looked, draws, looks=looks, keep_best=True, checkpoint=checkpoint)

    def loss(one: EncoderDecoder) -> float:
        return fitting.evaluate(one, task.validation, looked, torch.Generator().manual_seed(0))["loss_nats"][0]

    importance = head_importance(model.eval(), loss)
    batch = task.tests[translating.TESTS[TASK]](case["tested"], torch.Generator().manual_seed(0))
    found = {}
    for first in FIRST:
        removed = order(importance, first)
        for count in range(len(removed) + 1):
            smaller = pruned(model, removed[:count])
            found[arm(first, count)] = fitting.evaluate(smaller, lambda *_: batch, case, torch.Generator())
    named = {str(index): [round(rise, 6) for rise in rises] for index, rises in importance.items()}
    return {
        "seeds": seeds,
        "repetitions": {**found, **fitting.examine(model, task, case, draws)},
        "facts": {**learnt, "importance": named},
    }


def head_importance(model: EncoderDecoder, loss: Callable[[EncoderDecoder], float]) -> dict[int, list[float]]:
    """How much the loss rises without each head of the encoder, by the layer (Michel et al. 2019, section 3.2)."""
    whole, layers = loss(model), enumerate(_encoder(model))
    return {
        index: [loss(pruned(model, [(index, head)])) - whole for head in range(block.attention.num_heads)]
        for index, block in layers
    }


def _encoder(model: EncoderDecoder) -> list[TransformerBlock]:
    return [cast(TransformerBlock, block) for block in model.encoder]


def order(importance: dict[int, list[float]], first: str) -> list[Head]:
    """The heads to remove, in order: in each layer all but the one that would go last."""
    sign = 1 if first == "least" else -1
    heads = [(index, head) for index, rises in importance.items() for head in range(len(rises))]
    ranked = sorted(heads, key=lambda head: sign * importance[head[0]][head[1]])
    staying = {index: [head for head in ranked if head[0] == index][-1] for index in importance}
    return [head for head in ranked if head not in staying.values()]


@torch.no_grad()
def pruned(model: EncoderDecoder, removed: Iterable[Head]) -> EncoderDecoder:
    """A copy of the model without these heads."""
    other = copy.deepcopy(model)
    blocks = _encoder(other)
    for index, head in removed:
        layer = blocks[index].attention
        layer.weight_o[:, head * layer.head_dim : (head + 1) * layer.head_dim] = 0
    return other


def arm(first: str, count: int) -> str:
    """The name of the test with `count` heads removed."""
    return f"{count} removed, {first} needed first"


def curve(record: Record, first: str, quantity: str = "loss_nats") -> list[float]:
    """A quantity of the test by the number of heads removed, from 0."""
    found: list[float] = []
    while (name := arm(first, len(found))) in record["repetitions"]:
        found.append(float(record["repetitions"][name][quantity][0]))
    return found


def removable(record: Record, first: str = "least", lost: float = 0.01) -> int:
    """How many heads can be removed before the share of faultless sentences falls by more than `lost`."""
    shares = curve(record, first, "faultless_fraction")
    return next((count - 1 for count, share in enumerate(shares) if share < shares[0] - lost), len(shares) - 1)


label = fitting.label
