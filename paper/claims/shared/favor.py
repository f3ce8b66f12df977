"""Queries and keys for FAVOR+, of a given spread of the scores."""

from functools import cache
from math import sqrt

from torch import Tensor

from paper.claims.shared.common import normal

HEAD_WIDTH = 64  # K, the source's d: its features are those of one head
NARROW = 16  # K where many rows are drawn


@cache
def scaled_tokens(spread: float, length: int = 128, width: int = HEAD_WIDTH) -> tuple[Tensor, Tensor, Tensor]:
    """(x, y, softmax weights) with normal x and y whose products have this standard deviation: q and k times K^-1/4."""
    x, y = sqrt(spread) / width**0.25 * normal(2, length, width)
    return x, y, (x @ y.mT).softmax(-1)
