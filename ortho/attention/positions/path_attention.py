r"""PaTH: between a key and a query stand the reflections of the tokens on the way,
$q_i^T H_i \cdots H_{j+1} k_j / \sqrt K$ with $H_t = I - \beta_t w_t w_t^T$ (Yang et al. 2025, arXiv:2505.16381).

The same products carry a delta-rule memory from token to token; here they carry the keys. As published, w comes out of
a low-rank map and a convolution over three tokens; here without the convolution, so that a token's gates are its own.
"""

from math import sqrt
from typing import Any

import torch

from ortho import _checks
from ortho._autocast import no_autocast
from ortho._checks import checked
from ortho._typing import Bool, Float, State, Tensor
from ortho.attention.mechanism import Mechanism
from ortho.attention.operands import absent_keys, carried, working
from ortho.attention.positions.position_gates import Directions
from ortho.attention.recurrent.householder import (
    BLOCK,
    Reflections,
    reflected_attention,
    reflected_attention_reference,
    reflections,
)
from ortho.attention.recurrent.householder_cost import reflections_cost
from ortho.gates import ReflectingWriteStrength


@checked(shapes=False)
def path_attention_reference(
    q: Float[Tensor, "*batch N K"],
    k: Float[Tensor, "*batch N K"],
    v: Float[Tensor, "*batch N V"],
    *,
    directions: Float[Tensor, "*batch N K"] | None = None,
    beta: Float[Tensor, "*batch N"] | None = None,
    is_causal: bool = False,
    attn_mask: Bool[Tensor, "..."] | None = None,
    scale: float | None = None,
    initial_state: State | None = None,
    return_state: bool = False,
) -> Float[Tensor, "*batch N V"] | tuple[Float[Tensor, "*batch N V"], State]:
    r"""Softmax attention with keys that every later token reflects, one token after the other; $O(N^2 K)$.

    Arguments as in `softmax_attention_reference`, but for `is_causal`, which must be True. `directions` are divided by
    their lengths; without them nothing is reflected. `beta`, in [0, 2], is 1 by default, and 0 for a token that no
    query may attend to: a mask must be one row for all queries. The state is (keys as they are behind the last
    reflection, in float32 at least; values).

    Raises TypeError or ValueError, naming the argument, for operands that do not fit together or leave their range.
    """
    q, k, v, r, past, dtype = _operands(q, k, v, directions, beta, is_causal, attn_mask, scale, initial_state)
    with no_autocast(q):
        o, keys = reflected_attention_reference(q, k, working(v), r, past, attn_mask)
    return (o.to(dtype), (keys, v)) if return_state else o.to(dtype)


@checked(shapes=False)
def path_attention(
    q: Float[Tensor, "*batch N K"],
    k: Float[Tensor, "*batch N K"],
    v: Float[Tensor, "*batch N V"],
    *,
    directions: Float[Tensor, "*batch N K"] | None = None,
    beta: Float[Tensor, "*batch N"] | None = None,
    is_causal: bool = False,
    attn_mask: Bool[Tensor, "..."] | None = None,
    scale: float | None = None,
    initial_state: State | None = None,
    return_state: bool = False,
    block: int = BLOCK,
) -> Any:
    """`path_attention_reference` in blocks of at most `block` tokens, in memory linear in N. Not differentiable twice.

    Queries are moved from block to block by the product of a block's reflections, as in section 3.3 of the paper.
    """
    q, k, v, r, past, dtype = _operands(q, k, v, directions, beta, is_causal, attn_mask, scale, initial_state)
    with no_autocast(q):
        o, keys = reflected_attention(q, k, working(v), r, past, attn_mask, block=block, return_keys=return_state)
    return (o.to(dtype), (keys, v)) if return_state else o.to(dtype)


def _operands(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    directions: Tensor | None,
    beta: Tensor | None,
    is_causal: bool,
    attn_mask: Tensor | None,
    scale: float | None,
    initial_state: State | None,
) -> tuple[Tensor, Tensor, Tensor, Reflections, Tensor, torch.dtype]:
    """q, scaled, and k in float32 at least; all values; the reflections; past keys; the dtype of q."""
    _checks.scale_factor(scale)
    past, past_v = (None, None) if initial_state is None else _checks.state(initial_state, "keys", "values", axes=2)
    _checks.qkv(q, k, v, attn_mask, is_causal, past=0 if past is None else past.shape[-2])
    if not is_causal:
        raise ValueError("is_causal: expected True, since tokens reflect the keys before them, got False")
    absent = absent_keys(attn_mask, k, 0 if past is None else past.shape[-2], is_causal)
    r = reflections(directions, beta, k, k.shape[-1], absent)
    scaled, keys = working(q) * (1 / sqrt(q.shape[-1]) if scale is None else scale), working(k)
    if past is None or past_v is None:
        return scaled, keys, v, r, keys.new_zeros((*k.shape[:-2], 0, k.shape[-1])), q.dtype
    carried("keys", past, (*k.shape[:-2], past.shape[-2], k.shape[-1]), keys.dtype)
    carried("values", past_v, (*v.shape[:-2], past.shape[-2], v.shape[-1]), v.dtype)
    return scaled, keys, torch.cat([past_v, v], -2), r, past, q.dtype


MECHANISM = Mechanism(
    name="path",
    family="positions",
    source="Yang et al. 2025, arXiv:2505.16381",
    reference=path_attention_reference,
    fast=path_attention,
    causal=True,
    bidirectional=False,
    exact=False,
    positional=True,
    one_sequence=True,
    cost=reflections_cost,
    gates={"directions": Directions, "beta": ReflectingWriteStrength},
)
