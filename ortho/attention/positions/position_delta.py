r"""Softmax attention with a bias that a delta rule of its own makes: $q_i^T k_j / \sqrt K + u'^T_j H_{j+1} \cdots H_i\,
u_i / \sqrt D$ with $H_t = I - \beta_t w_t w_t^T$ and narrow u, u', w of width D.

The source asks for a "position DeltaNet" beside the attention, whose state gives a dynamic bias for its scores. The
memory of a delta rule is $S_t = S_{t-1} H_t + \beta_t\, v_t w_t^T$; read at $u_i$, what a token j has written is seen
through the later tokens' products, so that the bias is PaTH's score (Yang et al. 2025, arXiv:2505.16381, equation 3) of
vectors made for it. It depends on the input where the gates do: made of positions alone it would be the same for all.
"""

from functools import partial
from math import sqrt
from typing import Any, NamedTuple

import torch

from ortho import _checks
from ortho._autocast import no_autocast
from ortho._checks import checked
from ortho._typing import Bool, Float, State, Tensor
from ortho.attention.mechanism import Mechanism
from ortho.attention.operands import absent_keys, carried, with_past, working
from ortho.attention.positions.position_gates import BiasVectors
from ortho.attention.recurrent.householder import (
    BLOCK,
    Reflections,
    reflected_attention,
    reflected_attention_reference,
    reflections,
)
from ortho.attention.recurrent.householder_cost import reflections_cost
from ortho.attention.recurrent.memory import gate
from ortho.gates import ReflectingWriteStrength


class _Operands(NamedTuple):
    """The vectors of the bias, their reflections, those of past keys; the content's queries, scaled, and all keys; all
    values, in float32 at least. Keys and values as they came."""

    q: Float[Tensor, "*batch N D"]
    k: Float[Tensor, "*batch N D"]
    v: Float[Tensor, "*batch M V"]
    reflections: Reflections
    past: Float[Tensor, "*batch P D"]
    attn_mask: Bool[Tensor, "..."] | None
    content: tuple[Float[Tensor, "*batch N K"], Float[Tensor, "*batch M K"]]


@checked(shapes=False)
def position_delta_attention_reference(
    q: Float[Tensor, "*batch N K"],
    k: Float[Tensor, "*batch N K"],
    v: Float[Tensor, "*batch N V"],
    *,
    bias_queries: Float[Tensor, "*batch N D"] | None = None,
    bias_keys: Float[Tensor, "*batch N D"] | None = None,
    directions: Float[Tensor, "*batch N D"] | None = None,
    beta: Float[Tensor, "*batch N"] | None = None,
    is_causal: bool = False,
    attn_mask: Bool[Tensor, "..."] | None = None,
    scale: float | None = None,
    initial_state: State | None = None,
    return_state: bool = False,
) -> Float[Tensor, "*batch N V"] | tuple[Float[Tensor, "*batch N V"], State]:
    """Softmax attention with the bias added, whose vectors every later token reflects, one token after the other.

    Arguments as in `softmax_attention_reference`, but for `is_causal`, which must be True. `bias_queries` are the u and
    `bias_keys` the u'; without both there is no bias. `directions` are divided by their lengths; without them nothing
    is reflected. `beta`, in [0, 2], is 1 by default, and 0 for a token that no query may attend to: a mask must be one
    row for all queries. The state is (keys, values, bias keys as they are behind the last reflection, in float32 at
    least).

    Raises TypeError or ValueError, naming the argument, for operands that do not fit together or leave their range.
    """
    gates = (bias_queries, bias_keys, directions, beta)
    k, v, operands = _operands(q, k, v, *gates, is_causal, attn_mask, scale, initial_state)
    with no_autocast(q):
        o, keys = reflected_attention_reference(*operands)
    return (o.to(q.dtype), (k, v, keys)) if return_state else o.to(q.dtype)


@checked(shapes=False)
def position_delta_attention(
    q: Float[Tensor, "*batch N K"],
    k: Float[Tensor, "*batch N K"],
    v: Float[Tensor, "*batch N V"],
    *,
    bias_queries: Float[Tensor, "*batch N D"] | None = None,
    bias_keys: Float[Tensor, "*batch N D"] | None = None,
    directions: Float[Tensor, "*batch N D"] | None = None,
    beta: Float[Tensor, "*batch N"] | None = None,
    is_causal: bool = False,
    attn_mask: Bool[Tensor, "..."] | None = None,
    scale: float | None = None,
    initial_state: State | None = None,
    return_state: bool = False,
    block: int = BLOCK,
) -> Any:
    """`position_delta_attention_reference` in blocks of at most `block` tokens, in memory linear in N. Not
    differentiable twice."""
    gates = (bias_queries, bias_keys, directions, beta)
    k, v, operands = _operands(q, k, v, *gates, is_causal, attn_mask, scale, initial_state)
    with no_autocast(q):
        o, keys = reflected_attention(*operands, block=block, return_keys=return_state)
    return (o.to(q.dtype), (k, v, keys)) if return_state else o.to(q.dtype)


def _operands(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias_queries: Tensor | None,
    bias_keys: Tensor | None,
    directions: Tensor | None,
    beta: Tensor | None,
    is_causal: bool,
    attn_mask: Tensor | None,
    scale: float | None,
    initial_state: State | None,
) -> tuple[Tensor, Tensor, _Operands]:
    """All keys and values as they came, and the operands of the reflected attention."""
    _checks.scale_factor(scale)
    state = None if initial_state is None else _checks.state(initial_state, "keys", "values", "bias keys")
    keys, values = with_past(q, k, v, is_causal, attn_mask, state if state is None else state[:2])
    if not is_causal:
        raise ValueError("is_causal: expected True, since tokens reflect the keys before them, got False")
    wide = torch.promote_types(q.dtype, torch.float32)
    u, u_keys = _bias_vectors(bias_queries, bias_keys, k)
    if bias_keys is None and directions is not None:
        raise ValueError(f"directions: expected None without bias vectors, got {_checks.describe(directions)}")
    past = u_keys.new_zeros((*k.shape[:-2], 0, u.shape[-1]))
    if state is not None:
        past = carried("bias keys", state[2], (*k.shape[:-2], keys.shape[-2] - k.shape[-2], u.shape[-1]), wide)
    r = reflections(directions, beta, k, u.shape[-1], absent_keys(attn_mask, k, past.shape[-2], is_causal))
    content = working(q) * (1 / sqrt(q.shape[-1]) if scale is None else scale), working(keys)
    u = u * (1 / sqrt(max(1, u.shape[-1])))
    return keys, values, _Operands(u, u_keys, working(values), r, past, attn_mask, content)


def _bias_vectors(bias_queries: Tensor | None, bias_keys: Tensor | None, k: Tensor) -> tuple[Tensor, Tensor]:
    """u and u' in float32 at least; by default of width 0, whose products are 0."""
    wide = torch.promote_types(k.dtype, torch.float32)
    for name, one, other in (("bias_queries", bias_queries, bias_keys), ("bias_keys", bias_keys, bias_queries)):
        if one is None and other is not None:
            raise ValueError(f"{name}: expected a tensor beside the other part of the bias, got None")
    if bias_queries is None or bias_keys is None:
        nothing = k.new_zeros((*k.shape[:-1], 0), dtype=wide)
        return nothing, nothing
    _checks.float_tensor("bias_queries", bias_queries)
    width = bias_queries.shape[-1] if bias_queries.dim() else 0
    for name, value in (("bias_queries", bias_queries), ("bias_keys", bias_keys)):
        gate(name, value, k, (*k.shape[:-1], width))
        _checks.finite(name, value)
    return working(bias_queries.to(wide)), working(bias_keys.to(wide))


MECHANISM = Mechanism(
    name="position-delta",
    family="positions",
    source="document S3, section 3.3d; the products: Yang et al. 2025, arXiv:2505.16381",
    reference=position_delta_attention_reference,
    fast=position_delta_attention,
    causal=True,
    bidirectional=False,
    exact=False,
    positional=True,
    one_sequence=True,
    cost=partial(reflections_cost, bias_width=BiasVectors.width),
    gates={
        "bias_queries": BiasVectors,
        "bias_keys": BiasVectors,
        "directions": BiasVectors,
        "beta": ReflectingWriteStrength,
    },
)
