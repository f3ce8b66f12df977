"""Closed forms for mechanisms that choose their pairs: softmax attention over the chosen, and the choice."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from ortho._typing import Size
from ortho.attention.mechanism import AttentionCost
from ortho.attention.sparse.tiled_attention import masked_cost, tiled_cost
from ortho.attention.sparse.tiling import Work


class Flops(NamedTuple):
    """FLOPs of matrix products in a forward pass: what goes into choosing pairs, and into attending to them."""

    choosing: Size
    attending: Size

    @property
    def share(self) -> Size:
        """Of choosing, in both."""
        return self.choosing / (self.choosing + self.attending)


def flops(choosing: Size, work: Sequence[Work], K: Size, V: Size) -> Flops:
    """Of one sequence, with the work of its parts."""
    return Flops(choosing, 2 * (K + V) * sum(each.pairs for each in work))


def chosen_cost(
    B: Size,
    N: Size,
    H: Size,
    K: Size,
    V: Size,
    *,
    choosing: Size,
    comparing: Size,
    last_choosing: Size,
    work: Sequence[Work],
    last: Sequence[Work],
    form: str = "fast",
    qk_grad: bool = True,
    itemsize: int = 4,
    state_bytes: Size | None = None,
    extra_bytes: Size = 0,
) -> AttentionCost:
    """Of one sequence: FLOPs of `choosing`, its scalar operations, and FLOPs for the last query alone; and the parts'
    work. The positions and tables that say what was chosen are not counted.

    `state_bytes` are those of a sequence, by default of its keys and values, and of `extra_bytes` beside them.
    """
    G = B * H
    if form == "reference":
        cost = masked_cost(G, N, K, V, masks=G, qk_grad=qk_grad, itemsize=itemsize)
    else:
        cost = tiled_cost(B, N, H, K, V, work=work, last=last, qk_grad=qk_grad, itemsize=itemsize)
    return replace(
        cost,
        forward=cost.forward + G * choosing,
        elementwise_forward=cost.elementwise_forward + G * comparing,
        decode=cost.decode + G * last_choosing,
        state_bytes=G * extra_bytes + (cost.state_bytes if state_bytes is None else G * state_bytes),
    )


def best_cost(M: Size, count: Size) -> Size:
    """Scalar operations of `choice.best`, a row of M: each compared with minus infinity; the highest found, and all
    compared twice with the least of them, and these once. A symbol M stands for more than `count`."""
    return M if isinstance(M, int) and count >= M else 4 * M + count
