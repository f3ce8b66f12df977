"""Parts of a pattern of attention, and which of the pairs that they read are kept."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ortho.attention.sparse.orders import ABSENT, Order, rows_of


class Part(NamedTuple):
    """Pairs that are computed together, none of them in two parts of a call.

    `table` (T, W) names the blocks of keys that each tile of queries reads, each but once, before any `ABSENT`; or it
    is (G, T, W). `allowed(i, j)` says of positions that broadcast which pairs are kept; None keeps all. `relative` says
    that this depends on i - j alone.
    """

    queries: Order
    keys: Order
    table: Tensor
    allowed: Callable[[Tensor, Tensor], Tensor] | None = None
    relative: bool = False

    @property
    def shared(self) -> bool:
        """Whether all sequences have the same positions and table."""
        return self.queries.positions.dim() == self.keys.positions.dim() == self.table.dim() == 2


def kept_pairs(part: Part, G: slice, T: slice, blocks: Tensor, mask: Tensor | None, start: int) -> Tensor:
    """Whether each pair is kept of these sequences' tiles and the blocks (c, w), or (g, c, w), that they read:
    (1 or g, c, B, w B), or (1, 1, B, w B) for tiles that are alike.

    A mask (1 or g, N or 1, M or 1) is that of these sequences; the first query stands at `start`.
    """
    i, j = _positions(part, G, T, blocks)
    if part.relative and mask is None and _alike(i, j):
        i, j = i[..., :1, :], j[..., :1, :]
    i, j = i[..., :, None], j[..., None, :]
    kept = i.new_ones(1, 1, 1, dtype=torch.bool) if part.allowed is None else part.allowed(i, j)
    if bool((i < 0).any()) or bool((j < 0).any()):
        kept = kept & (i >= 0) & (j >= 0)
    if kept.dim() == 3:
        kept = kept[None]
    if mask is not None:
        kept = kept & _visible(mask, (i - start).clamp(min=0), j.clamp(min=0))
    return kept


def _positions(part: Part, G: slice, T: slice, blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Of the queries, (c, B) or (g, c, B), and of the keys that they read, (c, w B) or (g, c, w B)."""
    i, places = part.queries.positions, part.keys.positions
    i = i[G, T] if i.dim() == 3 else i[T]
    if places.dim() == 2 and blocks.dim() == 2:
        return i, places[blocks].flatten(-2)
    g = G.stop - G.start
    blocks = blocks.expand(g, *blocks.shape[-2:])
    places = places[G] if places.dim() == 3 else places.expand(g, -1, -1)
    j = rows_of(places, blocks.clamp(min=0).flatten(1)).unflatten(1, blocks.shape[1:])
    return i, j.masked_fill((blocks < 0)[..., None], ABSENT).flatten(-2)


def _alike(i: Tensor, j: Tensor) -> bool:
    """Whether in each of some tiles all places, (c, B) and (c, w B), hold tokens, equally far from one another."""
    if i.dim() == 3 or j.dim() == 3:
        return False
    places = torch.cat([i, j], 1)
    apart = places - places[:, :1]
    return bool((places >= 0).all()) and bool((apart == apart[0]).all())


def _visible(mask: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """The entries (i, j) of a mask (G or 1, N or 1, M or 1), (G or 1, c, B, w B)."""
    i, j = i * int(mask.shape[1] > 1), j * int(mask.shape[2] > 1)
    index = (i * mask.shape[2] + j).flatten(-3)
    flat = mask.flatten(1)
    found = flat[:, index] if index.dim() == 1 else flat.expand(len(index), -1).gather(1, index)
    return found.unflatten(1, torch.broadcast_shapes(i.shape, j.shape)[-3:])
