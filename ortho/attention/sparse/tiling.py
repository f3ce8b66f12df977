"""Tilings of a pattern: queries in tiles, keys in blocks, and a table of the blocks that each tile reads.

The tilings of a pattern say which pairs are computed. `band` makes the tiling of consecutive keys; other patterns
build their `TokenBlocks` and table themselves.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ortho._typing import Size

Bound = Callable[[Tensor], Tensor]  # from queries' positions to the first or the last key that each may attend to
Rule = Callable[[Tensor, Tensor], Tensor]  # (i, j), positions that broadcast: whether the query may attend to the key

ABSENT = -1  # in place of a position, or of a block
TILE = 64  # queries in a tile: with fewer, less is read in vain, but products run slower
BLOCK = 16  # keys in a block: contiguous blocks are read without a copy, so small ones cost nothing


class TokenBlocks(NamedTuple):
    """Tokens in blocks of B: their positions (S, B), or (G, S, B) where each sequence has its own; no token twice.

    A place without a token is `ABSENT`. `span` (first, stop) says that the tokens are those from first to stop,
    exclusive, in order, in blocks that begin at multiples of B: then no row has to be gathered.
    """

    positions: Tensor
    span: tuple[int, int] | None = None

    def gather(self, x: Tensor, start: int = 0) -> Tensor:
        """The rows of x (G, n, ·) in blocks (G, S, B, ·); the first row of x is at position `start`.

        A place without a token holds zeros or another token's row.
        """
        S, B = self.positions.shape[-2:]
        if self.span is None:
            return gather_rows(x, (self.positions - start).clamp(min=0).flatten(-2)).unflatten(1, (S, B))
        base = self.span[0] // B * B
        low, high = max(base, start), min(base + S * B, start + x.shape[1])
        return _pad(x[:, low - start : high - start], low - base, base + S * B - high).unflatten(1, (S, B))

    def scatter(self, blocks: Tensor, n: int, start: int = 0, fill: float = 0.0) -> Tensor:
        """The inverse of `gather`: (G, n, ·) with the rows of blocks (G, S, B, ·) at their tokens, `fill` elsewhere."""
        rows = blocks.flatten(1, 2)
        if self.span is not None:
            first, stop = self.span
            base = first // blocks.shape[2] * blocks.shape[2]
            return _pad(rows[:, first - base : stop - base], first - start, start + n - stop, fill)
        positions, places = self.positions.flatten(-2), rows.shape[1]
        tokens = torch.where(positions < 0, n, positions - start)  # absent ones count as one more token
        found = tokens.new_full((*tokens.shape[:-1], n + 1), places)
        found = found.scatter_(-1, tokens, torch.arange(places, device=rows.device).expand_as(tokens))[..., :n]
        absent = bool((found == places).any())
        return gather_rows(_pad(rows, 0, int(absent), fill), found)


def consecutive(first: int, stop: int, block: int, device: torch.device | None = None) -> TokenBlocks:
    """The tokens from `first` to `stop`, exclusive, in blocks of `block`."""
    places = torch.arange(first // block * block, -(-stop // block) * block, device=device)
    absent = (places < first) | (places >= stop)
    return TokenBlocks(places.masked_fill(absent, ABSENT).unflatten(0, (-1, block)), (first, stop))


def gather_rows(x: Tensor, index: Tensor) -> Tensor:
    """The rows of x (G, n, ·) whose numbers `index` holds, (m,) or (G, m): (G, m, ·)."""
    if index.dim() == 1:
        return x.index_select(1, index)
    offsets = x.shape[1] * torch.arange(len(x), device=x.device)[:, None]
    return x.flatten(0, 1).index_select(0, (index + offsets).flatten()).unflatten(0, index.shape)


def _pad(x: Tensor, before: int, after: int, fill: float = 0.0) -> Tensor:
    """x (G, n, ·) with rows of `fill` before and after; not copied if there are none."""
    return pad(x, (0, 0, before, after), value=fill) if before or after else x


def causal(i: Tensor, j: Tensor) -> Tensor:
    """The rule of a causal call if a tiling needs no other: no key after the query."""
    return j <= i


class Section(NamedTuple):
    """The pairs that a call computes: queries from `first` to `stop`, exclusive, with the first `keys` keys."""

    first: int
    stop: int
    keys: int
    is_causal: bool = False
    device: torch.device = torch.device("cpu")

    def rule(self, allowed: Rule | None) -> Rule | None:
        """The rule of a call: `allowed`, and in a causal call no key after the query."""
        if not self.is_causal or allowed is None:
            return causal if self.is_causal else allowed
        return lambda i, j: allowed(i, j) & causal(i, j)

    def last_keys(self, high: Tensor, i: Tensor) -> Tensor:
        """The last key that each query at i reads: `high`, but in a causal call no key after the query."""
        return torch.minimum(high, i) if self.is_causal else high

    def tile_starts(self, tile: int) -> Tensor:
        """The positions at which tiles of queries begin, (T,)."""
        return torch.arange(self.first // tile, -(-self.stop // tile), device=self.device) * tile


class Work(NamedTuple):
    """What a tiling computes for one sequence: the number of `tiles` that read anything, of `queries` queries each; and
    of the `blocks` that they read, of `keys` keys each, counted once for each tile that reads them.

    Places without a token are computed too.
    """

    tiles: Size
    blocks: Size
    queries: Size
    keys: Size

    @property
    def pairs(self) -> Size:
        """The number of scores computed, for allowed pairs and for others."""
        return self.blocks * self.queries * self.keys


class Tiling(NamedTuple):
    """Pairs that are computed together. A call may have several tilings, but no pair twice.

    `table` (T, W), or (G, T, W), lists the blocks of keys that each tile of queries reads, each at most once, before
    any `ABSENT`. `allowed(i, j)` says which pairs count, for positions that broadcast; None allows all. `relative` says
    that the rule depends on i - j alone.
    """

    queries: TokenBlocks
    keys: TokenBlocks
    table: Tensor
    allowed: Rule | None = None
    relative: bool = False

    @property
    def shared(self) -> bool:
        """Whether all sequences have the same positions and table."""
        return self.queries.positions.dim() == self.keys.positions.dim() == self.table.dim() == 2

    @property
    def work(self) -> Work:
        """The work, counted from the table. If each sequence has a table of its own, absent blocks are computed too."""
        queries, keys = self.queries.positions.shape[-1], self.keys.positions.shape[-1]
        if self.table.dim() == 3:
            _, T, W = self.table.shape
            return Work(T if W else 0, T * W, queries, keys)
        there = self.table >= 0
        return Work(int(there.any(1).sum()), int(there.sum()), queries, keys)

    def allowed_pairs(self, G: slice, T: slice, blocks: Tensor, mask: Tensor | None, start: int) -> Tensor:
        """Which pairs count, for tiles T of sequences G with the `blocks` (c, w), or (g, c, w), that they read.

        Returns (1 or g, c, B, w B), or (1, 1, B, w B) if the tiles are alike. `mask` (1 or g, N or 1, M or 1) is the
        mask of these sequences; the first query is at position `start`.
        """
        i, j = self._positions(G, T, blocks)
        if self.relative and mask is None and _alike(i, j):
            i, j = i[..., :1, :], j[..., :1, :]
        i, j = i[..., :, None], j[..., None, :]
        pairs = i.new_ones(1, 1, 1, dtype=torch.bool) if self.allowed is None else self.allowed(i, j)
        if bool((i < 0).any()) or bool((j < 0).any()):
            pairs = pairs & (i >= 0) & (j >= 0)
        if pairs.dim() == 3:
            pairs = pairs[None]
        if mask is not None:
            pairs = pairs & _entries(mask, (i - start).clamp(min=0), j.clamp(min=0))
        return pairs

    def _positions(self, G: slice, T: slice, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """The positions of queries, (c, B) or (g, c, B), and of the keys that they read, (c, w B) or (g, c, w B)."""
        i, places = self.queries.positions, self.keys.positions
        i = i[G, T] if i.dim() == 3 else i[T]
        if places.dim() == 2 and blocks.dim() == 2:
            return i, places[blocks].flatten(-2)
        g = G.stop - G.start
        blocks = blocks.expand(g, *blocks.shape[-2:])
        places = places[G] if places.dim() == 3 else places.expand(g, -1, -1)
        j = gather_rows(places, blocks.clamp(min=0).flatten(1)).unflatten(1, blocks.shape[1:])
        return i, j.masked_fill((blocks < 0)[..., None], ABSENT).flatten(-2)


def _alike(i: Tensor, j: Tensor) -> bool:
    """Whether all places of these tiles, (c, B) and (c, w B), hold tokens, at the same distances in each tile."""
    if i.dim() == 3 or j.dim() == 3:
        return False
    places = torch.cat([i, j], 1)
    apart = places - places[:, :1]
    return bool((places >= 0).all()) and bool((apart == apart[0]).all())


def _entries(mask: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """The entries (G or 1, c, B, w B) at (i, j) of a mask (G or 1, N or 1, M or 1)."""
    i, j = i * int(mask.shape[1] > 1), j * int(mask.shape[2] > 1)
    index = (i * mask.shape[2] + j).flatten(-3)
    flat = mask.flatten(1)
    found = flat[:, index] if index.dim() == 1 else flat.expand(len(index), -1).gather(1, index)
    return found.unflatten(1, torch.broadcast_shapes(i.shape, j.shape)[-3:])


def band(
    section: Section,
    low: Bound,
    high: Bound,
    allowed: Rule | None,
    *,
    keys: tuple[int, int] | None = None,
    tile: int = TILE,
    relative: bool = False,
) -> Tiling:
    """The tiling in which each query of a section reads the keys from low(i) to high(i); in a causal call up to i.

    The two bounds never fall. `keys` (first, stop) limits the keys, by default to all of the section's.
    """
    first, stop, start, end = section.first, section.stop, *(keys or (0, section.keys))
    tile, block = (tile, BLOCK) if stop - first > 1 else (1, 1)  # a lone query, in decoding, reads just its keys
    i = section.tile_starts(tile)
    lowest = low(i.clamp(min=first)).clamp(min=start) // block
    last = (i + tile - 1).clamp(max=stop - 1)
    highest = section.last_keys(high(last), last).clamp(max=end - 1) // block
    table = block_ranges(lowest - start // block, highest - start // block)
    queries, blocks = (consecutive(*some, section.device) for some in ((first, stop, tile), (start, end, block)))
    return Tiling(queries, blocks, table, section.rule(allowed), relative)


def window_tile(width: int) -> int:
    """The number of queries in a window's tile: fewer for a narrow window, whose queries share few keys."""
    return TILE if width > TILE else TILE // 2


def window_band(section: Section, width: int) -> Tiling:
    """The tiling of a section's queries with the keys less than `width` positions away."""
    reach = min(width, max(section.stop, section.keys)) - 1

    def near(i: Tensor, j: Tensor) -> Tensor:
        return (i - j).abs() <= reach

    return band(section, lambda i: i - reach, lambda i: i + reach, near, tile=window_tile(width), relative=True)


def block_ranges(low: Tensor, high: Tensor) -> Tensor:
    """A table (T, W) of the blocks from low (T,) to high (T,), inclusive; no blocks where high is lower."""
    table = low[:, None] + torch.arange(max(0, int((high - low).max()) + 1), device=low.device)
    return table.masked_fill(table > high[:, None], ABSENT)
