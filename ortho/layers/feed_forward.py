"""The feed-forward network of a Transformer block."""

import torch
from torch import nn
from torch.nn.functional import gelu, linear

from ortho import _checks
from ortho._checks import checked
from ortho._typing import Float, Tensor
from ortho._weights import new_bias, new_weight

__all__ = ["FeedForward"]


class FeedForward(nn.Module):
    r"""$\mathrm{GELU}(x W_1 + b_1)\, W_2 + b_2$ with hidden width `d_ff`, 4 d_model by default; b only with `bias`."""

    @checked
    def __init__(
        self,
        d_model: int,
        d_ff: int | None = None,
        *,
        bias: bool = False,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        d_ff = 4 * d_model if d_ff is None else d_ff
        self.weight_up = new_weight(d_ff, d_model, generator=generator, dtype=dtype, device=device)
        self.weight_down = new_weight(d_model, d_ff, generator=generator, dtype=dtype, device=device)
        self.bias_up, self.bias_down = (new_bias(w) if bias else None for w in (self.weight_up, self.weight_down))

    @checked(shapes=False)
    def forward(self, x: Float[Tensor, "B N d"]) -> Float[Tensor, "B N d"]:
        """x (B, N, d) -> (B, N, d)."""
        _checks.sequence("x", x, self.weight_up)
        return linear(gelu(linear(x, self.weight_up, self.bias_up)), self.weight_down, self.bias_down)
