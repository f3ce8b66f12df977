"""torch's own attention layer with frozen heads, and with heads of several kinds."""

from typing import Any

import torch
from torch import nn
from torch.nn.functional import _canonical_mask, dropout, scaled_dot_product_attention

from ortho._typing import Float, Tensor
from ortho.adapters.kinds import Kind, asks, attend
from ortho.adapters.rows import FrozenRows

_PACKED, _SEPARATE = ("in_proj_weight",), ("q_proj_weight", "k_proj_weight", "v_proj_weight")


class AdaptedAttention(nn.MultiheadAttention):
    """A `torch.nn.MultiheadAttention` whose queries and keys are made by `FrozenRows`; it is called as that is.

    Such a layer is made of one that there is, in place (`adapt`), and becomes that again where nothing of it is frozen.
    The packed weights are put together when they are asked for, so that torch's own code, its fast path for inference
    included, reads what it has always read. With `kinds`, one a head, a head is what its kind says: those that do not
    ask have no rows of queries and keys. torch's fast path is then barred.
    """

    rows_q: FrozenRows
    rows_k: FrozenRows
    rows_v: FrozenRows
    kinds: tuple[Kind, ...] | None

    @staticmethod
    def adapt(layer: nn.MultiheadAttention, q: FrozenRows, k: FrozenRows, kinds: tuple[Kind, ...] | None) -> None:
        """Give a layer these queries, keys and kinds of heads. The caller has checked that they fit."""
        v = read_attention(layer)[2]
        whole = layer.kdim == layer.vdim == layer.embed_dim
        if kinds is not None or q.frozen_weight is not None or k.frozen_weight is not None:
            for name in (*_PACKED, *_SEPARATE, "in_proj_bias"):
                layer._parameters.pop(name, None)
            layer.__class__ = AdaptedAttention
            assert isinstance(layer, AdaptedAttention)
            layer.rows_q, layer.rows_k, layer.rows_v = (x.train(layer.training) for x in (q, k, v))
            layer.kinds = kinds
            layer._qkv_same_embed_dim = whole and kinds is None  # which is what the fast paths ask for
        elif isinstance(layer, AdaptedAttention):
            del layer.rows_q, layer.rows_k, layer.rows_v, layer.kinds
            layer.__class__ = nn.MultiheadAttention  # type: ignore[assignment]
            weights = [x.weight.detach() for x in (q, k, v)]
            new: dict[str, Tensor | None] = dict.fromkeys((*_PACKED, *_SEPARATE, "in_proj_bias"))
            new |= {_PACKED[0]: torch.cat(weights)} if whole else dict(zip(_SEPARATE, weights, strict=True))
            biases = [x.bias for x in (q, k, v) if x.bias is not None]
            new["in_proj_bias"] = torch.cat(biases).detach() if biases else None
            for name, value in new.items():
                layer.register_parameter(name, None if value is None else nn.Parameter(value))
            layer._qkv_same_embed_dim = whole

    @property
    def in_proj_weight(self) -> Float[Tensor, "d3 d"] | None:  # type: ignore[override]
        return torch.cat([x.weight for x in self._rows]) if self._qkv_same_embed_dim else None

    @property
    def in_proj_bias(self) -> Float[Tensor, "d3"] | None:  # type: ignore[override]
        biases = [x.bias for x in self._rows if x.bias is not None]
        return torch.cat(biases) if biases else None

    @property
    def q_proj_weight(self) -> Float[Tensor, "d d"] | None:  # type: ignore[override]
        return None if self._qkv_same_embed_dim else self.rows_q.weight

    @property
    def k_proj_weight(self) -> Float[Tensor, "d kdim"] | None:  # type: ignore[override]
        return None if self._qkv_same_embed_dim else self.rows_k.weight

    @property
    def v_proj_weight(self) -> Float[Tensor, "d vdim"] | None:  # type: ignore[override]
        return None if self._qkv_same_embed_dim else self.rows_v.weight

    @property
    def _rows(self) -> tuple[FrozenRows, ...]:
        return self.rows_q, self.rows_k, self.rows_v

    def asking(self) -> tuple[int, ...]:
        """The heads that have queries and keys."""
        return tuple(h for h in range(self.num_heads) if self.kinds is None or asks(self.kinds[h]))

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """What `torch.nn.MultiheadAttention` takes and returns. With `kinds` there are no weights to return and no
        dropout in training, and masks say which keys may be attended to and nothing else: ValueError.
        """
        stopped = torch.is_grad_enabled() and any(x.stop_gradient for x in (self.rows_q, self.rows_k))
        if self.kinds is None and not stopped:
            return super().forward(
                query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
            )
        if is_causal and attn_mask is None:
            raise ValueError("attn_mask: expected the mask that is_causal hints at, got None")
        if any(x.is_nested for x in (query, key, value)):
            raise ValueError(
                "query: expected no nested tensors, which nn.TransformerEncoder(..., "
                "enable_nested_tensor=False) does not make"
            )
        batched = query.dim() == 3
        swap = batched and not self.batch_first
        sources = [x.transpose(0, 1) if swap else x if batched else x[None] for x in (query, key, value)]
        made = (rows(x) for rows, x in zip(self._rows, sources, strict=True))
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for y in made)
        mask = self._mask(attn_mask, key_padding_mask, len(v), query.dtype)
        weights = None
        if self.kinds is not None:
            o = self._by_kinds(self.kinds, (q, k, v), sources[0].shape[1], mask, need_weights, is_causal)
        elif need_weights:
            scores = q @ k.mT * self.head_dim**-0.5
            weights = dropout((scores if mask is None else scores + mask).softmax(-1), self.dropout, self.training)
            o = weights @ v
            weights = weights.mean(1) if average_attn_weights else weights
        else:
            o = scaled_dot_product_attention(q, k, v, mask, self.dropout if self.training else 0.0)
        y = self.out_proj(o.transpose(1, 2).flatten(2))
        if not batched:
            return y[0], None if weights is None else weights[0]
        return y.transpose(0, 1) if swap else y, weights

    def extra_repr(self) -> str:
        names = (kind if isinstance(kind, str) else getattr(kind, "name", repr(kind)) for kind in self.kinds or ())
        return f"kinds=({', '.join(names)})" if self.kinds else ""

    def _by_kinds(
        self,
        kinds: tuple[Kind, ...],
        operands: tuple[Tensor, Tensor, Tensor],
        queries: int,
        mask: Tensor | None,
        need_weights: bool,
        is_causal: bool,
    ) -> Float[Tensor, "B H N K"]:
        """The heads' outputs, each after its kind."""
        if need_weights:
            raise ValueError(
                "need_weights: expected False, as heads of several kinds have no weights in common, got True"
            )
        if self.training and self.dropout:
            raise ValueError(f"dropout: expected 0 in training with heads of several kinds, got {self.dropout}")
        allowed = None
        if mask is not None:
            allowed = mask == 0
            known = (allowed | (mask == -torch.inf)).all()
            wanted = "attn_mask: expected booleans, or 0 and -inf, with heads of several kinds, got others"
            if torch.compiler.is_compiling():
                torch._assert_async(known, wanted)
            elif not known:
                raise ValueError(wanted)
        return attend(kinds, *operands, queries=queries, mask=allowed, is_causal=is_causal)

    def _mask(
        self, attn_mask: Tensor | None, padding: Tensor | None, batch: int, dtype: torch.dtype
    ) -> Float[Tensor, "B h N M"] | None:
        """Both masks in one that is added to the scores."""
        kind: dict[str, Any] = {"other_type": None, "other_name": "", "target_type": dtype, "check_other": False}
        attn_mask = _canonical_mask(attn_mask, "attn_mask", **kind)
        padding = _canonical_mask(padding, "key_padding_mask", **kind)
        if attn_mask is not None:
            attn_mask = attn_mask[None, None] if attn_mask.dim() == 2 else attn_mask.unflatten(0, (batch, -1))
        if padding is None:
            return attn_mask
        padding = padding[None] if padding.dim() == 1 else padding
        padding = padding[:, None, None]
        return padding if attn_mask is None else attn_mask + padding


def read_attention(layer: nn.MultiheadAttention) -> tuple[FrozenRows, FrozenRows, FrozenRows]:
    """What makes a layer's queries, keys and values."""
    if isinstance(layer, AdaptedAttention):
        return layer.rows_q, layer.rows_k, layer.rows_v
    if layer._qkv_same_embed_dim:
        weights = layer.in_proj_weight.chunk(3)
    else:
        weights = (layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight)
    biases = (None,) * 3 if layer.in_proj_bias is None else layer.in_proj_bias.chunk(3)
    q, k, v = (FrozenRows.trainable(w, b) for w, b in zip(weights, biases, strict=True))
    return q, k, v
