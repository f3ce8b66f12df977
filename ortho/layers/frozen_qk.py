"""Attention whose queries and keys are frozen and outside the graph: less to compute backward, and less to keep."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ortho import checks
from ortho._typing import Bool, Float
from ortho.attention.softmax.frozen_qk import recomputed_attention
from ortho.heads import repeat_kv
from ortho.layers.multihead import MultiheadAttention
from ortho.projections import Projection


class FrozenQKAttention(MultiheadAttention):
    """Softmax `MultiheadAttention` with a projection that stops the gradient, and a backward pass for values alone.

    In the backward pass, a forward pass with q and k exchanged gives the values' gradient (`softmax.frozen_qk`).
    Between the passes the layer keeps x, the merged heads, and one number for each head and token, but not q, k and v.
    Its arguments are those of `MultiheadAttention` except `attention`; `projection` is 'structured-stopped', 'stopped',
    or a class or module of projections that stop the gradient. The reference form, and calls with a context, a mask of
    numbers, a state, a cache, weights or dropout of weights, run as in `MultiheadAttention`, with the same results.

    Raises TypeError or ValueError, naming the argument, for what `MultiheadAttention` refuses, and for a projection
    through which a gradient passes.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        *,
        projection: str | Callable[..., Projection] | Projection = "structured-stopped",
        **kwargs: Any,
    ) -> None:
        if "attention" in kwargs:
            raise TypeError(f"attention: expected none, it is softmax, got {checks.describe(kwargs['attention'])}")
        super().__init__(d_model, num_heads, projection=projection, **kwargs)
        if not self.projection.stop_gradient:
            raise ValueError(f"projection: expected one that stops the gradient, got {checks.describe(projection)}")

    def forward(
        self,
        x: Float[Tensor, "B N d"],
        context: Float[Tensor, "B M d"] | None = None,
        value: Float[Tensor, "B M d"] | None = None,
        *,
        attn_mask: Bool[Tensor, "..."] | Float[Tensor, "..."] | None = None,
        key_padding_mask: Bool[Tensor, "B M"] | None = None,
        is_causal: bool = False,
        **others: Any,
    ) -> Float[Tensor, "B N d"] | tuple[Float[Tensor, "B N d"], Any]:
        """x (B, N, d) -> (B, N, d); see `MultiheadAttention.forward`."""
        others |= {"context": context, "value": value}
        plain = all(x is None or x is False for x in others.values())
        plain = plain and (attn_mask is None or attn_mask.dtype == torch.bool)
        if self.form == "reference" or not plain or (self.training and self.dropout):
            others |= {"attn_mask": attn_mask, "key_padding_mask": key_padding_mask, "is_causal": is_causal}
            return super().forward(x, **others)
        checks.sequence("x", x, self.d_model)
        mask = checks.layer_mask(attn_mask, key_padding_mask, len(x), self.num_heads, x.shape[1], x.shape[1])
        v = repeat_kv(self._values(x), self.num_heads)
        return self._merge(recomputed_attention(x, v, self._constants(), attn_mask=mask, is_causal=is_causal))

    def _constants(self) -> nn.Module:
        """What makes q (B, H, N, K) and k (B, G, N, K) of x."""
        return self.projection
