"""Beam search: the likeliest sequences that are found by keeping a few at a time."""

from collections.abc import Callable
from math import inf
from typing import NamedTuple

import torch

from ortho._checks import checked
from ortho._typing import Float, Int, Tensor

__all__ = ["Found", "beam_search", "penalty"]


class Found(NamedTuple):
    """The best sequence of each row (B, n), without the start, filled with the stop behind its end; its score (B,)."""

    tokens: Tensor
    scores: Tensor


@checked
def penalty(length: int, alpha: float) -> float:
    """By what the log-probability of so many tokens is divided (Wu et al. 2016, arXiv:1609.08144, equation 14)."""
    return ((5 + length) / 6) ** alpha


@checked
def beam_search(
    following: Callable[[Int[Tensor, "rows n"]], Float[Tensor, "rows vocab"]],
    count: int,
    *,
    beams: int,
    start: int,
    stop: int,
    max_length: int,
    length_penalty: float = 0.6,
    device: torch.device | str | None = None,
) -> Found:
    """The best sequences of `count` rows, B, by log-probability over `penalty` of the length, the stop included.

    `following` gives log-probabilities (B beams, vocab) of what comes after prefixes (B beams, n), which begin with
    `start`, and of which `beams` after one another belong to one row. Of all their continuations the likeliest stay, as
    many as there are beams, less one for each sequence that has ended with `stop`; those that have not at `max_length`
    tokens count as they are. One beam is greedy decoding, and as many beams as there are prefixes search all.

    Raises TypeError or ValueError, naming the argument, for sizes below 1 and for a penalty below 0.
    """
    alpha = length_penalty
    if alpha < 0:
        raise ValueError(f"length_penalty: expected a number of at least 0, got {alpha}")
    written = torch.full((count, beams, 1), start, device=device)
    total = torch.full((count, beams), -inf, dtype=torch.float64, device=device)  # -inf: no sequence
    total[:, 0] = 0
    places = torch.full((count, 1), beams, device=device)  # for sequences that have not ended
    best = Found(torch.full((count, max_length), stop, device=device), total.new_full((count,), -inf))
    ranks = torch.arange(beams, device=device)
    for length in range(1, max_length + 1):
        further = following(written.flatten(0, 1)).to(total.dtype).unflatten(0, (count, beams))  # (B, beams, vocab)
        vocab = further.shape[-1]
        total, chosen = (total[..., None] + further).flatten(1).topk(beams)  # (B, beams) of beams * vocab
        total = total.masked_fill(ranks >= places, -inf)
        token = chosen % vocab
        before = written.take_along_dim((chosen // vocab)[..., None], 1)
        written = torch.cat([before, token[..., None]], -1)
        ended = (token == stop) & (total > -inf)
        counts = ended if length < max_length else total > -inf
        best = _better(best, written[..., 1:], total.masked_fill(~counts, -inf) / penalty(length, alpha), stop)
        total, places = total.masked_fill(ended, -inf), places - ended.sum(1, keepdim=True)
        # A longer sequence is no likelier: where none can come to be the best, the row is done.
        hopeless = total.amax(1) / penalty(max_length, alpha) <= best.scores
        total = total.masked_fill(hopeless[:, None], -inf)
        if bool(hopeless.all()):
            break
    longest = int((best.tokens != stop).sum(1).max())
    return Found(best.tokens[:, : min(longest + 1, max_length)], best.scores)


def _better(best: Found, written: Tensor, scores: Tensor, stop: int) -> Found:
    """The best so far, or one of further sequences (B, beams, n) where its score (B, beams) is higher."""
    top, which = scores.max(1)
    tokens = torch.full_like(best.tokens, stop)
    tokens[:, : written.shape[-1]] = written.take_along_dim(which[:, None, None], 1)[:, 0]
    higher = top > best.scores
    return Found(torch.where(higher[:, None], tokens, best.tokens), torch.where(higher, top, best.scores))
