r"""Softmax attention with constant scores: a forward pass with q and k exchanged gives the gradient of the values.

If queries and keys have no gradient, only v has one. With the scores $s_{ij} = q_i^T k_j / \sqrt K$ and the
log-sum-exp of a row, $L_i = \ln \sum_j e^{s_{ij}}$,

$$dv_j = \sum_i e^{s_{ij} - L_i}\, do_i = e^{M_j} \sum_i \frac{e^{s_{ij} - L_i}}{e^{M_j}}\, do_i, \qquad
  M_j = \ln \sum_i e^{s_{ij} - L_i}.$$

The last sum is softmax attention with $k_j$ as the query, $q_i$ as the key and $do_i$ as the value; M is its own
log-sum-exp. So the backward pass is a call of the forward kernel. It needs neither v nor o, and makes no dP, dQ, dK.

The bias $-L_i$ has channels of its own, $q' = [q, -L \sqrt K / c]$ and $k' = [k, c]$, so any kernel will do. In half
precision the bias is a sum of terms in these channels, each the rounded remainder of the terms before it. The kernel
adds up their products with c in float32, and three terms have the bits of one float32 number. c is a power of two that
brings the terms into the range of float16. In a causal call $k_j$ reads $q_i$ with $i \ge j$, so both are reversed.

On GPUs, half precision without a mask has a kernel of its own (`frozen_qk_triton`): L is known, so it needs no
channels, and no M.

A *sink* is one more score in each row, for a key whose value is 0: a query whose scores are all far below it reads
nothing. The sink adds a term to $L_i$, which makes the output and, in the backward pass, the weights smaller.
"""

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from math import floor, frexp, log2, sqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.func import functional_call
from torch.nn.attention import SDPBackend
from torch.nn.functional import pad

from ortho import checks
from ortho._typing import Bool, Float
from ortho.attention.backward import once
from ortho.attention.call import Call, attention_function, blocked_pairs
from ortho.attention.scores import masked_softmax
from ortho.attention.softmax.softmax_attention import positive_scale
from ortho.heads import repeat_kv

aten = torch.ops.aten
HAS_TRITON = find_spec("triton") is not None  # it comes with PyTorch's builds for GPUs


def _constants(call: Call, sink: float | None) -> None:
    """ValueError for queries or keys that need a gradient, those of a state too, since they would get none."""
    largest = torch.finfo(torch.float32).max
    checks.expect(sink is None or abs(sink) <= largest, "sink", f"a number of at most {largest:.3g} in size", sink)
    for name, x in (("q", call.q), ("initial_state" if call.past else "k", call.k)):
        if x.requires_grad:
            raise ValueError(f"{name}: expected a constant without a gradient, got a tensor that needs one")


@attention_function()
def frozen_qk_attention_reference(call: Call, *, sink: float | None = None) -> Float[Tensor, "*batch N V"]:
    """Softmax attention as its formula reads, for queries and keys without gradients, with a `sink` if one is given.

    Takes, returns and raises what `softmax_attention_reference` does. It also raises ValueError for a q or k that needs
    a gradient, since it would get none.
    """
    _constants(call, sink)
    scores, blocked = call.q @ call.k.mT * call.factor, call.blocked  # (..., N, M)
    if sink is None:
        return masked_softmax(scores, blocked, empty_rows=call.attn_mask is not None) @ call.v
    if blocked is not None:
        blocked = pad(blocked.expand(torch.broadcast_shapes(blocked.shape, scores.shape[-1:])), (1, 0), value=False)
    scores = pad(scores, (1, 0), value=sink)
    return masked_softmax(scores, blocked, empty_rows=False)[..., 1:] @ call.v


@attention_function(upcasts=False)
def frozen_qk_attention(call: Call, *, sink: float | None = None) -> Float[Tensor, "*batch N V"]:
    """`frozen_qk_attention_reference` by fused kernels, forward and backward; keeps q, k and a number per row.

    Takes and returns the same, for values at most as wide as keys; narrower ones are padded with zeros to K. V > K
    raises ValueError, and a device without a fused kernel for the dtype raises PyTorch's RuntimeError. The result
    cannot be differentiated twice.
    """
    checks.untraced("frozen_qk_attention")
    _constants(call, sink)
    q, k, v = call.q, call.k, call.v
    if v.shape[-1] > q.shape[-1]:
        wanted = f"at most the width {q.shape[-1]} of q, for the fused kernel"
        raise ValueError(f"v: expected {wanted}, got shape {tuple(v.shape)}")
    mask, in_kernel = _mask(q.shape, k.shape[-2], call.is_causal, call.attn_mask, bool(call.past), q.device)
    flat = [x if x.dim() == 4 else x.reshape(1, -1, *x.shape[-2:]) for x in (v, q, k)]
    if torch.is_grad_enabled() and v.requires_grad:
        o = _FrozenQK.apply(flat[0], mask, None, in_kernel, call.factor, sink, *flat[1:])
    else:
        o = attend(flat[1], flat[2], flat[0], mask, in_kernel, call.factor, sink)[0]
    return o.reshape(*q.shape[:-1], v.shape[-1])


def recomputed_attention(
    x: Float[Tensor, "B N d"],
    v: Float[Tensor, "B H N V"],
    projection: nn.Module,
    *,
    is_causal: bool = False,
    attn_mask: Bool[Tensor, "..."] | None = None,
    sink: float | None = None,
) -> Float[Tensor, "B H N V"]:
    """`frozen_qk_attention(*projection(x), v)` that keeps x and a number per row and recomputes q and k backward.

    `projection` gives q (B, H, N, K) and k (B, G, N, K), whose G heads the H heads of q share. It must give the same
    both times: the second time it has the parameters and buffers of the first, whatever the module holds by then. No
    gradient passes through it to x, and none reaches its parameters. The caller has checked the numbers. The result
    cannot be differentiated twice.

    Raises TypeError or ValueError, naming the argument, if attn_mask is not a fitting boolean mask, if is_causal is not
    a bool, and if v does not fit the projection's keys.
    """
    checks.untraced("frozen_qk_attention")
    if not isinstance(is_causal, bool):
        raise TypeError(f"is_causal: expected True or False, got {checks.describe(is_causal)}")
    if attn_mask is not None:
        checks.mask(attn_mask, (*v.shape[:-1], v.shape[-2]))
    mask, in_kernel = _mask(v.shape, v.shape[-2], is_causal, attn_mask, False, v.device)
    return _FrozenQK.apply(v, mask, projection, in_kernel, None, sink, x, *_tensors(projection).values())


def _tensors(projection: nn.Module) -> dict[str, Tensor]:
    """All that a projection computes with, by name."""
    return {**dict(projection.named_parameters()), **dict(projection.named_buffers())}


def _projected(projection: Callable[..., tuple[Tensor, Tensor]], x: Tensor) -> tuple[Tensor, Tensor]:
    """q and k, with a head of keys for each head of queries."""
    q, k = projection(x)
    return q, repeat_kv(k, q.shape[1])


def _mask(
    shape: torch.Size, keys: int, is_causal: bool, attn_mask: Tensor | None, past: bool, device: torch.device
) -> tuple[Tensor | None, bool]:
    """The mask of allowed pairs, with four axes, some of which may be 1; and whether the kernel handles causality."""
    if attn_mask is None and (not is_causal or not past or shape[-2] == 1):
        return None, is_causal and shape[-2] > 1
    blocked = blocked_pairs(shape[-2], keys, is_causal, attn_mask, device)
    assert blocked is not None
    if blocked.dim() > 2 and len(shape) != 4:
        blocked = blocked.expand(*shape[:-2], *blocked.shape[-2:]).reshape(1, -1, *blocked.shape[-2:])
    return ~blocked[(None,) * (4 - blocked.dim())], False


class _FrozenQK(Function):
    """Attention to v. Kept are q and k, or x and the tensors of the `projection` that makes them each time."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        """Of (v, mask, projection, is_causal, scale, sink, *kept). `torch.compile` leaves ctx out if a function has as
        many parameters as it is given arguments, which two are never."""
        v, mask, projection, is_causal, scale, sink, *kept = given
        q, k = kept if projection is None else _projected(projection, kept[0])
        if projection is not None and (v.shape[:-1] != k.shape[:-1] or v.shape[-1] > q.shape[-1]):
            wanted = f"shape {(*k.shape[:-1], 'V')} with V of at most {q.shape[-1]}, like the projection's keys"
            raise ValueError(f"v: expected {wanted}, got {tuple(v.shape)}")
        ctx.scale = 1 / sqrt(q.shape[-1]) if scale is None else scale
        o, L = attend(q, k, v, mask, is_causal, ctx.scale, sink)
        ctx.save_for_backward(L, mask, *kept)
        ctx.projection, ctx.is_causal, device = projection, is_causal, q.device.type
        # q and k are made again as in the forward pass, in half precision if autocast made them so.
        ctx.autocast = device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
        return o

    @staticmethod
    @once
    def backward(ctx: Any, do: Tensor) -> Any:
        L, mask, *kept = ctx.saved_tensors
        if ctx.projection is None:
            q, k = kept
        else:
            held = dict(zip(_tensors(ctx.projection), kept[1:], strict=True))
            device, dtype, enabled = ctx.autocast
            with torch.autocast(device, dtype, enabled=enabled):
                q, k = _projected(partial(functional_call, ctx.projection, held), kept[0])
        dv = gradient_of_values(q, k, L, do, mask, ctx.is_causal, ctx.scale)
        return dv, *(None for _ in ctx.needs_input_grad[1:])


def attend(
    q: Float[Tensor, "B H N K"],
    k: Float[Tensor, "B H M K"],
    v: Float[Tensor, "B H M V"],
    mask: Bool[Tensor, "..."] | None,
    is_causal: bool,
    scale: float,
    sink: float | None = None,
) -> tuple[Float[Tensor, "B H N V"], Float[Tensor, "B H N"]]:
    """(o, L) by the device's kernel, with the sink in both; o is 0 for a query that may attend to nothing, and so is L
    without a sink."""
    q, scale = _scaled(q, scale)
    bias, empty = (None, None) if mask is None else _bias(mask, q.dtype)
    o, L = _kernel(q, k, v, bias, is_causal, scale)
    if empty is not None:
        o, L = o.masked_fill(empty, 0), L.masked_fill(empty[..., 0], 0)
    if sink is not None:
        beside = torch.logaddexp(L, L.new_full((), sink))
        o, L = (o * (L - beside).exp()[..., None]).to(o.dtype), beside
    return o if o.shape[-1] == k.shape[-1] else o.contiguous(), L  # a part of the kernel's output would keep all of it


def gradient_of_values(
    q: Float[Tensor, "B H N K"],
    k: Float[Tensor, "B H M K"],
    L: Float[Tensor, "B H N"],
    do: Float[Tensor, "B H N V"],
    mask: Bool[Tensor, "..."] | None,
    is_causal: bool,
    scale: float,
) -> Float[Tensor, "B H M V"]:
    """dv by the forward kernel, as explained at the top of this file; on GPUs by a kernel of its own if that serves."""
    if _own_kernel(q, do, mask):
        from ortho.attention.softmax import frozen_qk_triton  # not every PyTorch has Triton

        return frozen_qk_triton.gradient_of_values(q, k, L, do, is_causal, scale)
    q, scale = _scaled(q, scale)
    c = _factor(scale, q.dtype)
    terms = _channels(L / (-scale * c), q)
    factors = k.new_full((1,), c).expand(*k.shape[:-1], terms.shape[-1])
    wide = [_beside(k, factors), _beside(q, terms), _beside(do, torch.zeros_like(terms))]
    asking, answering, read = (x.flip(2) for x in wide) if is_causal else wide
    bias, empty = (None, None) if mask is None else _bias(mask.mT, q.dtype)
    o, M = _kernel(asking, answering, read, bias, is_causal, scale)
    del wide, asking, answering, read  # frees their memory for the result
    dv = (o[..., : do.shape[-1]] * M.exp()[..., None]).to(do.dtype)
    if empty is not None:
        dv = dv.masked_fill(empty, 0)
    return dv.flip(2) if is_causal else dv


def _own_kernel(q: Tensor, do: Tensor, mask: Tensor | None) -> bool:
    """Whether the Triton kernel serves such a call."""
    half = q.is_cuda and q.dtype.itemsize == 2 and mask is None
    return half and HAS_TRITON and all(x.shape[-1] in (16, 32, 64, 128) for x in (q, do))


def _scaled(q: Tensor, scale: float) -> tuple[Tensor, float]:
    """(q, scale) for the same scores; if the scale is too small to divide by, a power of two moves from it to q."""
    q, scale = positive_scale(q, scale)
    small = 2.0 ** min(0, frexp(scale)[1] + 24)
    return (q, scale) if small == 1 else (q * small, scale / small)


def _bias(mask: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(0, but minus infinity for blocked pairs; which rows are empty, (..., 1)). An empty row is 0, so never NaN."""
    empty = ~mask.any(-1, keepdim=True)
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~(mask | empty), -torch.inf), empty


def _beside(x: Float[Tensor, "B H N K"], channels: Float[Tensor, "B H N c"]) -> Float[Tensor, "B H N Kc"]:
    """x with further channels, laid out token by token. Kernels then lay out results so, and merging heads is free."""
    return torch.cat([x.transpose(1, 2), channels.transpose(1, 2)], -1).transpose(1, 2)


def channels(itemsize: int) -> int:
    """The number of channels for the log-sum-exp: 16 bytes, which suits kernels' reads, and more terms than needed."""
    return 16 // itemsize


def _factor(scale: float, dtype: torch.dtype) -> float:
    """c, a power of two, so that multiplying by it rounds nothing. With it the terms of a log-sum-exp L are at most
    L / 64: float16 then reaches up to 2^22, in steps of 2^-17. (At scale 1, L itself may be too large for float16.)"""
    return 2.0 ** min(max(0, 6 - floor(log2(scale))), frexp(torch.finfo(dtype).max)[1] - 1)


def _channels(values: Float[Tensor, "B H N"], like: Tensor) -> Float[Tensor, "B H N c"]:
    """Numbers of `like`'s dtype that sum to the values, to float32 precision; those of float32 are exact in TF32."""
    terms, short = [], torch.bfloat16 if like.dtype == torch.float32 else like.dtype
    for _ in range(channels(like.dtype.itemsize)):
        terms.append(values.to(short).to(like.dtype))
        values = values - terms[-1]
    return torch.stack(terms, -1)


def _kernel(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """(o, L) of PyTorch's fused kernel; `scaled_dot_product_attention` calls it too, but does not return L.

    The kernel takes values as wide as keys, so narrower ones are padded with zeros.
    """
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))  # kernels read rows without gaps
    width = v.shape[-1]
    if width < q.shape[-1]:
        o, L = _kernel(q, k, pad(v, (0, q.shape[-1] - width)), bias, is_causal, scale)
        return o[..., :width], L
    if q.device.type == "cpu":
        kernel = aten._scaled_dot_product_flash_attention_for_cpu
        return kernel(q, k, v, 0.0, is_causal, attn_mask=bias, scale=scale)[:2]
    if bias is None and q.dtype.itemsize == 2 and q.shape[-1] % 8 == 0:
        if _cudnn(q.shape[-2], k.shape[-2], q.shape[-1], is_causal, q.dtype, q.device):
            o, L = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, is_causal, scale=scale)[:2]
            return o, L.squeeze(-1)
        return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal, scale=scale)[:2]
    if bias is not None:  # the kernel reads it in rows of 16 bytes
        M = k.shape[-2]
        bias = bias.expand(*q.shape[:-1], M)
        bias = torch.nn.functional.pad(bias, (0, -M % 8))[..., :M]
    o, L = aten._scaled_dot_product_efficient_attention(q, k, v, bias, True, 0.0, is_causal, scale=scale)[:2]
    return o, L[..., : q.shape[-2]]  # the kernel pads L to a multiple of 32


def _cudnn(N: int, M: int, K: int, is_causal: bool, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether `scaled_dot_product_attention` would take cuDNN's kernel here, which on a Hopper GPU is the fastest."""
    q, k = (torch.empty(1, 1, tokens, K, dtype=dtype, device=device) for tokens in (N, M))
    return torch._fused_sdp_choice(q, k, k, is_causal=is_causal) == SDPBackend.CUDNN_ATTENTION.value


# The compiler asks once and keeps the answer. `torch.compiler.assume_constant_result` sets the same attribute, but it
# loads the whole compiler, which would slow the import of this package.
_cudnn._dynamo_marked_constant = True  # type: ignore[attr-defined]
