r"""Causal Efficient Attention: keys are normalised over the positions up to the query's own.

$O_i = \sum_f \rho_q(q_i)_f \sum_{j \le i} e^{k_{jf} - L_{if}}\, v_j$ with $L_{if} = \log \sum_{j \le i} e^{k_{jf}}$:
what `efficient` (Shen et al. 2021, arXiv:1812.01243) gives at its last query when it sees the tokens up to i. With one
running normaliser for each feature this is a recurrence, namely gated linear attention (`gla`): token i writes the key
$p_i = e^{k_i - L_i}$, the running softmax, and keeps a share $a_i = e^{L_{i-1} - L_i} = 1 - p_i$ of the earlier state.
"""

from dataclasses import replace
from typing import Any

import torch

from ortho import _checks
from ortho._checks import Kernel, attention_form, carried, once
from ortho._cost import Cost, product
from ortho._typing import Bool, Float, State, Tensor
from ortho.attention.mechanism import (
    CostedCall,
    Mechanism,
    closed_form,
)
from ortho.attention.recurrence import CHUNK
from ortho.attention.recurrent.gla import gated_linear_attention, gla_cost, power_chunks
from ortho.attention.scores import blocked_pairs, masked_softmax, scaled


def _causal(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, **_: object) -> None:
    if not is_causal:
        raise ValueError("is_causal: expected True (`efficient` serves calls that are not causal), got False")


@attention_form(check=_causal)
def causal_efficient_attention_reference(
    q: Float[Tensor, "*batch N K"],
    k: Float[Tensor, "*batch M K"],
    v: Float[Tensor, "*batch M V"],
    *,
    is_causal: bool = True,
    attn_mask: Bool[Tensor, "..."] | None = None,
    scale: float | None = None,
    initial_state: State | None = None,
    return_state: bool = False,
) -> Float[Tensor, "*batch N V"] | tuple[Float[Tensor, "*batch N V"], State]:
    r"""The N x M weights, materialised, times v; each query i and feature has its own softmax over the keys up to i.

    Arguments and state are as in `softmax_attention_reference`, except `scale`: q and k are multiplied by its square
    root before the softmax; by default, as published, they are not scaled. A row that may attend to nothing gives 0.
    Raises ValueError for a call that is not causal.
    """
    q, k = scaled(scale, q, k)
    blocked = blocked_pairs(q.shape[-2], k.shape[-2], is_causal, attn_mask, q.device)
    assert blocked is not None
    over_keys = masked_softmax(k.mT[..., None, :], blocked[..., None, :, :], empty_rows=True)  # (..., K, N, M)
    return (q.softmax(-1).mT[..., None] * over_keys).sum(-3) @ v


@attention_form(fixed_state=True, check=_causal)
def causal_efficient_attention(
    q: Float[Tensor, "*batch N K"],
    k: Float[Tensor, "*batch M K"],
    v: Float[Tensor, "*batch M V"],
    *,
    is_causal: bool = True,
    attn_mask: Bool[Tensor, "..."] | None = None,
    scale: float | None = None,
    initial_state: State | None = None,
    return_state: bool = False,
    chunk: int | None = None,
) -> Float[Tensor, "*batch N V"] | tuple[Float[Tensor, "*batch N V"], State]:
    """`causal_efficient_attention_reference` in time and memory linear in N, as gated linear attention in chunks.

    The state is S (..., K, V), the average of the values for each feature, and L (..., K), the logarithms of the sums
    that these averages are divided by, in float32 at least. The result cannot be differentiated twice; the reference's
    can. Raises ValueError for a call that is not causal, and for a mask that is not one row for all queries or is given
    with a state.
    """
    q, k = scaled(scale, q, k)
    hidden = None if attn_mask is None else ~attn_mask[..., None]  # (..., M, 1)
    S, before = _memory(initial_state, k, v)
    k = k if hidden is None else k.masked_fill(hidden, torch.finfo(k.dtype).min)
    sums = RunningLogSum.apply(torch.cat([before[..., None, :], k], -2))  # (..., 1 + M, K)
    shares = (k - sums[..., 1:, :]).exp()
    shares = shares if hidden is None else shares.masked_fill(hidden, 0)
    log_decay = sums[..., :-1, :] - sums[..., 1:, :]
    own = {"log_decay": log_decay, "is_causal": True, "scale": 1.0, "initial_state": (S,), "return_state": True}
    o, (S,) = gated_linear_attention(q.softmax(-1), shares, v, **own, chunk=chunk)
    return o, (S, sums[..., -1, :])


class RunningLogSum(Kernel):
    r"""$\log \sum_{j \le i} e^{x_j}$ along the tokens of x (..., N, K). PyTorch's own has NaN second derivatives."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        sums = x.logcumsumexp(-2)
        ctx.save_for_backward(x, sums)
        return sums

    @staticmethod
    @once
    def backward(ctx: Any, d_sums: Tensor) -> Tensor:
        x, sums = ctx.saved_tensors
        # $e^{x_j} \sum_{i \ge j} d_i e^{-L_i}$, separately for positive and negative d_i, so that logarithms exist
        parts = ((sign * d_sums).clamp(min=0).log().sub_(sums) for sign in (1, -1))
        plus, minus = ((part.flip(-2).logcumsumexp(-2).flip(-2) + x).exp() for part in parts)
        return plus - minus


def _memory(state: State | None, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """(S, L) from the state; without a state, averages over no tokens."""
    shapes = {"S": (*k.shape[:-2], k.shape[-1], v.shape[-1]), "L": (*k.shape[:-2], k.shape[-1])}
    if state is None:
        # Lower than any sum, but not so low that its difference from a sum is infinite.
        return v.new_zeros(shapes["S"]), k.new_full(shapes["L"], torch.finfo(k.dtype).min / 2)
    given = zip(shapes, _checks.state(state, *shapes), strict=True)
    S, L = (carried(name, value, shapes[name], v.dtype) for name, value in given)
    return S, L


@closed_form
def causal_efficient_cost(call: CostedCall, *, chunk: int = CHUNK) -> Cost:
    """Closed-form cost of one self-attention call, in either form. Half precision costs as much as float32.

    A symbolic N stands for a multiple of `chunk`, a power of two, greater than `chunk`. Raises ValueError for a call
    that is not causal.
    """
    if not call.causal:
        raise ValueError("causal: expected True, got False")
    (G, N, K, V), item = call.sizes, call.item
    if call.form == "reference":
        held = Cost(decode=2 * G * N * V, state_bytes=call.itemsize * G * N * (K + V))
        return product(G * N * N * V, 1 + call.reach) + held
    width, number = power_chunks(N, chunk)
    core = replace(call._replace(qk_grad=True).by(gla_cost, chunk=chunk), state_bytes=item * G * K * (V + 1))
    if call.qk_grad:
        return core
    # Values alone: within the chunks, and from chunks to later ones.
    return replace(core, backward=2 * G * number * width**2 * V + 4 * G * (number - 1) * width * K * V)


MECHANISM = Mechanism(
    name="efficient-causal",
    family="linear",
    source="after Shen et al. 2021, arXiv:1812.01243",
    reference=causal_efficient_attention_reference,
    fast=causal_efficient_attention,
    bidirectional=False,
    cost=causal_efficient_cost,
)
