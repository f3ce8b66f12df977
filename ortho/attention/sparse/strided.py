"""Strided attention of the Sparse Transformer (Child et al. 2019, arXiv:1904.10509, section 4.3)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ortho._checks import checked
from ortho.attention.sparse.pattern import Pattern, both_ways, pattern_mechanism
from ortho.attention.sparse.tiling import TILE, Tiling, residue_band
from ortho.attention.sparse.window import Window

CAUSAL_TILE = 32  # of queries of a column: it has few, and half of what the last of its tiles read is not kept


@checked
@dataclass(frozen=True)
class Columns(Pattern):
    """The keys a multiple of `stride` positions away: with the sequence in rows of that many tokens, a column."""

    stride: int

    def allowed(self, i: Tensor, j: Tensor) -> Tensor:
        return (i - j) % self.stride == 0

    def pairs(self, n: int, *, is_causal: bool = False) -> int:
        return both_ways(_multiples(n, self.stride, n), n, is_causal)

    def tilings(self, first: int, stop: int, keys: int, *, is_causal: bool, device: torch.device) -> tuple[Tiling, ...]:
        return (_column(self, self.stride, 0, first, stop, keys, is_causal, device),)


@checked
@dataclass(frozen=True)
class Strided(Pattern):
    """The `Window` and the `Columns` of the Sparse Transformer in one head.

    `width` is the window's; by default it is the stride, as in the authors' code. The paper's sets, of the keys from
    i - stride to i, hold one key more.
    """

    stride: int
    width: int | None = None

    @property
    def window(self) -> Window:
        return Window(self.stride if self.width is None else self.width)

    def allowed(self, i: Tensor, j: Tensor) -> Tensor:
        return self.window.allowed(i, j) | Columns(self.stride).allowed(i, j)

    def pairs(self, n: int, *, is_causal: bool = False) -> int:
        window, columns = (p.pairs(n, is_causal=is_causal) for p in (self.window, Columns(self.stride)))
        return window + columns - both_ways(_multiples(n, self.stride, self.window.width), n, is_causal)

    def tilings(self, first: int, stop: int, keys: int, *, is_causal: bool, device: torch.device) -> tuple[Tiling, ...]:
        window = self.window.tilings(first, stop, keys, is_causal=is_causal, device=device)
        return (*window, _column(self, self.stride, self.window.width, first, stop, keys, is_causal, device))


def _multiples(n: int, stride: int, below: int) -> int:
    """How many pairs of n tokens, the later first, are a multiple of `stride` apart, and less than `below`."""
    last = min(below - 1, n - 1) // stride
    return (last + 1) * n - stride * last * (last + 1) // 2


def _column(
    pattern: Pattern, stride: int, beyond: int, first: int, stop: int, keys: int, is_causal: bool, device: torch.device
) -> Tiling:
    """The pairs of a pattern that are a multiple of `stride` apart, and at least `beyond`."""
    rule = pattern.rule(is_causal)
    rows = min(-(-beyond // stride), keys)  # that lie nearer
    return residue_band(
        stride,
        (first, stop),
        keys,
        torch.zeros_like,
        lambda s: s - rows if is_causal else torch.full_like(s, keys),
        lambda i, j: rule(i, j) & ((i - j).abs() >= beyond),
        tile=CAUSAL_TILE if is_causal else TILE,
        device=device,
    )


SOURCE = "Child et al. 2019, arXiv:1904.10509"
MECHANISMS = (
    pattern_mechanism("columns", Columns(64), SOURCE),
    pattern_mechanism("strided", Strided(64), SOURCE),
)
