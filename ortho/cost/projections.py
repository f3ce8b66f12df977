"""Closed forms of what makes queries and keys (`ortho.projections`)."""

from dataclasses import dataclass
from typing import Any

from ortho._checks import checked, one_of
from ortho._typing import Size
from ortho.projections import PROJECTIONS
from ortho.projections.structured import factors, sufficient_rounds


@dataclass(frozen=True)
class ProjectionCost:
    """What queries and keys cost, of H heads and of G that they share: as `ortho.cost.Cost`, and `gradient`, whether a
    gradient reaches them. The sum of x's gradients is the layer's; x, which the layer keeps, does not count."""

    forward: Any
    backward: Any
    elementwise_forward: Any
    elementwise_backward: Any
    saved_bytes: Any
    decode: Any
    trained: Any
    frozen: Any
    gradient: bool


@checked
def projection_cost(
    name: str,
    B: Size,
    N: Size,
    d: Size,
    H: Size,
    K: Size,
    G: Size,
    *,
    bias: bool = False,
    input_grad: bool = True,
    itemsize: int = 4,
) -> ProjectionCost:
    """`PROJECTIONS[name]` on x (B, N, d) with heads of width K. Structured ones need numbers for d, H, K and G."""
    one_of("projection", name, PROJECTIONS)
    learned, gradient = name == "learned", name == "learned" or (input_grad and not name.endswith("stopped"))
    numbers = K * (H + G)  # of a token's queries and keys
    biases = int(bias) * numbers
    if not name.startswith("structured"):
        product, stored = 2 * B * N * d * numbers, d * numbers + biases
        return ProjectionCost(
            forward=product,
            backward=(learned + (gradient and input_grad)) * product,
            elementwise_forward=0,
            elementwise_backward=B * N * biases if learned else 0,
            saved_bytes=0,
            decode=2 * B * d * numbers,
            trained=stored if learned else 0,
            frozen=0 if learned else stored,
            gradient=gradient,
        )
    (a, b), rounds = factors(d, K), sufficient_rounds(d, K)
    last = sum(-(-heads * K // b) for heads in (H, G))  # rows of the tables that are read in the end
    products = 2 * rounds * 2 * d * b + 2 * (rounds - 1) * 2 * d * a + 2 * last * a * b  # of a token
    return ProjectionCost(
        forward=B * N * products,
        backward=B * N * products if gradient else 0,
        elementwise_forward=2 * rounds * 2 * d * b + B * N * biases,  # signs into the blocks
        elementwise_backward=0,
        saved_bytes=itemsize * 2 * rounds * d * b if gradient else 0,  # the blocks
        decode=B * products,
        trained=0,
        frozen=2 * rounds * 2 * d + a * a + b * b + biases,
        gradient=gradient,
    )
