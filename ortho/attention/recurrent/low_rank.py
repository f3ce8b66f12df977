r"""A state to which each token adds several outer products, $S_t = S_{t-1} + U_t V_t^T$, $o_t = S_t^T q_t$.

The columns of $U_t$ (K, n) are a token's keys and those of $V_t$ (V, n) its values, all made of its input alone:
nothing is erased, and nothing fades. With one column this is linear attention without feature map or divisor.
DeltaProduct (`delta_product.py`) writes the errors of its state in place of the values. The state of Mamba-3 with
several inputs (Lahoti et al. 2026, arXiv:2603.15569) also fades, and is read by several queries.
"""

from typing import Any

from ortho._typing import Float, Tensor
from ortho.attention.call import Call
from ortho.attention.chunked_recurrence import in_chunks
from ortho.attention.mechanism import Mechanism
from ortho.attention.recurrent.delta_product import LaterOperands, by_step
from ortho.attention.recurrent.state import Operands, in_two_forms, operands


def _low_rank(
    call: Call,
    *,
    more_keys: Float[Tensor, "*batch M more K"] | None = None,
    more_values: Float[Tensor, "*batch M more V"] | None = None,
) -> tuple[Operands, dict[str, Any]]:
    """Low-rank writes by their sum, column by column.

    A token's first column is (k, v). `more_keys` (..., M, more, K) and `more_values` (..., M, more, V), given together,
    are further ones, if any. Queries and keys are not normalised; `scale`, if given, multiplies the queries. In a call
    that is not causal every query reads the state after the last key. A masked key leaves the state unchanged; the
    mask, of the new keys, must be the same for all queries. The state is (S (..., K, V),); it and all computation are
    in float32 at least.

    Raises TypeError or ValueError, naming the argument, for operands that do not fit together.
    """
    call, _, steps = by_step(call, None, more_keys, more_values)
    return operands(call, qk_l2norm=False, erase=False), {"erase": False, "steps": steps}


low_rank_reference, low_rank = in_two_forms(_low_rank, in_chunks)


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
