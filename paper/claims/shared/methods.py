r"""S0, sections 3.1, 3.2 and 5.2b: the methods compared, by what they cost and by what they can do."""

from collections.abc import Sequence
from functools import cache
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from ortho.attention import softmax_attention_reference
from ortho.attention.linear.favor import PositiveFeatures, orthogonal_features
from ortho.attention.linear.linear_attention import linear_attention
from ortho.cost import layer, synthesizer
from ortho.cost.big_o import H, N, d, m
from paper.claims.shared import lookup
from paper.claims.shared.common import normal, relative_error, seeded

COSTS = {
    "learned": layer(1, N, d, H, form="reference"),
    "synthesizer": synthesizer(1, N, d, H),
    "favor": layer(1, N, d, H, attention="favor", m=m),
    "linear": layer(1, N, d, H, attention="linear"),
    "frozen": layer(1, N, d, H, projection="frozen", form="reference"),
    "stopped": layer(1, N, d, H, projection="stopped", form="reference"),
}


FAVOR_LENGTH, FAVOR_WIDTH, FAVOR_DRAWS = 128, 64, 5


@cache
def _scores(spread: float) -> tuple[Tensor, Tensor, Tensor]:
    """(q, k, softmax weights) with normal q and k, whose scores have this standard deviation."""
    q, k = sqrt(spread) * normal(2, FAVOR_LENGTH, FAVOR_WIDTH)
    exact: Any = softmax_attention_reference(q, k, torch.eye(FAVOR_LENGTH, dtype=torch.float64))
    return q, k, exact


def misplaced(weights: Tensor, exact: Tensor) -> float:
    """The share of a row's weight, in per cent, that lies elsewhere than in the exact row; the mean over rows."""
    return 50 * float((weights - exact).abs().sum(-1).mean())


@cache
def _favor_rows(count: int) -> tuple[Tensor, ...]:
    """Some draws of `count` rows; not from the generator of q and k, as the rows would then be parallel to these."""
    generators = (seeded(1000 + draw) for draw in range(FAVOR_DRAWS))
    return tuple(orthogonal_features(count, FAVOR_WIDTH, generator=g, dtype=torch.float64) for g in generators)


@cache
def favor_misplaced(spread: float, count: int) -> Sequence[float]:
    """`misplaced` of FAVOR+ with `count` features, for some draws of them, in rising order."""
    q, k, exact = _scores(spread)
    values = torch.eye(FAVOR_LENGTH, dtype=torch.float64)  # so that the outputs are the weights
    found = []
    for omega in _favor_rows(count):
        weights: Any = linear_attention(q, k, values, feature_map=PositiveFeatures(omega))
        found.append(misplaced(weights, exact))
    return sorted(found)


@torch.no_grad()
def unlike_softmax() -> float:
    """Relative difference of a frozen layer's outputs and those of PyTorch's own layer with the same matrices."""
    module, x = lookup.attention_layer("frozen"), lookup.sequences(lookup.apart()).x
    return relative_error(module.to_torch()(x, x, x, need_weights=False)[0], module(x))
