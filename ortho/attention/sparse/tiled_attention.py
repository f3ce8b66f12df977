r"""Softmax attention over the pairs of some block masks: a tile of queries reads its blocks of keys, and nothing else.

As in Dao et al. 2022 (arXiv:2205.14135), each block mask is normalised by itself and merged with the others by the
logarithms $L_p$ of the sums of its exponentials,

$$o = \sum_p 2^{L_p - L}\, o_p, \qquad L = \log_2 \sum_p 2^{L_p},$$

and the backward pass computes the weights $2^{s - L}$ again. So what a call keeps is linear in the tokens. On a CPU
powers of 2 take less time than those of e, above all where they vanish: the scores s are $\log_2 e$ times the usual
ones.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby
from math import e, log, log2
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from ortho.attention.backward import once
from ortho.attention.call import no_autocast
from ortho.attention.sparse.block_mask import BlockMask

# How many numbers, of scores or of gathered keys, are computed together: on a CPU they stay in its cache, on a GPU they
# fill it.
NUMBERS = {"cpu": 2**19, "cuda": 2**27}


def tiled_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_masks: Sequence[BlockMask],
    *,
    scale: float,
    start: int = 0,
    attn_mask: Tensor | None = None,
) -> Tensor:
    """softmax(scale q k^T) v over the pairs of the block masks, (G, N, V), for q (G, N, K), k (G, M, K), v (G, M, V).

    The first query stands at position `start`, the first key at 0. A mask (G or 1, N or 1, M or 1) hides more pairs. A
    query without a pair gets zeros. The result cannot be differentiated twice.

    Scores of hidden pairs are computed with the others of their tile, and are hidden before anything else uses them.
    So keys after a query may be so large that their scores leave the range of the dtype.

    Gradients use the weights 2^(s - L). In float32 the logarithm L distinguishes tied scores from a single one as long
    as the scores are below 2^24.
    """
    with no_autocast(q):
        return _TiledAttention.apply(q, k, v, attn_mask, tuple(block_masks), start, scale)


class _TiledAttention(Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        block_masks: tuple[BlockMask, ...],
        start: int,
        scale: float,
    ) -> Tensor:
        q = q * (scale * log2(e))
        o, L = _forward(_Blocked(q, k, v, mask, block_masks[0], start))
        for one in block_masks[1:]:
            o_next, L_next = _forward(_Blocked(q, k, v, mask, one, start))
            share = ((L - L_next) * log(2)).sigmoid()
            o = torch.lerp(o_next, o, share)  # between the two, however large their scores are
            L = torch.logaddexp2(L, L_next)
        ctx.block_masks, ctx.start, ctx.scale = block_masks, start, scale
        ctx.save_for_backward(q, k, v, mask, o, L)
        return o

    @staticmethod
    @once
    def backward(ctx: Any, d_o: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, mask, o, L = ctx.saved_tensors
        reach_qk = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        mean = (d_o * o).sum(-1, keepdim=True) if reach_qk else None  # of each row's weight gradients
        d_v, *d_qk = _backward(_Blocked(q, k, v, mask, ctx.block_masks[0], ctx.start), L, d_o, mean)
        for one in ctx.block_masks[1:]:
            more = _backward(_Blocked(q, k, v, mask, one, ctx.start), L, d_o, mean)
            for total, part in zip((d_v, *d_qk), more, strict=True):
                total.add_(part)
        gradients = (d_qk[0].mul_(ctx.scale), d_qk[1].mul_(log(2))) if reach_qk else (None, None)
        return (*gradients, d_v, None, None, None, None)


def _forward(blocked: "_Blocked") -> tuple[Tensor, Tensor]:
    """The output of this block mask alone, (G, N, V), and L, (G, N, 1)."""
    # For the logarithm of 0 a number that is finite, and negligible beside any other logarithm.
    lowest, tiny = torch.finfo(blocked.q.dtype).min / 4, torch.finfo(blocked.q.dtype).tiny
    o, L = blocked.zeros(blocked.v.shape[-1]), blocked.zeros(1).fill_(lowest)
    for tiles in blocked.tiles():
        scores = blocked.scores(tiles)
        peak = scores.amax(-1, keepdim=True).clamp_(min=lowest)
        weights = scores.sub_(peak).exp2_()
        total = weights.sum(-1, keepdim=True)
        tiles.set_queries(o, torch.bmm(weights, tiles.keys(blocked.v)).div_(total.clamp(min=tiny)))
        tiles.set_queries(L, total.log2_().add_(peak).clamp_(min=lowest))
    return blocked.scatter_queries(o), blocked.scatter_queries(L, lowest)


def _backward(blocked: "_Blocked", L: Tensor, d_o: Tensor, mean: Tensor | None) -> tuple[Tensor, ...]:
    """What a block mask contributes to the gradients of v, q and k; without `mean`, to that of v alone."""
    L, d_o = blocked.gather_queries(L), blocked.gather_queries(d_o)
    mean = None if mean is None else blocked.gather_queries(mean)
    d_queries, d_keys, d_values = (x.new_zeros(x.shape) for x in (blocked.q, blocked.k, blocked.v))
    for tiles in blocked.tiles():
        d_rows = tiles.queries(d_o)
        weights = blocked.scores(tiles).sub_(tiles.queries(L)).exp2_()
        tiles.add_keys(d_values, torch.bmm(weights.mT, d_rows))
        if mean is None:
            continue
        d_scores = torch.bmm(d_rows, tiles.keys(blocked.v).mT).sub_(tiles.queries(mean)).mul_(weights)
        tiles.set_queries(d_queries, torch.bmm(d_scores, tiles.keys(blocked.k)))
        tiles.add_keys(d_keys, torch.bmm(d_scores.mT, tiles.queries(blocked.q)))
    d_v = blocked.scatter_keys(d_values)
    return (d_v,) if mean is None else (d_v, blocked.scatter_queries(d_queries), blocked.scatter_keys(d_keys))


class _Blocked:
    """The operands of one block mask, in blocks: q (G, T, B, K), k (G, S, C, K), v (G, S, C, V)."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, of: BlockMask, start: int) -> None:
        self.of, self.mask, self.start, self.N, self.M = of, mask, start, q.shape[1], k.shape[1]
        self.q, self.k, self.v = self.gather_queries(q), _gather(k, of.keys), _gather(v, of.keys)
        self._last: tuple[slice, Tensor] | None = None  # the last tiles, and the limits of their scores

    def gather_queries(self, x: Tensor) -> Tensor:
        return _gather(x, self.of.queries, self.start)

    def scatter_queries(self, x: Tensor, fill: float = 0.0) -> Tensor:
        return _scatter(x, self.of.queries, self.N, self.start, fill)

    def scatter_keys(self, x: Tensor) -> Tensor:
        return _scatter(x, self.of.keys, self.M)

    def tiles(self) -> Iterator["_Tiles"]:
        return _tiles(self.of, len(self.k), self.k.shape[-1])

    def zeros(self, width: int) -> Tensor:
        """Zeros with a row for each place of a query, (G, T, B, width)."""
        return self.q.new_zeros((*self.q.shape[:3], width))

    def scores(self, tiles: "_Tiles") -> Tensor:
        """The scores, (g c, B, w C), times log2(e); -inf for pairs that are not allowed."""
        scores = torch.bmm(tiles.queries(self.q), tiles.keys(self.k).mT)
        # On a CPU a limit takes a twentieth of the time of `masked_fill_`. A product that leaves the range is infinite
        # or NaN: NaN becomes +inf here, so that the limit can hide it.
        scores.nan_to_num_(torch.inf, torch.inf, -torch.inf)
        tiles.split(scores).clamp_(max=self._limit(tiles))
        return scores

    def _limit(self, tiles: "_Tiles") -> Tensor:
        """-inf for pairs to hide, inf for others, (1 or g, c, B, w C); found once if all sequences share them."""
        shared = self.mask is None or len(self.mask) == 1
        if not shared or self._last is None or self._last[0] != tiles.T:
            mask = self.mask if shared or self.mask is None else self.mask[tiles.G]
            hidden = self.of.hidden(tiles.T, tiles.blocks, mask, self.start)
            self._last = tiles.T, torch.where(hidden, -torch.inf, torch.inf).to(self.q.dtype)
        return self._last[1]


def _in_order(positions: Tensor, n: int, start: int) -> bool:
    """Whether these are the tokens from `start` on, all n of them, one after the other."""
    if positions.numel() != n:
        return False
    return torch.equal(positions.flatten(), torch.arange(start, start + n, device=positions.device))


def _gather(x: Tensor, positions: Tensor, start: int = 0) -> Tensor:
    """The rows of x (G, n, ·), which begin at position `start`, in blocks (G, S, B, ·). A place without a token holds
    another token's row."""
    if _in_order(positions, x.shape[1], start):
        return x.unflatten(1, positions.shape)
    return x.index_select(1, (positions.flatten() - start).clamp(min=0)).unflatten(1, positions.shape)


def _scatter(blocks: Tensor, positions: Tensor, n: int, start: int = 0, fill: float = 0.0) -> Tensor:
    """The inverse of `_gather`: (G, n, ·) with the rows of blocks (G, S, B, ·) at their tokens, `fill` elsewhere."""
    rows = blocks.flatten(1, 2)
    if _in_order(positions, n, start):
        return rows
    tokens = torch.where(positions < 0, n, positions - start).flatten()  # absent ones share one more row
    return rows.new_full((len(rows), n + 1, rows.shape[2]), fill).index_copy_(1, tokens, rows)[:, :n]


class _Tiles(NamedTuple):
    """Tiles that are computed together: c tiles of queries of g sequences, with w blocks of keys each."""

    G: slice  # of the sequences
    T: slice  # of the tiles of queries
    blocks: Tensor  # (c, w), none absent
    run: tuple[int, int] | None  # (first, step) if each tile reads w blocks in a row, `step` after the tile before it

    def queries(self, x: Tensor) -> Tensor:
        """The rows of x (G, T, B, ·) for these tiles' queries, (g c, B, ·)."""
        return x[self.G, self.T].flatten(0, 1)

    def set_queries(self, x: Tensor, rows: Tensor) -> None:
        """Write what `queries` reads."""
        x[self.G, self.T] = self.split(rows)

    def keys(self, x: Tensor) -> Tensor:
        """The blocks of x (G, S, C, ·) that each tile reads, (g c, w C, ·); at equal distances without a copy, which a
        window would make of every key for each of the tiles that read it."""
        x, (c, w) = x[self.G], self.blocks.shape
        if self.run is None:
            return x.index_select(1, self.blocks.flatten()).view(-1, w * x.shape[2], x.shape[3])
        first, step = self.run
        size, stride = (len(x), c, w * x.shape[2], x.shape[3]), (x.stride(0), step * x.stride(1), *x.stride()[2:])
        return x[:, first:].as_strided(size, stride).flatten(0, 1)

    def add_keys(self, x: Tensor, rows: Tensor) -> None:
        """Add to what `keys` reads."""
        x = x[self.G]
        x.index_add_(1, self.blocks.flatten(), rows.reshape(len(x), -1, *x.shape[2:]))

    def split(self, rows: Tensor) -> Tensor:
        """(g c, ...) as (g, c, ...)."""
        return rows.unflatten(0, (-1, len(self.blocks)))


def _tiles(of: BlockMask, G: int, K: int) -> Iterator[_Tiles]:
    """All tiles of a block mask, for G sequences with keys of K numbers.

    Tiles that are computed together read equally many blocks, at least one, and none of which is absent, so results do
    not depend on how many tiles are computed together.
    """
    most, stop = NUMBERS["cuda" if of.table.is_cuda else "cpu"], 0
    for width, rows in groupby((of.table >= 0).sum(1).tolist()):
        start, stop = stop, stop + len(list(rows))
        if not width:
            continue
        numbers = width * of.keys.shape[1] * max(of.queries.shape[1], K)  # in a tile
        tiles = min(stop - start, max(1, most // numbers))
        sequences = max(1, most // (numbers * tiles))
        for t in range(start, stop, tiles):
            T = slice(t, min(stop, t + tiles))
            blocks = of.table[T, :width]
            run = _run(blocks)
            for g in range(0, G, sequences):
                yield _Tiles(slice(g, min(G, g + sequences)), T, blocks, run)


def _run(blocks: Tensor) -> tuple[int, int] | None:
    """(the first block, by how much each row exceeds the one before it) of a table (c, w) whose rows are consecutive
    blocks at one distance; None for other tables."""
    first, *second = blocks[:2, 0].tolist()
    step = second[0] - first if second else 0
    rows, columns = (torch.arange(size, device=blocks.device) for size in blocks.shape)
    return (first, step) if step >= 0 and torch.equal(blocks, first + step * rows[:, None] + columns) else None
