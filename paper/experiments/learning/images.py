"""Which heads see images: small vision transformers on handwritten digits.

A case is one model. The arms of a seed see the same batches and are tested on the same images, so that they are
compared pair by pair. Every arm is tested with the weights of its best look at the validation part.

Patches have learned embeddings of their places, and nothing is causal, so softmax heads do not turn queries and keys.
Attention has no biases, as not every kind of head supports them; the rest of the blocks has them. Classes are read from
the mean of all tokens: with heads through which no token reaches the class token, there would otherwise be nothing to
read.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from ortho.checks import one_of
from ortho.layers.frozen_qk import FrozenQKAttention
from ortho.layers.multihead import MultiheadAttention
from ortho.layers.positional import PositionalHeads
from ortho.models.encoders import VisionTransformer
from ortho.projections import FrozenProjection
from paper.experiments.engine.records import Case, Record
from paper.experiments.learning import analysis, fitting, rates
from paper.experiments.learning.analysis import Measures, Runs, tested
from paper.experiments.learning.heads import random_feature_heads
from paper.experiments.learning.rates import TUNING
from paper.experiments.statistics import Decision
from paper.tasks.images import digits

HEADS = 4
DATA = "digits"
CHANNELS, IMAGE, PATCH = 1, 8, 2
TOKENS = 1 + (IMAGE // PATCH) ** 2  # the class token, and the patches row by row
SIZES: dict[str, dict[str, int]] = {
    "cpu": {"B": 32, "d": 32, "L": 2, "steps": 600, "tested": 359},
    "cuda": {"B": 64, "d": 64, "L": 4, "steps": 2000, "tested": 359},
}
SEEDS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10)
TRIED = (3e-3, 1e-2)  # for d = 64; a model that is n times as wide tries rates an n-th as high
LOOKS = 8
FEATURES = 32  # of FAVOR+: four for each of the 8 dimensions of a head of the smallest models
# A hundredth of the images, three or four of the digits tested.
DECISION = Decision(margin=0.01, level=0.05, higher_is_better=True)

# Arm -> what makes a layer of such heads, for these images; 'frozen' is orthogonal random attention.
ARMS: Mapping[str, Callable[..., nn.Module]] = {
    "learned": MultiheadAttention,
    "frozen": partial(MultiheadAttention, projection="frozen"),
    "stopped": partial(FrozenQKAttention, projection="stopped"),
    "frozen Gaussian": partial(MultiheadAttention, projection=partial(FrozenProjection, draw="gaussian")),
    "identity": partial(PositionalHeads, patterns=("current",) * HEADS),
    "linear": partial(MultiheadAttention, attention="linear"),
    "frozen linear": partial(MultiheadAttention, projection="frozen", attention="linear"),
    "FAVOR+": partial(random_feature_heads, m=FEATURES),
}


class PooledTransformer(VisionTransformer):
    """A vision transformer that reads classes from the mean over its tokens and not from the class token. Both work
    equally well, each at its own learning rate (Dosovitskiy et al. 2021, arXiv:2010.11929, appendix D.3)."""

    def forward(self, images: Tensor) -> Tensor:
        """Images (B, channels, S, S) -> logits (B, num_classes)."""
        return linear(self.encode(images).mean(1), self.weight_head, self.bias_head)


def build(case: Case, generator: torch.Generator) -> PooledTransformer:
    """The untrained model of a case, on the CPU."""
    return PooledTransformer(
        IMAGE,
        PATCH,
        case["d"],
        case["H"],
        case["L"],
        num_classes=digits().vocab_size,
        channels=CHANNELS,
        generator=generator,
        layer=partial(_without_bias, make=ARMS[case["arm"]]),
    )


def _without_bias(d_model: int, num_heads: int, *, make: Callable[..., nn.Module], **kwargs: Any) -> nn.Module:
    """A layer for blocks whose other parts have biases."""
    kwargs.pop("bias")
    return make(d_model, num_heads, **kwargs)


def case(arm: str, seed: int = TUNING, rate: float | None = None, *, device: str = "cpu", **sizes: int) -> Case:
    """One run; `sizes` are by default those of `SIZES`.

    Raises TypeError or ValueError for unknown names, and for sizes that are not integers above 0.
    """
    size = fitting.sizes(SIZES[one_of("device", device, fitting.DEVICES)], sizes)
    return {
        "device": device,
        "data": DATA,
        "arm": one_of("arm", arm, ARMS),
        "seed": seed,
        "rate": rates.tried(TRIED, size["d"])[0] if rate is None else rate,
        "N": TOKENS,
        "H": HEADS,
        **size,
        **DECISION.settings(),
    }


def cases(device: str) -> list[Case]:
    """The runs that choose the rates; then all seeds of arms whose rate is chosen."""
    options = [{"arm": arm, "device": device} for arm in ARMS]
    return fitting.cases("images", case, options, partial(rates.tried, TRIED), SEEDS)


def run(case: Case, *, checkpoint: Path | None = None) -> dict[str, Any]:
    """Train and test one model (`fitting.run`); a run that was killed goes on from its `checkpoint`."""
    make = partial(build, case)
    own: dict[str, Any] = {"looks": LOOKS, "keep_best": True, "checkpoint": checkpoint, "facts": {}}
    return fitting.run(case, seeds_of(case), digits(), make, **own)


def seeds_of(case: Case) -> dict[str, int]:
    """Seeds of a run: hashes of what is drawn and of its seed; the arms of a seed share all but the weights."""
    return fitting.paired_seeds(case["arm"], "images", case["data"], case["seed"])


label = "{data}: {arm} seed={seed} rate={rate:g}".format_map


MEASURES: Measures = {
    "correct": partial(tested, test="test", quantity="correct_fraction"),
    "loss": partial(tested, test="test", quantity="loss_nats"),
}
judged = partial(analysis.judged, measure="correct")


def by_arm(records: Iterable[Record], device: str) -> dict[str, Runs]:
    """Arm -> its runs that count, with the measures 'correct', a share, and 'loss', nats an image.

    Raises ValueError if an arm's runs differ in more than the seed.
    """
    return analysis.by_arm(records, device, MEASURES)
