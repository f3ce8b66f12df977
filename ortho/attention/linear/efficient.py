r"""Efficient Attention: softmax over features for queries, over positions for keys.

$O = \rho_q(Q)\, (\rho_k(K)^T V)$ (Shen et al. 2021, arXiv:1812.01243). Row i of the implied weights averages K
distributions over positions, one for each feature, with the softmax of $q_i$ as weights. Rows sum to 1 without a
division. The softmax over positions looks at the whole sequence, so the attention is not causal and has no state.
`efficient_causal` has a causal form; `linear-exp` has the same features and normalises rows instead.
"""

from ortho import checks
from ortho._typing import Float, Tensor
from ortho.attention.call import Call, attention_function
from ortho.attention.mechanism import Mechanism
from ortho.attention.scores import masked_softmax, scaled


@attention_function(keeps="sums")
def efficient_attention_reference(call: Call) -> Float[Tensor, "*batch N V"]:
    r"""The N x M weights $\rho_q(Q) \rho_k(K)^T$, materialised, times v.

    Arguments and errors are as in `softmax_attention_reference`, except `scale`: q and k are multiplied by its square
    root before the softmax; by default, as published, they are not scaled. A mask must be one row for all queries.
    Raises ValueError for a causal call and for a state.
    """
    rho_q, rho_k = _distributions(call)
    return (rho_q @ rho_k.mT) @ call.v


@attention_function(keeps="sums")
def efficient_attention(call: Call) -> Float[Tensor, "*batch N V"]:
    """`efficient_attention_reference`, multiplied from the right, in time and memory linear in N."""
    rho_q, rho_k = _distributions(call)
    return rho_q @ (rho_k.mT @ call.v)


def _distributions(call: Call) -> tuple[Tensor, Tensor]:
    """The softmax of q over features (..., N, K), and of k over positions (..., M, K), 0 for masked keys."""
    parts = {"is_causal": call.is_causal, "initial_state": bool(call.state), "return_state": call.return_state}
    for name, given in parts.items():
        checks.expect(not given, name, "none, since keys are normalised over the whole sequence", "one")
    q, k = scaled(call.scale, call.q, call.k)
    blocked = None if call.key_mask is None else ~call.key_mask[..., None, :]
    return q.softmax(-1), masked_softmax(k.mT, blocked, empty_rows=True).mT


MECHANISM = Mechanism(
    name="efficient",
    family="linear",
    source="Shen et al. 2021, arXiv:1812.01243",
    reference=efficient_attention_reference,
    fast=efficient_attention,
    causal=False,
)
