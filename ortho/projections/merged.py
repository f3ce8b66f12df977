"""One frozen matrix in place of two, where a head stands alone."""

import torch

from ortho import _checks
from ortho._checks import checked
from ortho._typing import Float, Tensor
from ortho._weights import split_heads
from ortho.orthogonal import DRAWS
from ortho.projections.projection import Detached


class MergedProjection(Detached):
    r"""Of a single head: q = x W^T and k = x, with one frozen matrix.

    Scores hold $W_Q W_K^T$ alone, which for two independent Haar matrices is one again: half the products, and the same
    law. A head that is one of several has a product of rank K, which would cost d^2 in place of 2 d K: for more than
    one head ValueError is raised.
    """

    @checked
    def __init__(
        self,
        d_model: int,
        num_heads: int = 1,
        *,
        draw: str = "haar",
        stop_gradient: bool = False,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(d_model, num_heads)
        if num_heads != 1:
            raise ValueError(f"num_heads: expected 1, of which W_Q W_K^T is one matrix, got {num_heads}")
        self.draw = _checks.one_of("draw", draw, DRAWS)
        self.stop_gradient = stop_gradient
        weight = DRAWS[draw](d_model, generator=generator, dtype=dtype, device=device)
        self.register_buffer("weight_q", weight)
        self.register_buffer("bias_q", None)
        self.register_buffer("bias_k", None)

    @property
    def weight_k(self) -> Float[Tensor, "d d"]:  # type: ignore[override]
        """The identity."""
        return torch.eye(self.d_model, dtype=self.weight_q.dtype, device=self.weight_q.device)

    def forward(
        self, x: Float[Tensor, "B N d"], context: Float[Tensor, "B M d"] | None = None
    ) -> tuple[Float[Tensor, "B 1 N d"], Float[Tensor, "B 1 M d"]]:
        """x (B, N, d), context (B, M, d) or x -> q (B, 1, N, d), k (B, 1, M, d)."""
        x, context = self._sources(x, context)
        return split_heads(x @ self.weight_q.T, 1), split_heads(context, 1)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, draw={self.draw!r}, stop_gradient={self.stop_gradient}"
