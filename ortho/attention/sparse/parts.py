r"""Softmax attention over some of the pairs, in parts: tiles of queries, each with the blocks of keys that it reads.

Only what a part names is computed. As in Dao et al. 2022 (arXiv:2205.14135), a part is normalised by itself and merged
with the others by the logarithms $L_p$ of the sums of its exponentials,

$$o = \sum_p 2^{L_p - L}\, o_p, \qquad L = \log_2 \sum_p 2^{L_p},$$

and the weights $2^{s - L}$ are computed again for the gradient. So what is kept of a call is linear in the tokens.
Powers of 2 take a CPU less time than those of e, above all where they vanish: the scores s are $\log_2 e$ times the
usual ones.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise, takewhile
from math import e, log, log2
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ortho._autocast import no_autocast
from ortho.attention.chunking import once
from ortho.attention.indexing import indexing
from ortho.attention.sparse.kept import Part, kept_pairs
from ortho.attention.sparse.orders import ABSENT, Order, in_order, rows_of
from ortho.attention.transforms import Kernel

__all__ = ["ABSENT", "Order", "Part", "attention_by_parts", "in_order", "rows_of"]

# Numbers that are worked on together, scores or those of gathered keys: on a CPU they stay in its cache, on a GPU they
# fill it.
NUMBERS = {"cpu": 2**19, "cuda": 2**27}


class _Tiles(NamedTuple):
    """Tiles that are computed together: c tiles of queries of g sequences, with w blocks of keys each."""

    G: slice  # of the sequences
    T: slice  # of the tiles of queries
    blocks: Tensor  # (c, w), none absent; or (g, c, w)
    run: tuple[int, int] | None  # (first, step): each tile reads w blocks as they lie, from `step` behind the last's on

    def own(self, x: Tensor) -> Tensor:
        """The tiles' own rows of x (G, T, B, ·), (g c, B, ·)."""
        return x[self.G, self.T].flatten(0, 1)

    def set(self, x: Tensor, rows: Tensor) -> None:
        """Write what `own` reads."""
        x[self.G, self.T] = self.apart(rows)

    def read(self, x: Tensor) -> Tensor:
        """The blocks of x (G, S, B, ·) that each tile reads, (g c, w B, ·)."""
        if self.run is not None:
            return self._lying(x, *self.run, self.blocks.shape[-1]).flatten(0, 1)
        index = self.blocks.clamp(min=0)
        found = rows_of(x[self.G].flatten(2), index.flatten(-2))  # (g, c w, B ·)
        return found.unflatten(2, x.shape[2:]).unflatten(1, index.shape[-2:]).flatten(2, 3).flatten(0, 1)

    def add(self, x: Tensor, rows: Tensor) -> None:
        """Add to what `read` reads."""
        S, B = x.shape[1:3]
        if self.run is not None:
            (first, step), rows = self.run, self.apart(rows)
            if step == 0:
                for some in rows.unbind(1):
                    self._lying(x, first, 0, self.blocks.shape[-1])[:, 0].add_(some)
                return
            for number, some in enumerate(rows.split(step * B, 2)):  # so many do not overlap
                self._lying(x, first + number * step, step, some.shape[2] // B).add_(some)
            return
        x = x[self.G].flatten(2)
        index = self.blocks.clamp(min=0).flatten(-2) + S * torch.arange(len(x), device=x.device)[:, None]
        x.flatten(0, 1).index_add_(0, index.flatten(), rows.reshape(index.numel(), -1))

    def apart(self, rows: Tensor) -> Tensor:
        """(g c, ...) as (g, c, ...)."""
        return rows.unflatten(0, (-1, self.T.stop - self.T.start))

    def _lying(self, x: Tensor, first: int, step: int, width: int) -> Tensor:
        """A view (g, c, w B, ·) of x (G, S, B, ·): so many blocks from the first on, then from `step` behind it on."""
        x = x[self.G]
        size = (len(x), self.T.stop - self.T.start, width * x.shape[2], x.shape[3])
        stride = (x.stride(0), step * x.stride(1), x.stride(2), x.stride(3))
        return x.as_strided(size, stride, x.storage_offset() + first * x.stride(1))


def _tiles(part: Part, G: int, K: int) -> Iterator[_Tiles]:
    """All tiles of a part, for G sequences with keys of K numbers. Tiles that are computed together read equally many
    blocks, of which none is absent where all sequences have one table: what is computed does not depend on how much is
    computed together."""
    B, C = part.queries.positions.shape[-1], part.keys.positions.shape[-1]
    for start, stop, width, run in _runs(part.table.cpu()):
        numbers = width * C * (B if run else max(B, K))  # of a tile
        together = max(1, NUMBERS["cuda" if part.table.is_cuda else "cpu"] // numbers)
        tiles = min(stop - start, together)
        sequences = together // tiles
        for t in range(start, stop, tiles):
            T = slice(t, min(stop, t + tiles))
            here = None if run is None else (run[0] + (t - start) * run[1], run[1])
            for g in range(0, G, sequences):
                some = slice(g, min(G, g + sequences))
                blocks = part.table[T] if part.table.dim() == 2 else part.table[some, T]
                yield _Tiles(some, T, blocks[..., :width], here)


_Run = tuple[int, int, int, tuple[int, int] | None]  # of tiles: start, stop, width of the table, and `_Tiles.run`


def _runs(table: Tensor) -> Iterator[_Run]:
    """Rows of a table that hold equally many blocks, and any; if it is not for a few, such as lie equally far apart."""
    if table.dim() == 3:
        if table.shape[2]:
            yield 0, table.shape[1], table.shape[2], None
        return
    widths = (table >= 0).sum(1)
    lie = ((table.diff() == 1) | (table[:, 1:] < 0)).all(1)
    stop = 0
    for (width, straight), rows in groupby(zip(widths.tolist(), lie.tolist(), strict=True)):
        start, stop = stop, stop + len(list(rows))
        if not width:
            continue
        pieces = list(_equally_far(table[start:stop, 0].tolist(), start, width)) if straight else []
        yield from pieces if pieces and len(pieces) <= max(1, (stop - start) / 4) else [(start, stop, width, None)]


def _equally_far(firsts: list[int], start: int, width: int) -> Iterator[_Run]:
    """Runs of tiles from number `start` on, whose first blocks are these."""
    steps = [b - a for a, b in pairwise(firsts)]
    t = 0
    while t < len(firsts):
        step = steps[t] if t < len(steps) else width
        stop = t + 1 + len(list(takewhile(step.__eq__, steps[t:])))
        yield start + t, start + stop, width, (firsts[t], step) if step >= 0 else None
        t = stop


@indexing()
def attention_by_parts(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    parts: Sequence[Part],
    *,
    scale: float,
    start: int = 0,
    attn_mask: Tensor | None = None,
) -> Tensor:
    """softmax(scale q k^T) v over the pairs of the parts, (G, N, V), for q (G, N, K), k (G, M, K), v (G, M, V).

    The first query stands at position `start`, the first key at 0. A mask (G or 1, N or 1, M or 1) hides more pairs. A
    query without a pair gets zeros. The result cannot be differentiated twice.

    Scores of hidden pairs are computed with the others of their tile, and are hidden before anything is made of them:
    the keys behind a query may be so large that they leave the range of the dtype.

    Gradients are those of weights 2^(s - L), whose logarithm L, in float32, tells tied scores from a single one as long
    as they are below 2^24.
    """
    with no_autocast(q):
        return _Attention.apply(q, k, v, attn_mask, tuple(parts), start, scale)


class _Attention(Kernel):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        parts: tuple[Part, ...],
        start: int,
        scale: float,
    ) -> Tensor:
        q = q * (scale * log2(e))
        o, L = _forward(_Call(q, k, v, mask, parts[0], start))
        for part in parts[1:]:
            o_part, L_part = _forward(_Call(q, k, v, mask, part, start))
            share = ((L - L_part) * log(2)).sigmoid()
            o = torch.lerp(o_part, o, share)  # between the two, however large their scores are
            L = torch.logaddexp2(L, L_part)
        o, L = _alone(o), _alone(L)
        ctx.parts, ctx.start, ctx.scale = parts, start, scale
        ctx.save_for_backward(q, k, v, mask, o, L)
        return o

    @staticmethod
    @once
    @indexing()
    def backward(ctx: Any, d_o: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, mask, o, L = ctx.saved_tensors
        reach_qk = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        mean = (d_o * o).sum(-1, keepdim=True) if reach_qk else None  # of the weights' gradients, a row
        totals: list[Tensor | None] = [None, None, None]
        for part in ctx.parts:
            call = _Call(q, k, v, mask, part, ctx.start)
            for number, gradient in enumerate(_backward(call, L, d_o, mean)):
                total = totals[number]
                totals[number] = gradient if total is None or gradient is None else total.add_(gradient)
        for total, factor in zip(totals[:2], (ctx.scale, log(2)), strict=True):
            if total is not None:
                total.mul_(factor)
        return (*totals, None, None, None, None)


def _alone(x: Tensor) -> Tensor:
    """x without the rows beside it in memory, which would be kept with it."""
    return x if x.untyped_storage().nbytes() == x.nbytes else x.clone(memory_format=torch.contiguous_format)


def _lowest(x: Tensor) -> float:
    """In place of the logarithm of 0: finite, and beside any other logarithm nothing."""
    return torch.finfo(x.dtype).min / 4


class _Call:
    """One part of a call, with its operands in blocks."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, part: Part, start: int) -> None:
        self.part, self.mask, self.start = part, mask, start
        self.N, self.M, self.G = q.shape[1], k.shape[1], len(q)
        self.queries, self.keys, self.values = part.queries.take(q, start), part.keys.take(k), part.keys.take(v)
        self._limits = q.new_tensor([-torch.inf, torch.inf])  # of a pair that is not kept, and of one that is
        self._last: tuple[slice, Tensor] | None = None  # the tiles that were asked for, and their limits

    def tiles(self) -> Iterator[_Tiles]:
        return _tiles(self.part, self.G, self.keys.shape[-1])

    def zeros(self, width: int) -> Tensor:
        """A row for each place of a query."""
        return self.queries.new_zeros((*self.queries.shape[:3], width))

    def scores(self, tiles: _Tiles) -> Tensor:
        """(g c, B, w B), times log2(e); -inf where a pair is not kept."""
        scores = torch.bmm(tiles.own(self.queries), tiles.read(self.keys).mT)
        # A product that leaves the range is infinite, or NaN; at once, it is neither where the limit is lower.
        scores = scores.nan_to_num_(torch.inf, torch.inf, -torch.inf)
        tiles.apart(scores).clamp_(max=self._limit(tiles))
        return scores

    def _limit(self, tiles: _Tiles) -> Tensor:
        """What scores are at most: infinity where a pair is kept and -inf elsewhere, (1 or g, 1 or c, B, w B); found
        once if all sequences share it."""
        if self.mask is not None and len(self.mask) > 1:
            return self._new_limit(tiles, self.mask[tiles.G])
        if tiles.blocks.dim() == 3 or not self.part.shared:
            return self._new_limit(tiles, self.mask)
        if self._last is None or self._last[0] != tiles.T:
            self._last = tiles.T, self._new_limit(tiles, self.mask)
        return self._last[1]

    def _new_limit(self, tiles: _Tiles, mask: Tensor | None) -> Tensor:
        kept = kept_pairs(self.part, tiles.G, tiles.T, tiles.blocks, mask, self.start)
        return self._limits.index_select(0, kept.flatten().int()).view(kept.shape)


def _forward(call: _Call) -> tuple[Tensor, Tensor]:
    """The output of this part alone, (G, N, V), and L, (G, N, 1)."""
    lowest, tiny = _lowest(call.queries), torch.finfo(call.queries.dtype).tiny
    o, L = call.zeros(call.values.shape[-1]), call.zeros(1).fill_(lowest)
    for tiles in call.tiles():
        scores = call.scores(tiles)
        peak = scores.amax(-1, keepdim=True).clamp_(min=lowest)
        weights = scores.sub_(peak).exp2_()
        total = weights.sum(-1, keepdim=True)
        tiles.set(o, torch.bmm(weights, tiles.read(call.values)).div_(total.clamp(min=tiny)))
        tiles.set(L, total.log2_().add_(peak).clamp_(min=lowest))
    order = call.part.queries
    return order.put(o, call.N, call.start), order.put(L, call.N, call.start, lowest)


def _backward(call: _Call, L: Tensor, d_o: Tensor, mean: Tensor | None) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """What a part adds to the gradients of q, k and v, to the former two only with `mean`."""
    order = call.part.queries
    L, d_o = (order.take(x, call.start) for x in (L, d_o))
    mean = None if mean is None else order.take(mean, call.start)
    d_q, d_k, d_v = (x.new_zeros(x.shape) for x in (call.queries, call.keys, call.values))
    for tiles in call.tiles():
        own = tiles.own(d_o)
        weights = call.scores(tiles).sub_(tiles.own(L)).exp2_()
        tiles.add(d_v, torch.bmm(weights.mT, own))
        if mean is None:
            continue
        d_scores = torch.bmm(own, tiles.read(call.values).mT).sub_(tiles.own(mean)).mul_(weights)
        tiles.set(d_q, torch.bmm(d_scores, tiles.read(call.keys)))
        tiles.add(d_k, torch.bmm(d_scores.mT, tiles.own(call.queries)))
    d_values = call.part.keys.put(d_v, call.M)
    if mean is None:
        return None, None, d_values
    return order.put(d_q, call.N, call.start), call.part.keys.put(d_k, call.M), d_values
