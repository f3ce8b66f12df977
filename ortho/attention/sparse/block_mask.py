"""Block masks: queries in tiles, keys in blocks, and a table of the blocks that each tile reads.

The block masks of a pattern say which pairs are computed. `band` makes the one of consecutive keys; other patterns
arrange their tokens and the table themselves.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

Bound = Callable[[Tensor], Tensor]  # from queries' positions to the first or the last key that each may attend to
Rule = Callable[[Tensor, Tensor], Tensor]  # (i, j), positions that broadcast: whether the query may attend to the key

ABSENT = -1  # in place of a position, or of a block
TILE = 64  # queries in a tile: with fewer, less is read in vain, but products run slower
BLOCK = 16  # keys in a block: contiguous blocks are read without a copy, so small ones cost nothing


class BlockMask(NamedTuple):
    """Pairs that are computed together. A call may have several block masks, but no pair twice.

    `queries` (T, B) are the positions of the queries in tiles, and `keys` (S, C) those of the keys in blocks, each
    token at most once; a place without a token is `ABSENT`. `table` (T, W) lists the blocks that each tile reads, each
    at most once, before any `ABSENT`. `allowed(i, j)` says which pairs count, for positions that broadcast; None allows
    all.
    """

    queries: Tensor
    keys: Tensor
    table: Tensor
    allowed: Rule | None = None

    @property
    def computed_pairs(self) -> int:
        """The number of scores computed for one sequence, for allowed pairs and for others, counted from the table."""
        return int((self.table >= 0).sum()) * self.queries.shape[1] * self.keys.shape[1]

    def hidden(self, T: slice, blocks: Tensor, mask: Tensor | None, start: int) -> Tensor:
        """True for pairs that do not count, for the tiles T with the `blocks` (c, w) that they read.

        Returns (1 or g, c, B, w C). `mask` (1 or g, N or 1, M or 1) is the mask of these sequences, True = attend; the
        first query is at position `start`.
        """
        i, j = self.queries[T], self.keys[blocks].flatten(1)
        i, j = i[:, :, None], j[:, None, :]
        hidden = (i < 0) | (j < 0)
        if self.allowed is not None:
            hidden = hidden | ~self.allowed(i, j)
        if mask is None:
            return hidden[None]
        rows, columns = (i - start).clamp(min=0) * int(mask.shape[1] > 1), j.clamp(min=0) * int(mask.shape[2] > 1)
        return hidden | ~mask[:, rows, columns]


def consecutive(first: int, stop: int, block: int, device: torch.device | None = None) -> Tensor:
    """The positions from `first` to `stop`, exclusive, in blocks (S, block) that begin at multiples of `block`."""
    places = torch.arange(first // block * block, -(-stop // block) * block, device=device)
    return places.masked_fill((places < first) | (places >= stop), ABSENT).unflatten(0, (-1, block))


def block_ranges(low: Tensor, high: Tensor) -> Tensor:
    """A table (T, W) of the blocks from low (T,) to high (T,), inclusive; no blocks where high is lower."""
    table = low[:, None] + torch.arange(max(0, int((high - low).max()) + 1), device=low.device)
    return table.masked_fill(table > high[:, None], ABSENT)


class Section(NamedTuple):
    """The pairs that a call computes: queries from `first` to `stop`, exclusive, with the first `keys` keys."""

    first: int
    stop: int
    keys: int
    is_causal: bool = False
    device: torch.device = torch.device("cpu")

    def rule(self, allowed: Rule | None) -> Rule | None:
        """The rule of a call: `allowed`, and in a causal call no key after the query."""
        if not self.is_causal:
            return allowed
        return lambda i, j: j <= i if allowed is None else allowed(i, j) & (j <= i)

    def last_keys(self, high: Tensor, i: Tensor) -> Tensor:
        """The last key that each query at i reads: `high`, but in a causal call no key after the query."""
        return torch.minimum(high, i) if self.is_causal else high

    def tile_starts(self, tile: int) -> Tensor:
        """The positions at which tiles of queries begin, (T,)."""
        return torch.arange(self.first // tile, -(-self.stop // tile), device=self.device) * tile


def band(
    section: Section,
    low: Bound | None,
    high: Bound | None,
    allowed: Rule | None,
    *,
    keys: tuple[int, int] | None = None,
    tile: int = TILE,
) -> BlockMask:
    """The block mask in which each query of a section reads the keys from low(i) to high(i); in a causal call up to i.

    The two bounds never fall; without them all keys are read. `keys` (first, stop) limits the keys, by default to all
    of the section's.
    """
    first, stop, start, end = section.first, section.stop, *(keys or (0, section.keys))
    tile, block = (tile, BLOCK) if stop - first > 1 else (1, 1)  # a lone query, in decoding, reads just its keys
    i = section.tile_starts(tile)
    last = (i + tile - 1).clamp(max=stop - 1)
    lowest = torch.full_like(i, start) if low is None else low(i.clamp(min=first)).clamp(min=start)
    highest = section.last_keys(torch.full_like(i, end) if high is None else high(last), last).clamp(max=end - 1)
    table = block_ranges(lowest // block - start // block, highest // block - start // block)
    queries, blocks = (consecutive(*some, section.device) for some in ((first, stop, tile), (start, end, block)))
    return BlockMask(queries, blocks, table, section.rule(allowed))


def evenly(length: int, most: int) -> int:
    """The width of equal pieces, at most `most`, of which as few as possible cover `length`."""
    return -(-length // -(-length // most))
