r"""How x becomes queries and keys: learned, frozen, or frozen and outside the graph.

A projection is a module that maps x (B, N, d) and a context (B, M, d), by default x itself, to q (B, H, N, K) and
k (B, H, M, K) with K = d/H. With fewer heads of keys, G = `num_kv_heads`, k is (B, G, M, K), and H/G heads of queries
one after the other share one of them (Ainslie et al. 2023, arXiv:2305.13245; G = 1: Shazeer 2019, arXiv:1911.02150).
Weights are stored as in `torch.nn.Linear`: q = x W^T, so that the sources' $W_Q$ is the transpose of `weight_q`.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.nn.functional import linear

from ortho import _checks
from ortho._typing import Float, Tensor
from ortho._weights import new_bias, new_weight, split_heads
from ortho.orthogonal import DRAWS

__all__ = ["PROJECTIONS", "FrozenProjection", "LearnedProjection", "Projection"]


class Projection(nn.Module):
    """Matrices (d, d) and (G K, d) and, if any, what is added; the subclasses say whether they are trained."""

    weight_q: Tensor
    weight_k: Tensor
    bias_q: Tensor | None
    bias_k: Tensor | None

    def __init__(self, d_model: int, num_heads: int, *, num_kv_heads: int | None = None) -> None:
        super().__init__()
        self.d_model, self.num_heads = _checks.heads(d_model, num_heads)
        self.num_kv_heads = kv_heads(num_heads, num_kv_heads)

    @property
    def kv_width(self) -> int:
        """The numbers of a token's keys, of all heads, and of its values."""
        return self.d_model // self.num_heads * self.num_kv_heads

    def forward(
        self, x: Float[Tensor, "B N d"], context: Float[Tensor, "B M d"] | None = None
    ) -> tuple[Float[Tensor, "B H N K"], Float[Tensor, "B G M K"]]:
        """x (B, N, d), context (B, M, d) or x -> q (B, H, N, K), k (B, G, M, K)."""
        q = linear(x, self.weight_q, self.bias_q)
        k = linear(x if context is None else context, self.weight_k, self.bias_k)
        return split_heads(q, self.num_heads), split_heads(k, self.num_kv_heads)

    def extra_repr(self) -> str:
        shared = "" if self.num_kv_heads == self.num_heads else f", num_kv_heads={self.num_kv_heads}"
        return f"d_model={self.d_model}, num_heads={self.num_heads}{shared}"


def kv_heads(num_heads: int, num_kv_heads: int | None) -> int:
    """How many heads of keys and values there are beside `num_heads` of queries, by default as many.

    Raises TypeError or ValueError, naming the argument, unless they divide the heads of queries.
    """
    if num_kv_heads is None:
        return num_heads
    if num_heads % _checks.positive_int("num_kv_heads", num_kv_heads):
        raise ValueError(f"num_kv_heads: expected a divisor of num_heads = {num_heads}, got {num_kv_heads}")
    return num_kv_heads


class LearnedProjection(Projection):
    """The standard layer's W_Q and W_K, trained (Vaswani et al. 2017), and with `bias` what is added, 0 at first."""

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        bias: bool = False,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(d_model, num_heads, num_kv_heads=num_kv_heads)
        for name, width in (("q", d_model), ("k", self.kv_width)):
            weight = new_weight(width, d_model, generator=generator, dtype=dtype, device=device)
            self.register_parameter(f"weight_{name}", weight)
            self.register_parameter(f"bias_{name}", new_bias(weight) if bias else None)


class FrozenProjection(Projection):
    r"""Orthogonal random attention's W_Q and W_K: drawn once, never trained, kept as buffers in the state dict.

    `draw` names the law (`ortho.orthogonal.DRAWS`). Gradients still pass through q and k to x; with `stop_gradient`
    they do not, and the scores become constants of the backward pass. Of fewer heads of keys an orthogonal W_K has
    orthonormal rows. With `bias` what is added is frozen, too, at what the standard layer begins with, 0.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        *,
        draw: str = "haar",
        stop_gradient: bool = False,
        num_kv_heads: int | None = None,
        bias: bool = False,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(d_model, num_heads, num_kv_heads=num_kv_heads)
        self.draw = _checks.one_of("draw", draw, DRAWS)
        self.stop_gradient = stop_gradient
        for name, width in (("q", d_model), ("k", self.kv_width)):
            weight = DRAWS[draw](width, d_model, generator=generator, dtype=dtype, device=device)
            self.register_buffer(f"weight_{name}", weight)
            self.register_buffer(f"bias_{name}", weight.new_zeros(width) if bias else None)

    def forward(
        self, x: Float[Tensor, "B N d"], context: Float[Tensor, "B M d"] | None = None
    ) -> tuple[Float[Tensor, "B H N K"], Float[Tensor, "B G M K"]]:
        """x (B, N, d), context (B, M, d) or x -> q (B, H, N, K), k (B, G, M, K)."""
        if self.stop_gradient:
            x, context = x.detach(), None if context is None else context.detach()
        return super().forward(x, context)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, draw={self.draw!r}, stop_gradient={self.stop_gradient}"


# Each takes (d_model, num_heads, *, num_kv_heads, bias, generator, dtype, device).
PROJECTIONS: dict[str, Callable[..., Projection]] = {
    "learned": LearnedProjection,
    "frozen": FrozenProjection,
    "stopped": partial(FrozenProjection, stop_gradient=True),
}
