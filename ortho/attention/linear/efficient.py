r"""Efficient Attention: softmax over features for queries, over positions for keys (Shen et al. 2021).

$O = \rho_q(Q)\, (\rho_k(K)^T V)$ (arXiv:1812.01243). Row i of the implied weights averages K distributions over
positions, one for each feature, with the softmax of $q_i$ as weights. Rows sum to 1 without a division. The softmax
over positions looks at the whole sequence, so the attention is not causal, and no state is kept here.
`efficient-causal` takes it over the positions so far; `linear-exp` has the same features and normalises rows instead.
"""

from dataclasses import replace

from ortho import _checks
from ortho._checks import attention_form
from ortho._cost import Cost, product
from ortho._typing import Bool, Float, State, Tensor
from ortho.attention.mechanism import CostedCall, Mechanism, closed_form
from ortho.attention.scores import masked_softmax, scaled


@attention_form(fixed_state=True)
def efficient_attention_reference(
    q: Float[Tensor, "*batch N K"],
    k: Float[Tensor, "*batch M K"],
    v: Float[Tensor, "*batch M V"],
    *,
    is_causal: bool = False,
    attn_mask: Bool[Tensor, "..."] | None = None,
    scale: float | None = None,
    initial_state: State | None = None,
    return_state: bool = False,
) -> Float[Tensor, "*batch N V"]:
    r"""The N x M weights $\rho_q(Q) \rho_k(K)^T$, materialised, times v.

    Arguments and errors are as in `softmax_attention_reference`, except `scale`: q and k are multiplied by its square
    root before the softmax; by default, as published, they are not scaled. A mask must be one row for all queries.
    Raises ValueError for a causal call and for a state.
    """
    _refuse_parts(is_causal=is_causal, initial_state=initial_state, return_state=return_state)
    rho_q, rho_k = _shares(q, k, attn_mask, scale)
    return (rho_q @ rho_k.mT) @ v


@attention_form(fixed_state=True)
def efficient_attention(
    q: Float[Tensor, "*batch N K"],
    k: Float[Tensor, "*batch M K"],
    v: Float[Tensor, "*batch M V"],
    *,
    is_causal: bool = False,
    attn_mask: Bool[Tensor, "..."] | None = None,
    scale: float | None = None,
    initial_state: State | None = None,
    return_state: bool = False,
) -> Float[Tensor, "*batch N V"]:
    """`efficient_attention_reference`, multiplied from the right, in time and memory linear in N."""
    _refuse_parts(is_causal=is_causal, initial_state=initial_state, return_state=return_state)
    rho_q, rho_k = _shares(q, k, attn_mask, scale)
    return rho_q @ (rho_k.mT @ v)


def _shares(q: Tensor, k: Tensor, attn_mask: Tensor | None, scale: float | None) -> tuple[Tensor, Tensor]:
    """The softmax of q over features (..., N, K), and of k over positions (..., M, K), 0 for hidden keys."""
    q, k = scaled(scale, q, k)
    blocked = None if attn_mask is None else ~attn_mask[..., None, :]
    return q.softmax(-1), masked_softmax(k.mT, blocked, empty_rows=True).mT


def _refuse_parts(**given: object) -> None:
    for name, value in given.items():
        expected = None if name == "initial_state" else False
        if value is not expected:
            wanted = f"expected {expected}, since keys are normalised over the whole sequence"
            raise ValueError(f"{name}: {wanted}, got {_checks.describe(value)}")


@closed_form
def efficient_cost(call: CostedCall) -> Cost:
    """Closed-form cost of one self-attention call, in either form; decoding keeps the keys and reads all of them.

    Raises ValueError for a causal call, which the mechanism does not serve.
    """
    if call.causal:
        raise ValueError("causal: expected False (`efficient-causal` serves causal calls), got True")
    (G, N, K, V), held = call.sizes, call.held_keys()
    if call.form == "reference":
        return call.attending(G * N * N) + held
    return product(2 * G * N * K * V, 1 + call.reach) + replace(held, decode=2 * (N + 1) * G * K * V)


MECHANISM = Mechanism(
    name="efficient",
    family="linear",
    source="Shen et al. 2021, arXiv:1812.01243",
    reference=efficient_attention_reference,
    fast=efficient_attention,
    causal=False,
    cost=efficient_cost,
)
