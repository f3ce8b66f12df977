"""Fixed attention of the Sparse Transformer (Child et al. 2019, arXiv:1904.10509, section 4.2)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ortho._checks import checked
from ortho.attention.sparse.pattern import Pattern, pattern_mechanism
from ortho.attention.sparse.tiling import (
    ABSENT,
    Bound,
    Rule,
    Section,
    Tiling,
    TokenBlocks,
    block_ranges,
    causal,
    consecutive,
)
from ortho.attention.sparse.window import BlockedWindow, tile_width


@checked
@dataclass(frozen=True)
class Summaries(Pattern):
    """The last `summaries` keys of every block of `stride` tokens."""

    stride: int
    summaries: int

    def __post_init__(self) -> None:
        if self.summaries > self.stride:
            raise ValueError(f"summaries: expected at most the stride, {self.stride}, got {self.summaries}")

    def allowed(self, i: Tensor, j: Tensor) -> Tensor:
        return (j % self.stride >= self.stride - self.summaries) & (i >= 0)

    def blocks(self, n: int) -> tuple[int, int, int]:
        """The numbers of whole blocks in n tokens, of tokens after these blocks, and of summaries among the latter."""
        whole, rest = divmod(n, self.stride)
        return whole, rest, max(0, rest - self.stride + self.summaries)

    def pairs(self, n: int, *, is_causal: bool = False) -> int:
        l, c, (whole, rest, last) = self.stride, self.summaries, self.blocks(n)
        if not is_causal:
            return n * (whole * c + last)
        own = whole * c * (c + 1) // 2 + last * (last + 1) // 2  # pairs of summaries within one block
        return l * c * whole * (whole - 1) // 2 + rest * whole * c + own

    def tilings(self, section: Section) -> tuple[Tiling, ...]:
        def high(i: Tensor) -> Tensor:  # the last block whose summaries have begun
            return (i - self.stride + self.summaries) // self.stride

        last, rule = (high, causal) if section.is_causal else (None, None)
        return (self.read(section, last, rule),)

    def read(self, section: Section, high: Bound | None, rule: Rule | None) -> Tiling:
        """The tiling in which queries read the summaries, one block of keys each, of blocks up to high(i) or of all."""
        first, stop, keys, _, device = section
        tile = tile_width(self.stride) if stop - first > 1 else 1
        whole, _, last = self.blocks(keys)
        count = whole + (last > 0)
        j = self.stride * torch.arange(1, count + 1, device=device)[:, None]
        j = j + torch.arange(-self.summaries, 0, device=device)
        i = section.tile_starts(tile)
        highest = torch.full_like(i, count - 1)
        if high is not None:
            highest = torch.minimum(highest, high((i + tile - 1).clamp(max=stop - 1)))
        queries, keys_of_blocks = consecutive(first, stop, tile, device), TokenBlocks(j.masked_fill(j >= keys, ABSENT))
        return Tiling(queries, keys_of_blocks, block_ranges(torch.zeros_like(i), highest), rule, relative=True)


@checked
@dataclass(frozen=True)
class Fixed(Pattern):
    """`BlockedWindow` and `Summaries` in one head: the keys of the query's own block, and the summaries of the others.

    In a causal call the queries of later blocks read only the summaries of a block.
    """

    stride: int
    summaries: int

    def __post_init__(self) -> None:
        Summaries(self.stride, self.summaries)  # raises for sizes that do not fit together

    def allowed(self, i: Tensor, j: Tensor) -> Tensor:
        return (i // self.stride == j // self.stride) | Summaries(self.stride, self.summaries).allowed(i, j)

    def pairs(self, n: int, *, is_causal: bool = False) -> int:
        l, c, (whole, rest, last) = self.stride, self.summaries, Summaries(self.stride, self.summaries).blocks(n)
        own = BlockedWindow(l).pairs(n, is_causal=is_causal)
        if is_causal:
            return own + l * c * whole * (whole - 1) // 2 + rest * whole * c
        return own + n * (whole * c + last) - whole * l * c - rest * last

    def tilings(self, section: Section) -> tuple[Tiling, ...]:
        is_causal = section.is_causal

        def others(i: Tensor, j: Tensor) -> Tensor:
            return (j // self.stride < i // self.stride) if is_causal else (j // self.stride != i // self.stride)

        def high(i: Tensor) -> Tensor:
            return i // self.stride - 1

        alone = is_causal and self.stride % tile_width(self.stride) == 0  # tiles lie in one block: `high` is exact
        rule = None if alone else others
        tiling = Summaries(self.stride, self.summaries).read(section, high if is_causal else None, rule)
        return *BlockedWindow(self.stride).tilings(section), tiling._replace(relative=False)


SOURCE = "Child et al. 2019, arXiv:1904.10509"
MECHANISMS = (
    pattern_mechanism("summaries", Summaries(64, 8), SOURCE),
    pattern_mechanism("fixed", Fixed(64, 8), SOURCE),
)
