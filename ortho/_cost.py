"""The record of what a call, a layer or a model costs. Records can be added."""

from dataclasses import dataclass, fields, replace
from typing import Any

from ortho._typing import Size

__all__ = ["Cost", "causal_pairs", "head_width", "linear_map", "product", "quotient"]


@dataclass(frozen=True)
class Cost:
    """The cost of a computation: integers for integer sizes, formulas for symbols, 0 if not given.

    forward, backward: FLOPs of matrix products; a multiply-add counts as 2. decode: FLOPs of one generated token at
    context N, itself included. state_bytes: bytes carried from one decode step to the next. trained, frozen: numbers of
    parameters, of `itemsize` bytes each. Bytes that autograd keeps, and work outside matrix products, depend on how
    code is written, and are counted (`ortho.cost.of`).
    """

    forward: Any = 0
    backward: Any = 0
    decode: Any = 0
    state_bytes: Any = 0
    trained: Any = 0
    frozen: Any = 0
    itemsize: Any = 4

    def __add__(self, other: "Cost") -> "Cost":
        """The sum of both costs."""
        return replace(self, **{name: value + getattr(other, name) for name, value in self._figures()})

    def __sub__(self, other: "Cost") -> "Cost":
        return self + other * -1

    def __mul__(self, count: Any) -> "Cost":
        """The cost of `count` such computations."""
        return replace(self, **{name: count * value for name, value in self._figures()})

    def _figures(self) -> list[tuple[str, Any]]:
        return [(each.name, getattr(self, each.name)) for each in fields(self) if each.name != "itemsize"]

    @property
    def step(self) -> Any:
        """FLOPs of matrix products in one training step, forward and backward."""
        return self.forward + self.backward

    @property
    def recompute(self) -> Any:
        """FLOPs added by recomputing the forward pass from its input."""
        return self.forward

    @property
    def optimiser_bytes(self) -> Any:
        """AdamW's two moments of every trained parameter (Loshchilov & Hutter 2019, arXiv:1711.05101)."""
        return 2 * self.itemsize * self.trained


def product(multiply_adds: Size, gradients: Size = 2) -> Cost:
    """A matrix product, and one of the same size backward for each factor that needs a gradient."""
    return Cost(forward=2 * multiply_adds, backward=2 * gradients * multiply_adds)


def linear_map(
    B: Size, N: Size, inputs: Size, outputs: Size, *, bias: bool = False, input_grad: bool = True, itemsize: int = 4
) -> Cost:
    """A trained linear map of B N vectors."""
    return replace(
        product(B * N * inputs * outputs, 1 + input_grad),
        decode=2 * B * inputs * outputs,
        trained=inputs * outputs + (outputs if bias else 0),
        itemsize=itemsize,
    )


def quotient(number: Size, divisor: Size) -> Size:
    """number / divisor, rounded down to an integer if both are integers."""
    return number // divisor if isinstance(number, int) and isinstance(divisor, int) else number / divisor


def causal_pairs(N: Size) -> Size:
    """The number of (query, key) pairs with key <= query, N (N + 1) / 2, exact for integers and symbols alike."""
    return quotient(N * (N + 1), 2)


def head_width(d: Size, H: Size, head_dim: Size | None = None) -> Size:
    """K: `head_dim`, by default d/H. Raises ValueError for integers if H does not divide d."""
    if head_dim is not None:
        return head_dim
    if isinstance(d, int) and isinstance(H, int) and d % H:
        raise ValueError(f"H: expected a divisor of d = {d}, got {H}")
    return quotient(d, H)
