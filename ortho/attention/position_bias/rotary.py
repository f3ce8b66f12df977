r"""Rotary positions: queries and keys are rotated by their positions, so that scores depend on their distance.

Channels i and i + K/2 are the two coordinates of a point in a plane, which position p rotates by the angle
$p\, \theta_i$, $\theta_i = 10000^{-2i/K}$. Rotating both leaves $q_i^T R_{j-i}\, k_j$, a function of j - i alone
(Su et al. 2021, arXiv:2104.09864, section 3.2, who pair neighbouring channels instead). With an odd K the last channel
is not rotated.
"""

from typing import Any

import torch

from ortho._typing import Float, State, Tensor
from ortho.attention.call import AttentionFunction, Call, attention_function, upcast
from ortho.attention.mechanism import Mechanism
from ortho.attention.softmax.softmax_attention import softmax_attention, softmax_attention_reference

BASE = 10000.0


@attention_function(keeps="fewer keys")
def rotary_attention_reference(call: Call, *, base: float = BASE) -> tuple[Float[Tensor, "*batch N V"], State]:
    """`softmax_attention_reference` of the rotated queries and keys. Keys stand at positions 0, 1, ..., and so do
    queries, after the keys of the state. The state holds rotated keys and values. A masked key keeps its position."""
    return _attend(softmax_attention_reference, call, base)


@attention_function(keeps="fewer keys", upcasts=False)
def rotary_attention(call: Call, *, base: float = BASE) -> tuple[Float[Tensor, "*batch N V"], State]:
    """`rotary_attention_reference` through PyTorch's fused kernels, with the errors of `softmax_attention`."""
    return _attend(softmax_attention, call, base)


def _attend(attention: AttentionFunction, call: Call, base: float) -> tuple[Float[Tensor, "*batch N V"], State]:
    """(o, (keys, values)); the keys of the state have been rotated before."""
    past = (call.k[..., : call.past, :], call.v[..., : call.past, :]) if call.past else None
    q, k = rotated(call.q, call.k[..., call.past :, :], call.past, base)
    options: dict[str, Any] = {"is_causal": call.is_causal, "attn_mask": call.attn_mask, "scale": call.scale}
    return attention(q, k, call.v[..., call.past :, :], initial_state=past, return_state=True, **options)


def angles(start: int, stop: int, width: int, base: float = BASE, *, device: torch.device | None = None) -> Tensor:
    """The angle of each position from `start` to `stop` - 1 in each plane, (stop - start, width // 2).

    In float64: at position 100,000 an angle in float32 is 0.004 off.
    """
    planes = width // 2
    speeds = torch.tensor([base ** (-i / planes) for i in range(planes)], dtype=torch.float64, device=device)
    return torch.arange(start, stop, dtype=torch.float64, device=device)[:, None] * speeds


def apply_rotary(x: Float[Tensor, "*batch N K"], cos: Float[Tensor, "N h"], sin: Float[Tensor, "N h"]) -> Tensor:
    """Each row's planes (i, i + h), h = K // 2, rotated by the angles with these cosines and sines."""
    planes = cos.shape[-1]
    pairs, rest = x.split([2 * planes, x.shape[-1] - 2 * planes], -1)
    a, b = pairs.unflatten(-1, (2, planes)).unbind(-2)
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)


def rotated(q: Tensor, k: Tensor, past: int, base: float = BASE) -> tuple[Tensor, Tensor]:
    """q and k, which follow `past` other keys, rotated by their positions; computed in float32 at least."""
    table = angles(past, past + max(q.shape[-2], k.shape[-2]), q.shape[-1], base, device=q.device)
    wide = torch.promote_types(q.dtype, torch.float32)
    cos, sin = table.cos().to(wide), table.sin().to(wide)
    q, k = (apply_rotary(upcast(x), cos[: x.shape[-2]], sin[: x.shape[-2]]).to(x.dtype) for x in (q, k))
    return q, k


MECHANISM = Mechanism(
    name="rotary",
    family="position_bias",
    source="Su et al. 2021, arXiv:2104.09864",
    reference=rotary_attention_reference,
    fast=rotary_attention,
    positional=True,
)
