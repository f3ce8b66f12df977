"""The Transformer block: attention and a feed-forward network, each added to its input."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ortho import _checks
from ortho._checks import checked
from ortho._typing import Float, State, Tensor
from ortho.layers.feed_forward import FeedForward
from ortho.layers.multihead import MultiheadAttention

__all__ = ["TransformerBlock"]


class TransformerBlock(nn.Module):
    """Attention and a feed-forward network, each added to what it is given.

    Pre-norm, x + attention(norm(x)), then x + feed-forward(norm(x)) (Xiong et al. 2020, arXiv:2002.04745); or, without
    `norm_first`, post-norm, norm(x + attention(x)), then norm(x + feed-forward(x)) (Vaswani et al. 2017, section 3.1).
    `layer` is the class of the attention layer, which is given `kwargs`: `MultiheadAttention`, or one that is called as
    it is, such as `HybridAttention`. `bias` is that of all parts, the norms' included. While training, a share
    `dropout` of what either half gives is left out (Srivastava et al. 2014), by PyTorch's global generator.

    Raises TypeError or ValueError for a `dropout` outside [0, 1).
    """

    attention: Any

    @checked
    def __init__(
        self,
        d_model: int,
        num_heads: int,
        *,
        layer: Callable[..., nn.Module] = MultiheadAttention,
        d_ff: int | None = None,
        norm_first: bool = True,
        dropout: float = 0.0,
        bias: bool = False,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        kind: dict[str, Any] = {"bias": bias, "dtype": dtype, "device": device}
        own = {name: value for name, value in kind.items() if value}  # not every layer knows of biases
        self.attention = layer(d_model, num_heads, generator=generator, **own, **kwargs)
        self.feed_forward = FeedForward(d_model, d_ff, generator=generator, **kind)
        self.norm_attention = nn.LayerNorm(d_model, **kind)
        self.norm_feed_forward = nn.LayerNorm(d_model, **kind)
        self.norm_first = norm_first
        self.dropout = nn.Dropout(_checks.share("dropout", dropout))

    @checked(shapes=False)
    def forward(
        self,
        x: Float[Tensor, "B N d"],
        *,
        initial_state: State | None = None,
        return_state: bool = False,
        **kwargs: Any,
    ) -> Float[Tensor, "B N d"] | tuple[Float[Tensor, "B N d"], State]:
        """x (B, N, d) -> (B, N, d); the arguments are `MultiheadAttention.forward`'s, without the context."""
        _checks.sequence("x", x, self.norm_attention.weight)
        y = self.attention(
            self.norm_attention(x) if self.norm_first else x,
            initial_state=initial_state,
            return_state=return_state,
            **kwargs,
        )
        if not return_state:
            return self._after(x, y)
        y, state = y
        return self._after(x, y), state

    def _after(self, x: Float[Tensor, "B N d"], y: Float[Tensor, "B N d"]) -> Float[Tensor, "B N d"]:
        """The first residual sum and the feed-forward half."""
        if not self.norm_first:
            x = self.norm_attention(x + self.dropout(y))
            return self.norm_feed_forward(x + self.dropout(self.feed_forward(x)))
        x = x + self.dropout(y)
        return x + self.dropout(self.feed_forward(self.norm_feed_forward(x)))
