r"""The delta rule, plain and gated: a linear state that corrects what it holds instead of adding to it.

$S_t = a_t S_{t-1} + \beta_t k_t (v_t - a_t S_{t-1}^T k_t)^T$, $o_t = S_t^T q_t$: a decay $a_t$, and then one step of
gradient descent with rate $\beta_t$ on $\tfrac12 |S^T k_t - v_t|^2$. With $a_t = 1$ it is DeltaNet (Schlag et al. 2021,
arXiv:2102.11174; in chunks: Yang et al. 2024, arXiv:2406.06484), otherwise Gated DeltaNet (arXiv:2412.06464).
"""

from typing import Any

import torch
from torch import nn
from torch.nn.functional import softplus

from ortho._typing import Float, Tensor
from ortho.attention.call import Call
from ortho.attention.chunked_recurrence import in_chunks
from ortho.attention.mechanism import Mechanism
from ortho.attention.recurrent.state import Operands, in_two_forms, operands
from ortho.gates import Gate, WriteStrength, rate_logarithms, step_biases


def _delta_rule(
    call: Call,
    *,
    beta: Float[Tensor, "*batch M"] | None = None,
    log_decay: Float[Tensor, "*batch M"] | None = None,
    qk_l2norm: bool = True,
) -> tuple[Operands, dict[str, Any]]:
    r"""The delta rule by its recurrence, token by token.

    `beta` (..., M), in [0, 2], is 1 by default; `log_decay` (..., M), $\log a_t \le 0$, is 0 by default. Queries and
    keys are divided by their lengths (1e-6 is added to the squared length) unless `qk_l2norm` is False. `scale`, if
    given, then multiplies the queries. In a call that is not causal every query reads the state after the last key. A
    masked key leaves the state unchanged; the mask, of the new keys, must be the same for all queries. The state is
    (S (..., K, V),); it and all computation are in float32 at least.

    Raises TypeError or ValueError, naming the argument, for operands that do not fit together; on the CPU also for
    gates outside their range, and for keys that are not normalised and have $\beta |k|^2 > 2$: every write would
    enlarge the state along them.
    """
    return operands(call, beta, log_decay, qk_l2norm=qk_l2norm), {}


delta_rule_reference, delta_rule = in_two_forms(_delta_rule, in_chunks)


def reorthogonalised(S: Float[Tensor, "*batch K V"]) -> Float[Tensor, "*batch K V"]:
    r"""A state with its singular directions kept and all its singular values replaced by their root mean square.

    For long runs in which rounding, or keys that are not quite of length 1, let some directions of a state grow and
    others vanish: pass `(reorthogonalised(S),)` on as the `initial_state` of the next call. The result is a multiple of
    the nearest matrix with orthonormal rows or columns (the polar factor), with the Frobenius norm of S.

    S (..., K, V) -> (..., K, V).
    """
    U, s, Vh = torch.linalg.svd(S, full_matrices=False)
    return s.square().mean(-1).sqrt()[..., None, None] * (U @ Vh)


class Decay(Gate):
    r"""$\log a = -e^A\, \mathrm{softplus}(x W^T + b)$, at most 0: one decay per head and token (Dao & Gu 2024,
    arXiv:2405.21060; Yang et al. 2024, arXiv:2412.06464).

    $e^A$ starts uniform in [1, 16] and softplus(b) log-uniform in [0.001, 0.1].
    """

    trained = 2  # a rate and a bias

    def _make(self, generator: torch.Generator | None, kind: dict[str, Any]) -> None:
        super()._make(generator, kind)
        self.log_rate = nn.Parameter(rate_logarithms(self.num_heads, generator, kind))
        self.bias = nn.Parameter(step_biases(self.num_heads, generator, kind))

    def forward(self, x: Float[Tensor, "B N d"]) -> Float[Tensor, "B H N"]:
        return -self.log_rate.exp()[:, None] * softplus(self._numbers(x) + self.bias[:, None])


DELTA = Mechanism(
    name="delta",
    family="recurrent",
    source="Schlag et al. 2021, arXiv:2102.11174; Yang et al. 2024, arXiv:2406.06484",
    reference=delta_rule_reference,
    fast=delta_rule,
    positional=True,
    signed=True,
    gates={"beta": WriteStrength},
)
GATED_DELTA = Mechanism(
    name="gated-delta",
    family="recurrent",
    source="Yang et al. 2024, arXiv:2412.06464",
    reference=delta_rule_reference,
    fast=delta_rule,
    positional=True,
    signed=True,
    gates={"beta": WriteStrength, "log_decay": Decay},
)
MECHANISMS = (DELTA, GATED_DELTA)
