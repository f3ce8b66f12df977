r"""State-space duality, the core of Mamba-2 (Dao & Gu 2024, arXiv:2405.21060): a state-space model, one rate per head.

The state fades by $\dot S = -\alpha S$ for the time $\Delta_t$ that a token chooses, and takes up
$\Delta_t k_t v_t^T$:

$$S_t = e^{-\Delta_t \alpha} S_{t-1} + \Delta_t k_t v_t^T, \qquad o_t = S_t^T q_t ,$$

with C, B, x in the paper for q, k, v. The same outputs are $(L \circ Q K^T)\, \mathrm{diag}(\Delta)\, V$ with $L_{ij} =
a_{j+1} \cdots a_i$ for $j \le i$, the products of the decays (section 5). The fast form uses this within chunks, and
the recurrence from chunk to chunk (section 6).

The skip $D v_t$, the short convolution and the output gate are left to the layer around it.
"""

from typing import Any

import torch
from torch import nn
from torch.nn.functional import softplus

from ortho import checks
from ortho._typing import Float, Size, Tensor
from ortho.attention.call import Call
from ortho.attention.chunked_recurrence import in_chunks
from ortho.attention.mechanism import Mechanism
from ortho.attention.recurrent.state import Operands, in_two_forms, operands
from ortho.gates import Gate, rate_logarithms, step_biases


def _state_space_duality(
    call: Call, *, dt: Float[Tensor, "*batch M"] | None = None, A: Float[Tensor, "*batch M"] | None = None
) -> tuple[Operands, dict[str, Any]]:
    r"""State-space duality by its recurrence, token by token.

    `dt` (..., M), $\Delta_t \ge 0$, is 1 by default; `A` (..., M), $\alpha \ge 0$ (the paper's A is its negative), is
    0 by default, so that nothing fades. Queries and keys are not normalised; `scale`, if given, multiplies the queries.
    In a call that is not causal every query reads the state after the last key. A masked key leaves the state
    unchanged; the mask, of the new keys, must be the same for all queries. The state is (S (..., K, V),); it and all
    computation are in float32 at least.

    Raises TypeError or ValueError, naming the argument, for operands that do not fit together; on the CPU also for a
    `dt` or an `A` below 0 or not finite.
    """
    for name, value in (("dt", dt), ("A", A)):
        checks.gate(name, value, call.k.shape[:-1])
        checks.within(name, "numbers", value, 0, torch.finfo(call.k.dtype).max)
    log_decay = None if A is None else -A if dt is None else -(A * dt)
    q, k, v, _, log_decay, S = operands(call, None, log_decay, qk_l2norm=False, erase=False)
    return (q, k, v, dt, log_decay, S), {"erase": False}


state_space_duality_reference, state_space_duality = in_two_forms(_state_space_duality, in_chunks)


class StepSize(Gate):
    r"""$\Delta = \mathrm{softplus}(x W^T + b)$, the duration of a token; softplus(b) starts log-uniform in [0.001, 0.1]
    (Dao & Gu 2024, arXiv:2405.21060)."""

    trained = 1

    def _make(self, generator: torch.Generator | None, kind: dict[str, Any]) -> None:
        super()._make(generator, kind)
        self.bias = nn.Parameter(step_biases(self.num_heads, generator, kind))

    def forward(self, x: Float[Tensor, "B N d"]) -> Float[Tensor, "B H N"]:
        return softplus(self._numbers(x) + self.bias[:, None])


class Rate(Gate):
    r"""$\alpha = e^A$, how fast a head's state fades, the same for every token: it starts uniform in [1, 16] (Dao & Gu
    2024, arXiv:2405.21060)."""

    def _make(self, generator: torch.Generator | None, kind: dict[str, Any]) -> None:
        self.log_rate = nn.Parameter(rate_logarithms(self.num_heads, generator, kind))

    def forward(self, x: Float[Tensor, "B N d"]) -> Float[Tensor, "B H N"]:
        return self.log_rate.exp()[:, None].expand(len(x), -1, x.shape[1])

    @classmethod
    def sizes(cls, d: Size, K: Size, H: Size) -> tuple[list[tuple[Size, Size]], Size]:
        return [], H


MECHANISM = Mechanism(
    name="ssd",
    family="recurrent",
    source="Dao & Gu 2024, arXiv:2405.21060",
    reference=state_space_duality_reference,
    fast=state_space_duality,
    positional=True,
    signed=True,
    gates={"dt": StepSize, "A": Rate},
)
