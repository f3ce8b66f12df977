r"""Rotary positions: queries and keys are turned by their positions, so that scores depend on their distance.

Channels i and i + K/2 are the two coordinates of a point in a plane, which position p turns by the angle
$p\, \theta_i$, $\theta_i = 10000^{-2i/K}$. Turning both leaves $q_i^T R_{j-i}\, k_j$, a function of j - i alone
(Su et al. 2021, arXiv:2104.09864, section 3.2, who pair neighbouring channels instead). With an odd K the last channel
is not turned.
"""

import torch

from ortho import _checks
from ortho._checks import checked, past_length, upcast
from ortho._typing import Bool, Float, State, Tensor
from ortho.attention.mechanism import Mechanism
from ortho.attention.softmax.softmax_attention import softmax_attention, softmax_attention_reference, softmax_cost

BASE = 10000.0


@checked(shapes=False)
def rotary_attention_reference(
    q: Float[Tensor, "*batch N K"],
    k: Float[Tensor, "*batch M K"],
    v: Float[Tensor, "*batch M V"],
    *,
    is_causal: bool = False,
    attn_mask: Bool[Tensor, "..."] | None = None,
    scale: float | None = None,
    initial_state: State | None = None,
    return_state: bool = False,
    base: float = BASE,
) -> Float[Tensor, "*batch N V"] | tuple[Float[Tensor, "*batch N V"], State]:
    """`softmax_attention_reference` of the turned queries and keys. Keys stand at positions 0, 1, ..., and so do
    queries, after the keys of the state. The state holds turned keys and values. A masked key keeps its position."""
    q, k = _turned(q, k, v, is_causal, initial_state, base)
    return softmax_attention_reference(
        q,
        k,
        v,
        is_causal=is_causal,
        attn_mask=attn_mask,
        scale=scale,
        initial_state=initial_state,
        return_state=return_state,
    )


@checked(shapes=False)
def rotary_attention(
    q: Float[Tensor, "*batch N K"],
    k: Float[Tensor, "*batch M K"],
    v: Float[Tensor, "*batch M V"],
    *,
    is_causal: bool = False,
    attn_mask: Bool[Tensor, "..."] | None = None,
    scale: float | None = None,
    initial_state: State | None = None,
    return_state: bool = False,
    base: float = BASE,
) -> Float[Tensor, "*batch N V"] | tuple[Float[Tensor, "*batch N V"], State]:
    """`rotary_attention_reference` through PyTorch's fused kernels, with the errors of `softmax_attention`."""
    q, k = _turned(q, k, v, is_causal, initial_state, base)
    return softmax_attention(
        q,
        k,
        v,
        is_causal=is_causal,
        attn_mask=attn_mask,
        scale=scale,
        initial_state=initial_state,
        return_state=return_state,
    )


def angles(start: int, stop: int, width: int, base: float = BASE, *, device: torch.device | None = None) -> Tensor:
    """The angle of each position from `start` to `stop` - 1 in each plane, (stop - start, width // 2).

    In float64: at position 100,000 an angle in float32 is 0.004 off.
    """
    planes = width // 2
    speeds = torch.tensor([base ** (-i / planes) for i in range(planes)], dtype=torch.float64, device=device)
    return torch.arange(start, stop, dtype=torch.float64, device=device)[:, None] * speeds


def turn(x: Float[Tensor, "*batch N K"], cos: Float[Tensor, "N h"], sin: Float[Tensor, "N h"]) -> Tensor:
    """Each row's planes (i, i + h), h = K // 2, turned by the angles with these cosines and sines."""
    planes = cos.shape[-1]
    pairs, rest = x.split([2 * planes, x.shape[-1] - 2 * planes], -1)
    a, b = pairs.unflatten(-1, (2, planes)).unbind(-2)
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)


def turned(q: Tensor, k: Tensor, past: int, base: float = BASE) -> tuple[Tensor, Tensor]:
    """q and k, which follow `past` other keys, turned by their positions; computed in float32 at least."""
    upto = max(q.shape[-2], k.shape[-2])
    table = angles(past, past + upto, q.shape[-1], base, device=q.device)
    wide = torch.promote_types(q.dtype, torch.float32)
    cos, sin = table.cos().to(wide), table.sin().to(wide)
    q, k = (turn(upcast(x), cos[: x.shape[-2]], sin[: x.shape[-2]]).to(x.dtype) for x in (q, k))
    return q, k


def _turned(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, initial_state: State | None, base: float
) -> tuple[Tensor, Tensor]:
    _checks.qkv(q, k, v, None, is_causal)
    if base <= 0:
        raise ValueError(f"base: expected a positive finite number, got {_checks.describe(base)}")
    state = None if initial_state is None else _checks.state(initial_state, "keys", "values", axes=2)
    return turned(q, k, past_length(state), base)


MECHANISM = Mechanism(
    name="rotary",
    family="positions",
    source="Su et al. 2021, arXiv:2104.09864",
    reference=rotary_attention_reference,
    fast=rotary_attention,
    positional=True,
    cost=softmax_cost,  # turning q and k takes no product,
)
