"""How a layer weighs the three branches of `ortho.attention.selected.nsa`."""

from typing import Any, ClassVar

import torch
from torch.nn.functional import linear

from ortho._typing import Float, Size, Tensor
from ortho._weights import new_weight
from ortho.gates import Gate, GateCost


class BranchGates(Gate):
    r"""$\sigma(x W^T)$, three numbers in (0, 1) a head and token: x (B, N, d) -> (B, H, N, 3).

    Each stands for itself, and they need not add up to 1 (Yuan et al. 2025, arXiv:2502.11089, section 3.2, where a
    two-layer network makes them).
    """

    branches: ClassVar[int] = 3

    def _make(self, generator: torch.Generator | None, kind: dict[str, Any]) -> None:
        self.weight = new_weight(self.num_heads * self.branches, self.d_model, generator=generator, **kind)

    def forward(self, x: Float[Tensor, "B N d"]) -> Float[Tensor, "B H N 3"]:
        numbers = linear(x, self.weight).unflatten(-1, (self.num_heads, self.branches)).transpose(1, 2)
        return numbers.contiguous().sigmoid()

    @classmethod
    def cost(cls, B: Size, N: Size, d: Size, H: Size, *, input_grad: bool = True, itemsize: int = 4) -> GateCost:
        rows = cls.branches * H
        product, numbers = 2 * B * N * d * rows, B * N * rows
        return GateCost(
            forward=product,
            backward=(1 + input_grad) * product,
            elementwise_forward=numbers,
            elementwise_backward=numbers + (B * N * d if input_grad else 0),
            saved_bytes=0,  # the mechanism keeps what is made
            decode=2 * B * d * rows,
            trained=d * rows,
        )
