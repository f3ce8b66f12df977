"""Closed forms of `ortho.layers.recomputation`: what is computed again, and what is kept."""

from typing import Any, NamedTuple

from ortho import _checks
from ortho._checks import checked
from ortho._typing import Size
from ortho.cost.closed_forms import block


class RecomputedCost(NamedTuple):
    """FLOPs of a step's matrix products, those of them that are computed again, and bytes of activations: kept from
    the forward pass, and at the peak, when a segment's are there again."""

    step: Any
    again: Any
    kept_bytes: Any
    peak_bytes: Any


@checked
def recomputed(
    B: Size, N: Size, d: Size, H: Size, L: int, segments: int, *, itemsize: int = 4, **kwargs: Any
) -> RecomputedCost:
    """`Recomputed` of L blocks, of whose last products in each segment PyTorch knows that nothing needs them; `kwargs`
    are `block`'s. With 0 segments nothing is recomputed, and all is kept."""
    one = block(B, N, d, H, itemsize=itemsize, **kwargs)
    whole = L * (one.forward + one.backward)
    if not segments:
        return RecomputedCost(whole, 0, L * one.saved_bytes, L * one.saved_bytes)
    if _checks.positive_int("segments", segments) > _checks.positive_int("L", L):
        raise ValueError(f"segments: expected at most the {L} blocks, got {segments}")
    d_ff = kwargs.get("d_ff") or 4 * d
    again = L * one.forward - segments * 2 * B * N * d * d_ff
    own, longest = itemsize * B * N * d, -(-L // segments)
    # A segment's input is also what its first block keeps.
    peak = (segments - 1) * own + longest * one.saved_bytes
    return RecomputedCost(whole + again, again, segments * own, peak)
