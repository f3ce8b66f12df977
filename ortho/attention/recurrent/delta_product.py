r"""DeltaProduct: several steps of the delta rule per token (Siems et al. 2025, arXiv:2502.10297, equation 5).

With $n_h$ keys $k_{t,j}$, values $v_{t,j}$ and write strengths $\beta_{t,j}$ per token,

$$\begin{aligned} S_{t,j} &= (I - \beta_{t,j} k_{t,j} k_{t,j}^T) S_{t,j-1} + \beta_{t,j} k_{t,j} v_{t,j}^T, \\
S_{t,0} &= S_{t-1,n_h}, \qquad o_t = S_{t,n_h}^T q_t . \end{aligned}$$

This is the delta rule on a sequence $n_h$ times as long, read after every $n_h$-th key. A token multiplies the state
by a product of $n_h$ transitions. With $\beta$ up to 2, this can be any orthogonal matrix made of $n_h$ reflections.
"""

from typing import Any, ClassVar

import torch

from ortho import checks
from ortho._typing import Float, Size, Tensor
from ortho.attention.call import Call
from ortho.attention.chunked_recurrence import in_chunks
from ortho.attention.mechanism import Mechanism
from ortho.attention.recurrent.state import Operands, in_two_forms, operands
from ortho.gates import Gate


def by_step(
    call: Call, beta: Tensor | None, more_keys: Tensor | None, more_values: Tensor | None
) -> tuple[Call, Tensor | None, int]:
    """(the call with one key and value for each step, their strengths, the number of steps of a token).

    Raises ValueError for operands that differ in their number of steps per token.
    """
    steps = 1
    if more_keys is not None or more_values is not None:
        for name, value, first in (("more_keys", more_keys, call.k), ("more_values", more_values, call.v)):
            more = None if more_keys is None or more_keys.dim() < 2 else more_keys.shape[-2]
            wanted = (*first.shape[:-1], more or "more", first.shape[-1])
            got = None if value is None else tuple(value.shape)
            checks.expect(got == wanted, name, f"shape {wanted} beside the other, as many a token", got)
        assert more_keys is not None
        assert more_values is not None
        steps += more_keys.shape[-2]
        call.k, call.v = (
            torch.cat([first[..., None, :], later], -2).flatten(-3, -2)
            for first, later in ((call.k, more_keys), (call.v, more_values))
        )
    checks.gate("beta", beta, (*call.q.shape[:-2], call.k.shape[-2] // steps, steps))
    beta = beta if beta is None else beta.flatten(-2)
    if call.attn_mask is not None and call.attn_mask.shape[-1:] not in ((), (1,)):
        call.attn_mask = call.attn_mask.repeat_interleave(steps, -1)
    return call, beta, steps


def _delta_product(
    call: Call,
    *,
    beta: Float[Tensor, "*batch M steps"] | None = None,
    more_keys: Float[Tensor, "*batch M more K"] | None = None,
    more_values: Float[Tensor, "*batch M more V"] | None = None,
    qk_l2norm: bool = True,
) -> tuple[Operands, dict[str, Any]]:
    r"""DeltaProduct by its recurrence, step by step.

    A token's first step is (k, v). `more_keys` (..., M, more, K) and `more_values` (..., M, more, V), given together,
    are the later ones; without them this is the delta rule. `beta` (..., M, 1 + more), in [0, 2], is 1 by default. All
    else is as in `delta_rule_reference`: keys are divided by their lengths unless `qk_l2norm` is False, and the state
    is (S (..., K, V),) in float32 at least.

    Raises TypeError or ValueError, naming the argument, for operands that do not fit together; on the CPU also for
    gates outside their range and, without `qk_l2norm`, for keys with $\beta |k|^2 > 2$.
    """
    call, beta, steps = by_step(call, beta, more_keys, more_values)
    return operands(call, beta, qk_l2norm=qk_l2norm), {"steps": steps}


delta_product_reference, delta_product = in_two_forms(_delta_product, in_chunks)


class _Steps(Gate):
    """A number, or a vector of width d/H, for each of a token's steps, `num_householder` of them."""

    num_householder: ClassVar[int] = 2

    def _by_step(self, x: Float[Tensor, "B N d"], steps: int) -> Float[Tensor, "B H N steps width"]:
        return self._product(x).unflatten(-1, (self.num_heads, steps, -1)).transpose(1, 2)


class StepStrengths(_Steps):
    r"""$\beta = 2 \sigma(x W^T)$ in (0, 2), one for each of a token's steps: x (B, N, d) -> (B, H, N, steps)."""

    @classmethod
    def rows(cls, d: Size, H: Size) -> Size:
        return cls.num_householder * H

    def forward(self, x: Float[Tensor, "B N d"]) -> Float[Tensor, "B H N steps"]:
        # Copied first, so that autograd keeps a single copy, with the layout in which it is read.
        return self._by_step(x, self.num_householder)[..., 0].contiguous().sigmoid() * 2


class LaterOperands(_Steps):
    """The keys, or the values, of a token's steps after the first: x (B, N, d) -> (B, H, N, steps - 1, d/H)."""

    @classmethod
    def rows(cls, d: Size, H: Size) -> Size:
        return (cls.num_householder - 1) * d

    def forward(self, x: Float[Tensor, "B N d"]) -> Float[Tensor, "B H N more K"]:
        return self._by_step(x, self.num_householder - 1)


MECHANISM = Mechanism(
    name="delta-product",
    family="recurrent",
    source="Siems et al. 2025, arXiv:2502.10297",
    reference=delta_product_reference,
    fast=delta_product,
    positional=True,
    signed=True,
    has_weights=False,  # it has further values of its own
    gates={"beta": StepStrengths, "more_keys": LaterOperands, "more_values": LaterOperands},
)
