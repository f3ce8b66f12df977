"""Queries and keys by matrices: learned, frozen, or one frozen matrix for a single head."""

from typing import Any

import torch

from ortho import checks, heads
from ortho.heads import new_bias, new_weight
from ortho.orthogonal import DRAWS
from ortho.projections.projection import Projection


class LearnedProjection(Projection):
    """The standard layer's W_Q and W_K, trained (Vaswani et al. 2017); with `bias` also biases, 0 at first.

    Takes what `Projection` takes. With `head_dim` the entries begin with the variance of a square W_Q, 1/d, whatever
    the number of heads.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        *,
        head_dim: int | None = None,
        num_kv_heads: int | None = None,
        bias: bool = False,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(d_model, num_heads, head_dim=head_dim, num_kv_heads=num_kv_heads)
        kind: dict[str, Any] = {"generator": generator, "dtype": dtype, "device": device}
        fans = None if head_dim is None else 2 * d_model
        for name, width in (("q", self.q_width), ("k", self.kv_width)):
            weight = new_weight(width, d_model, fans=fans, **kind)
            self.register_parameter(f"weight_{name}", weight)
            self.register_parameter(f"bias_{name}", new_bias(weight) if bias else None)


class FrozenProjection(Projection):
    r"""Orthogonal random attention's W_Q and W_K: drawn once, never trained: parameters without gradients.

    `draw` names the law (`ortho.orthogonal.DRAWS`). Gradients still pass through q and k to x; with `stop_gradient`
    they do not, and the scores become constants of the backward pass. If the width is not d, an orthogonal matrix has
    orthonormal rows or columns. With `bias` the biases are frozen, too, at 0, the standard layer's initial value.
    """

    frozen = True

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        *,
        draw: str = "haar",
        stop_gradient: bool = False,
        head_dim: int | None = None,
        num_kv_heads: int | None = None,
        bias: bool = False,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(d_model, num_heads, head_dim=head_dim, num_kv_heads=num_kv_heads)
        self.draw = checks.one_of("draw", draw, DRAWS)
        self.stop_gradient = stop_gradient
        for name, width in (("q", self.q_width), ("k", self.kv_width)):
            weight = DRAWS[draw](width, d_model, generator=generator, dtype=dtype, device=device)
            self.register_parameter(f"weight_{name}", heads.frozen(weight))
            self.register_parameter(f"bias_{name}", heads.frozen(weight.new_zeros(width)) if bias else None)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, draw={self.draw!r}, stop_gradient={self.stop_gradient}"
