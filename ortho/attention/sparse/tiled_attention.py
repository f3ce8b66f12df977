r"""Softmax attention over the pairs of some tilings: each tile of queries reads its blocks of keys, and nothing else.

As in Dao et al. 2022 (arXiv:2205.14135), each tiling is normalised by itself and merged with the others by the
logarithms $L_p$ of the sums of its exponentials,

$$o = \sum_p 2^{L_p - L}\, o_p, \qquad L = \log_2 \sum_p 2^{L_p},$$

and the backward pass computes the weights $2^{s - L}$ again. So what a call keeps is linear in the tokens. On a CPU
powers of 2 take less time than those of e, above all where they vanish: the scores s are $\log_2 e$ times the usual
ones.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise, takewhile
from math import e, log, log2
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ortho._checks import Kernel, no_autocast, once
from ortho._cost import Cost
from ortho.attention.mechanism import CostedCall
from ortho.attention.sparse.tiling import Tiling, Work, gather_rows

# How many numbers, of scores or of gathered keys, are computed together: on a CPU they stay in its cache, on a GPU they
# fill it.
NUMBERS = {"cpu": 2**19, "cuda": 2**27}


def tiled_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tilings: Sequence[Tiling],
    *,
    scale: float,
    start: int = 0,
    attn_mask: Tensor | None = None,
) -> Tensor:
    """softmax(scale q k^T) v over the pairs of the tilings, (G, N, V), for q (G, N, K), k (G, M, K), v (G, M, V).

    The first query stands at position `start`, the first key at 0. A mask (G or 1, N or 1, M or 1) hides more pairs. A
    query without a pair gets zeros. The result cannot be differentiated twice.

    Scores of hidden pairs are computed with the others of their tile, and are hidden before anything else uses them.
    So keys after a query may be so large that their scores leave the range of the dtype.

    Gradients use the weights 2^(s - L). In float32 the logarithm L distinguishes tied scores from a single one as long
    as the scores are below 2^24.
    """
    with no_autocast(q):
        return _TiledAttention.apply(q, k, v, attn_mask, tuple(tilings), start, scale)


class _TiledAttention(Kernel):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        tilings: tuple[Tiling, ...],
        start: int,
        scale: float,
    ) -> Tensor:
        q = q * (scale * log2(e))
        o, L = _forward(_Blocked(q, k, v, mask, tilings[0], start))
        for tiling in tilings[1:]:
            o_next, L_next = _forward(_Blocked(q, k, v, mask, tiling, start))
            share = ((L - L_next) * log(2)).sigmoid()
            o = torch.lerp(o_next, o, share)  # between the two, however large their scores are
            L = torch.logaddexp2(L, L_next)
        o, L = _own_storage(o), _own_storage(L)
        ctx.tilings, ctx.start, ctx.scale = tilings, start, scale
        ctx.save_for_backward(q, k, v, mask, o, L)
        return o

    @staticmethod
    @once
    def backward(ctx: Any, d_o: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, mask, o, L = ctx.saved_tensors
        reach_qk = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        mean = (d_o * o).sum(-1, keepdim=True) if reach_qk else None  # of each row's weight gradients
        totals: list[Tensor | None] = [None, None, None]
        for tiling in ctx.tilings:
            blocked = _Blocked(q, k, v, mask, tiling, ctx.start)
            for number, gradient in enumerate(_backward(blocked, L, d_o, mean)):
                total = totals[number]
                totals[number] = gradient if total is None or gradient is None else total.add_(gradient)
        for total, factor in zip(totals[:2], (ctx.scale, log(2)), strict=True):
            if total is not None:
                total.mul_(factor)
        return (*totals, None, None, None, None)


def _forward(blocked: "_Blocked") -> tuple[Tensor, Tensor]:
    """The output of this tiling alone, (G, N, V), and L, (G, N, 1)."""
    lowest, tiny = _lowest(blocked.queries), torch.finfo(blocked.queries.dtype).tiny
    o, L = blocked.zeros(blocked.values.shape[-1]), blocked.zeros(1).fill_(lowest)
    for tiles in blocked.tiles():
        scores = blocked.scores(tiles)
        peak = scores.amax(-1, keepdim=True).clamp_(min=lowest)
        weights = scores.sub_(peak).exp2_()
        total = weights.sum(-1, keepdim=True)
        tiles.set_queries(o, torch.bmm(weights, tiles.keys(blocked.values)).div_(total.clamp(min=tiny)))
        tiles.set_queries(L, total.log2_().add_(peak).clamp_(min=lowest))
    return blocked.scatter_queries(o), blocked.scatter_queries(L, lowest)


def _backward(
    blocked: "_Blocked", L: Tensor, d_o: Tensor, mean: Tensor | None
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """What a tiling adds to the gradients of q, k and v; without `mean`, None for q and k."""
    L, d_o = blocked.gather_queries(L), blocked.gather_queries(d_o)
    mean = None if mean is None else blocked.gather_queries(mean)
    d_q, d_k, d_v = (x.new_zeros(x.shape) for x in (blocked.queries, blocked.keys, blocked.values))
    for tiles in blocked.tiles():
        d_rows = tiles.queries(d_o)
        weights = blocked.scores(tiles).sub_(tiles.queries(L)).exp2_()
        tiles.add_keys(d_v, torch.bmm(weights.mT, d_rows))
        if mean is None:
            continue
        d_scores = torch.bmm(d_rows, tiles.keys(blocked.values).mT).sub_(tiles.queries(mean)).mul_(weights)
        tiles.set_queries(d_q, torch.bmm(d_scores, tiles.keys(blocked.keys)))
        tiles.add_keys(d_k, torch.bmm(d_scores.mT, tiles.queries(blocked.queries)))
    d_values = blocked.scatter_keys(d_v)
    if mean is None:
        return None, None, d_values
    return blocked.scatter_queries(d_q), blocked.scatter_keys(d_k), d_values


def _own_storage(x: Tensor) -> Tensor:
    """x in storage of its own: a view would keep the rows beside it in memory, too."""
    return x if x.untyped_storage().nbytes() == x.nbytes else x.clone(memory_format=torch.contiguous_format)


def _lowest(x: Tensor) -> float:
    """The number used for the logarithm of 0: finite, and negligible beside any other logarithm."""
    return torch.finfo(x.dtype).min / 4


class _Blocked:
    """The operands of one tiling of a call, in blocks: queries (G, T, B, K), keys (G, S, B, K), values (G, S, B, V)."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, tiling: Tiling, start: int) -> None:
        self.tiling, self.mask, self.start = tiling, mask, start
        self.N, self.M, self.G = q.shape[1], k.shape[1], len(q)
        self.queries, self.keys, self.values = self.gather_queries(q), tiling.keys.gather(k), tiling.keys.gather(v)
        self._limits = q.new_tensor([-torch.inf, torch.inf])  # of scores: of hidden pairs, of allowed pairs
        self._last: tuple[slice, Tensor] | None = None  # the last tiles, and the limits of their scores

    def gather_queries(self, x: Tensor) -> Tensor:
        return self.tiling.queries.gather(x, self.start)

    def scatter_queries(self, x: Tensor, fill: float = 0.0) -> Tensor:
        return self.tiling.queries.scatter(x, self.N, self.start, fill)

    def scatter_keys(self, x: Tensor) -> Tensor:
        return self.tiling.keys.scatter(x, self.M)

    def tiles(self) -> Iterator["_Tiles"]:
        return _tiles(self.tiling, self.G, self.keys.shape[-1])

    def zeros(self, width: int) -> Tensor:
        """Zeros with a row for each place of a query, (G, T, B, width)."""
        return self.queries.new_zeros((*self.queries.shape[:3], width))

    def scores(self, tiles: "_Tiles") -> Tensor:
        """The scores, (g c, B, w B), times log2(e); -inf for pairs that are not allowed."""
        scores = torch.bmm(tiles.queries(self.queries), tiles.keys(self.keys).mT)
        # A product that leaves the range is infinite or NaN: NaN becomes +inf here, so that the limit can hide it.
        scores = scores.nan_to_num_(torch.inf, torch.inf, -torch.inf)
        tiles.split(scores).clamp_(max=self._limit(tiles))
        return scores

    def _limit(self, tiles: "_Tiles") -> Tensor:
        """The upper limits of scores: infinity for allowed pairs and -inf for others, (1 or g, 1 or c, B, w B). They
        are made once if all sequences share them."""
        if self.mask is not None and len(self.mask) > 1:
            return self._new_limit(tiles, self.mask[tiles.G])
        if tiles.blocks.dim() == 3 or not self.tiling.shared:
            return self._new_limit(tiles, self.mask)
        if self._last is None or self._last[0] != tiles.T:
            self._last = tiles.T, self._new_limit(tiles, self.mask)
        return self._last[1]

    def _new_limit(self, tiles: "_Tiles", mask: Tensor | None) -> Tensor:
        pairs = self.tiling.allowed_pairs(tiles.G, tiles.T, tiles.blocks, mask, self.start)
        return self._limits.index_select(0, pairs.flatten().int()).view(pairs.shape)


class _Tiles(NamedTuple):
    """Tiles that are computed together: c tiles of queries of g sequences, with w blocks of keys each."""

    G: slice  # of the sequences
    T: slice  # of the tiles of queries
    blocks: Tensor  # (c, w), none absent; or (g, c, w)
    run: tuple[int, int] | None  # (first, step): each tile reads w contiguous blocks, `step` after the tile before

    def queries(self, x: Tensor) -> Tensor:
        """The rows of x (G, T, B, ·) for these tiles' queries, (g c, B, ·)."""
        return x[self.G, self.T].flatten(0, 1)

    def set_queries(self, x: Tensor, rows: Tensor) -> None:
        """Write what `queries` reads."""
        x[self.G, self.T] = self.split(rows)

    def keys(self, x: Tensor) -> Tensor:
        """The blocks of x (G, S, B, ·) that each tile reads, (g c, w B, ·)."""
        if self.run is not None:
            return self._view(x, *self.run, self.blocks.shape[-1]).flatten(0, 1)
        index = self.blocks.clamp(min=0)
        found = gather_rows(x[self.G].flatten(2), index.flatten(-2))  # (g, c w, B ·)
        return found.unflatten(2, x.shape[2:]).unflatten(1, index.shape[-2:]).flatten(2, 3).flatten(0, 1)

    def add_keys(self, x: Tensor, rows: Tensor) -> None:
        """Add to what `keys` reads."""
        S, B = x.shape[1:3]
        if self.run is not None:
            (first, step), rows = self.run, self.split(rows)
            if step == 0:
                for some in rows.unbind(1):
                    self._view(x, first, 0, self.blocks.shape[-1])[:, 0].add_(some)
                return
            for number, some in enumerate(rows.split(step * B, 2)):  # pieces of `step` blocks do not overlap
                self._view(x, first + number * step, step, some.shape[2] // B).add_(some)
            return
        x = x[self.G].flatten(2)
        index = self.blocks.clamp(min=0).flatten(-2) + S * torch.arange(len(x), device=x.device)[:, None]
        x.flatten(0, 1).index_add_(0, index.flatten(), rows.reshape(index.numel(), -1))

    def split(self, rows: Tensor) -> Tensor:
        """(g c, ...) as (g, c, ...)."""
        return rows.unflatten(0, (-1, self.T.stop - self.T.start))

    def _view(self, x: Tensor, first: int, step: int, width: int) -> Tensor:
        """A view (g, c, w B, ·) of x (G, S, B, ·): `width` blocks for each tile. Those of the first tile
        begin at `first`, those of each next tile `step` further on."""
        x = x[self.G]
        size = (len(x), self.T.stop - self.T.start, width * x.shape[2], x.shape[3])
        stride = (x.stride(0), step * x.stride(1), x.stride(2), x.stride(3))
        return x.as_strided(size, stride, x.storage_offset() + first * x.stride(1))


def _tiles(tiling: Tiling, G: int, K: int) -> Iterator[_Tiles]:
    """All tiles of a tiling, for G sequences with keys of K numbers.

    Tiles that are computed together read equally many blocks. If all sequences share one table, none of these blocks is
    absent, so results do not depend on how many tiles are computed together.
    """
    B, C = tiling.queries.positions.shape[-1], tiling.keys.positions.shape[-1]
    for start, stop, width, run in _runs(tiling.table.cpu()):
        numbers = width * C * (B if run else max(B, K))  # in a tile
        together = max(1, NUMBERS["cuda" if tiling.table.is_cuda else "cpu"] // numbers)
        tiles = min(stop - start, together)
        sequences = together // tiles
        for t in range(start, stop, tiles):
            T = slice(t, min(stop, t + tiles))
            here = None if run is None else (run[0] + (t - start) * run[1], run[1])
            for g in range(0, G, sequences):
                some = slice(g, min(G, g + sequences))
                blocks = tiling.table[T] if tiling.table.dim() == 2 else tiling.table[some, T]
                yield _Tiles(some, T, blocks[..., :width], here)


_Run = tuple[int, int, int, tuple[int, int] | None]  # of tiles: start, stop, width of the table, and `_Tiles.run`


def _runs(table: Tensor) -> Iterator[_Run]:
    """Runs of a table's rows that hold equally many blocks, at least one. Unless that makes short pieces, runs are cut
    further, so that their blocks are contiguous and begin at equal distances."""
    if table.dim() == 3:
        if table.shape[2]:
            yield 0, table.shape[1], table.shape[2], None
        return
    widths = (table >= 0).sum(1)
    contiguous = ((table.diff() == 1) | (table[:, 1:] < 0)).all(1)
    stop = 0
    for (width, straight), rows in groupby(zip(widths.tolist(), contiguous.tolist(), strict=True)):
        start, stop = stop, stop + len(list(rows))
        if not width:
            continue
        pieces = list(_equal_steps(table[start:stop, 0].tolist(), start, width)) if straight else []
        yield from pieces if pieces and len(pieces) <= max(1, (stop - start) / 4) else [(start, stop, width, None)]


def _equal_steps(firsts: list[int], start: int, width: int) -> Iterator[_Run]:
    """Runs of tiles whose first blocks are at equal distances; the tiles from `start` on begin at blocks `firsts`."""
    steps = [b - a for a, b in pairwise(firsts)]
    t = 0
    while t < len(firsts):
        step = steps[t] if t < len(steps) else width
        stop = t + 1 + len(list(takewhile(step.__eq__, steps[t:])))
        yield start + t, start + stop, width, (firsts[t], step) if step >= 0 else None
        t = stop


def tiled_cost(call: CostedCall, work: Sequence[Work], last: Sequence[Work]) -> Cost:
    """The cost of `tiled_attention`, from the `work` of its tilings and from that of the tilings for the last query
    alone, `last`. The state is the keys and values."""
    G, N, K, V = call.sizes
    pairs = G * sum(w.pairs for w in work)
    return call.attending(pairs) + Cost(
        backward=2 * pairs * K,  # scores again
        decode=2 * G * (K + V) * sum(w.pairs for w in last),
        state_bytes=call.itemsize * G * N * (K + V),
    )
