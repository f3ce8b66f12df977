"""The two orders of the products of linear attention, in floating point."""

from collections.abc import Callable

from torch import Tensor

from ortho.theory import associativity
from paper.claims.shared.common import normal

TOKENS, WIDTH = 64, 16


def reordering(features: Callable[[Tensor], Tensor] = lambda x: x) -> associativity.Reordering:
    """How far the two orders are apart for normal tokens in float64."""
    q, k, v = normal(3, TOKENS, WIDTH)
    return associativity.reorder(features(q), features(k).mT, v)
