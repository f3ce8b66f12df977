"""How parts of a pattern are laid out: tiles of queries, and the keys between two bounds that each of them reads."""

from collections.abc import Callable

import torch
from torch import Tensor

from ortho.attention.chunking import chunks
from ortho.attention.sparse.parts import ABSENT, Order, Part, in_order

Bound = Callable[[Tensor], Tensor]  # of the places of queries: the first or the last key that each may attend to
Kept = Callable[[Tensor, Tensor], Tensor]

TILE = 64  # of queries: fewer would read less that is not kept, in products that run slower
BLOCK = 16  # of keys, which are read as they lie, so that smaller blocks cost nothing


def tile_of(width: int, most: int = TILE) -> int:
    """At most so many queries that straddle no more borders of blocks of `width` tokens than they must."""
    return most // width * width if width <= most else chunks(width, most)[0]


def both_ways(causal_pairs: int, n: int, is_causal: bool) -> int:
    """The pairs of n tokens, from those of a causal call, if each (i, i) is kept, and (j, i) wherever (i, j) is."""
    return causal_pairs if is_causal else 2 * causal_pairs - n


def between(
    queries: tuple[int, int],
    keys: tuple[int, int],
    low: Bound,
    high: Bound,
    kept: Kept | None,
    *,
    device: torch.device,
    tile: int = TILE,
    relative: bool = False,
) -> Part:
    """Queries (first, stop) that read, of the keys (first, stop), those from low(i) to high(i), which never fall.

    `relative` says that what is kept of these keys depends on i - j alone.
    """
    (first, stop), (start, end) = queries, keys
    tile, block = (tile, BLOCK) if stop - first > 1 else (1, 1)  # a lone query, which is decoded, reads no more
    i = torch.arange(first // tile, -(-stop // tile), device=device) * tile
    lowest = low(i.clamp(min=first)).clamp(min=start) // block
    highest = high((i + tile - 1).clamp(max=stop - 1)).clamp(max=end - 1) // block
    table = from_to(lowest - start // block, highest - start // block)
    return Part(in_order(first, stop, tile, device), in_order(start, end, block, device), table, kept, relative)


def every(
    step: int,
    queries: tuple[int, int],
    keys: int,
    low: Bound,
    high: Bound,
    kept: Kept,
    *,
    device: torch.device,
    tile: int = TILE,
) -> Part:
    """Queries (first, stop) that read, of the keys at multiples of `step` from them, those from low(s) to high(s).

    Tokens are sorted into classes, by their position modulo `step`, and s counts those of a class. What is kept depends
    on i - j alone.
    """
    first, stop = queries
    step = min(step, max(stop, keys))  # more classes than tokens are as good as none
    tile, _ = chunks(-(-(stop - first) // step), tile)
    block, _ = chunks(-(-keys // step), BLOCK if stop - first > 1 else 1)
    classes = torch.arange(step, device=device)
    starts = torch.arange(first, stop, step * tile, device=device)[:, None] + classes[: stop - first]
    # Whichever are more one behind the other, the tiles of a class or those of all classes: they are computed together.
    starts = (starts.T if starts.shape[0] > starts.shape[1] else starts).flatten()
    i = starts[:, None] + step * torch.arange(tile, device=device)
    j = classes[:, None] + torch.arange(0, keys, step, device=device)
    j = torch.nn.functional.pad(j, (0, -j.shape[1] % block), value=keys)
    own, s = starts % step, starts // step
    last = torch.minimum(s + tile, (stop - own + step - 1) // step) - 1
    highest = torch.minimum(high(last), (keys - own + step - 1) // step - 1) // block
    table = from_to(low(s).clamp(min=0) // block, highest.masked_fill(starts >= stop, ABSENT))
    table = torch.where(table < 0, ABSENT, table + own[:, None] * (j.shape[1] // block))
    return Part(
        Order(i.masked_fill(i >= stop, ABSENT)),
        Order(j.masked_fill(j >= keys, ABSENT).view(-1, block)),
        table,
        kept,
        relative=True,
    )


def from_to(low: Tensor, high: Tensor) -> Tensor:
    """A table (T, W) of the blocks from low (T,) to high (T,), both included; none where high is lower."""
    table = low[:, None] + torch.arange(max(0, int((high - low).max()) + 1), device=low.device)
    return table.masked_fill(table > high[:, None], ABSENT)
