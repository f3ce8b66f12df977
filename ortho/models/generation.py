"""Choosing the next tokens: sampling, and beam search, which keeps the few likeliest sequences at each step."""

from collections.abc import Callable
from math import inf
from typing import NamedTuple

import torch

from ortho._checks import checked, expect
from ortho._typing import Float, Int, Tensor

__all__ = ["Found", "beam_search", "next_token", "penalty"]


@checked
def next_token(
    logits: Float[Tensor, "B vocab"],
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> Int[Tensor, "B 1"]:
    """A token for each row of logits (B, vocab), drawn from their softmax at a temperature; at 0, the likeliest token.

    `top_k` leaves the k likeliest tokens to choose from, and those that are as likely as the last of them (Fan et al.
    2018, arXiv:1805.04833). `top_p` then leaves the fewest of the likeliest tokens whose chances are together p or more
    (Holtzman et al. 2020, arXiv:1904.09751). Both use the chances at that temperature.

    Raises TypeError or ValueError for a temperature below 0, a `top_k` below 1, and a `top_p` outside (0, 1].
    """
    check_sampling(temperature, top_p)
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    # In float64, relative to the largest: otherwise a very low temperature would leave the range of the dtype.
    scaled = (logits.double() - logits.amax(-1, keepdim=True)) / temperature
    if top_k is not None:
        least = scaled.topk(min(top_k, scaled.shape[-1])).values[:, -1:]
        scaled = scaled.masked_fill(scaled < least, -inf)
    chances = scaled.softmax(-1)
    if top_p is not None:
        ordered, tokens = chances.sort(-1, descending=True)
        before = ordered.cumsum(-1) - ordered  # the chances of all likelier tokens
        chances = chances.masked_fill((before >= top_p).gather(-1, tokens.argsort(-1)), 0)
    return torch.multinomial(chances.float(), 1, generator=generator)


class Found(NamedTuple):
    """The best sequence of each row (B, n), without the start, padded with the stop after its end; its score (B,)."""

    tokens: Tensor
    scores: Tensor


def check_sampling(temperature: float, top_p: float | None) -> None:
    """Raise ValueError for a temperature below 0, or a `top_p` outside (0, 1]."""
    expect(temperature >= 0, "temperature", "a number of at least 0", temperature)
    expect(top_p is None or 0 < top_p <= 1, "top_p", "a number in (0, 1]", top_p)


@checked
def penalty(length: int, alpha: float) -> float:
    """The divisor of the log-probability of `length` tokens (Wu et al. 2016, arXiv:1609.08144, equation 14)."""
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

    `following` maps prefixes (B beams, n) to log-probabilities (B beams, vocab) of the next token. Prefixes begin with
    `start`, and each row has `beams` consecutive ones. At each step a row keeps its likeliest continuations: `beams` of
    them, less one for each sequence that has ended with `stop`. At `max_length` tokens unended sequences count as they
    are. One beam is greedy decoding; as many beams as there are prefixes search all sequences.

    Raises TypeError or ValueError, naming the argument, for sizes below 1 and for a penalty below 0.
    """
    alpha = length_penalty
    expect(alpha >= 0, "length_penalty", "a number of at least 0", alpha)
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
        # A longer sequence is never likelier: a row is done when none of its sequences can become the best.
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
