r"""The two kernels of `factored`, with their gradients written out: all keys at once, and causal in chunks.

Autograd on the formulas gives the same gradients at twice the time: its sums of partial gradients, its slices and its
products with a column of ones pass over the sequence a dozen times more. Neither kernel can be differentiated twice.

Both take features of queries q (..., N, m), of keys k (..., M, m), values v (..., M, V), and the memory of earlier keys,
S (..., m, V) and z (..., m); both return $o$ (..., N, V), the row totals (..., N, 1), which have no gradient of their
own, and the memory after the last key. A row without weight is 0.
"""

from collections.abc import Iterator
from math import inf
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

# Within a chunk of C the weights are materialised, N C numbers; from chunk to chunk S is carried, N m V / C numbers.
# The two are equal at C = sqrt(m V), which is 64 for heads of width 64; at m = 256, 64 was the fastest as well.
CHUNK = 64
# Chunks that are worked on together, on a CPU: their operands, some MB, stay in its cache from one product to the next.
TILE = 32


def chunks(length: int, chunk: int) -> tuple[int, int]:
    """The width of the fewest, equally wide chunks of at most `chunk`, and how much longer than `length` they are."""
    number = -(-length // chunk)
    width = -(-length // number)
    return width, number * width - length


class AllAtOnce(Function):
    r"""$o_i = q_i^T S / q_i^T z$ for the S and z that hold all keys."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, S: Tensor, z: Tensor) -> tuple[Tensor, ...]:
        S = S + k.mT @ v
        z = z + k.sum(-2)
        total = q @ z[..., None]
        divisor = divisors(total)
        o = (q @ S).div_(divisor)
        ctx.save_for_backward(q, k, v, S, z, o, divisor)
        ctx.mark_non_differentiable(total)
        return o, total, S, z

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_o: Tensor, _: Tensor, d_S: Tensor, d_z: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, S, z, o, divisor = ctx.saved_tensors
        d_o, d_total = _through_division(d_o, o, divisor)
        d_S = d_S + q.mT @ d_o
        d_z = d_z + (q.mT @ d_total)[..., 0]
        d_q = d_k = None
        if ctx.needs_input_grad[0]:
            d_q = (d_o @ S.mT).addcmul_(d_total, z[..., None, :])
        if ctx.needs_input_grad[1]:
            d_k = (v @ d_S.mT).add_(d_z[..., None, :])
        return d_q, d_k, k @ d_S, d_S, d_z


class Chunked(Function):
    r"""Query i reads keys 0..i: in its own chunk by weights, in those before by their memory.

    `s`, the logarithms of the keys' scales (..., N), and `peak`, that of the memory (...), may be None. Every exponent
    is relative to the largest s up to the row (or up to the end of the chunk, for what later chunks read), so that it is
    at most 0 and nothing that a row reads depends on keys after it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        S: Tensor,
        z: Tensor,
        s: Tensor | None,
        peak: Tensor | None,
        width: int,
    ) -> tuple[Tensor, ...]:
        lead = q.shape[:-2]
        q, k, v = (x.reshape(-1, x.shape[-2] // width, width, x.shape[-1]) for x in (q, k, v))  # (G, n, C, ·)
        (G, n, C, m), V = q.shape, v.shape[-1]
        S, z = S.reshape(G, m, V).clone(), z.reshape(G, m, 1).clone()
        o, totals, weights = v.new_empty(G, n, C, V), v.new_empty(G, n, C, 1), v.new_empty(G, n, C, C)
        before_S, before_z = v.new_empty(G, n, m, V), v.new_empty(G, n, m, 1)
        scales = () if s is None or peak is None else _scales(s.reshape(G, n, C), peak.reshape(G))
        for tile in _tiles(G, n, q.is_cuda):
            qt, kt, vt, ot, tt, wt, St, zt = _flat(tile, q, k, v, o, totals, weights, before_S, before_z)
            torch.bmm(qt, kt.mT, out=wt)
            if scales:
                within, from_start, to_end = _flat(tile, *scales[:3])
                wt.mul_(within)
                new_S, new_z = kt.mT @ (vt * to_end), kt.mT @ to_end
            else:
                wt.tril_()
                new_S, new_z = kt.mT @ vt, kt.sum(-2)[..., None]
            fades = scales[3][tile] if scales else None
            _accumulate(S[tile[0]], new_S, fades, before_S[tile])
            _accumulate(z[tile[0]], new_z, fades, before_z[tile])
            torch.bmm(qt, St, out=ot)
            torch.bmm(qt, zt, out=tt)
            if scales:
                ot.mul_(from_start)
                tt.mul_(from_start)
            tt.add_(wt.sum(-1, keepdim=True))
            ot.baddbmm_(wt, vt).div_(divisors(tt))
        ctx.save_for_backward(q, k, v, o, totals, weights, before_S, before_z, *scales)
        ctx.lead = lead
        o, totals = o.view(*lead, n * C, V), totals.view(*lead, n * C, 1)
        ctx.mark_non_differentiable(totals)
        return o, totals, S.view(*lead, m, V), z.view(*lead, m)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_o: Tensor, _: Tensor, d_S: Tensor, d_z: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, o, totals, weights, before_S, before_z, *scales = ctx.saved_tensors
        (G, n, C, m), V = q.shape, v.shape[-1]
        d_o = d_o.reshape(G, n, C, V)
        d_S, d_z = d_S.reshape(G, m, V).clone(), d_z.reshape(G, m, 1).clone()  # of the memory after the tile
        needed = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        d_q, d_k = (torch.empty_like(q), torch.empty_like(k)) if needed else (None, None)
        d_v = torch.empty_like(v)
        for tile in reversed(list(_tiles(G, n, q.is_cuda))):
            qt, kt, vt, ot, tt, wt, gt, dvt = _flat(tile, q, k, v, o, totals, weights, d_o, d_v)
            gt, d_total = _through_division(gt, ot, divisors(tt))
            within, from_start, to_end = _flat(tile, *scales[:3]) if scales else (None, None, None)
            read, read_total = (gt * from_start, d_total * from_start) if scales else (gt, d_total)
            fades = scales[3][tile] if scales else None
            after_S = _accumulate_back(d_S[tile[0]], qt.mT @ read, fades)  # of the memory after each chunk
            after_z = _accumulate_back(d_z[tile[0]], qt.mT @ read_total, fades)
            torch.bmm(kt, after_S, out=dvt)
            if scales:
                dvt.mul_(to_end)
            dvt.baddbmm_(wt.mT, gt)
            if not needed:
                continue
            St, zt, dqt, dkt = _flat(tile, before_S, before_z, d_q, d_k)
            d_w = torch.baddbmm(d_total, gt, vt.mT)
            d_w = d_w.mul_(within) if scales else d_w.tril_()
            torch.bmm(read, St.mT, out=dqt).addcmul_(read_total, zt.mT).baddbmm_(d_w, kt)
            torch.bmm(vt, after_S.mT, out=dkt).add_(after_z.mT)
            if scales:
                dkt.mul_(to_end)
            dkt.baddbmm_(d_w.mT, qt)
        d_q, d_k, d_v = (x if x is None else x.view(*ctx.lead, n * C, x.shape[-1]) for x in (d_q, d_k, d_v))
        return d_q, d_k, d_v, d_S.view(*ctx.lead, m, V), d_z.view(*ctx.lead, m), None, None, None


def divisors(totals: Tensor) -> Tensor:
    """The totals, but infinity for those of rows without weight, which become 0."""
    return totals.masked_fill(totals.detach().abs() < torch.finfo(totals.dtype).tiny, inf)


def _through_division(d_o: Tensor, o: Tensor, divisor: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of numerators and totals, from that of their quotient o."""
    d_o = d_o / divisor
    return d_o, (d_o * o).sum(-1, keepdim=True).neg_()


def _scales(s: Tensor, peak: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What multiplies weights within a chunk (G, n, C, C), what a row reads from before it (G, n, C, 1), what a key adds
    to the memory after it (G, n, C, 1), and a memory from chunk to chunk (G, n, 1, 1)."""
    G, n, C = s.shape
    peaks = torch.cat([peak[:, None], s.flatten(1)], -1).cummax(-1).values  # (G, 1 + n C)
    start, end, row = peaks[:, :-1:C], peaks[:, C::C], peaks[:, 1:].unflatten(-1, (n, C))
    future = torch.ones(C, C, dtype=torch.bool, device=s.device).triu(1)
    within = (s[..., None, :] - row[..., None]).masked_fill_(future, -inf).exp_()
    from_start, to_end = (start[..., None] - row).exp_(), (s - end[..., None]).exp_()
    return within, from_start[..., None], to_end[..., None], (start - end).exp_()[..., None, None]


def _tiles(G: int, n: int, whole: bool) -> Iterator[tuple[slice, slice]]:
    """(sequences, chunks) of about `TILE` chunks each, contiguous in (G, n, ...); or all of them in one."""
    if whole or G * n <= TILE:
        yield slice(0, G), slice(0, n)
    elif n <= TILE:
        for start in range(0, G, TILE // n):
            yield slice(start, min(G, start + TILE // n)), slice(0, n)
    else:
        for sequence in range(G):
            for start in range(0, n, TILE):
                yield slice(sequence, sequence + 1), slice(start, min(n, start + TILE))


def _flat(tile: tuple[slice, slice], *tensors: Tensor) -> list[Tensor]:
    """Views of the tile with sequences and chunks in one axis."""
    return [x[tile].flatten(0, 1) for x in tensors]


def _accumulate(memory: Tensor, new: Tensor, fades: Tensor | None, before: Tensor) -> None:
    """Add what each chunk brings to the memory (g, ...), in place, and keep what it was `before` each (g, c, ...)."""
    for i, chunk in enumerate(new.view_as(before).unbind(1)):
        before[:, i] = memory
        if fades is not None:
            memory.mul_(fades[:, i])
        memory.add_(chunk)


def _accumulate_back(d_memory: Tensor, read: Tensor, fades: Tensor | None) -> Tensor:
    """The gradients of the memory after each chunk (g c, ...); `d_memory` (g, ...) moves from the last to the first."""
    read = read.unflatten(0, (len(d_memory), -1))
    after = torch.empty_like(read)
    for i in reversed(range(read.shape[1])):
        after[:, i] = d_memory
        if fades is not None:
            d_memory.mul_(fades[:, i])
        d_memory.add_(read[:, i])
    return after.flatten(0, 1)
