r"""How x becomes queries and keys: learned, frozen, or frozen and outside the graph.

A projection is a module that maps x (B, N, d) and a context (B, M, d), by default x itself, to q (B, H, N, K) and
k (B, H, M, K) with K = d/H. Weights are stored as in `torch.nn.Linear`: q = x W^T, so that the sources' $W_Q$ is the
transpose of `weight_q`.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.nn.functional import linear

from ortho import _checks
from ortho._typing import Float, Tensor
from ortho._weights import new_weight, split_heads
from ortho.orthogonal import DRAWS

__all__ = ["PROJECTIONS", "FrozenProjection", "LearnedProjection", "Projection"]


class Projection(nn.Module):
    """Two d x d matrices; the subclasses say where they come from and whether gradients pass."""

    weight_q: Tensor
    weight_k: Tensor

    def __init__(self, d_model: int, num_heads: int) -> None:
        super().__init__()
        self.d_model, self.num_heads = _checks.heads(d_model, num_heads)

    def forward(
        self, x: Float[Tensor, "B N d"], context: Float[Tensor, "B M d"] | None = None
    ) -> tuple[Float[Tensor, "B H N K"], Float[Tensor, "B H M K"]]:
        """x (B, N, d), context (B, M, d) or x -> q (B, H, N, K), k (B, H, M, K)."""
        q = linear(x, self.weight_q)
        k = linear(x if context is None else context, self.weight_k)
        return split_heads(q, self.num_heads), split_heads(k, self.num_heads)

    def extra_repr(self) -> str:
        return f"d_model={self.d_model}, num_heads={self.num_heads}"


class LearnedProjection(Projection):
    """The standard layer's W_Q and W_K, trained (Vaswani et al. 2017)."""

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        *,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(d_model, num_heads)
        for name in ("weight_q", "weight_k"):
            weight = new_weight(d_model, d_model, generator=generator, dtype=dtype, device=device)
            self.register_parameter(name, weight)


class FrozenProjection(Projection):
    r"""Orthogonal random attention's W_Q and W_K: drawn once, never trained, kept as buffers in the state dict.

    `draw` names the law (`ortho.orthogonal.DRAWS`). Gradients still pass through q and k to x; with `stop_gradient`
    they do not, and the scores become constants of the backward pass.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        *,
        draw: str = "haar",
        stop_gradient: bool = False,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(d_model, num_heads)
        self.draw = _checks.one_of("draw", draw, DRAWS)
        self.stop_gradient = stop_gradient
        for name in ("weight_q", "weight_k"):
            self.register_buffer(name, DRAWS[draw](d_model, generator=generator, dtype=dtype, device=device))

    def forward(
        self, x: Float[Tensor, "B N d"], context: Float[Tensor, "B M d"] | None = None
    ) -> tuple[Float[Tensor, "B H N K"], Float[Tensor, "B H M K"]]:
        """x (B, N, d), context (B, M, d) or x -> q (B, H, N, K), k (B, H, M, K)."""
        if self.stop_gradient:
            x, context = x.detach(), None if context is None else context.detach()
        return super().forward(x, context)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, draw={self.draw!r}, stop_gradient={self.stop_gradient}"


# Each takes (d_model, num_heads, *, generator, dtype, device).
PROJECTIONS: dict[str, Callable[..., Projection]] = {
    "learned": LearnedProjection,
    "frozen": FrozenProjection,
    "stopped": partial(FrozenProjection, stop_gradient=True),
}
