"""What a layer makes of its tokens for attention with reflections: vectors for each head."""

from typing import Any, ClassVar

import torch
from torch.nn.functional import linear

from ortho._typing import Float, Size, Tensor
from ortho._weights import new_weight, split_heads
from ortho.gates import Gate, GateCost

__all__ = ["BiasVectors", "Directions"]


class Directions(Gate):
    r"""$w = x W_1^T W_2^T$, one vector a head and token as wide as the keys, through a bottleneck of 32 numbers
    (Yang et al. 2025, arXiv:2505.16381, without the convolution behind it)."""

    rank: ClassVar[int] = 32

    def _make(self, generator: torch.Generator | None, kind: dict[str, Any]) -> None:
        self.weight_down = new_weight(self.rank, self.d_model, generator=generator, **kind)
        self.weight_up = new_weight(self.d_model, self.rank, generator=generator, **kind)

    def forward(self, x: Float[Tensor, "B N d"]) -> Float[Tensor, "B H N K"]:
        return split_heads(linear(linear(x, self.weight_down), self.weight_up), self.num_heads)

    @classmethod
    def cost(cls, B: Size, N: Size, d: Size, H: Size, *, input_grad: bool = True, itemsize: int = 4) -> GateCost:
        product = 2 * B * N * d * cls.rank
        return GateCost(
            forward=2 * product,
            backward=(3 + input_grad) * product,
            elementwise_forward=0,
            elementwise_backward=B * N * d if input_grad else 0,  # the sum of x's gradients
            saved_bytes=itemsize * B * N * cls.rank,
            decode=4 * B * d * cls.rank,
            trained=2 * d * cls.rank,
        )


class BiasVectors(Gate):
    r"""$x W^T$, one vector of 8 numbers a head and token: the u, u' or w of `position_delta`."""

    width: ClassVar[int] = 8

    def _make(self, generator: torch.Generator | None, kind: dict[str, Any]) -> None:
        self.weight = new_weight(self.num_heads * self.width, self.d_model, generator=generator, **kind)

    def forward(self, x: Float[Tensor, "B N d"]) -> Float[Tensor, "B H N K"]:
        return split_heads(linear(x, self.weight), self.num_heads)

    @classmethod
    def cost(cls, B: Size, N: Size, d: Size, H: Size, *, input_grad: bool = True, itemsize: int = 4) -> GateCost:
        product = 2 * B * N * d * H * cls.width
        return GateCost(
            forward=product,
            backward=(1 + input_grad) * product,
            elementwise_forward=0,
            elementwise_backward=B * N * d if input_grad else 0,
            saved_bytes=0,
            decode=2 * B * d * H * cls.width,
            trained=d * H * cls.width,
        )
