"""Choosing the next tokens."""

from collections.abc import Callable
from math import inf
from typing import Any

import torch
from torch import Tensor

from ortho._typing import Float, Int
from ortho.checks import expect, positive_int

__all__ = ["next_token"]


def next_token(
    logits: Float[Tensor, "B vocab"],
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    generator: torch.Generator | None = None,
) -> Int[Tensor, "B 1"]:
    """A token for each row of logits (B, vocab), drawn from their softmax at a temperature; at 0, the likeliest token.

    A logit of -inf forbids a token. `top_k` leaves the k likeliest tokens to choose from, and those that are as likely
    as the last of them (Fan et al. 2018, arXiv:1805.04833).

    Raises TypeError or ValueError for a temperature below 0, and for a `top_k` below 1.
    """
    check_sampling(temperature, top_k)
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    # In float64, relative to the largest: otherwise a very low temperature would leave the range of the dtype.
    scaled = (logits.double() - logits.amax(-1, keepdim=True)) / temperature
    if top_k is not None:
        least = scaled.topk(min(top_k, scaled.shape[-1])).values[:, -1:]
        scaled = scaled.masked_fill(scaled < least, -inf)
    return torch.multinomial(scaled.softmax(-1).float(), 1, generator=generator)


def continued(
    read: Callable[[Tensor], Tensor], tokens: Int[Tensor, "B N"], count: int, stop: int | None, **how: Any
) -> Int[Tensor, "B n"]:
    """Up to `count` tokens (B, n) that follow `tokens` (B, N), drawn one after the other; `how` is `next_token`'s.

    `read` maps further tokens to their logits, and remembers them. A row ends with the token `stop`, which also fills
    the places after it; drawing ends when all rows have.
    """
    last = tokens
    drawn: list[Tensor] = []
    ended = torch.zeros(len(tokens), 1, dtype=torch.bool, device=tokens.device)
    while len(drawn) < count and not (stop is not None and bool(ended.all())):
        last = next_token(read(last)[:, -1], **how).to(tokens.dtype)
        if stop is not None:
            last = last.masked_fill(ended, stop)
            ended = ended | (last == stop)
        drawn.append(last)
    return torch.cat(drawn, 1)


def check_sampling(temperature: float, top_k: int | None) -> None:
    """Raise TypeError or ValueError for a temperature below 0, or a `top_k` below 1."""
    if top_k is not None:
        positive_int("top_k", top_k)
    expect(temperature >= 0, "temperature", "a number of at least 0", temperature)
