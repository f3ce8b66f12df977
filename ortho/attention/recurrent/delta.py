r"""The delta rule, plain and gated: a linear state that corrects what it holds instead of adding to it.

$S_t = a_t S_{t-1} + \beta_t k_t (v_t - a_t S_{t-1}^T k_t)^T$, $o_t = S_t^T q_t$: a decay $a_t$, and then one step of
gradient descent with rate $\beta_t$ on $\tfrac12 |S^T k_t - v_t|^2$. With $a_t = 1$ it is DeltaNet (Schlag et al. 2021,
arXiv:2102.11174; in chunks: Yang et al. 2024, arXiv:2406.06484), otherwise Gated DeltaNet (arXiv:2412.06464).
"""

from functools import partial
from math import inf
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.functional import softplus

from ortho._checks import Kernel, attention_form, once
from ortho._cost import Cost, product
from ortho._typing import Bool, Float, Size, State, Tensor
from ortho.attention.chunking import CHUNK, chunks, cut, default_chunk, equal_chunks, flat, tiles
from ortho.attention.mechanism import CostedCall, Mechanism, closed_form
from ortho.attention.recurrent.recurrence import check_writes, memory_cost, prepared, read_at_end_cost, recurrence
from ortho.gates import Gate, WriteStrength, rate_logarithms, step_biases


@attention_form(fixed_state=True, check=check_writes)
def delta_rule_reference(
    q: Float[Tensor, "*batch N K"],
    k: Float[Tensor, "*batch M K"],
    v: Float[Tensor, "*batch M V"],
    *,
    beta: Float[Tensor, "*batch M"] | None = None,
    log_decay: Float[Tensor, "*batch M"] | None = None,
    normalise: bool = True,
    is_causal: bool = False,
    attn_mask: Bool[Tensor, "..."] | None = None,
    scale: float | None = None,
    initial_state: State | None = None,
    return_state: bool = False,
) -> Float[Tensor, "*batch N V"] | tuple[Float[Tensor, "*batch N V"], State]:
    r"""The delta rule by its recurrence, token by token.

    `beta`, in [0, 2], is 1 by default; `log_decay`, $\log a_t \le 0$, is 0 by default. Queries and keys are divided by
    their lengths (1e-6 is added to the squared length) unless `normalise` is False. `scale`, if given, then multiplies
    the queries. In a call that is not causal every query reads the state after the last key. A masked key leaves the
    state unchanged; the mask must be the same for all queries, and cannot be combined with an `initial_state`. The
    state is (S (..., K, V),); it and all computation are in float32 at least.

    Raises TypeError or ValueError, naming the argument, for operands that do not fit together; on the CPU also for
    gates outside their range, and for keys that are not normalised and have $\beta |k|^2 > 2$: every write would
    enlarge the state along them.
    """
    x = prepared(q, k, v, beta, log_decay, attn_mask, scale, initial_state, normalise=normalise)
    o, S = recurrence(*x, is_causal=is_causal)
    return o, (S,)


@attention_form(fixed_state=True, check=check_writes)
def delta_rule(
    q: Float[Tensor, "*batch N K"],
    k: Float[Tensor, "*batch M K"],
    v: Float[Tensor, "*batch M V"],
    *,
    beta: Float[Tensor, "*batch M"] | None = None,
    log_decay: Float[Tensor, "*batch M"] | None = None,
    normalise: bool = True,
    is_causal: bool = False,
    attn_mask: Bool[Tensor, "..."] | None = None,
    scale: float | None = None,
    initial_state: State | None = None,
    return_state: bool = False,
    chunk: int | None = None,
) -> Float[Tensor, "*batch N V"] | tuple[Float[Tensor, "*batch N V"], State]:
    """`delta_rule_reference` by matrix products over chunks of at most `chunk` tokens; time and memory linear in N.

    Chunks have 64 tokens by default; on a GPU they are longer where there would be more than 128 of them. Kept for the
    backward pass are one state per chunk and, per token, some vectors of widths K, V and `chunk`. This form cannot be
    differentiated twice; the reference can.
    """
    x = prepared(q, k, v, beta, log_decay, attn_mask, scale, initial_state, normalise=normalise)
    o, S = _in_chunks(*x, is_causal=is_causal, chunk=chunk or default_chunk(k))
    return o, (S,)


def _in_chunks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    log_decay: Tensor | None,
    S: Tensor,
    *,
    is_causal: bool,
    chunk: int,
) -> tuple[Tensor, Tensor]:
    """o (..., N, V) and the state after the last key (..., K, V), from q and k (..., N, K), v (..., N, V), gates
    (..., N) and the state before the first key."""
    *lead, N, _ = k.shape
    width, behind = chunks(N, chunk)
    beta = torch.ones_like(k[..., 0]) if beta is None else beta
    keys, values, strengths = (cut(x, width) for x in (k, v, beta[..., None]))
    rates = None if log_decay is None else cut(log_decay[..., None], width)[..., 0]
    fading = () if rates is None else decays(rates)
    written, before, after = Write.apply(keys, values, strengths, S.reshape(-1, *S.shape[-2:]), rates, *fading)
    after = after.view(S.shape)
    if not is_causal:
        return q @ after, after
    o = Read.apply(cut(q, width), keys, written, before, rates, *fading)
    return o.reshape(*lead, N + behind, -1)[..., :N, :], after


class Decays(NamedTuple):
    """The decays within each chunk, made of `log_decay` by `decays`; `through_decays` is the backward pass."""

    within: Tensor  # Gamma, (G, n, C, C), 0 for the future
    from_start: Tensor  # exp(gamma), (G, n, C, 1)
    to_end: Tensor  # exp(gamma_C - gamma), (G, n, C, 1)

    @property
    def fades(self) -> Tensor:
        """The decay over a whole chunk, (G, n, 1, 1)."""
        return self.from_start[..., -1:, :]


@torch.no_grad()
def decays(log_decay: Tensor) -> Decays:
    """The decays of chunks (G, n, C), from sums of only the terms between two tokens: after a very strong decay,
    differences of two sums from the chunk's start would lose all digits of the later terms."""
    C = log_decay.shape[-1]
    ones = torch.ones(C, C, dtype=torch.bool, device=log_decay.device)
    between = log_decay[..., :, None].expand(*log_decay.shape, C).masked_fill(ones.triu(), 0)  # x_s where s > j
    within = between.cumsum(-2).masked_fill_(ones.triu(1), -inf).exp_()
    from_start = log_decay.cumsum(-1).exp_()
    return Decays(within, from_start[..., None], within[..., -1, :, None])


def through_decays(d_gamma: Tensor | None) -> Tensor | None:
    """The gradient of `log_decay` (G, n, C) from the gradient of its sums from the chunk's start (G, n, C, 1)."""
    return None if d_gamma is None else d_gamma[..., 0].flip(-1).cumsum(-1).flip(-1)


class Write(Kernel):
    r"""What is written, chunk by chunk: (U, the states before each chunk (G, n, K, V), the last state S (G, K, V)).

    Let S be the state before a chunk, $\gamma_i$ the sum of the logarithms of its decays up to token i, and
    $\Gamma_{ij} = e^{\gamma_i - \gamma_j}$ for $j \le i$. The errors $e_i = v_i - a_i S_{i-1}^T k_i$ solve a triangular
    system

    $$(I + M\,\mathrm{diag}(\beta)) E = V - \mathrm{diag}(e^\gamma) K S,
    \quad M = \mathrm{tril}(K K^T, -1) \circ \Gamma .$$

    With the inverse T of the left matrix (the UT transform of Yang et al. 2024, arXiv:2406.06484, section 3.2; with
    decays arXiv:2412.06464, section 3.3) $E = T V - T\,\mathrm{diag}(e^\gamma) K S$. All of this but the products with
    S is computed for all chunks at once. What is written is $U = \mathrm{diag}(\beta) E$, and then
    $S \leftarrow e^{\gamma_C} S + K^T \mathrm{diag}(e^{\gamma_C - \gamma})\, U$. `Read` computes
    $O = \mathrm{diag}(e^\gamma) Q S + (\mathrm{tril}(Q K^T) \circ \Gamma)\, U$.

    Operands are (G, n, C, ·): G sequences of n chunks of C tokens. `beta` is (G, n, C, 1); `log_decay` (G, n, C) and
    the `Decays` made of it may be None. If queries and keys need no gradient, only that of `log_decay` needs the
    gradient of the products. Neither kernel can be differentiated twice. Names that end in `t` belong to one tile: some
    chunks of some sequences.
    """

    @staticmethod
    def forward(
        ctx: Any, k: Tensor, v: Tensor, beta: Tensor, S: Tensor, _log_decay: Tensor | None, *parts: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        fading = Decays(*parts) if parts else None
        (G, n, C, K), V = k.shape, v.shape[-1]
        identity = torch.eye(C, dtype=k.dtype, device=k.device)
        products, inverse = k.new_empty(G, n, C, C), k.new_empty(G, n, C, C)
        erased, errors = torch.empty_like(k), torch.empty_like(v)
        written, before = torch.empty_like(v), v.new_empty(G, n, K, V)
        for tile in tiles(G, n, k.is_cuda):
            kt, vt, bt, Mt, Tt, Wt, et = flat(tile, k, v, beta, products, inverse, erased, errors)
            torch.bmm(kt, kt.mT, out=Mt).tril_(-1)
            if fading:
                Mt.mul_(flat(tile, fading.within)[0])
                kt = kt * flat(tile, fading.from_start)[0]
            system = Mt * bt.mT
            torch.linalg.solve_triangular(system, identity.expand_as(system), upper=False, unitriangular=True, out=Tt)
            torch.bmm(Tt, kt, out=Wt)
            torch.bmm(Tt, vt, out=et)
        to_end = k * fading.to_end if fading else k
        for i in range(n):
            before[:, i] = S
            errors[:, i].baddbmm_(erased[:, i], S, alpha=-1)
            written[:, i] = errors[:, i] * beta[:, i]
            S = torch.baddbmm(S * fading.fades[:, i] if fading else S, to_end[:, i].mT, written[:, i])
        ctx.save_for_backward(k, beta, products, inverse, erased, errors, written, before, *parts)
        return written, before, S

    @staticmethod
    @once
    def backward(ctx: Any, d_written: Tensor, d_before: Tensor, d_S: Tensor) -> tuple[Tensor | None, ...]:
        k, beta, products, inverse, erased, errors, written, before, *parts = ctx.saved_tensors
        fading = Decays(*parts) if parts else None
        G, n, _, _ = k.shape
        to_end = k * fading.to_end if fading else k
        d_written, d_errors, d_after = d_written.clone(), torch.empty_like(errors), torch.empty_like(before)
        for i in reversed(range(n)):
            d_after[:, i] = d_S
            d_written[:, i].baddbmm_(to_end[:, i], d_S)
            d_errors[:, i] = d_written[:, i] * beta[:, i]
            d_S = d_before[:, i] + (d_S * fading.fades[:, i] if fading else d_S)
            d_S.baddbmm_(erased[:, i].mT, d_errors[:, i], alpha=-1)
        d_v, d_beta = torch.empty_like(errors), torch.empty_like(beta)
        d_k = torch.empty_like(k) if ctx.needs_input_grad[0] else None
        d_gamma = torch.empty_like(beta) if fading else None
        for tile in tiles(G, n, k.is_cuda):
            bt, Mt, Tt, et, ut, d_ut, d_et, d_vt, d_bt = flat(
                tile, beta, products, inverse, errors, written, d_written, d_errors, d_v, d_beta
            )
            torch.bmm(Tt.mT, d_et, out=d_vt)
            d_M = torch.bmm(d_vt, et.mT).neg_()  # so far the gradient of M diag(beta)
            torch.sum(d_ut * et, -1, keepdim=True, out=d_bt).add_((d_M * Mt).sum(-2)[..., None])
            if d_k is None and d_gamma is None:
                continue
            d_M.mul_(bt.mT)
            kt, before_t, d_after_t = flat(tile, k, before, d_after)
            by_erasing = torch.bmm(d_vt, before_t.mT).neg_()
            by_writing = torch.bmm(ut, d_after_t.mT)
            if fading and d_gamma is not None:
                within, from_start, to_end_t = flat(tile, *fading)
                by_erasing.mul_(from_start)
                by_writing.mul_(to_end_t)
                at_end = (kt * by_writing).sum(-1, keepdim=True)
                kept = (before_t * d_after_t).sum((-1, -2))[..., None] * from_start[:, -1]
                (d_gamma_t,) = flat(tile, d_gamma)
                torch.sub(_of_gamma(d_M, Mt) + (kt * by_erasing).sum(-1, keepdim=True), at_end, out=d_gamma_t)
                d_gamma_t[:, -1].add_(at_end.sum(-2)).add_(kept)
                d_M.mul_(within)
            if d_k is not None:
                (d_kt,) = flat(tile, d_k)
                d_M.tril_(-1)
                torch.bmm(d_M + d_M.mT, kt, out=d_kt).add_(by_erasing).add_(by_writing)
        return d_k, d_v, d_beta, d_S, through_decays(d_gamma), *(None for _ in parts)


class Read(Kernel):
    """The outputs O (G, n, C, V) of the queries, from what `Write` has written and the state before each chunk."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, written: Tensor, before: Tensor, _log_decay: Tensor | None, *parts: Tensor
    ) -> Tensor:
        fading = Decays(*parts) if parts else None
        G, n, C, _ = q.shape
        weights, o = q.new_empty(G, n, C, C), torch.empty_like(written)
        for tile in tiles(G, n, q.is_cuda):
            qt, kt, ut, St, wt, ot = flat(tile, q, k, written, before, weights, o)
            torch.bmm(qt, kt.mT, out=wt)
            if fading:
                within, from_start = flat(tile, fading.within, fading.from_start)
                wt.mul_(within)
                qt = qt * from_start
            else:
                wt.tril_()
            torch.bmm(qt, St, out=ot).baddbmm_(wt, ut)
        ctx.save_for_backward(q, k, written, before, weights, *parts)
        return o

    @staticmethod
    @once
    def backward(ctx: Any, d_o: Tensor) -> tuple[Tensor | None, ...]:
        q, k, written, before, weights, *parts = ctx.saved_tensors
        fading = Decays(*parts) if parts else None
        G, n, _, _ = q.shape
        d_o = d_o.contiguous()
        d_written, d_before = torch.empty_like(written), torch.empty_like(before)
        needed = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        d_q, d_k = (torch.empty_like(q), torch.empty_like(k)) if needed else (None, None)
        d_gamma = q.new_empty(*q.shape[:-1], 1) if fading else None
        for tile in tiles(G, n, q.is_cuda):
            qt, kt, ut, St, wt, gt, d_ut, d_St = flat(tile, q, k, written, before, weights, d_o, d_written, d_before)
            torch.bmm(wt.mT, gt, out=d_ut)
            reader = qt
            if fading:
                within, from_start = flat(tile, fading.within, fading.from_start)
                reader = qt * from_start
            torch.bmm(reader.mT, gt, out=d_St)
            if d_q is None and d_gamma is None:
                continue
            d_w = torch.bmm(gt, ut.mT)
            by_reading = torch.bmm(gt, St.mT)
            if fading and d_gamma is not None:
                by_reading.mul_(from_start)
                (d_gamma_t,) = flat(tile, d_gamma)
                torch.add(_of_gamma(d_w, wt), (qt * by_reading).sum(-1, keepdim=True), out=d_gamma_t)
                d_w.mul_(within)
            else:
                d_w.tril_()
            if d_q is not None and d_k is not None:
                d_qt, d_kt = flat(tile, d_q, d_k)
                torch.bmm(d_w, kt, out=d_qt).add_(by_reading)
                torch.bmm(d_w.mT, qt, out=d_kt)
        return d_q, d_k, d_written, d_before, through_decays(d_gamma), *(None for _ in parts)


def _of_gamma(d_weights: Tensor, weights: Tensor) -> Tensor:
    """The gradient of gamma (G, C, 1) from the gradient of weights that have the factor exp(gamma_i - gamma_j)."""
    by_exponent = d_weights * weights
    return by_exponent.sum(-1)[..., None] - by_exponent.sum(-2)[..., None]


class Decay(Gate):
    r"""$\log a = -e^A\, \mathrm{softplus}(x W^T + b)$, at most 0: one decay per head and token (Dao & Gu 2024,
    arXiv:2405.21060; Yang et al. 2024, arXiv:2412.06464).

    $e^A$ starts uniform in [1, 16] and softplus(b) log-uniform in [0.001, 0.1].
    """

    trained = 2  # a rate and a bias

    def _make(self, generator: torch.Generator | None, kind: dict[str, Any]) -> None:
        super()._make(generator, kind)
        self.log_rate = nn.Parameter(rate_logarithms(self.num_heads, generator, kind))
        self.bias = nn.Parameter(step_biases(self.num_heads, generator, kind))

    def forward(self, x: Float[Tensor, "B N d"]) -> Float[Tensor, "B H N"]:
        return -self.log_rate.exp()[:, None] * softplus(self._numbers(x) + self.bias[:, None])


@closed_form
def delta_cost(call: CostedCall, *, gated: bool = False, chunk: int = CHUNK) -> Cost:
    """Closed form of one self-attention call with `beta` given, and if `gated` with `log_decay`, in either form.

    Half precision costs the same as float32. With symbols, N is a multiple of `chunk`, and no width is 1.
    """
    return memory_cost(call, partial(_chunks_cost, chunk=chunk, gated=int(gated)), fades=int(gated))


def write_cost(call: CostedCall, width: Size, number: Size, gated: int = 0, reach: int = 1) -> Cost:
    """The cost of `Write` on `number` chunks of this width, empty rows included. `gated` and `reach` are 0 or 1."""
    G, _, K, V = call.sizes
    rows = G * number * width
    pairs = rows * width
    further = max(reach, gated)  # whether a gradient of keys or decays needs products
    # Products of keys, the inverse of their system, two products with it; erasing and writing, chunk after chunk
    products = product(pairs * V) + product(2 * rows * K * V, 1 + further)
    return products + Cost(forward=pairs * (4 * K + width), backward=reach * 2 * pairs * K)


def _chunks_cost(call: CostedCall, *, chunk: int, gated: int) -> Cost:
    (G, N, K, V), reach = call.sizes, call.reach
    width, number = equal_chunks(N, chunk)
    rows = G * number * width  # with the padding at the end
    pairs = rows * width
    write = write_cost(call, width, number, gated, reach)
    if not call.causal:
        return write + read_at_end_cost(call)
    further = max(reach, gated)  # whether a gradient of queries or decays needs products
    return write + product(pairs * K, 2 * reach) + product((pairs + rows * K) * V, 1 + further)


DELTA = Mechanism(
    name="delta",
    family="recurrent",
    source="Schlag et al. 2021, arXiv:2102.11174; Yang et al. 2024, arXiv:2406.06484",
    reference=delta_rule_reference,
    fast=delta_rule,
    cost=delta_cost,
    positional=True,
    signed=True,
    gates={"beta": WriteStrength},
)
GATED_DELTA = Mechanism(
    name="gated-delta",
    family="recurrent",
    source="Yang et al. 2024, arXiv:2412.06464",
    reference=delta_rule_reference,
    fast=delta_rule,
    cost=partial(delta_cost, gated=True),
    positional=True,
    signed=True,
    gates={"beta": WriteStrength, "log_decay": Decay},
)
MECHANISMS = (DELTA, GATED_DELTA)
