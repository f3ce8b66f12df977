"""Closed form of `ortho.structured`."""

from typing import Any, NamedTuple

from ortho._typing import Size
from ortho.cost.closed_forms import check_sizes
from ortho.structured import ROUNDS, factors


class ProjectionCost(NamedTuple):
    """FLOPs of matrix products and scalar operations outside them, both passes, and numbers that are stored."""

    forward: Any
    backward: Any
    elementwise_forward: Any
    elementwise_backward: Any
    frozen: Any


def structured_projection(B: Size, N: Size, d: int, *, rounds: int = ROUNDS, input_grad: bool = True) -> ProjectionCost:
    """`StructuredProjection(d, H, rounds=rounds)` on x (B, N, d), queries and keys; autograd keeps nothing of x.

    `input_grad` says whether a gradient passes to x: not where the projection stops it. Stored are the signs and, for
    every layer anew, the two transforms.
    """
    check_sizes(B=B, N=N, d=d, rounds=rounds)
    a, b = factors(d)
    products, flips = 2 * rounds * 2 * B * N * d * (a + b), 2 * rounds * B * N * d
    again = int(input_grad)
    return ProjectionCost(
        forward=products,
        backward=again * products,
        elementwise_forward=flips,
        elementwise_backward=again * (flips + B * N * d),  # the two gradients added
        frozen=2 * rounds * d + a * a + b * b,
    )
