"""Inputs in which the softmax's weight lies in different places, and how much of it chosen keys hold.

Five kinds of input, `DRAWS` causal sequences each.
"""

from collections.abc import Callable
from functools import cache
from math import inf, sqrt
from typing import NamedTuple

import torch
from torch import Tensor

from ortho.attention.sparse.window import Window
from paper.claims.shared.common import seeded

DRAWS, TOKENS, WIDTH = 16, 256, 16  # sequences, N, K = V
TOPICS, STRETCH = 8, 8  # of `topics`: how many, and tokens that one lasts


class Operands(NamedTuple):
    """(DRAWS, N, K) each."""

    q: Tensor
    k: Tensor
    v: Tensor


def _normal(generator: torch.Generator) -> Tensor:
    return torch.randn(DRAWS, TOKENS, WIDTH, generator=generator, dtype=torch.float64)


def flat(generator: torch.Generator) -> Operands:
    """Everything independent; scores have a standard deviation of 1/2."""
    return Operands(_normal(generator) / 2, _normal(generator), _normal(generator))


def peaked(generator: torch.Generator) -> Operands:
    """The same, with scores of standard deviation 3."""
    return Operands(3 * _normal(generator), _normal(generator), _normal(generator))


def drifting(generator: torch.Generator) -> Operands:
    """Tokens near in position are alike: queries and keys follow a path with a correlation of 0.95 a step."""
    steps = _normal(generator)
    path = [steps[:, 0]]
    for step in steps[:, 1:].unbind(1):
        path.append(0.95 * path[-1] + sqrt(1 - 0.95**2) * step)
    x = torch.stack(path, 1)
    k = x + _normal(generator) / 2
    return Operands(x + _normal(generator) / 2, k, k)


def topics(generator: torch.Generator) -> Operands:
    """Stretches of tokens about one of a few topics, the same in all sequences, each of which comes again."""
    centres = torch.randn(TOPICS, WIDTH, generator=seeded(0), dtype=torch.float64)
    which = torch.randint(TOPICS, (DRAWS, TOKENS // STRETCH), generator=generator)
    x = centres[which.repeat_interleave(STRETCH, 1)]
    k = x + _normal(generator) / 2
    return Operands(x + _normal(generator) / 2, k, k)


def far_key(generator: torch.Generator) -> Operands:
    """Each query is twice one key, anywhere up to its own."""
    k = _normal(generator)
    shares = torch.rand(DRAWS, TOKENS, generator=generator, dtype=torch.float64)
    of = (shares * torch.arange(1, TOKENS + 1)).long()
    return Operands(2 * k.take_along_dim(of[..., None], 1), k, k)


INPUTS: dict[str, Callable[[torch.Generator], Operands]] = {
    "flat": flat,
    "peaked": peaked,
    "drifting": drifting,
    "topics": topics,
    "one far key": far_key,
}


@cache
def drawn(kind: str, seed: int = 1) -> Operands:
    """The sequences of a kind."""
    return INPUTS[kind](seeded(seed))


@cache
def weights(kind: str) -> Tensor:
    """The weights of causal softmax attention (DRAWS, N, N)."""
    q, k, _ = drawn(kind)
    scores = q @ k.mT / sqrt(WIDTH)
    return scores.masked_fill(torch.ones(TOKENS, TOKENS).triu(1).bool(), -inf).softmax(-1)


WINDOW = 32  # keys of a query


def by_window(_: str) -> Tensor:
    """The choice of the last `WINDOW` keys, for any kind of input (N, N)."""
    return Window(WINDOW).mask(TOKENS, is_causal=True)


@cache
def held(choice: Callable[[str], Tensor], kind: str) -> Tensor:
    """The share of the softmax's weight on kept keys (DRAWS,): the mean over queries with more keys than a window."""
    return (weights(kind) * choice(kind))[:, WINDOW:].sum(-1).mean(-1)
