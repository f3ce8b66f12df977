r"""A state to which each token adds several outer products, $S_t = S_{t-1} + U_t V_t^T$, $o_t = S_t^T q_t$.

The columns of $U_t$ (K, n) are a token's keys and those of $V_t$ (V, n) its values, all made of its input alone:
nothing is erased, and nothing fades. With one column this is linear attention without feature map or divisor.
DeltaProduct (`delta_product.py`) writes the errors of its state in place of the values. The state of Mamba-3 with
several inputs (Lahoti et al. 2026, arXiv:2603.15569) also fades, and is read by several queries.
"""

from ortho._typing import Float, State, Tensor
from ortho.attention.call import Call, attention_function
from ortho.attention.chunked_recurrence import in_chunks
from ortho.attention.mechanism import Mechanism
from ortho.attention.recurrence import token_by_token
from ortho.attention.recurrent.delta_product import LaterOperands, by_step
from ortho.attention.recurrent.state import operands


@attention_function(keeps="sums")
def low_rank_reference(
    call: Call,
    *,
    more_keys: Float[Tensor, "*batch M more K"] | None = None,
    more_values: Float[Tensor, "*batch M more V"] | None = None,
) -> tuple[Float[Tensor, "*batch N V"], State]:
    """Low-rank writes by their sum, column by column.

    A token's first column is (k, v). `more_keys` (..., M, more, K) and `more_values` (..., M, more, V), given together,
    are further ones, if any. Queries and keys are not normalised; `scale`, if given, multiplies the queries. In a call
    that is not causal every query reads the state after the last key. A masked key leaves the state unchanged; the
    mask, of the new keys, must be the same for all queries. The state is (S (..., K, V),); it and all computation are
    in float32 at least.

    Raises TypeError or ValueError, naming the argument, for operands that do not fit together.
    """
    call, _, steps = by_step(call, None, more_keys, more_values)
    x = operands(call, qk_l2norm=False, erase=False)
    o, S = token_by_token(*x, is_causal=call.is_causal, erase=False, steps=steps)
    return o, (S,)


@attention_function(keeps="sums")
def low_rank(
    call: Call,
    *,
    more_keys: Float[Tensor, "*batch M more K"] | None = None,
    more_values: Float[Tensor, "*batch M more V"] | None = None,
    chunk: int | None = None,
) -> tuple[Float[Tensor, "*batch N V"], State]:
    """`low_rank_reference` by matrix products over chunks of whole tokens, at most `chunk` columns or one token."""
    call, _, steps = by_step(call, None, more_keys, more_values)
    x = operands(call, qk_l2norm=False, erase=False)
    o, S = in_chunks(*x, is_causal=call.is_causal, erase=False, steps=steps, chunk=chunk)
    return o, (S,)


MECHANISM = Mechanism(
    name="low-rank",
    family="recurrent",
    source="Lahoti et al. 2026, arXiv:2603.15569, without decay, and with one query",
    reference=low_rank_reference,
    fast=low_rank,
    positional=True,
    signed=True,
    has_weights=False,  # it has further values of its own
    gates={"more_keys": LaterOperands, "more_values": LaterOperands},
)
