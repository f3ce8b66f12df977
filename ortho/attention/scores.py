"""Shared by the formulas of several mechanisms: a softmax that leaves pairs out, unit vectors."""

from math import inf, sqrt

import torch

from ortho import checks
from ortho._typing import Bool, Float, Tensor

TINY = 1e-6  # added to the squared length of a vector that is normalised


def root_scale(scale: float) -> float:
    """The factor for both q and k that multiplies their products by `scale`; ValueError for a negative scale."""
    if not 0 <= scale < inf:
        raise ValueError(f"scale: expected a finite number of at least 0, got {scale}")
    return sqrt(scale)


def scaled(scale: float | None, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """q and k, scaled so that their products are multiplied by `scale`; unchanged if it is None."""
    if scale is None:
        return q, k
    root = root_scale(scale)
    return q * root, k * root


def flat_mask(mask: Bool[Tensor, "..."], lead: torch.Size) -> Bool[Tensor, "G N M"]:
    """A mask that broadcasts to (*lead, N, M), its leading axes as one, of size 1 if all sequences share it."""
    mask = mask[(None,) * (2 - mask.dim())] if mask.dim() < 2 else mask
    if mask.dim() == 2 or all(size == 1 for size in mask.shape[:-2]):
        return mask.reshape(1, *mask.shape[-2:])
    return mask.expand(*lead, *mask.shape[-2:]).reshape(-1, *mask.shape[-2:])


def masked_softmax(scores: Tensor, blocked: Tensor | None, *, empty_rows: bool) -> Tensor:
    """The softmax of each row's free entries. Blocked ones are exactly 0, with `empty_rows` also if all are."""
    if blocked is None:
        return scores.softmax(-1)
    if not empty_rows:
        return scores.masked_fill(blocked, -torch.inf).softmax(-1)
    # The lowest finite number in place of -inf: a fully blocked row has no NaN in it or in its gradient.
    return scores.masked_fill(blocked, torch.finfo(scores.dtype).min).softmax(-1).masked_fill(blocked, 0)


def divisors(totals: Tensor) -> Tensor:
    """What to divide rows by: their totals, but infinity for rows without weight, which become 0, or with so little
    that a gradient divided by it would leave the range of the dtype."""
    limits = torch.finfo(totals.dtype)
    return totals.masked_fill(totals.detach().abs() < limits.tiny / limits.eps, inf)


def unit(x: Float[Tensor, "*batch N K"], name: str = "x") -> Float[Tensor, "*batch N K"]:
    """x with vectors of length 1, except very short ones: they grow at most `TINY` ** -0.5 times, and zero stays zero.

    Raises ValueError that names the argument, on the CPU, if a squared length exceeds the dtype's range: such a vector
    would become 0.
    """
    squares = (x * x).sum(-1, keepdim=True)
    checks.within(name, "squared lengths", squares, 0, torch.finfo(x.dtype).max)
    return x * squares.add(TINY).rsqrt()
