"""Attention over a window and global tokens, with separate projections for the global ones (Longformer)."""

import copy
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from ortho import checks
from ortho._typing import Bool, Float
from ortho.attention import MECHANISMS
from ortho.attention.sparse.global_local import GlobalKeys
from ortho.attention.sparse.pattern import pattern_attention, pattern_attention_reference
from ortho.heads import split_heads
from ortho.layers.heads import Heads
from ortho.projections import LearnedProjection


class LongformerAttention(Heads):
    """Attention over `GlobalLocal(width, tokens)` with separate projections for its first `tokens`, the global ones.

    `projection_global` and `weight_v_global` make the queries of the global tokens, and the keys and values that these
    queries read. `projection` and `weight_v` make all other queries, and the keys and values that those read, also of
    global tokens. The global weights start as copies of the others, so a new layer equals a `MultiheadAttention` over
    that pattern. There are 7 d^2 weights. Calls are not causal, as in an encoder.

    Source: Beltagy et al. 2020, arXiv:2004.05150, section 3.1, "Linear Projections for Global Attention".

    Raises TypeError or ValueError, naming the argument, for sizes below 1, an unknown form, and heads that do not
    divide d_model.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        *,
        width: int = 256,
        tokens: int = 16,
        bias: bool = False,
        form: str = "fast",
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(d_model, num_heads)
        self.form = checks.one_of("form", form, checks.FORMS)
        kind: dict[str, Any] = {"generator": generator, "dtype": dtype, "device": device}
        self.projection = LearnedProjection(d_model, num_heads, bias=bias, **kind)
        self.pattern = GlobalKeys(width, tokens)
        self._make_maps(bias=bias, **kind)
        self.projection_global = copy.deepcopy(self.projection)
        self.weight_v_global, self.bias_v_global = copy.deepcopy((self.weight_v, self.bias_v))

    def forward(
        self,
        x: Float[Tensor, "B N d"],
        *,
        attn_mask: Bool[Tensor, "..."] | None = None,
        key_padding_mask: Bool[Tensor, "B N"] | None = None,
        is_causal: bool = False,
    ) -> Float[Tensor, "B N d"]:
        """x (B, N, d) -> (B, N, d). Masks, and the errors for bad ones, are those of `MultiheadAttention`.

        Raises ValueError for a causal call: the first tokens would see only each other.
        """
        checks.sequence("x", x, self.d_model)
        checks.expect(not is_causal, "is_causal", "False, since global tokens see the whole sequence", is_causal)
        N, first = x.shape[1], min(self.pattern.tokens, x.shape[1])
        mask = checks.layer_mask(attn_mask, key_padding_mask, len(x), self.num_heads, N, N)
        q, k = self.projection_global(x[:, :first].contiguous(), x)
        v = split_heads(linear(x, self.weight_v_global, self.bias_v_global), self.num_heads)
        rows = mask if mask is None or mask.dim() < 2 or mask.shape[-2] == 1 else mask[..., :first, :]
        outputs = [MECHANISMS["softmax"].form(self.form)(q, k, v, attn_mask=rows)]
        if first < N:
            attend = pattern_attention if self.form == "fast" else pattern_attention_reference
            o: Any = attend(*self.projection(x), self._values(x), pattern=self.pattern, attn_mask=mask)
            outputs.append(o[:, :, first:])
        return self._merge(torch.cat(outputs, 2))

    def extra_repr(self) -> str:
        return f"d_model={self.d_model}, num_heads={self.num_heads}, pattern={self.pattern}, form={self.form!r}"
