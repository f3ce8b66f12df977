r"""Linear attention: a kernel that factorises, $\kappa(q, k) = \phi(q)^T \phi(k)$, in place of softmax's.

$o_i = \sum_j \kappa(q_i, k_j)\, v_j / \sum_j \kappa(q_i, k_j)$. The sums over keys, $S = \sum_j \phi(k_j) v_j^T$ and
$z = \sum_j \phi(k_j)$, are the same for every query, so that nothing need be N x M (Katharopoulos et al. 2020,
arXiv:2006.16236, section 3.2; causal: section 3.3, here in chunks). The attention does not know its kernel: that is a
`FeatureMap`, and a mechanism is these functions with a map of its own.
"""

from collections.abc import Callable
from functools import partial
from math import inf, nan
from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad

from ortho import _checks
from ortho._autocast import no_autocast
from ortho._checks import checked
from ortho._typing import Bool, Float, Size, State, Tensor
from ortho.attention.chunking import CHUNK, chunks, default_chunk, flat, pad_tokens, sequences, tiles
from ortho.attention.linear.feature_maps import CosFormer, EluPlusOne, Exp, FeatureMap, Features, Relu, Taylor
from ortho.attention.mechanism import AttentionCost, Mechanism
from ortho.attention.operands import blocked_pairs, hidden_keys, known_tokens, with_past, working
from ortho.attention.transforms import Kernel, once


def kernel_weights(
    feature_map: FeatureMap,
    q: Float[Tensor, "*batch N K"],
    k: Float[Tensor, "*batch M K"],
    *,
    is_causal: bool = False,
    attn_mask: Bool[Tensor, "..."] | None = None,
    scale: float | None = None,
    q_start: int = 0,
    same_tokens: bool = False,
) -> Float[Tensor, "*batch N M"]:
    r"""The weights $\kappa(q_i, k_j)$ of all pairs, not yet divided by their row sums; 0 where one may not attend.

    With a `log_k`, up to a factor of each row. `q_start` is the number of keys before the first query's own, and
    `same_tokens` as in `linear_attention_reference`.
    """
    blocked = blocked_pairs(q.shape[-2], k.shape[-2], is_causal, attn_mask, q.device)
    hidden = None if attn_mask is None else ~attn_mask.expand(*q.shape[:-1], k.shape[-2]).any(-2)
    f = feature_map(q, k, scale=scale, q_start=q_start, hidden=hidden, hidden_q=hidden if same_tokens else None)
    weights = f.q @ f.k.mT  # (..., N, M)
    if f.log_k is not None:
        s = f.log_k[..., None, :]
        if blocked is not None:
            s = s.masked_fill(blocked, torch.finfo(s.dtype).min)
        weights = weights * (s - s.amax(-1, keepdim=True)).exp()
    return weights if blocked is None else weights.masked_fill(blocked, 0)


@checked(shapes=False)
def linear_attention_reference(
    q: Float[Tensor, "*batch N K"],
    k: Float[Tensor, "*batch M K"],
    v: Float[Tensor, "*batch M V"],
    *,
    feature_map: FeatureMap,
    is_causal: bool = False,
    attn_mask: Bool[Tensor, "..."] | None = None,
    scale: float | None = None,
    initial_state: State | None = None,
    return_state: bool = False,
    same_tokens: bool = False,
) -> Float[Tensor, "*batch N V"] | tuple[Float[Tensor, "*batch N V"], State]:
    """The N x M weights of the kernel, materialised: their product with v, divided by their row sums.

    The arguments and errors are those of `softmax_attention_reference`, and so is the state: earlier keys and values.
    `same_tokens` says that query i and key i are the same token: a map that looks at the whole sequence then leaves out
    the queries at hidden keys' positions too. A row whose weights are all 0 gives 0. On the CPU, rows whose weights
    leave the range of the dtype raise ValueError.
    """
    _checks.scale_factor(scale)
    _in_parts(feature_map, is_causal, initial_state, return_state)
    known_tokens(same_tokens, q, k)
    k, v = with_past(q, k, v, is_causal, attn_mask, initial_state)
    past = 0 if initial_state is None else initial_state[0].shape[-2]
    with no_autocast(q):
        weights = kernel_weights(
            feature_map,
            working(q),
            working(k),
            is_causal=is_causal,
            attn_mask=attn_mask,
            scale=scale,
            q_start=past,
            same_tokens=same_tokens,
        )
        total = weights.sum(-1, keepdim=True)
        # A quotient, and not the product with 1 / total, whose gradient squares it and may overflow.
        o = weights @ working(v) / divisors(total)

        def empty() -> Tensor | None:
            blocked = blocked_pairs(q.shape[-2], k.shape[-2], is_causal, attn_mask, q.device)
            return None if attn_mask is None or blocked is None else blocked.all(-1, keepdim=True)

        o = _in_range(o, total, feature_map, empty).to(q.dtype)
    return (o, (k, v)) if return_state else o


@checked(shapes=False)
def linear_attention(
    q: Float[Tensor, "*batch N K"],
    k: Float[Tensor, "*batch M K"],
    v: Float[Tensor, "*batch M V"],
    *,
    feature_map: FeatureMap,
    is_causal: bool = False,
    attn_mask: Bool[Tensor, "..."] | None = None,
    scale: float | None = None,
    initial_state: State | None = None,
    return_state: bool = False,
    same_tokens: bool = False,
    chunk: int | None = None,
) -> Float[Tensor, "*batch N V"] | tuple[Float[Tensor, "*batch N V"], State]:
    """`linear_attention_reference` in time and memory linear in N; a causal call goes in chunks of at most `chunk`.

    By default these are of 64 tokens, on a GPU of so many that there are 128 of them at most. Nothing is computed in
    less than float32, half precision included, which on a GPU leaves its fast products of half precision unused.

    The state is (S (..., m, V), z (..., m)); of a map that scales keys then the largest scale's logarithm (...), by
    whose exponential S and z are divided; of a positional one then the number of tokens seen (). Half precision is
    computed, and its state kept, in float32: sums over a long sequence overflow float16. It cannot be differentiated
    twice; the reference can.

    Raises ValueError for an `attn_mask` that is not one row for all queries, or that stands beside an initial state, in
    which keys are no longer apart; and, on the CPU, for features so small or large that a row's weights leave the range
    of the dtype (elsewhere, where to look would stall, such a row is NaN).
    """
    _checks.qkv(q, k, v, attn_mask, is_causal)
    _checks.scale_factor(scale)
    chunk = default_chunk(q) if chunk is None else _checks.positive_int("chunk", chunk)
    _in_parts(feature_map, is_causal, initial_state, return_state)
    known_tokens(same_tokens, q, k)
    hidden = hidden_keys(attn_mask, k, initial_state)  # (..., M)
    length, dtype = q.shape[-2], q.dtype
    with no_autocast(q):
        q, k, v = (working(x) for x in (q, k, v))
        S, z, peak, start = _memory(initial_state, feature_map, k, v)
        hidden_q = hidden if same_tokens else None
        f = feature_map(q, k, scale=scale, q_start=start, k_start=start, hidden=hidden, hidden_q=hidden_q)
        if (f.log_k is not None) != feature_map.scales_keys:
            raise TypeError(f"feature_map: expected a log_k if and only if it scales keys, got {feature_map!r}")
        if hidden is not None:
            f = Features(f.q, f.k.masked_fill(hidden[..., None], 0), _lowest(f.log_k, hidden))
        if is_causal and length > 1:  # a lone query is the last: it has no future
            width, behind = chunks(length, chunk)
            s = f.log_k if f.log_k is None or not behind else pad(f.log_k, (0, behind), value=-inf)
            o, total, S, z = Chunked.apply(*(pad_tokens(x, behind) for x in (f.q, f.k, v)), S, z, s, peak, width)
            o, total = o[..., :length, :], total[..., :length, :]
            peak = None if peak is None or f.log_k is None else torch.maximum(peak, f.log_k.amax(-1))
        else:
            scales = None
            if peak is not None and f.log_k is not None:
                before, peak = peak, torch.maximum(peak, f.log_k.amax(-1))
                fade = (before - peak).exp()[..., None]
                S, z = S * fade[..., None], z * fade
                scales = (f.log_k - peak[..., None]).exp()[..., None]  # (..., M, 1)
            o, total, S, z = AllAtOnce.apply(f.q, f.k, v, S, z, scales)

        def empty() -> Tensor | None:
            if hidden is None:
                return None
            return (hidden.cummin(-1).values if is_causal else hidden.all(-1, keepdim=True))[..., None]

        o = _in_range(o, total, feature_map, empty).to(dtype)
    if not return_state:
        return o
    seen = (torch.as_tensor(start + k.shape[-2], device=k.device),) if feature_map.positional else ()
    return o, (S, z, *(() if peak is None else (peak,)), *seen)


def _in_parts(feature_map: FeatureMap, is_causal: bool, initial_state: State | None, return_state: bool) -> None:
    """ValueError if a sequence is to be seen in parts by a map that looks at all of it."""
    if not feature_map.causal and (is_causal or return_state or initial_state is not None):
        name = "is_causal" if is_causal else "return_state" if return_state else "initial_state"
        raise ValueError(
            f"{name}: expected a feature map that looks at one token at a time, got {type(feature_map).__name__}, "
            "which looks at the whole sequence unless it is given what it would find there"
        )


def _lowest(log_k: Tensor | None, hidden: Tensor) -> Tensor | None:
    """The keys' logarithms with those of hidden keys below all others; not -inf, whose difference to itself is NaN."""
    return None if log_k is None else log_k.masked_fill(hidden, torch.finfo(log_k.dtype).min)


def _memory(
    state: State | None, feature_map: FeatureMap, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, Tensor | None, int | Tensor]:
    """(S, z, peak, start) that the state holds; without one, no key and no scale yet, at position 0."""
    lead, m, V = k.shape[:-2], feature_map.width(k.shape[-1]), v.shape[-1]
    shapes = {"S": (*lead, m, V), "z": (*lead, m)} | ({"peak": tuple(lead)} if feature_map.scales_keys else {})
    if state is None:
        peak = v.new_full(lead, torch.finfo(v.dtype).min) if feature_map.scales_keys else None
        return v.new_zeros(shapes["S"]), v.new_zeros(shapes["z"]), peak, 0
    seen = {"seen": ()} if feature_map.positional else {}
    state = _checks.state(state, *shapes, *seen)
    expected = [(v.dtype, shape) for shape in shapes.values()] + [(torch.int64, shape) for shape in seen.values()]
    if [(x.dtype, tuple(x.shape)) for x in state] != expected:
        wanted = ", ".join(f"{dtype} {shape}".removeprefix("torch.") for dtype, shape in expected)
        raise ValueError(f"initial_state: expected {wanted}, got {_checks.describe(state)}")
    named = dict(zip((*shapes, *seen), state, strict=True))
    return named["S"], named["z"], named.get("peak"), named.get("seen", 0)


def _in_range(o: Tensor, total: Tensor, feature_map: FeatureMap, empty: Callable[[], Tensor | None]) -> Tensor:
    """The rows o (..., N, V) of totals (..., N, 1) within the range of the dtype, and not so small that it holds few
    digits of them but where rows are `empty`, without a key. For others ValueError on the CPU, and elsewhere NaN.
    """
    shown = _checks.shows_values(total)
    if not (shown or _checks.reads_values(total)):
        return o
    limits = torch.finfo(total.dtype)
    least = {"signed": -limits.max, "non-negative": 0.0, "positive": limits.tiny / limits.eps}[feature_map.weights]
    rows = empty()
    total = total.detach() if rows is None else total.detach().masked_fill(rows, 1)
    if shown:
        return o.masked_fill(~((total >= least) & (total <= limits.max)), nan)
    _checks.within("q, k", f"row sums of the {total.dtype} weights", total, least, limits.max)
    return o


# The two kernels, with their gradients written out: all keys at once, and causal in chunks. Autograd on the formulas
# gives the same gradients at twice the time: its sums of partial gradients, its slices and its products with a column
# of ones pass over the sequence a dozen times more. Neither kernel can be differentiated twice.
#
# Both take features of queries q (..., N, m), of keys k (..., M, m), values v (..., M, V), and the sums over earlier
# keys, S (..., m, V) and z (..., m); both return o (..., N, V), the row totals (..., N, 1), which have no gradient of
# their own, and the sums after the last key. A row without weight is 0.


class AllAtOnce(Kernel):
    r"""$o_i = q_i^T S / q_i^T z$ for the S and z that hold all keys, times their scales (..., M, 1) where given."""

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
            if scale is None:
                S[g].baddbmm_(k[g].mT, v[g])
                z[g].add_(k[g].sum(-2)[..., None])
            else:
                S[g].baddbmm_(k[g].mT, v[g] * scale[g])
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
    r"""Query i reads keys 0..i: in its own chunk by weights, in those before by their memory.

    `s`, the logarithms of the keys' scales (..., N), and `peak`, that of the memory (...), may be None. Every exponent
    is relative to the largest s up to the row (or up to the end of the chunk, for what later chunks read), so that it
    is at most 0 and nothing that a row reads depends on keys after it.
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
        # From here on, memory_S and memory_z are what each chunk's queries read: that of the chunks before.
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
        d_S = _accumulate_back(d_S.reshape(G, m, V), memory_dS, scales)
        d_z = _accumulate_back(d_z.reshape(G, m, 1), memory_dz, scales)
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
    """The totals, but infinity for those of rows without weight, which become 0; or with so little that a gradient
    divided by it would leave the range of the dtype."""
    limits = torch.finfo(totals.dtype)
    return totals.masked_fill(totals.detach().abs() < limits.tiny / limits.eps, inf)


def _through_division(d_o: Tensor, o: Tensor, totals: Tensor, out: tuple[Tensor, Tensor]) -> None:
    """The gradients of numerators and totals, from that of their quotient o."""
    torch.div(d_o, divisors(totals), out=out[0])
    torch.sum(out[0] * o, -1, keepdim=True, out=out[1]).neg_()


class _Scales(NamedTuple):
    """What multiplies the weights within a chunk, what a row reads from before it, what a key adds to the memory after
    it, and the memory from chunk to chunk."""

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


def _accumulate(memory: Tensor, chunks: Tensor, scales: _Scales | tuple[()]) -> Tensor:
    """The memory (G, ...) after all chunks; `chunks` (G, n, ...), what each adds, becomes what there is before each."""
    for i in range(chunks.shape[1]):
        after = (memory * scales.fades[:, i] if scales else memory) + chunks[:, i]
        chunks[:, i] = memory
        memory = after
    return memory


def _accumulate_back(d_memory: Tensor, chunks: Tensor, scales: _Scales | tuple[()]) -> Tensor:
    """The gradient of the memory before all chunks, from that after them; `chunks` (G, n, ...), the gradient of what
    each reads, becomes that of what each adds."""
    for i in reversed(range(chunks.shape[1])):
        before = (d_memory * scales.fades[:, i] if scales else d_memory) + chunks[:, i]
        chunks[:, i] = d_memory
        d_memory = before
    return d_memory


@checked
def linear_attention_cost(
    B: Size,
    N: Size,
    H: Size,
    K: Size,
    V: Size,
    *,
    feature_map: FeatureMap,
    form: str = "fast",
    causal: bool = False,
    qk_grad: bool = True,
    itemsize: int = 4,
    chunk: int = CHUNK,
    m: Size = None,
) -> AttentionCost:
    """Closed form of one self-attention call, in either form; `m` is the number of features, by default the map's.

    Half precision costs what float32 does. Drawing random features is left out: it is done once. With symbols, N is a
    multiple of `chunk`, and greater.
    """
    G, item, scaled = B * H, max(itemsize, 4), int(feature_map.scales_keys)
    m = feature_map.width(K) if m is None else m
    fast = form == "fast"
    if not fast:
        rest, behind = _materialised(G, N, m, V, int(causal), qk_grad, item, scaled), 0
    elif not causal or N == 1:
        rest, behind = _at_once(G, N, m, V, qk_grad, item, scaled), 0
    else:
        width, behind = chunks(N, chunk) if isinstance(N, int) else (chunk, 0)
        number = (N + behind) // width if isinstance(N, int) else N / chunk
        rest = _in_chunks(G, N, m, V, width, number, qk_grad, item, scaled)
    mapped = feature_map.cost(G, N, N, K, m)
    # The features are kept once, unless the kernel keeps a copy, with rows behind the end, and the map its own.
    twice = 2 * G * N * m if behind and mapped.keeps_features else 0
    recurrent = fast and feature_map.causal  # else the keys are kept, and mapped anew for each query
    decoded = feature_map.cost(G, 1, 1 if recurrent else N, K, m).forward
    gathered = 2 * G * m * (V + scaled) * (1 if recurrent else N)
    state = item * G * (m * (V + 1) + scaled) + 8 * int(feature_map.positional)
    return AttentionCost(
        forward=rest.forward + mapped.forward,
        backward=rest.backward + (mapped.backward if qk_grad else 0),
        elementwise_forward=rest.elementwise_forward + mapped.elementwise_forward,
        elementwise_backward=rest.elementwise_backward + (mapped.elementwise_backward if qk_grad else 0),
        saved_bytes=rest.saved_bytes + (item * (mapped.saved + twice) if qk_grad else 0),
        decode=decoded + (gathered + 2 * G * m * (V + 1) if fast else 2 * G * N * (m + V)),
        state_bytes=state if recurrent else itemsize * G * N * (K + V),
        output_bytes=item * rest.output_bytes,
    )


# Below: G = B H, the sequences; m, the features; item, bytes a number; a flag counts as 0 or 1.


def _materialised(
    G: Size, N: Size, m: Size, V: Size, causal: int, qk_grad: bool, item: int, scaled: int
) -> AttentionCost:
    rows, pairs = G * N, G * N * N
    scales = pairs if causal else rows  # exp(s_j - max): one for all rows, unless they see different keys
    # A gradient's sum over a broadcast axis is left out by autograd where that axis has length 1.
    division_backward = rows * (5 * V + 1) + (rows * V if V != 1 else 0)
    return AttentionCost(
        forward=2 * pairs * (m + V),
        backward=2 * pairs * (2 * (m + V) if qk_grad else V),
        elementwise_forward=pairs * (1 + causal)  # row sums; blocked entries
        + rows * (V + 3)  # divisors, quotients
        + scaled * (pairs + (3 + causal) * scales),  # the product with the scales; blocked, maximum, subtract, exp
        elementwise_backward=pairs * (1 + causal + scaled) + division_backward if qk_grad else rows * V,
        saved_bytes=item * (pairs + rows)  # weights and totals; if gradients reach them, also all they come from
        + (item * (rows * (2 * m + 2 * V) + scaled * scales) + rows + causal * N * N if qk_grad else 0),
        decode=None,
        state_bytes=None,
    )


def _at_once(G: Size, N: Size, m: Size, V: Size, qk_grad: bool, item: int, scaled: int) -> AttentionCost:
    rows, memory = G * N, G * m * (V + 1)
    return AttentionCost(
        forward=4 * rows * m * V + 2 * rows * m * (1 + scaled),  # gather and read S; read z; with scales, gather it
        backward=(8 if qk_grad else 4) * rows * m * V + 2 * rows * m,
        elementwise_forward=(1 - scaled) * (rows + G) * m  # z
        + rows * (3 + V)  # divisors, quotients
        + scaled * (rows * (3 + V) + memory + 3 * G),  # maximum, subtract, exp; products with values and memory
        elementwise_backward=rows * (3 * V + 4) + scaled * rows * V + ((2 * m + scaled * V) * rows if qk_grad else 0),
        saved_bytes=item * (rows * (2 * m + V + 1 + scaled) + memory),
        output_bytes=rows * V,
        decode=None,
        state_bytes=None,
    )


def _in_chunks(
    G: Size, N: Size, m: Size, V: Size, width: Size, number: Size, qk_grad: bool, item: int, scaled: int
) -> AttentionCost:
    rows, memory = G * number * width, G * number * m * (V + 1)  # with what is behind the end
    pairs = rows * width
    return AttentionCost(
        # In the chunk: weights, outputs. Memories: gather and read S, read z; with scales, gather z by a product too.
        forward=2 * pairs * (m + V) + 4 * rows * m * V + 2 * rows * m * (1 + scaled),
        backward=2 * pairs * V
        + 4 * rows * m * V
        + 2 * rows * m
        + (2 * pairs * (2 * m + V) + 4 * rows * m * V if qk_grad else 0),
        elementwise_forward=(1 - scaled) * rows * m  # z
        + memory
        + pairs  # totals within the chunk
        + rows * (V + 4)  # with those before it; divisors, quotients
        # Running maximum; subtract and exp for three scales and the fades, blocked; products with the weights, the
        # values, the memories, and what is read; the peak
        + scaled * (G + rows + 4 * pairs + rows * (5 + 2 * V) + 2 * G * number + memory + G * N + G),
        elementwise_backward=rows * (3 * V + 4)
        + memory
        + scaled * (memory + rows * (2 * V + 1))
        + (2 * rows * m + scaled * (pairs + rows * (2 * V + 1)) if qk_grad else 0),
        saved_bytes=item * (rows * (2 * m + V + 1) + pairs + memory + scaled * (pairs + 2 * rows + G * number)),
        output_bytes=rows * V,
        decode=None,
        state_bytes=None,
    )


def kernel_mechanism(name: str, feature_map: FeatureMap, source: str) -> Mechanism:
    """The entry of the attention with that map."""
    return Mechanism(
        name=name,
        family="kernel",
        source=source,
        reference=partial(linear_attention_reference, feature_map=feature_map),
        fast=partial(linear_attention, feature_map=feature_map),
        causal=feature_map.causal,
        exact=False,
        cost=partial(linear_attention_cost, feature_map=feature_map),
        positional=feature_map.positional,
        fitted=not feature_map.causal,
        same_tokens=not feature_map.causal,
        signed=feature_map.weights == "signed",
    )


MECHANISMS = (
    kernel_mechanism("linear", EluPlusOne(), "Katharopoulos et al. 2020, arXiv:2006.16236"),
    kernel_mechanism("linear-relu", Relu(), "Choromanski et al. 2021, arXiv:2009.14794"),
    kernel_mechanism("linear-exp", Exp(), "Shen et al. 2021, arXiv:1812.01243"),
    kernel_mechanism("cosformer", CosFormer(), "Qin et al. 2022, arXiv:2202.08791"),
    kernel_mechanism("taylor", Taylor(), "Arora et al. 2024, arXiv:2402.18668"),
)
