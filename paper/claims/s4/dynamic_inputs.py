"""Five kinds of input on which choices of keys are compared: where the softmax's weight lies is different in each."""

from collections.abc import Callable
from functools import cache
from math import inf, sqrt
from typing import NamedTuple

import torch
from torch import Tensor

DRAWS, TOKENS, WIDTH = 16, 256, 16  # sequences, N, K = V
TOPICS, STRETCH = 8, 8  # of `topics`: how many, and tokens that one lasts


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


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
    """What is near in position is alike: queries and keys follow a path with a correlation of 0.95 a step."""
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
    return INPUTS[kind](seeded(seed))


@cache
def weights(kind: str) -> Tensor:
    """Of causal softmax attention (DRAWS, N, N)."""
    q, k, _ = drawn(kind)
    scores = q @ k.mT / sqrt(WIDTH)
    return scores.masked_fill(torch.ones(TOKENS, TOKENS).triu(1).bool(), -inf).softmax(-1)
