"""Linear attention's two kernels, with their gradients written out: all keys at once, and causal in chunks.

Autograd on the formulas gives the same gradients in twice the time: its sums of partial gradients, its slices and its
products with a column of ones make a dozen more passes over the sequence. Neither kernel can be differentiated twice.

Both take the features of queries q (..., N, m) and keys k (..., M, m), values v (..., M, V), and the sums over earlier
keys, S (..., m, V) and z (..., m). Both return o (..., N, V), the row totals (..., N, 1), which have no gradient of
their own, and the sums after the last key. A row without weight gives 0.
"""

from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ortho._checks import Kernel, once
from ortho.attention.chunking import flat, sequences, tiles


class AllAtOnce(Kernel):
    r"""$o_i = q_i^T S / q_i^T z$, where S and z sum over all keys, times their scales (..., M, 1) if given."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, S: Tensor, z: Tensor, scale: Tensor | None
    ) -> tuple[Tensor, ...]:
        lead, scale = q.shape[:-2], None if scale is None else scale.reshape(-1, *scale.shape[-2:])
        q, k, v = (x.reshape(-1, *x.shape[-2:]) for x in (q, k, v))  # (G, N or M, ·)
        (G, N, m), V = q.shape, v.shape[-1]
        S, z = S.reshape(G, m, V).clone(), z.reshape(G, m, 1).clone()
        o, totals = v.new_empty(G, N, V), v.new_empty(G, N, 1)
        for g in sequences(q, k):
            S[g].baddbmm_(k[g].mT, v[g] if scale is None else v[g] * scale[g])
            if scale is None:
                z[g].add_(k[g].sum(-2)[..., None])
            else:
                z[g].baddbmm_(k[g].mT, scale[g])
            torch.bmm(q[g], z[g], out=totals[g])
            torch.bmm(q[g], S[g], out=o[g]).div_(divisors(totals[g]))
        ctx.save_for_backward(q, k, v, S, z, scale, o, totals)
        ctx.lead = lead
        o, totals = o.view(*lead, N, V), totals.view(*lead, N, 1)
        ctx.mark_non_differentiable(totals)
        return o, totals, S.view(*lead, m, V), z.view(*lead, m)

    @staticmethod
    @once
    def backward(ctx: Any, d_o: Tensor, _: Tensor, d_S: Tensor, d_z: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, S, z, scale, o, totals = ctx.saved_tensors
        d_o = d_o.reshape(o.shape)
        d_S, d_z = d_S.reshape(S.shape).clone(), d_z.reshape(z.shape).clone()
        needed = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        d_q, d_k = (torch.empty_like(q), torch.empty_like(k)) if needed else (None, None)
        d_v = torch.empty_like(v)
        for g in sequences(q, k):
            d_numerator, d_total = torch.empty_like(o[g]), torch.empty_like(totals[g])
            _through_division(d_o[g], o[g], totals[g], out=(d_numerator, d_total))
            d_S[g].baddbmm_(q[g].mT, d_numerator)
            d_z[g].baddbmm_(q[g].mT, d_total)
            torch.bmm(k[g], d_S[g], out=d_v[g])
            if scale is not None:
                d_v[g].mul_(scale[g])
            if d_q is None or d_k is None:
                continue
            torch.bmm(d_numerator, S[g].mT, out=d_q[g]).addcmul_(d_total, z[g].mT)
            if scale is None:
                torch.bmm(v[g], d_S[g].mT, out=d_k[g]).add_(d_z[g].mT)
            else:
                torch.bmm(v[g] * scale[g], d_S[g].mT, out=d_k[g]).addcmul_(scale[g], d_z[g].mT)
        gradients = (x if x is None else x.view(*ctx.lead, *x.shape[-2:]) for x in (d_q, d_k, d_v, d_S))
        return *gradients, d_z.view(*ctx.lead, -1), None


class Chunked(Kernel):
    r"""Query i reads keys 0..i: those of its own chunk by weights, those of earlier chunks through the memory S and z.

    `s`, the logarithms of the keys' scales (..., N), and `peak`, the logarithm of the memory's scale (...), may be
    None. Every exponent is relative to the largest s up to the row (or up to the end of the chunk, for what later
    chunks read). So it is at most 0, and nothing that a row reads depends on later keys.
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
        o, totals, weights = v.new_empty(G, n, C, V), v.new_empty(G, n, C, 1), v.new_empty(G, n, C, C)
        memory_S, memory_z = v.new_empty(G, n, m, V), v.new_empty(G, n, m, 1)
        scales = () if s is None or peak is None else _scales(s.reshape(G, n, C), peak.reshape(G))
        for tile in tiles(G, n, q.is_cuda):
            kt, vt, St, zt = flat(tile, k, v, memory_S, memory_z)
            if scales:
                (to_end,) = flat(tile, scales.to_end)
                torch.bmm(kt.mT, vt * to_end, out=St)
                torch.bmm(kt.mT, to_end, out=zt)
            else:
                torch.bmm(kt.mT, vt, out=St)
                torch.sum(kt, -2, out=zt[..., 0])
        # From here on, memory_S and memory_z are what each chunk's queries read: the memory of the chunks before it.
        S = _accumulate(S.reshape(G, m, V), memory_S, scales)
        z = _accumulate(z.reshape(G, m, 1), memory_z, scales)
        for tile in tiles(G, n, q.is_cuda):
            qt, kt, vt, ot, tt, wt, St, zt = flat(tile, q, k, v, o, totals, weights, memory_S, memory_z)
            torch.bmm(qt, kt.mT, out=wt)
            torch.bmm(qt, St, out=ot)
            torch.bmm(qt, zt, out=tt)
            if scales:
                within, from_start = flat(tile, scales.within, scales.from_start)
                wt.mul_(within)
                ot.mul_(from_start)
                tt.mul_(from_start)
            else:
                wt.tril_()
            tt.add_(wt.sum(-1, keepdim=True))
            ot.baddbmm_(wt, vt).div_(divisors(tt))
        ctx.save_for_backward(q, k, v, o, totals, weights, memory_S, memory_z, *scales)
        ctx.lead = lead
        o, totals = o.view(*lead, n * C, V), totals.view(*lead, n * C, 1)
        ctx.mark_non_differentiable(totals)
        return o, totals, S.view(*lead, m, V), z.view(*lead, m)

    @staticmethod
    @once
    def backward(ctx: Any, d_o: Tensor, _: Tensor, d_S: Tensor, d_z: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, o, totals, weights, memory_S, memory_z, *saved = ctx.saved_tensors
        scales = _Scales(*saved) if saved else ()
        (G, n, C, m), V = q.shape, v.shape[-1]
        d_o, d_numerators, d_totals = d_o.reshape(G, n, C, V), torch.empty_like(o), torch.empty_like(totals)
        memory_dS, memory_dz = torch.empty_like(memory_S), torch.empty_like(memory_z)
        for tile in tiles(G, n, q.is_cuda):
            qt, gt, ot, tt, nt, dt, St, zt = flat(tile, q, d_o, o, totals, d_numerators, d_totals, memory_dS, memory_dz)
            _through_division(gt, ot, tt, out=(nt, dt))
            if scales:
                (from_start,) = flat(tile, scales.from_start)
                nt, dt = nt * from_start, dt * from_start
            torch.bmm(qt.mT, nt, out=St)
            torch.bmm(qt.mT, dt, out=zt)
        # From here on, memory_dS and memory_dz are the gradients of the memory after each chunk.
        d_S = _accumulate(d_S.reshape(G, m, V), memory_dS, scales, backward=True)
        d_z = _accumulate(d_z.reshape(G, m, 1), memory_dz, scales, backward=True)
        d_v = torch.empty_like(v)
        needed = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        d_q, d_k = (torch.empty_like(q), torch.empty_like(k)) if needed else (None, None)
        for tile in tiles(G, n, q.is_cuda):
            kt, vt, wt, nt, dSt, dvt = flat(tile, k, v, weights, d_numerators, memory_dS, d_v)
            torch.bmm(kt, dSt, out=dvt)
            if scales:
                within, from_start, to_end = flat(tile, scales.within, scales.from_start, scales.to_end)
                dvt.mul_(to_end)
            dvt.baddbmm_(wt.mT, nt)
            if d_q is None or d_k is None:
                continue
            qt, dt, St, zt, dzt, dqt, dkt = flat(tile, q, d_totals, memory_S, memory_z, memory_dz, d_q, d_k)
            d_w = torch.baddbmm(dt, nt, vt.mT)
            if scales:
                d_w.mul_(within)
                torch.bmm(nt * from_start, St.mT, out=dqt).addcmul_(dt * from_start, zt.mT)
                torch.bmm(vt * to_end, dSt.mT, out=dkt).addcmul_(to_end, dzt.mT)
            else:
                d_w.tril_()
                torch.bmm(nt, St.mT, out=dqt).addcmul_(dt, zt.mT)
                torch.bmm(vt, dSt.mT, out=dkt).add_(dzt.mT)
            dqt.baddbmm_(d_w, kt)
            dkt.baddbmm_(d_w.mT, qt)
        gradients = (x if x is None else x.view(*ctx.lead, n * C, x.shape[-1]) for x in (d_q, d_k, d_v))
        return *gradients, d_S.view(*ctx.lead, m, V), d_z.view(*ctx.lead, m), None, None, None


def divisors(totals: Tensor) -> Tensor:
    """What to divide rows by: their totals, but infinity for rows without weight, which become 0, or with so little
    that a gradient divided by it would leave the range of the dtype."""
    limits = torch.finfo(totals.dtype)
    return totals.masked_fill(totals.detach().abs() < limits.tiny / limits.eps, inf)


def _through_division(d_o: Tensor, o: Tensor, totals: Tensor, out: tuple[Tensor, Tensor]) -> None:
    """Write to `out` the gradients of numerators and totals, given the gradient of their quotient o."""
    torch.div(d_o, divisors(totals), out=out[0])
    torch.sum(out[0] * o, -1, keepdim=True, out=out[1]).neg_()


class _Scales(NamedTuple):
    """Factors of the weights within a chunk, of what a row reads from earlier chunks, of what a key adds to the memory
    after its chunk, and of the memory from chunk to chunk."""

    within: Tensor  # (G, n, C, C), 0 for the future
    from_start: Tensor  # (G, n, C, 1)
    to_end: Tensor  # (G, n, C, 1)
    fades: Tensor  # (G, n, 1, 1)


def _scales(s: Tensor, peak: Tensor) -> _Scales:
    n, C = s.shape[1:]
    peaks = torch.cat([peak[:, None], s.flatten(1)], -1).cummax(-1).values  # (G, 1 + n C)
    start, end, row = peaks[:, :-1:C], peaks[:, C::C], peaks[:, 1:].unflatten(-1, (n, C))
    future = torch.ones(C, C, dtype=torch.bool, device=s.device).triu(1)
    within = (s[..., None, :] - row[..., None]).masked_fill_(future, -inf).exp_()
    from_start, to_end = (start[..., None] - row).exp_(), (s - end[..., None]).exp_()
    return _Scales(within, from_start[..., None], to_end[..., None], (start - end).exp_()[..., None, None])


def _accumulate(memory: Tensor, chunks: Tensor, scales: _Scales | tuple[()], *, backward: bool = False) -> Tensor:
    """The memory (G, ...) after all chunks; `chunks` (G, n, ...), what each adds, becomes the memory before each.

    In a `backward` pass these are gradients: the result is the gradient of the memory before all chunks, and `chunks`,
    the gradients of what each chunk reads, become the gradients of what each adds.
    """
    steps = range(chunks.shape[1])
    for i in reversed(steps) if backward else steps:
        after = (memory * scales.fades[:, i] if scales else memory) + chunks[:, i]
        chunks[:, i] = memory
        memory = after
    return memory
