r"""States in which each channel of the keys fades at its own rate.

Gated Linear Attention (Yang et al. 2023, arXiv:2312.06635, section 4) adds to what is left,
$S_t = \mathrm{Diag}(a_t)\, S_{t-1} + k_t v_t^T$. Kimi Delta Attention (arXiv:2510.26692, section 3) corrects it,
$S_t = (I - \beta_t k_t k_t^T)\, \mathrm{Diag}(a_t)\, S_{t-1} + \beta_t k_t v_t^T$. Outputs are $o_t = S_t^T q_t$.
"""

from typing import Any

from ortho._typing import Float, Tensor
from ortho.attention.call import Call
from ortho.attention.mechanism import Mechanism
from ortho.attention.recurrent.channels import ChannelDecay, by_chunks
from ortho.attention.recurrent.state import Operands, in_two_forms, operands
from ortho.gates import WriteStrength


def _gated_linear_attention(
    call: Call, *, log_decay: Float[Tensor, "*batch M K"] | None = None
) -> tuple[Operands, dict[str, Any]]:
    r"""Gated linear attention by its recurrence, which does not erase, token by token.

    `log_decay` (..., M, K), $\log a_t \le 0$, is 0 by default. Queries and keys are not normalised; `scale`, by default
    1/sqrt(K), multiplies the queries. In a call that is not causal every query reads the state after the last key. A
    masked key leaves the state unchanged; the mask, of the new keys, must be the same for all queries. The state is
    (S (..., K, V),); it and all computation are in float32 at least.

    Raises TypeError or ValueError, naming the argument, for operands that do not fit together; on the CPU also for a
    `log_decay` above 0 or not finite.
    """
    call.scale = call.factor
    return operands(call, None, log_decay, qk_l2norm=False, erase=False, channels=True), {"erase": False}


gated_linear_attention_reference, gated_linear_attention = in_two_forms(_gated_linear_attention, by_chunks)


def _kimi_delta_attention(
    call: Call,
    *,
    beta: Float[Tensor, "*batch M"] | None = None,
    log_decay: Float[Tensor, "*batch M K"] | None = None,
    qk_l2norm: bool = True,
) -> tuple[Operands, dict[str, Any]]:
    """Kimi Delta Attention by its recurrence, token by token.

    Arguments, state and errors are as in `delta_rule_reference`, except for one decay per channel of the keys.
    """
    return operands(call, beta, log_decay, qk_l2norm=qk_l2norm, channels=True), {}


kimi_delta_attention_reference, kimi_delta_attention = in_two_forms(_kimi_delta_attention, by_chunks)


GLA = Mechanism(
    name="gla",
    family="recurrent",
    source="Yang et al. 2023, arXiv:2312.06635",
    reference=gated_linear_attention_reference,
    fast=gated_linear_attention,
    positional=True,
    signed=True,
    gates={"log_decay": ChannelDecay},
)
KDA = Mechanism(
    name="kda",
    family="recurrent",
    source="Kimi Team 2025, arXiv:2510.26692",
    reference=kimi_delta_attention_reference,
    fast=kimi_delta_attention,
    positional=True,
    signed=True,
    gates={"beta": WriteStrength, "log_decay": ChannelDecay},
)
MECHANISMS = (GLA, KDA)
