r"""Gates make from a layer's input what a mechanism takes besides q, k and v: one number a head and token, or several.

A gate is a module that maps x (B, N, d) to (B, H, N), or to (B, H, N, K). A mechanism says which of its arguments come
from which gate (`Mechanism.gates`), mostly one of its own file, and `MultiheadAttention` makes and trains them. Gates
see only their own token: a gate that looked at the state would make it impossible to compute a sequence in parallel.
"""

from abc import ABC, abstractmethod
from math import log
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn.functional import linear

from ortho import checks
from ortho._typing import Float, Size, Tensor

__all__ = ["Gate", "ReflectingWriteStrength", "WriteStrength"]


class Gate(nn.Module, ABC):
    """x (B, N, d) -> (B, H, N), or (B, H, N, width): a product x W^T, and what the subclass makes of its numbers.

    With a `rank` the product is x W_1^T W_2^T, through a bottleneck of that width. `per_channel` says whether a head
    has a number for each of its channels, or one. `trained` counts parameters beside the matrices, for each of one
    token's numbers.
    """

    rank: ClassVar[int | None] = None
    per_channel: ClassVar[bool] = False
    trained: ClassVar[int] = 0
    weight: Tensor
    weight_down: Tensor
    weight_up: Tensor

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        *,
        head_dim: int | None = None,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if head_dim is None:
            checks.heads(d_model, num_heads)
        self.d_model, self.num_heads, self.head_dim = d_model, num_heads, head_dim or d_model // num_heads
        self._make(generator, {"dtype": dtype, "device": device})

    @classmethod
    def rows(cls, width: Size, H: Size) -> Size:
        """How many numbers are made for a token, for heads of this width together."""
        return width if cls.per_channel else H

    def _make(self, generator: torch.Generator | None, kind: dict[str, Any]) -> None:
        """Draw the parameters."""
        rows = self.rows(self.num_heads * self.head_dim, self.num_heads)
        shapes = {"weight": (rows, self.d_model)}
        if self.rank is not None:
            shapes = {"weight_down": (self.rank, self.d_model), "weight_up": (rows, self.rank)}
        for name, shape in shapes.items():
            drawn = nn.init.xavier_uniform_(torch.empty(shape, **kind), generator=generator)
            setattr(self, name, nn.Parameter(drawn))

    @abstractmethod
    def forward(self, x: Float[Tensor, "B N d"]) -> Tensor: ...

    def _product(self, x: Float[Tensor, "B N d"]) -> Float[Tensor, "B N rows"]:
        return linear(x, self.weight) if self.rank is None else linear(linear(x, self.weight_down), self.weight_up)

    def _vectors(self, x: Float[Tensor, "B N d"]) -> Float[Tensor, "B H N K"]:
        """The product by heads, several numbers each."""
        return self._product(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def _numbers(self, x: Float[Tensor, "B N d"]) -> Float[Tensor, "B H N"]:
        """The product by heads, one number each."""
        # Copied into the layout that is read, before anything else, so that autograd keeps one copy.
        return self._product(x).mT.contiguous()

    @classmethod
    def sizes(cls, d: Size, K: Size, H: Size) -> tuple[list[tuple[Size, Size]], Size]:
        """The (inputs, outputs) of the matrices that x passes one after the other, for H heads of width K, and the
        number of parameters beside them: what the closed form of the cost needs (`ortho.cost.layer`)."""
        rows = cls.rows(H * K, H)
        matrices = [(d, rows)] if cls.rank is None else [(d, cls.rank), (cls.rank, rows)]
        return matrices, cls.trained * rows

    def extra_repr(self) -> str:
        return f"d_model={self.d_model}, num_heads={self.num_heads}"


class WriteStrength(Gate):
    r"""$\beta = \sigma(x W^T)$ in (0, 1): how much of what a key holds is replaced (Yang et al. 2024,
    arXiv:2406.06484, section 3.1)."""

    maximum: ClassVar[float] = 1

    def forward(self, x: Float[Tensor, "B N d"]) -> Float[Tensor, "B H N"]:
        return self._numbers(x).sigmoid() * self.maximum


class ReflectingWriteStrength(WriteStrength):
    r"""$\beta = 2 \sigma(x W^T)$ in (0, 2): above 1, $I - \beta k k^T$ turns what lies along k round (Grazzi et al.
    2024, arXiv:2411.12537)."""

    maximum: ClassVar[float] = 2


def rate_logarithms(H: int, generator: torch.Generator | None, kind: dict[str, Any]) -> Tensor:
    """Initial logarithms of the heads' decay rates, (H,); the rates are uniform in [1, 16]."""
    return nn.init.uniform_(torch.empty(H, **kind), 1, 16, generator=generator).log_()


def step_biases(H: int, generator: torch.Generator | None, kind: dict[str, Any]) -> Tensor:
    """Initial biases of the heads' step sizes, (H,); their softplus is log-uniform in [0.001, 0.1]."""
    step = nn.init.uniform_(torch.empty(H, **kind), log(1e-3), log(1e-1), generator=generator).exp_()
    return step + (-(-step).expm1()).log()
