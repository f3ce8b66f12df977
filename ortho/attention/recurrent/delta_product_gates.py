"""What a layer makes for DeltaProduct: the keys and values of a token's later steps, and a write strength a step."""

from typing import Any, ClassVar

import torch
from torch.nn.functional import linear

from ortho._typing import Float, Size, Tensor
from ortho._weights import new_weight
from ortho.gates import Gate, GateCost


class _Steps(Gate):
    """One product x W^T, and what the subclass makes of it. For more steps: a subclass with another number."""

    steps: ClassVar[int] = 2
    given: ClassVar[int] = 0  # steps that have theirs from elsewhere
    wide: ClassVar[bool] = False  # whether a step and head has d/H numbers, not one
    operations: ClassVar[int] = 0  # scalar operations a number, forward as backward
    kept: ClassVar[int] = 0  # numbers that autograd keeps for each

    @classmethod
    def _rows(cls, d: Size, H: Size) -> Size:
        """The numbers made for a token."""
        return (cls.steps - cls.given) * (d if cls.wide else H)

    def _make(self, generator: torch.Generator | None, kind: dict[str, Any]) -> None:
        rows = self._rows(self.d_model, self.num_heads)
        self.weight = new_weight(rows, self.d_model, generator=generator, **kind)

    def _numbers(self, x: Float[Tensor, "B N d"]) -> Float[Tensor, "B H N more width"]:
        made = linear(x, self.weight).unflatten(-1, (self.num_heads, self.steps - self.given, -1))
        return made.transpose(1, 2)

    @classmethod
    def cost(cls, B: Size, N: Size, d: Size, H: Size, *, input_grad: bool = True, itemsize: int = 4) -> GateCost:
        rows = cls._rows(d, H)
        product, numbers = 2 * B * N * d * rows, B * N * rows
        return GateCost(
            forward=product,
            backward=(1 + input_grad) * product,
            elementwise_forward=cls.operations * numbers,
            elementwise_backward=cls.operations * numbers + (B * N * d if input_grad else 0),
            saved_bytes=itemsize * cls.kept * numbers,
            decode=2 * B * d * rows,
            trained=d * rows,
        )


class StepStrengths(_Steps):
    r"""$\beta = 2 \sigma(x W^T)$ in (0, 2), one for each of a token's steps: x (B, N, d) -> (B, H, N, steps)."""

    operations = 2  # sigmoid, product
    kept = 1

    def forward(self, x: Float[Tensor, "B N d"]) -> Float[Tensor, "B H N steps"]:
        # Copied before anything is made of it, so that autograd keeps one copy, laid out as it is read.
        return self._numbers(x)[..., 0].contiguous().sigmoid() * 2


class LaterOperands(_Steps):
    """The keys, or the values, of a token's steps after the first: x (B, N, d) -> (B, H, N, steps - 1, d/H)."""

    given = 1
    wide = True

    def forward(self, x: Float[Tensor, "B N d"]) -> Float[Tensor, "B H N more K"]:
        return self._numbers(x)
