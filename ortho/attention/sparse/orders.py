"""Tokens in some order, cut into blocks: what attention over some of the pairs reads and writes together."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

ABSENT = -1  # in place of a position, or of a block


class Order(NamedTuple):
    """Tokens in blocks of B: their positions (S, B), or (G, S, B) where each sequence has its own; no token twice.

    A place without a token is `ABSENT`. `span` (first, stop) says that the tokens are those of these positions in
    their order, in blocks that begin at multiples of B: then no row has to be gathered.
    """

    positions: Tensor
    span: tuple[int, int] | None = None

    def take(self, x: Tensor, start: int = 0) -> Tensor:
        """The rows of x (G, n, ·), whose first is at position `start`, in blocks (G, S, B, ·).

        Where there is no token stands a row of zeros or another token's.
        """
        S, B = self.positions.shape[-2:]
        if self.span is None:
            return rows_of(x, (self.positions - start).clamp(min=0).flatten(-2)).unflatten(1, (S, B))
        base = self.span[0] // B * B
        low, high = max(base, start), min(base + S * B, start + x.shape[1])
        return _pad(x[:, low - start : high - start], low - base, base + S * B - high).unflatten(1, (S, B))

    def put(self, blocks: Tensor, n: int, start: int = 0, fill: float = 0.0) -> Tensor:
        """The reverse of `take`: (G, n, ·) with the rows of blocks (G, S, B, ·) at their tokens, `fill` elsewhere."""
        rows = blocks.flatten(1, 2)
        if self.span is not None:
            first, stop = self.span
            base = first // blocks.shape[2] * blocks.shape[2]
            return _pad(rows[:, first - base : stop - base], first - start, start + n - stop, fill)
        positions, places = self.positions.flatten(-2), rows.shape[1]
        tokens = torch.where(positions < 0, n, positions - start)  # those that are not there, as one more
        found = tokens.new_full((*tokens.shape[:-1], n + 1), places)
        found = found.scatter_(-1, tokens, torch.arange(places, device=rows.device).expand_as(tokens))[..., :n]
        absent = bool((found == places).any())
        return rows_of(_pad(rows, 0, int(absent), fill), found)


def in_order(first: int, stop: int, block: int, device: torch.device | None = None) -> Order:
    """The tokens from `first` to `stop`, without the last, in blocks of `block`."""
    places = torch.arange(first // block * block, -(-stop // block) * block, device=device)
    absent = (places < first) | (places >= stop)
    return Order(places.masked_fill(absent, ABSENT).unflatten(0, (-1, block)), (first, stop))


def rows_of(x: Tensor, index: Tensor) -> Tensor:
    """The rows of x (G, n, ·) with these numbers, (m,) or (G, m): (G, m, ·)."""
    if index.dim() == 1:
        return x.index_select(1, index)
    offsets = x.shape[1] * torch.arange(len(x), device=x.device)[:, None]
    return x.flatten(0, 1).index_select(0, (index + offsets).flatten()).unflatten(0, index.shape)


def _pad(x: Tensor, before: int, behind: int, fill: float = 0.0) -> Tensor:
    """x (G, n, ·) with more rows; without a copy where there are none."""
    return pad(x, (0, 0, before, behind), value=fill) if before or behind else x
