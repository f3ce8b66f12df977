r"""Softmax attention with a bias from a separate delta rule: $q_i^T k_j / \sqrt K + u'^T_j H_{j+1} \cdots H_i\,
u_i / \sqrt D$ with $H_t = I - \beta_t w_t w_t^T$ and narrow u, u', w of width D.

The source asks for a "position DeltaNet" beside the attention, whose state gives a dynamic bias for the scores. The
state of a delta rule is $S_t = S_{t-1} H_t + \beta_t\, v_t w_t^T$. When $u_i$ reads it, what token j wrote has been
multiplied by the later tokens' $H_t$. So the bias is PaTH's score (Yang et al. 2025, arXiv:2505.16381, equation 3) of
vectors made for it. It depends on the input if the gates do; made from positions alone it would be the same for all.
"""

from math import sqrt
from typing import ClassVar

from ortho import checks
from ortho._typing import Float, Size, Tensor
from ortho.attention.call import Call
from ortho.attention.forms import two_forms
from ortho.attention.mechanism import Mechanism
from ortho.attention.position_bias.path_attention import (
    Reflections,
    reflected_attention,
    reflected_attention_reference,
    reflections,
)
from ortho.gates import Gate, ReflectingWriteStrength


def _position_delta_attention(
    call: Call,
    *,
    bias_queries: Float[Tensor, "*batch N D"] | None = None,
    bias_keys: Float[Tensor, "*batch N D"] | None = None,
    directions: Float[Tensor, "*batch N D"] | None = None,
    beta: Float[Tensor, "*batch N"] | None = None,
) -> tuple[Tensor, Tensor, Reflections, Tensor, tuple[Tensor, Tensor]]:
    """Softmax attention plus a bias whose vectors every later token reflects, computed token by token.

    Arguments are as in `softmax_attention_reference`, except `is_causal`, which must be True. `bias_queries` are the u
    and `bias_keys` the u'; without both there is no bias. `directions` are divided by their lengths; without them
    nothing is reflected. `beta`, in [0, 2], is 1 by default, and 0 for a token that no query may attend to: a mask must
    be one row for all queries. The state is (keys, values, bias keys after the last reflection, in float32 at least).

    Raises TypeError or ValueError, naming the argument, for operands that do not fit together; on the CPU also for a
    `beta` out of its range.
    """
    # The width is 0 by default, and products are 0.
    none, new = call.k.new_zeros(*call.q.shape[:-1], 0), call.q.shape[:-1]
    wanted = "a tensor beside the other part of the bias"
    checks.expect(bias_keys is not None or bias_queries is None, "bias_keys", wanted, bias_keys)
    checks.expect(bias_queries is not None or bias_keys is None, "bias_queries", wanted, bias_queries)
    u, keys = (none if x is None else x for x in (bias_queries, bias_keys))
    D = u.shape[-1]
    checks.gate("bias_queries", u, (*new, D), "queries")
    checks.gate("bias_keys", keys, (*new, D))
    past = call.k.new_zeros(*new[:-1], call.past, D)
    if call.state:
        past = checks.carried("bias keys", call.state[0], past.shape, call.k)
    content = call.q * call.factor, call.k
    return u * (1 / sqrt(max(1, D))), keys, reflections(call, directions, beta, D), past, content


position_delta_attention_reference, position_delta_attention = two_forms(
    _position_delta_attention, reflected_attention_reference, reflected_attention, beside=("bias keys",)
)


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
    family="position_bias",
    source="document S3, section 3.3d; the products: Yang et al. 2025, arXiv:2505.16381",
    reference=position_delta_attention_reference,
    fast=position_delta_attention,
    bidirectional=False,
    positional=True,
    self_attention_only=True,
    gates={
        "bias_queries": BiasVectors,
        "bias_keys": BiasVectors,
        "directions": BiasVectors,
        "beta": ReflectingWriteStrength,
    },
)
