"""Fixed attention of the Sparse Transformer (Child et al. 2019, arXiv:1904.10509, section 4.2)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ortho import checks
from ortho.attention.sparse.block_mask import (
    ABSENT,
    BlockMask,
    Bound,
    Rule,
    Section,
    block_ranges,
    consecutive,
)
from ortho.attention.sparse.blocked_window import BlockedWindow, tile_width
from ortho.attention.sparse.pattern import Pattern, pattern_mechanism


@dataclass(frozen=True)
class FixedColumns(Pattern):
    """The last `summaries` keys of every block of `stride` tokens."""

    stride: int = 64
    summaries: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        most, given = self.stride, self.summaries
        checks.expect(given <= most, "summaries", f"at most the stride, {most}", given)

    def allowed(self, i: Tensor, j: Tensor) -> Tensor:
        return (j % self.stride >= self.stride - self.summaries) & (i >= 0)

    def block_masks(self, section: Section) -> tuple[BlockMask, ...]:
        def high(i: Tensor) -> Tensor:  # the last block whose summaries have begun
            return (i - self.stride + self.summaries) // self.stride

        return (self.read(section, high if section.is_causal else None, section.rule(None)),)

    def read(self, section: Section, high: Bound | None, rule: Rule | None) -> BlockMask:
        """Queries read the summaries, a block of keys each, of blocks up to high(i) or of all."""
        first, stop, keys, _, device = section
        tile = tile_width(self.stride) if stop - first > 1 else 1
        count = (keys + self.summaries - 1) // self.stride  # of blocks whose summaries have begun
        j = self.stride * torch.arange(1, count + 1, device=device)[:, None]
        j = j + torch.arange(-self.summaries, 0, device=device)
        i = section.tile_starts(tile)
        highest = torch.full_like(i, count - 1)
        if high is not None:
            highest = torch.minimum(highest, high((i + tile - 1).clamp(max=stop - 1)))
        table, blocks = block_ranges(torch.zeros_like(i), highest), j.masked_fill(j >= keys, ABSENT)
        return BlockMask(consecutive(first, stop, tile, device), blocks, table, rule)


@dataclass(frozen=True)
class Fixed(Pattern):
    """`BlockedWindow` and `FixedColumns` in one head: the keys of the query's own block, and the others' summaries.

    In a causal call the queries of later blocks read only the summaries of a block.
    """

    stride: int = 64
    summaries: int = 8

    def __post_init__(self) -> None:
        FixedColumns(self.stride, self.summaries)  # raises for sizes that do not fit together

    def allowed(self, i: Tensor, j: Tensor) -> Tensor:
        return (i // self.stride == j // self.stride) | FixedColumns(self.stride, self.summaries).allowed(i, j)

    def block_masks(self, section: Section) -> tuple[BlockMask, ...]:
        is_causal = section.is_causal

        def others(i: Tensor, j: Tensor) -> Tensor:
            return (j // self.stride < i // self.stride) if is_causal else (j // self.stride != i // self.stride)

        def high(i: Tensor) -> Tensor:
            return i // self.stride - 1

        alone = is_causal and self.stride % tile_width(self.stride) == 0  # tiles lie in one block: `high` is exact
        rule = None if alone else others
        columns = FixedColumns(self.stride, self.summaries).read(section, high if is_causal else None, rule)
        return *BlockedWindow(self.stride).block_masks(section), columns


SOURCE = "Child et al. 2019, arXiv:1904.10509"
MECHANISMS = (
    pattern_mechanism("fixed-columns", FixedColumns, SOURCE),
    pattern_mechanism("fixed", Fixed, SOURCE),
)
fixed_columns_attention, fixed_attention = (m.fast for m in MECHANISMS)
