r"""Efficient Attention, causal: softmax over features for queries, over the positions so far for keys.

Keys are normalised over the positions up to the query's own:

$$O_i = \sum_f \rho_q(q_i)_f \sum_{j \le i} e^{k_{jf} - L_{if}}\, v_j, \qquad L_{if} = \log \sum_{j \le i} e^{k_{jf}},$$

which is what `efficient` gives at its last query when it sees the tokens up to i. With one running normaliser for each
feature this is a recurrence, namely gated linear attention (`gla`): token i writes the key $p_i = e^{k_i - L_i}$, the
running softmax, and keeps a share $a_i = e^{L_{i-1} - L_i} = 1 - p_i$ of the earlier state.
"""

from typing import Any

import torch
from torch.autograd import Function

from ortho import checks
from ortho._typing import Float, State, Tensor
from ortho.attention.backward import once
from ortho.attention.call import Call, attention_function
from ortho.attention.mechanism import Mechanism
from ortho.attention.recurrent.channels import by_chunks
from ortho.attention.scores import masked_softmax, scaled


@attention_function()
def causal_efficient_attention_reference(call: Call) -> Float[Tensor, "*batch N V"]:
    r"""The N x M weights, materialised, times v; each query i and feature has its own softmax over the keys up to i.

    Arguments and state are as in `softmax_attention_reference`, except `scale`: q and k are multiplied by its square
    root before the softmax; by default, as published, they are not scaled. A row that may attend to nothing gives 0.
    Raises ValueError for a call that is not causal.
    """
    _refuse_bidirectional(call)
    q, k = scaled(call.scale, call.q, call.k)
    blocked = call.blocked
    assert blocked is not None
    over_keys = masked_softmax(k.mT[..., None, :], blocked[..., None, :, :], empty_rows=True)  # (..., K, N, M)
    return (q.softmax(-1).mT[..., None] * over_keys).sum(-3) @ call.v


@attention_function(keeps="sums")
def causal_efficient_attention(call: Call, *, chunk: int | None = None) -> tuple[Float[Tensor, "*batch N V"], State]:
    """`causal_efficient_attention_reference` in time and memory linear in N, as gated linear attention in chunks.

    The state is S (..., K, V), the average of the values for each feature, in float32 at least, and L (..., K), the
    logarithms of the sums that these averages are divided by, in float64. The result cannot be differentiated twice;
    the reference's can. Raises ValueError for a call that is not causal, and for a mask that is not one row for all
    queries.
    """
    _refuse_bidirectional(call)
    q, k = scaled(call.scale, call.q, call.k)
    S, before = _memory(call)
    lowest = torch.finfo(k.dtype).min
    hidden = None if call.key_mask is None else ~call.key_mask[..., None]  # (..., M, 1)
    k = k.double() if hidden is None else k.double().masked_fill(hidden, lowest)
    # In float64: a running sum in float32 drops what a late token adds, 1e-5 of it at 100,000 tokens, or rounds it.
    # Its second derivative would be NaN, as that of `logcumsumexp` is where the first is 0.
    sums = torch.cat([before[..., None, :], _Once.apply(k)], -2).logcumsumexp(-2)  # (..., 1 + M, K)
    keys = (k - sums[..., 1:, :]).exp().to(S.dtype)
    keys = keys if hidden is None else keys.masked_fill(hidden, 0)
    log_decay = (sums[..., :-1, :] - sums[..., 1:, :]).to(S.dtype)
    o, S = by_chunks(q.softmax(-1), keys, call.v, None, log_decay, S, is_causal=True, chunk=chunk, erase=False)
    return o, (S, sums[..., -1, :])


class _Once(Function):
    """x, whose gradient refuses to be differentiated: PyTorch gets the second derivative of `logcumsumexp` wrong."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    @once
    def backward(_: Any, gradient: Tensor) -> Tensor:
        return gradient


def _refuse_bidirectional(call: Call) -> None:
    checks.expect(call.is_causal, "is_causal", "True (`efficient` serves calls that are not causal)", False)


def _memory(call: Call) -> tuple[Tensor, Tensor]:
    """(S, L) from the state; without a state, averages over no tokens."""
    k, v = call.k, call.v
    shapes = (*k.shape[:-2], k.shape[-1], v.shape[-1]), (*k.shape[:-2], k.shape[-1])
    if not call.state:
        # Lower than any sum, but not so low that its difference from a sum is infinite.
        return v.new_zeros(shapes[0]), k.new_full(shapes[1], torch.finfo(k.dtype).min / 2, dtype=torch.float64)
    S, L = checks.state(call.state, "S", "L")
    return checks.carried("S", S, shapes[0], v), checks.carried("L", L, shapes[1], v.new_empty(0, dtype=torch.float64))


MECHANISM = Mechanism(
    name="efficient-causal",
    family="linear",
    source="after Shen et al. 2021, arXiv:1812.01243",
    reference=causal_efficient_attention_reference,
    fast=causal_efficient_attention,
    bidirectional=False,
)
