r"""Softmax attention, $o_i = \sum_j \mathrm{softmax}_j(q_i^T k_j / \sqrt{K})\, v_j$ (Vaswani et al. 2017, eq. 1)."""

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from ortho._typing import Float, Tensor
from ortho.attention.call import Call, attention_function
from ortho.attention.mechanism import Mechanism
from ortho.attention.scores import masked_softmax

_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]


@attention_function(bias=True)
def softmax_attention_reference(call: Call) -> Float[Tensor, "*batch N V"]:
    r"""Softmax attention as its formula reads, with the N x M matrix of weights materialised, in float32 at least.

    `attn_mask` broadcasts to (..., N, M), True = attend; a row with nothing to attend to gives zeros. A mask of numbers
    is added to the scores. `is_causal` lets query i attend to keys 0..i. `scale` defaults to $1/\sqrt{K}$.
    `initial_state` holds earlier keys and values, which every query may attend to (the mask then spans them too); with
    `return_state` the result is (o, state).

    Raises TypeError or ValueError, naming the argument, for operands that do not fit together.
    """
    scores = call.q @ call.k.mT * call.factor  # (..., N, M)
    if call.bias is not None:
        scores = scores + call.bias
    # only a mask can block a whole row
    return masked_softmax(scores, call.blocked, empty_rows=call.attn_mask is not None) @ call.v


@attention_function(bias=True, upcasts=False)
def softmax_attention(call: Call) -> Float[Tensor, "*batch N V"]:
    """`softmax_attention_reference` through PyTorch's fused kernels; no matrix of weights is kept.

    A mask that differs between queries is kept, as a bias of the scores.

    Takes and returns the same, in the dtype of q even under autocast; sums and the softmax are float32 at least. The
    fused kernels need values as wide as keys: V != K raises ValueError, and a device without a fused kernel for the
    dtype (float64 on CUDA) raises PyTorch's RuntimeError rather than falling back. The kernels add a mask to the
    scores: if the scores of hidden keys leave the range of the dtype, rows are NaN.
    """
    q, k, v = call.q, call.k, call.v
    if v.shape[-1] != q.shape[-1]:
        raise ValueError(f"v: expected width {q.shape[-1]} like q, for the fused kernel, got shape {tuple(v.shape)}")
    call.is_causal = call.is_causal and q.shape[-2] > 1  # a lone query is the last: it has no future
    if call.is_causal and call.attn_mask is None and not call.past:
        return _fused(q, k, v, None, True, call.scale)
    return _fused(q, k, v, call.blocked, False, call.scale, call.bias)


def _fused(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    blocked: Tensor | None,
    is_causal: bool,
    scale: float | None,
    added: Tensor | None = None,
) -> Float[Tensor, "*batch N V"]:
    """`scaled_dot_product_attention` on any number of leading axes, without its materialised fallback."""
    lead = q.shape[:-2]
    if scale is not None:
        q, scale = positive_scale(q, scale)
    bias = None
    if blocked is not None:  # made before it is spread over the heads: most kernels would make one for each
        none = torch.zeros(blocked.shape, dtype=q.dtype, device=q.device) if added is None else added.to(q.dtype)
        bias = none.masked_fill(blocked, -torch.inf)
        # the kernels broadcast some leading axes and not others
        bias = bias.expand(torch.broadcast_shapes(bias.shape, (*lead, 1, k.shape[-2])))
        bias = bias if q.dim() == 4 else bias.reshape(1, -1, *bias.shape[-2:])
    if q.dim() != 4:
        q, k, v = (x.reshape(1, -1, *x.shape[-2:]) for x in (q, k, v))
    # The kernels only read rows that are contiguous in memory.
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    with sdpa_kernel(_KERNELS):
        o = scaled_dot_product_attention(q, k, v, attn_mask=bias, is_causal=is_causal, scale=scale)
    return o.reshape(*lead, *o.shape[-2:])


def positive_scale(q: Tensor, scale: float) -> tuple[Tensor, float]:
    """(q, scale) for the same scores, with a scale above 0: a kernel multiplies the -inf of blocked pairs by it, in
    float32."""
    if abs(scale) < torch.finfo(torch.float32).tiny:
        return q * scale, 1.0
    return (q, scale) if scale > 0 else (-q, -scale)


MECHANISM = Mechanism(
    name="softmax",
    family="softmax",
    source="Vaswani et al. 2017, arXiv:1706.03762; fused: Dao et al. 2022, arXiv:2205.14135",
    reference=softmax_attention_reference,
    fast=softmax_attention,
    exact=True,
)
