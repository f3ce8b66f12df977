r"""The delta rule with a vector as its forgetting gate: what a key finds is replaced while the whole state fades.

$$S_t = \mathrm{Diag}(a_t)\, S_{t-1} + \beta_t k_t (v_t - S_{t-1}^T k_t)^T, \qquad o_t = S_t^T q_t .$$

The error is taken before the state fades; Kimi Delta Attention (`gla.py`) takes it afterwards. With one decay per
channel, neither can be written as the other with different gates. The formula is the recurrence of RWKV-7 (Peng et al.
2025, arXiv:2503.14456),
$S_t = (\mathrm{Diag}(w_t) - (\alpha_t \circ \kappa_t) \kappa_t^T)\, S_{t-1} + \tilde k_t v_t^T$, with one number for
$\alpha_t$ and $\tilde k_t = \alpha_t \kappa_t$.

A step multiplies the state by $\mathrm{Diag}(a) - \beta k k^T$, which is symmetric and for a unit key has no eigenvalue
below $\min a - \beta$ or above $\max a$: with $\beta$ up to 1 it enlarges nothing, whatever the decays.
"""

from typing import Any

from ortho._typing import Float, Tensor
from ortho.attention.call import Call
from ortho.attention.mechanism import Mechanism
from ortho.attention.recurrent.channels import ChannelDecay, by_chunks
from ortho.attention.recurrent.state import Operands, in_two_forms, operands
from ortho.gates import WriteStrength


def _vector_gated_delta(
    call: Call, *, beta: Float[Tensor, "*batch M"] | None = None, log_decay: Float[Tensor, "*batch M K"] | None = None
) -> tuple[Operands, dict[str, Any]]:
    """The vector-gated delta rule by its recurrence, token by token.

    `beta` (..., M), in [0, 1], is 1 by default; `log_decay` (..., M, K), log a, at most 0, is 0 by default. Queries and
    keys are divided by their lengths (1e-6 is added to the squared length). All else is as in `delta_rule_reference`;
    the state is (S (..., K, V),) in float32 at least.

    Raises TypeError or ValueError, naming the argument, for operands that do not fit together; on the CPU also for
    gates outside their range.
    """
    return operands(call, beta, log_decay, channels=True, most=1), {"before_fading": True}


vector_gated_delta_reference, vector_gated_delta = in_two_forms(_vector_gated_delta, by_chunks)


MECHANISM = Mechanism(
    name="vector-gated",
    family="recurrent",
    source="Peng et al. 2025, arXiv:2503.14456",
    reference=vector_gated_delta_reference,
    fast=vector_gated_delta,
    positional=True,
    signed=True,
    gates={"beta": WriteStrength, "log_decay": ChannelDecay},
)
