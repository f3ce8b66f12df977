r"""Softmax attention with a bias from a separate delta rule: $q_i^T k_j / \sqrt K + u'^T_j H_{j+1} \cdots H_i\,
u_i / \sqrt D$ with $H_t = I - \beta_t w_t w_t^T$ and narrow u, u', w of width D.

The source asks for a "position DeltaNet" beside the attention, whose state gives a dynamic bias for the scores. The
state of a delta rule is $S_t = S_{t-1} H_t + \beta_t\, v_t w_t^T$. When $u_i$ reads it, what token j wrote has been
multiplied by the later tokens' $H_t$. So the bias is PaTH's score (Yang et al. 2025, arXiv:2505.16381, equation 3) of
vectors made for it. It depends on the input if the gates do; made from positions alone it would be the same for all.
"""

from functools import partial
from math import sqrt
from typing import Any, ClassVar

from ortho import _checks
from ortho._checks import attention_form, carried, gate, past_length
from ortho._typing import Bool, Float, Size, State, Tensor
from ortho.attention.mechanism import Mechanism
from ortho.attention.positions.path_attention import (
    BLOCK,
    Reflections,
    check_reflections,
    reflected_attention,
    reflected_attention_reference,
    reflections,
    reflections_cost,
)
from ortho.gates import Gate, ReflectingWriteStrength


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    is_causal: bool,
    bias_queries: Tensor | None = None,
    bias_keys: Tensor | None = None,
    directions: Tensor | None = None,
    beta: Tensor | None = None,
    **_: Any,
) -> None:
    """Raise unless bias vectors are (..., N, D), both or neither are given, and the reflections fit them."""
    for name, one, other in (("bias_queries", bias_queries, bias_keys), ("bias_keys", bias_keys, bias_queries)):
        if one is None and other is not None:
            raise ValueError(f"{name}: expected a tensor beside the other part of the bias, got None")
    if bias_keys is None and directions is not None:
        raise ValueError(f"directions: expected None without bias vectors, got {_checks.describe(directions)}")
    width = bias_queries.shape[-1] if bias_queries is not None and bias_queries.dim() else 0
    for name, value in (("bias_queries", bias_queries), ("bias_keys", bias_keys)):
        gate(name, value, k, (*k.shape[:-1], width))
        if value is not None:
            _checks.finite(name, value)
    check_reflections(k, width, directions, beta, is_causal)


@attention_form(beside=("bias keys",), check=_check)
def position_delta_attention_reference(
    q: Float[Tensor, "*batch N K"],
    k: Float[Tensor, "*batch M K"],
    v: Float[Tensor, "*batch M V"],
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
    """Softmax attention plus a bias whose vectors every later token reflects, computed token by token.

    Arguments are as in `softmax_attention_reference`, except `is_causal`, which must be True. `bias_queries` are the u
    and `bias_keys` the u'; without both there is no bias. `directions` are divided by their lengths; without them
    nothing is reflected. `beta`, in [0, 2], is 1 by default, and 0 for a token that no query may attend to: a mask must
    be one row for all queries. The state is (keys, values, bias keys after the last reflection, in float32 at least).

    Raises TypeError or ValueError, naming the argument, for operands that do not fit together or leave their range.
    """
    gates = (bias_queries, bias_keys, directions, beta)
    u, u_keys, r, past = _bias(k, *gates, attn_mask, initial_state)
    q = q * (1 / sqrt(q.shape[-1]) if scale is None else scale)
    o, keys = reflected_attention_reference(u, u_keys, v, r, past, attn_mask, (q, k))
    return o, (keys,)


@attention_form(beside=("bias keys",), check=_check)
def position_delta_attention(
    q: Float[Tensor, "*batch N K"],
    k: Float[Tensor, "*batch M K"],
    v: Float[Tensor, "*batch M V"],
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
    u, u_keys, r, past = _bias(k, *gates, attn_mask, initial_state)
    q = q * (1 / sqrt(q.shape[-1]) if scale is None else scale)
    o, keys = reflected_attention(u, u_keys, v, r, past, attn_mask, (q, k), block=block, return_keys=return_state)
    return o, (keys,)


def _bias(
    k: Tensor,
    bias_queries: Tensor | None,
    bias_keys: Tensor | None,
    directions: Tensor | None,
    beta: Tensor | None,
    attn_mask: Tensor | None,
    initial_state: State | None,
) -> tuple[Tensor, Tensor, Reflections, Tensor]:
    """(u, scaled; u'; their reflections; the u' of past keys); by default the width is 0, and products are 0."""
    length = past_length(initial_state)
    k = k[..., length:, :]  # the new ones
    if bias_queries is None or bias_keys is None:
        bias_queries = bias_keys = k.new_zeros(*k.shape[:-1], 0)
    D = bias_keys.shape[-1]
    past = k.new_zeros(*k.shape[:-2], 0, D)
    if initial_state is not None:
        past = carried("bias keys", initial_state[2], (*k.shape[:-2], length, D), k.dtype)
    r = reflections(directions, beta, k, D, attn_mask, length)
    return bias_queries * (1 / sqrt(max(1, D))), bias_keys, r, past


class BiasVectors(Gate):
    r"""$x W^T$, one vector of 8 numbers per head and token: the u, u' or w of `position_delta`."""

    width: ClassVar[int] = 8

    @classmethod
    def rows(cls, d: Size, H: Size) -> Size:
        return H * cls.width

    def forward(self, x: Float[Tensor, "B N d"]) -> Float[Tensor, "B H N K"]:
        return self._vectors(x)


MECHANISM = Mechanism(
    name="position-delta",
    family="positions",
    source="document S3, section 3.3d; the products: Yang et al. 2025, arXiv:2505.16381",
    reference=position_delta_attention_reference,
    fast=position_delta_attention,
    bidirectional=False,
    positional=True,
    self_attention_only=True,
    cost=partial(reflections_cost, bias_width=BiasVectors.width),
    gates={
        "bias_queries": BiasVectors,
        "bias_keys": BiasVectors,
        "directions": BiasVectors,
        "beta": ReflectingWriteStrength,
    },
)
