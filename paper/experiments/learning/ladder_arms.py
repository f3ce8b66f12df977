"""The arms of the ladder: what their heads are, with a short convolution before them or without, and what they cost."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from math import sqrt
from typing import Any

import torch

from ortho.attention.shifted import ShiftedKeysValues
from ortho.cost import model as model_cost
from ortho.cost.induction import induction_heads
from ortho.cost.layers import Cost, added, layer
from ortho.cost.local_mixing import convolved_layer, shifted_layer
from ortho.cost.positional import positional_heads
from ortho.layers.hybrid import HybridAttention
from ortho.layers.induction import InductionHeads
from ortho.layers.multihead import MultiheadAttention
from ortho.layers.positional import PositionalHeads
from ortho.layers.short_convolution import ConvolvedAttention
from ortho.models.language_model import LanguageModel
from ortho.projections import LearnedProjection
from paper.experiments.learning.kinds import Kind
from paper.tasks.text import VOCAB_SIZE

CONVOLUTION = 4  # taps
NEAR = ("previous", "recent", "left")  # right before a token, the mean of the last eight, the mean of all before
ENDS = ("previous", "left")
ALONE = ("current", *NEAR)
MIMETIC = 0.7  # of the identity and of noise in the product of W_Q and W_K


class MimeticProjection(LearnedProjection):
    r"""Learned queries and keys that begin alike: $W_Q W_K^T \approx \alpha Z + \beta I$ of each head.

    Z is Gaussian with the variance 1/d, and both factors are 0.7; the K largest singular values are kept (Trockman and
    Kolter 2023, arXiv:2305.09828, section 3).
    """

    def __init__(self, d_model: int, num_heads: int, *, generator: torch.Generator | None = None, **kwargs: Any) -> None:
        super().__init__(d_model, num_heads, generator=generator, **kwargs)
        K, weight = self.head_dim, self.weight_q
        kind: dict[str, Any] = {"dtype": weight.dtype, "device": weight.device}
        with torch.no_grad():
            for q, k in zip(self.weight_q.split(K), self.weight_k.split(K), strict=True):
                noise = torch.randn(d_model, d_model, generator=generator, **kind) / sqrt(d_model)
                u, s, vh = torch.linalg.svd(MIMETIC * noise + MIMETIC * torch.eye(d_model, **kind))
                q.copy_(s[:K, None].sqrt() * u[:, :K].mT)
                k.copy_(s[:K, None].sqrt() * vh[:K])


def _shifted(d_model: int, num_heads: int, *, form: str = "fast", **kwargs: Any) -> MultiheadAttention:
    """Learned rotary heads with the KV shift."""
    shift = ShiftedKeysValues(num_heads, "rotary", form=form, **kwargs)
    return MultiheadAttention(d_model, num_heads, attention=shift, **kwargs)


def _patterns(*names: str) -> Kind:
    """A head for each of these positional patterns."""
    return Kind(partial(PositionalHeads, patterns=names), partial(positional_heads, patterns=names))


KINDS: Mapping[str, Kind] = {
    "learned": Kind(partial(MultiheadAttention, attention="rotary"), partial(layer, attention="rotary")),
    "mimetic": Kind(
        partial(MultiheadAttention, attention="rotary", projection=MimeticProjection), partial(layer, attention="rotary")
    ),
    "shifted": Kind(_shifted, partial(shifted_layer, attention="rotary")),
    "frozen": Kind(
        partial(MultiheadAttention, attention="rotary", projection="frozen"),
        partial(layer, attention="rotary", projection="frozen"),
    ),
    "induction": Kind(InductionHeads, induction_heads),
    "near": _patterns(*NEAR),
    "ends": _patterns(*ENDS),
    "alone": _patterns(*ALONE),
}


@dataclass(frozen=True)
class Arm:
    """How many heads of which of `KINDS` a layer has."""

    heads: tuple[tuple[str, int], ...]

    @property
    def num_heads(self) -> int:
        """Heads of a layer, of all kinds."""
        return sum(count for _, count in self.heads)

    def build(self, case: Mapping[str, Any], generator: torch.Generator) -> LanguageModel:
        """The untrained model of a case."""
        layer: dict[str, Any] = {"layer": KINDS[self.heads[0][0]].make}
        if len(self.heads) > 1:
            layer = {"layer": HybridAttention, "heads": [(KINDS[kind].make, count) for kind, count in self.heads]}
        if case["convolution"]:
            layer = {**layer, "layer": ConvolvedAttention, "of": layer["layer"], "width": case["convolution"]}
        sizes = (VOCAB_SIZE, case["d"], self.num_heads, case["L"])
        return LanguageModel(*sizes, max_length=None, d_ff=case["d_ff"], generator=generator, **layer)

    def cost(self, B: int, N: int, d: int, H: int, **kwargs: Any) -> Cost:
        """The attention layer's closed form, but for the sums of heads of several kinds."""
        kinds = [(KINDS[kind].cost, count) for kind, count in self.heads]
        return added(*(cost(B, N, d, count, head_dim=d // H, **kwargs) for cost, count in kinds))


ARMS: Mapping[str, Arm] = {
    "learned": Arm((("learned", 4),)),
    "2 induction + 2 positional": Arm((("induction", 2), ("ends", 2))),
    "1 learned + 3 positional": Arm((("learned", 1), ("near", 3))),
    "1 learned + 1 induction + 2 positional": Arm((("learned", 1), ("induction", 1), ("ends", 2))),
    "1 induction + 3 positional": Arm((("induction", 1), ("near", 3))),
    "positional": Arm((("alone", 4),)),
    "learned, KV shift": Arm((("shifted", 4),)),
    "learned, mimetic": Arm((("mimetic", 4),)),
    "frozen": Arm((("frozen", 4),)),
}


def step_flop(case: Mapping[str, Any]) -> int:
    """FLOPs of the matrix products of a case's training step, by closed forms; the convolution has none."""
    arm = ARMS[case["arm"]]
    cost: Any = partial(convolved_layer, of=arm.cost, width=case["convolution"]) if case["convolution"] else arm.cost
    sizes = (case["B"], case["N"], case["d"], arm.num_heads, case["L"])
    found = model_cost(*sizes, vocab_size=VOCAB_SIZE, max_length=None, d_ff=case["d_ff"], layer=cost)
    return int(found.step)
