"""Logits of positions alone: a matrix for each head, the same for every sequence (Tay et al. 2021, section 3)."""

from typing import Any, ClassVar

import torch
from torch import nn

from ortho import _checks
from ortho._checks import checked
from ortho._typing import Float, Tensor
from ortho.layers.synthesizer.source import Call, LogitSource, Seen, SourceCost, product, shared

__all__ = ["FactoredRandom", "FixedRandom", "Random"]


class Random(LogitSource):
    """The random Synthesizer: a trained matrix R (H, max_length, max_length), drawn from N(0, 1)."""

    name = "random"
    trained: ClassVar[bool] = True

    matrix: Tensor

    def _make(self, options: dict[str, Any]) -> None:
        matrix = torch.randn(self.num_heads, self.max_length, self.max_length, **options)
        if self.trained:
            self.register_parameter("matrix", nn.Parameter(matrix))
        else:
            self.register_buffer("matrix", matrix)

    def logits(self, x: Float[Tensor, "B N d"], seen: Seen, share: Tensor | None = None) -> Float[Tensor, "1 H N M"]:
        matrix = self.matrix[None, :, seen.keys - x.shape[1] : seen.keys, : seen.keys]
        return shared(matrix, share)

    @classmethod
    def cost(cls, call: Call) -> SourceCost:
        entries, matrix = call.H * call.N**2, call.H * call.max_length**2
        return SourceCost(
            items=1,
            elementwise_forward=call.shared * entries,
            elementwise_backward=call.shared * (2 + cls.trained) * entries,  # of the share: multiply, sum; of R
            trained=matrix if cls.trained else 0,
            frozen=0 if cls.trained else matrix,
        )


class FixedRandom(Random):
    """The fixed random Synthesizer: R stays as it was drawn, a buffer."""

    name = "fixed-random"
    trained = False


class FactoredRandom(LogitSource):
    """The factorised random Synthesizer: R = R1 R2^T with `left` R1 and `right` R2 (H, max_length, rank).

    Of R only the rows and columns of a call are computed, and none is kept; the softmax, as large, is. Raises
    TypeError or ValueError for a rank below 1, besides `LogitSource`'s errors. The paper's rank is 8.
    """

    name = "factored-random"

    @checked
    def __init__(self, d_model: int, num_heads: int, max_length: int, *, rank: int = 8, **options: Any) -> None:
        self.rank = _checks.positive_int("rank", rank)
        super().__init__(d_model, num_heads, max_length, **options)

    def _make(self, options: dict[str, Any]) -> None:
        shape = (self.num_heads, self.max_length, self.rank)
        # A logit is a sum of `rank` products of two numbers, each of variance rank^(-1/2).
        self.left, self.right = (nn.Parameter(torch.randn(shape, **options) * self.rank**-0.25) for _ in range(2))

    def logits(self, x: Float[Tensor, "B N d"], seen: Seen, share: Tensor | None = None) -> Float[Tensor, "1 H N M"]:
        left = self.left[None, :, seen.keys - x.shape[1] : seen.keys]
        return product(shared(left, share), self.right[:, : seen.keys])

    @classmethod
    def cost(cls, call: Call) -> SourceCost:
        factor = call.H * call.N * call.rank
        return SourceCost(
            items=1,
            forward=2 * call.N * factor,
            backward=4 * call.N * factor,
            elementwise_forward=call.shared * factor,
            elementwise_backward=3 * call.shared * factor,
            saved_bytes=call.itemsize * call.shared * factor,
            decode=2 * call.N * call.H * call.rank,
            trained=2 * call.H * call.max_length * call.rank,
        )

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, rank={self.rank}"
