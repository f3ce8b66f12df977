r"""States in which each channel of the keys fades at its own rate.

Gated Linear Attention (Yang et al. 2023, arXiv:2312.06635, section 4) adds to what is left,
$S_t = \mathrm{Diag}(a_t)\, S_{t-1} + k_t v_t^T$. Kimi Delta Attention (arXiv:2510.26692, section 3) corrects it,
$S_t = (I - \beta_t k_t k_t^T)\, \mathrm{Diag}(a_t)\, S_{t-1} + \beta_t k_t v_t^T$. Outputs are $o_t = S_t^T q_t$.
"""

from ortho._typing import Float, State, Tensor
from ortho.attention.call import Call, attention_function
from ortho.attention.mechanism import Mechanism
from ortho.attention.recurrence import token_by_token
from ortho.attention.recurrent.channels import ChannelDecay, by_chunks
from ortho.attention.recurrent.state import operands
from ortho.gates import WriteStrength


@attention_function(keeps="sums")
def gated_linear_attention_reference(
    call: Call, *, log_decay: Float[Tensor, "*batch M K"] | None = None
) -> tuple[Float[Tensor, "*batch N V"], State]:
    r"""Gated linear attention by its recurrence, which does not erase, token by token.

    `log_decay` (..., M, K), $\log a_t \le 0$, is 0 by default. Queries and keys are not normalised; `scale`, by default
    1/sqrt(K), multiplies the queries. In a call that is not causal every query reads the state after the last key. A
    masked key leaves the state unchanged; the mask, of the new keys, must be the same for all queries. The state is
    (S (..., K, V),); it and all computation are in float32 at least.

    Raises TypeError or ValueError, naming the argument, for operands that do not fit together; on the CPU also for a
    `log_decay` above 0 or not finite.
    """
    call.scale = call.factor
    x = operands(call, None, log_decay, qk_l2norm=False, erase=False, channels=True)
    o, S = token_by_token(*x, is_causal=call.is_causal, erase=False)
    return o, (S,)


@attention_function(keeps="sums")
def gated_linear_attention(
    call: Call, *, log_decay: Float[Tensor, "*batch M K"] | None = None, chunk: int | None = None
) -> tuple[Float[Tensor, "*batch N V"], State]:
    """`gated_linear_attention_reference` by matrix products over chunks like those of `kimi_delta_attention`."""
    call.scale = call.factor
    x = operands(call, None, log_decay, qk_l2norm=False, erase=False, channels=True)
    o, S = by_chunks(*x, is_causal=call.is_causal, chunk=chunk, erase=False)
    return o, (S,)


@attention_function(keeps="sums")
def kimi_delta_attention_reference(
    call: Call,
    *,
    beta: Float[Tensor, "*batch M"] | None = None,
    log_decay: Float[Tensor, "*batch M K"] | None = None,
    qk_l2norm: bool = True,
) -> tuple[Float[Tensor, "*batch N V"], State]:
    """Kimi Delta Attention by its recurrence, token by token.

    Arguments, state and errors are as in `delta_rule_reference`, except for one decay per channel of the keys.
    """
    x = operands(call, beta, log_decay, qk_l2norm=qk_l2norm, channels=True)
    o, S = token_by_token(*x, is_causal=call.is_causal)
    return o, (S,)


@attention_function(keeps="sums")
def kimi_delta_attention(
    call: Call,
    *,
    beta: Float[Tensor, "*batch M"] | None = None,
    log_decay: Float[Tensor, "*batch M K"] | None = None,
    qk_l2norm: bool = True,
    chunk: int | None = None,
) -> tuple[Float[Tensor, "*batch N V"], State]:
    """`kimi_delta_attention_reference` by matrix products over chunks, in time and memory linear in N.

    The length of a chunk is the largest power of two that is at most `chunk`: by default 64, on a GPU more from 16,257
    tokens. Kept for the backward pass are one state per chunk and, for each token, a few vectors for each time that a
    chunk can be halved.
    """
    x = operands(call, beta, log_decay, qk_l2norm=qk_l2norm, channels=True)
    o, S = by_chunks(*x, is_causal=call.is_causal, chunk=chunk, erase=True)
    return o, (S,)


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
