r"""ALiBi: a score falls in proportion to the distance, $q_i^T k_j / \sqrt K - m_h |i - j|$ (Press et al. 2022,
arXiv:2108.12409, section 3), with a slope $m_h$ for each head, the same for every input."""

from functools import partial

import torch

from ortho._checks import attention_form, checked, past_length
from ortho._typing import Bool, Float, State, Tensor
from ortho.attention.mechanism import Mechanism
from ortho.attention.positions.distance import distance_attention, distance_attention_reference, distance_cost
from ortho.attention.softmax.tiling import TILE


@attention_form()
def alibi_attention_reference(
    q: Float[Tensor, "*batch N K"],
    k: Float[Tensor, "*batch M K"],
    v: Float[Tensor, "*batch M V"],
    *,
    is_causal: bool = False,
    attn_mask: Bool[Tensor, "..."] | None = None,
    scale: float | None = None,
    initial_state: State | None = None,
    return_state: bool = False,
) -> Float[Tensor, "*batch N V"] | tuple[Float[Tensor, "*batch N V"], State]:
    """Softmax attention minus the biases, with both N x M matrices materialised.

    Arguments, errors and state are as in `softmax_attention_reference`. The heads are the axis before N; 2-d operands
    have one head. Keys stand at positions 0, 1, ..., and so do queries, after the keys of the state; a masked key keeps
    its position. In causal calls the bias is the published one; other calls mirror it for later keys.
    """
    depths = _depths(q, k, past_length(initial_state))
    return distance_attention_reference(q, k, v, *depths, is_causal=is_causal, attn_mask=attn_mask, scale=scale)


@attention_form()
def alibi_attention(
    q: Float[Tensor, "*batch N K"],
    k: Float[Tensor, "*batch M K"],
    v: Float[Tensor, "*batch M V"],
    *,
    is_causal: bool = False,
    attn_mask: Bool[Tensor, "..."] | None = None,
    scale: float | None = None,
    initial_state: State | None = None,
    return_state: bool = False,
    tile: int = TILE,
) -> Float[Tensor, "*batch N V"] | tuple[Float[Tensor, "*batch N V"], State]:
    """`alibi_attention_reference` `tile` queries at a time, in memory linear in N. Not differentiable twice."""
    depths = _depths(q, k, past_length(initial_state))
    return distance_attention(q, k, v, *depths, is_causal=is_causal, attn_mask=attn_mask, scale=scale, tile=tile)


@checked
def slopes(heads: int) -> list[float]:
    r"""The slopes $2^{-8h/H}$ for the heads h = 1 to H, a power of 2. For another H, as published, those of the power
    below, and for the remaining heads every second slope of the power above."""
    power = 1 << (heads.bit_length() - 1)
    own = [2 ** (-8 * h / power) for h in range(1, power + 1)]
    return own if power == heads else own + slopes(2 * power)[::2][: heads - power]


def _depths(q: Tensor, k: Tensor, past: int) -> tuple[Tensor, Tensor]:
    """The depth -m_h p of each query and key, (H, N) and (H, M); without heads (N,) and (M,)."""
    end = max(past + q.shape[-2], k.shape[-2])
    of_heads = torch.tensor(slopes(q.shape[-3] if q.dim() > 2 else 1), dtype=torch.float64, device=q.device)
    depths = of_heads[:, None] * torch.arange(0, -end, -1, dtype=torch.float64, device=q.device)
    depths = depths if q.dim() > 2 else depths[0]
    return depths[..., past : past + q.shape[-2]], depths[..., : k.shape[-2]]


MECHANISM = Mechanism(
    name="alibi",
    family="positions",
    source="Press et al. 2022, arXiv:2108.12409",
    reference=alibi_attention_reference,
    fast=alibi_attention,
    positional=True,
    cost=partial(distance_cost, gated=False),
)
