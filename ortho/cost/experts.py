"""Closed forms of feed-forward networks with gates, and of mixtures of experts."""

from typing import Any, NamedTuple

from ortho._checks import checked
from ortho._typing import Size


class ExpertCost(NamedTuple):
    """FLOPs of matrix products on x (B, N, d) that needs a gradient, for a token behind others too; and parameters, all
    of them and those that a token goes through."""

    forward: Any
    backward: Any
    decode: Any
    trained: Any
    active: Any


@checked
def gated_feed_forward(B: Size, N: Size, d: Size, d_ff: Size) -> ExpertCost:
    """`GatedFeedForward(d, d_ff)`: three products, and two backward for each."""
    forward = 6 * B * N * d * d_ff
    return ExpertCost(forward, 2 * forward, 6 * B * d * d_ff, 3 * d * d_ff, 3 * d * d_ff)


@checked
def mixture_of_experts(
    B: Size, N: Size, d: Size, E: Size, k: Size, d_ff: Size, *, gated: bool = False, form: str = "fast"
) -> ExpertCost:
    """`MixtureOfExperts(d, E, top_k=k, d_ff=d_ff)`, none of whose tokens is dropped: the router's product, and those of
    k experts a token; of all E in the form "reference"."""
    matrices = 3 if gated else 2
    expert, run = matrices * d * d_ff, E if form == "reference" else k
    token = 2 * d * E + 2 * run * expert
    return ExpertCost(B * N * token, 2 * B * N * token, B * token, E * expert + d * E, k * expert + d * E)
