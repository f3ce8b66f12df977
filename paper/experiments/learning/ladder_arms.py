"""The arms of the ladder: what their heads are, with a short convolution before them or without."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from math import sqrt
from typing import Any

import torch
from torch import nn

from ortho.cost.layers import induction_heads, layer, positional_heads
from ortho.layers.hybrid import HybridAttention
from ortho.layers.induction import SINK, InductionHeads
from ortho.layers.multihead import MultiheadAttention
from ortho.layers.positional import PositionalHeads
from ortho.layers.short_convolution import ConvolvedAttention
from ortho.models.language_model import LanguageModel
from ortho.projections import LearnedProjection
from paper.experiments.learning.kinds import Kind
from paper.experiments.learning.ngram_heads import NgramHeads, NgramModel, ngram_heads
from paper.experiments.learning.shifted import ShiftedKeysValues
from paper.tasks.text import VOCAB_SIZE

CONVOLUTION = 4  # taps
NEAR = ("previous", "recent", "left")  # right before a token, the mean of the last eight, the mean of all before
ENDS = ("previous", "left")
ALONE = ("current", *NEAR)
MIMETIC = 0.7  # the factor of the identity, and of noise, in the product of W_Q and W_K


class MimeticProjection(LearnedProjection):
    r"""Learned queries and keys that begin alike: $W_Q W_K^T \approx \alpha Z + \beta I$ for each head.

    Z is Gaussian with the variance 1/d, and both factors are 0.7; the K largest singular values are kept (Trockman and
    Kolter 2023, arXiv:2305.09828, section 3).
    """

    def __init__(
        self, d_model: int, num_heads: int, *, generator: torch.Generator | None = None, **kwargs: Any
    ) -> None:
        super().__init__(d_model, num_heads, generator=generator, **kwargs)
        K, weight = self.head_dim, self.weight_q
        kind: dict[str, Any] = {"dtype": weight.dtype, "device": weight.device}
        with torch.no_grad():
            for q, k in zip(self.weight_q.split(K), self.weight_k.split(K), strict=True):
                noise = torch.randn(d_model, d_model, generator=generator, **kind) / sqrt(d_model)
                u, s, vh = torch.linalg.svd(MIMETIC * noise + MIMETIC * torch.eye(d_model, **kind))
                q.copy_(s[:K, None].sqrt() * u[:, :K].mT)
                k.copy_(s[:K, None].sqrt() * vh[:K])


def _shifted(
    d_model: int, num_heads: int, *, form: str = "fast", head_dim: int | None = None, **kwargs: Any
) -> MultiheadAttention:
    """Learned rotary heads with the KV shift."""
    shift = ShiftedKeysValues(num_heads, form=form, **kwargs)
    return MultiheadAttention(d_model, num_heads, attention=shift, head_dim=head_dim, **kwargs)


def _patterns(names: tuple[str, ...]) -> Kind:
    """A head for each of these positional patterns."""
    return Kind(partial(PositionalHeads, patterns=names), partial(positional_heads, patterns=names))


def _rotary(make: Callable[..., nn.Module], **options: Any) -> Kind:
    """Rotary heads that cost as much as those of `MultiheadAttention` with these options."""
    return Kind(make, partial(layer, attention="rotary", **options))


def _matches(tokens: int) -> Kind:
    """Selective induction heads. The sink was chosen with the seed and on the part of the text that also choose the
    rates."""
    own: dict[str, Any] = {"tokens": tokens, "sink": SINK}
    return Kind(partial(InductionHeads, **own), partial(induction_heads, **own))


# What makes a layer of such heads, and its closed form.
KINDS: Mapping[str, Kind] = {
    "learned": _rotary(partial(MultiheadAttention, attention="rotary")),
    "mimetic": _rotary(partial(MultiheadAttention, attention="rotary", projection=MimeticProjection)),
    "shifted": _rotary(_shifted),
    "frozen": _rotary(partial(MultiheadAttention, attention="rotary", projection="frozen"), projection="frozen"),
    "induction": Kind(InductionHeads, induction_heads),
    "match of 2": _matches(2),
    "match of 4": _matches(4),
    "n-gram": Kind(NgramHeads, ngram_heads),
    "previous": _patterns(NEAR[:1]),
    "near": _patterns(NEAR),
    "ends": _patterns(ENDS),
    "alone": _patterns(ALONE),
}


@dataclass(frozen=True)
class Arm:
    """The number of heads of each of `KINDS` in a layer."""

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
            layer = {**layer, "layer": ConvolvedAttention, "of": layer["layer"], "kernel_size": case["convolution"]}
        sizes = (VOCAB_SIZE, case["d"], self.num_heads, case["L"])
        model = NgramModel if "n-gram" in dict(self.heads) else LanguageModel
        return model(*sizes, max_length=None, d_ff=case["d_ff"], generator=generator, **layer)


SELECTIVE = (("match of 2", 1), ("match of 4", 1))
ARMS: Mapping[str, Arm] = {
    "learned": Arm((("learned", 4),)),
    "2 induction + 2 positional": Arm((("induction", 2), ("ends", 2))),
    "1 learned + 3 positional": Arm((("learned", 1), ("near", 3))),
    "1 learned + 1 induction + 2 positional": Arm((("learned", 1), ("induction", 1), ("ends", 2))),
    "2 selective induction + 2 positional": Arm((*SELECTIVE, ("ends", 2))),
    "2 n-gram + 2 positional": Arm((("n-gram", 2), ("ends", 2))),
    "1 learned + 2 selective induction + 1 positional": Arm((("learned", 1), *SELECTIVE, ("previous", 1))),
    "1 induction + 3 positional": Arm((("induction", 1), ("near", 3))),
    "positional": Arm((("alone", 4),)),
    "learned, KV shift": Arm((("shifted", 4),)),
    "1 learned, KV shift + 2 selective induction + 1 positional": Arm((("shifted", 1), *SELECTIVE, ("previous", 1))),
    "learned, mimetic": Arm((("mimetic", 4),)),
    "frozen": Arm((("frozen", 4),)),
}
