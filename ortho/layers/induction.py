"""Induction heads that nothing has to learn: they find where the present token stood before, and read what followed."""

from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear

from ortho import _checks
from ortho._checks import checked
from ortho._typing import Bool, Float, State, Tensor
from ortho._weights import new_weight, split_heads, tokens_there
from ortho.attention import FORMS, MECHANISMS
from ortho.attention.cache import KeyValueCache
from ortho.attention.softmax.value_gradient import (
    recomputed_attention,
    value_gradient_attention,
    value_gradient_attention_reference,
)
from ortho.layers.induction_projection import InductionProjection

__all__ = ["InductionCache", "InductionHeads"]


class InductionHeads(nn.Module):
    """Softmax attention whose keys are those of the token before, by the queries' own frozen projection.

    `InductionProjection` says how q and k are made, and has the arguments `tokens`, `sharpness` and `draw`. They are
    constants: values alone have a gradient (`softmax.value_gradient`), and q and k are made again for it. W_V
    (`weight_v`, (H K, d)) and W_O (`weight_o`, (d, H K)) are trained; K is `head_dim`, by default d/H. The reference
    form materialises the weights.

    A state is the next token's key, the last `tokens` - 1 tokens, keys and values. A token that a mask of keys leaves
    out is no predecessor; a mask of pairs leaves out none. Heads that copy what follows a match: Olsson et al. 2022
    (arXiv:2209.11895).

    Raises TypeError or ValueError, naming the argument, for what `InductionProjection` refuses.
    """

    @checked
    def __init__(
        self,
        d_model: int,
        num_heads: int,
        *,
        head_dim: int | None = None,
        tokens: int = 1,
        sharpness: float | int | None = None,
        draw: str = "haar",
        form: str = "fast",
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        kind: dict[str, Any] = {"generator": generator, "dtype": dtype, "device": device}
        own: dict[str, Any] = {"tokens": tokens, "sharpness": sharpness, "draw": draw}
        self.projection = InductionProjection(d_model, num_heads, head_dim=head_dim, **own, **kind)
        self.d_model, self.num_heads, self.head_dim = d_model, num_heads, self.projection.head_dim
        self.form = _checks.one_of("form", form, FORMS)
        width, fans = self.projection.q_width, None if head_dim is None else 2 * d_model
        self.weight_v = new_weight(width, d_model, fans=fans, **kind)
        self.weight_o = new_weight(d_model, width, fans=fans, **kind)

    @checked(shapes=False)
    def forward(
        self,
        x: Float[Tensor, "B N d"],
        *,
        attn_mask: Bool[Tensor, "..."] | None = None,
        key_padding_mask: Bool[Tensor, "B M"] | None = None,
        is_causal: bool = False,
        initial_state: State | None = None,
        return_state: bool = False,
        cache: "InductionCache | None" = None,
    ) -> Float[Tensor, "B N d"] | tuple[Float[Tensor, "B N d"], State]:
        """x (B, N, d) -> (B, N, d); the arguments are `MultiheadAttention.forward`'s, without the context."""
        _checks.sequence("x", x, self.weight_v)
        if cache is not None:
            return self._decoded(x, cache, is_causal, attn_mask, key_padding_mask, initial_state, return_state)
        keys = None if initial_state is not None else x.shape[1]
        mask = _checks.layer_mask(attn_mask, key_padding_mask, len(x), self.num_heads, x.shape[1], keys)
        v, there = self._values(x), tokens_there(mask, x.shape[1])
        if self.form == "fast" and initial_state is None and not return_state:
            seen = x if there is None else x.detach() * there[..., None]
            return self._merge(recomputed_attention(seen, v, self._constants, attn_mask=mask, is_causal=is_causal))
        before, past = self._before(initial_state)
        q, k, after = self.projection.step(x, there, before)
        attend = value_gradient_attention if self.form == "fast" else value_gradient_attention_reference
        kept: dict[str, Any] = {"initial_state": past, "return_state": return_state}
        o: Any = attend(q, k, v, is_causal=is_causal, attn_mask=mask, **kept)
        return (self._merge(o[0]), (*after, *o[1])) if return_state else self._merge(o)

    @checked
    def new_cache(self, capacity: int | None = None) -> "InductionCache":
        """An empty cache for decoding with this layer, with room for `capacity` tokens: keys, values, the next key."""
        return InductionCache(self, capacity)

    def _constants(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys of a sequence that begins here."""
        q, k = self.projection(x)
        return q, k

    def _values(self, x: Tensor) -> Float[Tensor, "B H N K"]:
        return split_heads(linear(x, self.weight_v), self.num_heads)

    def _merge(self, o: Float[Tensor, "B H N K"]) -> Float[Tensor, "B N d"]:
        """Heads side by side, then W_O."""
        return linear(o.transpose(1, 2).flatten(2), self.weight_o)

    @torch.no_grad()
    def _decoded(self, x: Tensor, cache: Any, is_causal: bool, *others: Any) -> Tensor:
        if cache.attention is not self:
            raise ValueError("cache: expected one of this layer, got another's")
        if not is_causal or any(other is not None and other is not False for other in others):
            raise ValueError("cache: expected in a causal call without mask or state")
        q, k, after = self.projection.step(x, None, cache.after)
        o = self._merge(cache.attend(q, k, self._values(x)))
        cache.after = after
        return o

    def _before(self, state: Any) -> tuple[State | None, State | None]:
        """What the projection needs of earlier tokens, and their keys and values."""
        if state is None:
            return None, None
        parts = _checks.state(state, "key", "tokens", "keys", "values", axes=3)
        return parts[:2], parts[2:]

    def extra_repr(self) -> str:
        return f"form={self.form!r}"


class InductionCache(KeyValueCache):
    """Keys and values, the key of the next token, and the last tokens that it is made of."""

    def __init__(self, layer: InductionHeads, capacity: int | None) -> None:
        super().__init__("softmax", MECHANISMS["softmax"].form(layer.form), capacity)
        self.attention = layer
        self.after: tuple[Tensor, Tensor] | None = None  # replaced with each call, and never written to

    @property
    def nbytes(self) -> int:
        return super().nbytes + sum(x.nbytes for x in self.after or ())
