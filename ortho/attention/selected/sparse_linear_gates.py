"""How a layer weighs far keys beside near ones in `ortho.attention.selected.sparse_linear`."""

from math import log
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear

from ortho._typing import Float, Size, Tensor
from ortho._weights import new_weight
from ortho.gates import Gate, GateCost


class FarWeight(Gate):
    """x W^T + b, the logarithm of a far key's weight: x (B, N, d) -> (B, H, N); b starts at -log(d/H)."""

    def _make(self, generator: torch.Generator | None, kind: dict[str, Any]) -> None:
        self.weight = new_weight(self.num_heads, self.d_model, generator=generator, **kind)
        self.bias = nn.Parameter(torch.full((self.num_heads,), -log(self.d_model / self.num_heads), **kind))

    def forward(self, x: Float[Tensor, "B N d"]) -> Float[Tensor, "B H N"]:
        return linear(x, self.weight).mT + self.bias[:, None]

    @classmethod
    def cost(cls, B: Size, N: Size, d: Size, H: Size, *, input_grad: bool = True, itemsize: int = 4) -> GateCost:
        product, numbers = 2 * B * N * d * H, B * N * H
        return GateCost(
            forward=product,
            backward=(1 + input_grad) * product,
            elementwise_forward=numbers,
            elementwise_backward=numbers + (B * N * d if input_grad else 0),  # the bias's sum
            saved_bytes=0,
            decode=2 * B * d * H,
            trained=d * H + H,
        )
