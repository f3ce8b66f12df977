"""torch's own attention layer with frozen heads, and with heads of several kinds."""

from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn.functional import _canonical_mask, dropout, scaled_dot_product_attention

from ortho._checks import expect
from ortho._typing import Float, Tensor
from ortho.adapters.kinds import HeadKinds, Kind, as_booleans, asks, attend
from ortho.adapters.rows import FrozenRows

_WEIGHTS = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "in_proj_bias")


def _weight_of(name: str) -> property:
    """A property: the weight of that matrix, or None if the layer has no matrix of this name."""

    def weight(layer: Any) -> Tensor | None:
        return layer._modules[name].weight if name in layer._modules else None

    return property(weight)


class AdaptedAttention(nn.MultiheadAttention):
    """A `torch.nn.MultiheadAttention` whose queries and keys are made by `FrozenRows`; it is called in the same way.

    `adapt` turns an existing layer into such a layer, in place, and turns it back once nothing is frozen and it has no
    `kinds`. As before there is one matrix, `in_proj`, or three, `q_proj`, `k_proj` and `v_proj`; torch's own code, its
    fast path for inference included, still reads the weights that it expects. With `kinds`, one for each head, each
    head works by its kind, and heads without queries and keys have no rows of them. torch's fast path is then disabled.

    If there is one matrix, the state dict has torch's names.
    """

    in_proj: FrozenRows
    q_proj: FrozenRows
    k_proj: FrozenRows
    v_proj: FrozenRows
    heads: HeadKinds | None

    @staticmethod
    def adapt(layer: nn.MultiheadAttention, matrices: dict[str, FrozenRows], kinds: tuple[Kind, ...] | None) -> None:
        """Give a layer these matrices and kinds of heads. The caller has checked that they fit."""
        matrices = read_attention(layer) | matrices
        packed = "in_proj" in matrices
        if kinds is not None or any(matrix.freezes for matrix in matrices.values()):
            for name in _WEIGHTS:
                layer._parameters.pop(name, None)
            layer.__class__ = AdaptedAttention
            assert isinstance(layer, AdaptedAttention)
            for name, matrix in matrices.items():
                setattr(layer, name, matrix.train(layer.training))
            layer.heads = None if kinds is None else HeadKinds(kinds)
            layer._qkv_same_embed_dim = packed and kinds is None  # the fast paths check this
        elif isinstance(layer, AdaptedAttention):
            for name in (*matrices, "heads"):
                delattr(layer, name)
            layer.__class__ = nn.MultiheadAttention  # type: ignore[assignment]
            plain = {name: matrix.plain() for name, matrix in matrices.items()}
            biases = [m.bias for m in plain.values() if isinstance(m.bias, nn.Parameter)]
            new: dict[str, Any] = {f"{name}_weight": m.weight for name, m in plain.items()}
            if biases:
                needs = all(bias.requires_grad for bias in biases)
                new["in_proj_bias"] = nn.Parameter(torch.cat([bias.detach() for bias in biases]), needs)
            for name in _WEIGHTS:
                layer.register_parameter(name, new.get(name))
            layer._qkv_same_embed_dim = packed

    @property
    def in_proj_weight(self) -> Float[Tensor, "d3 d"] | None:  # type: ignore[override]
        return self._modules["in_proj"].weight if self._qkv_same_embed_dim else None  # type: ignore[union-attr,return-value]

    @property
    def in_proj_bias(self) -> Float[Tensor, "d3"] | None:  # type: ignore[override]
        if "in_proj" in self._modules:
            return self._modules["in_proj"].bias  # type: ignore[union-attr,return-value]
        biases = [x.bias for x in read_attention(self).values() if x.bias is not None]
        return torch.cat(biases) if biases else None

    q_proj_weight: Any = _weight_of("q_proj")
    k_proj_weight: Any = _weight_of("k_proj")
    v_proj_weight: Any = _weight_of("v_proj")

    @property
    def kinds(self) -> tuple[Kind, ...] | None:
        """The kinds of its heads; None if none were set."""
        return None if self.heads is None else self.heads.kinds

    def asking(self) -> tuple[int, ...]:
        """The heads that have queries and keys."""
        return tuple(h for h in range(self.num_heads) if self.kinds is None or asks(self.kinds[h]))

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> list[Float[Tensor, "B h N K"]]:
        """Queries and keys of the heads that have them, and all values."""
        A = len(self.asking()) * self.head_dim
        if "in_proj" in self._modules:
            ends = (0, A, 2 * A, 2 * A + self.embed_dim)
            if query is key is value:
                made = self.in_proj(query).split((A, A, self.embed_dim), -1)
            else:
                made = [self.in_proj(x, *rows) for x, rows in zip((query, key, value), pairwise(ends), strict=True)]
        else:
            made = [self.q_proj(query), self.k_proj(key), self.v_proj(value)]
        return [y.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for y in made]

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
        """Takes and returns what `torch.nn.MultiheadAttention` does.

        With `kinds` it raises ValueError for need_weights=True, for dropout in training, and for a mask that is more
        than a mask of keys.
        """
        stopped = torch.is_grad_enabled() and any(x.stop_gradient for x in read_attention(self).values())
        if self.kinds is None and not stopped:
            return super().forward(
                query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
            )
        expect(not is_causal or attn_mask is not None, "attn_mask", "the mask that is_causal hints at", "None")
        if any(x.is_nested for x in (query, key, value)):
            raise ValueError(
                "query: expected no nested tensors, which nn.TransformerEncoder(..., "
                "enable_nested_tensor=False) does not make"
            )
        batched = query.dim() == 3
        swap = batched and not self.batch_first
        itself = query is key  # a sequence that attends to itself
        first = query.transpose(0, 1) if swap else query if batched else query[None]
        others = (x.transpose(0, 1) if swap else x if batched else x[None] for x in (key, value))
        sources = [first, *(first if same else x for x, same in zip(others, (itself, value is query), strict=True))]
        q, k, v = self._projected(*sources)
        mask = self._mask(attn_mask, key_padding_mask, (len(v), sources[0].shape[1], v.shape[2]), query.dtype)
        weights = None
        if self.kinds is not None:
            o = self._by_kinds(self.kinds, (q, k, v), sources[0].shape[1], itself, mask, need_weights, is_causal)
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
        itself: bool,
        mask: Tensor | None,
        need_weights: bool,
        is_causal: bool,
    ) -> Float[Tensor, "B H N K"]:
        """The heads' outputs, each by its kind."""
        expect(not need_weights, "need_weights", "False, as heads of several kinds have no weights in common", "True")
        if self.training and self.dropout:
            raise ValueError(f"dropout: expected 0 in training with heads of several kinds, got {self.dropout}")
        allowed = None if mask is None else as_booleans("attn_mask", mask)
        return attend(kinds, *operands, queries=queries, itself=itself, mask=allowed, is_causal=is_causal)

    def _mask(
        self, attn_mask: Tensor | None, padding: Tensor | None, sizes: tuple[int, int, int], dtype: torch.dtype
    ) -> Float[Tensor, "B h N M"] | None:
        """Both masks as one that is added to the scores. Raises ValueError for shapes that torch does not take."""
        B, N, M = sizes
        kind: dict[str, Any] = {"other_type": None, "other_name": "", "target_type": dtype, "check_other": False}
        attn_mask = _canonical_mask(attn_mask, "attn_mask", **kind)
        padding = _canonical_mask(padding, "key_padding_mask", **kind)
        if attn_mask is not None:
            if attn_mask.shape not in ((N, M), (B * self.num_heads, N, M)):
                raise ValueError(
                    f"attn_mask: expected shape {(N, M)} or {(B * self.num_heads, N, M)}, got {tuple(attn_mask.shape)}"
                )
            attn_mask = attn_mask[None, None] if attn_mask.dim() == 2 else attn_mask.unflatten(0, (B, -1))
        if padding is None:
            return attn_mask
        padding = padding[None] if padding.dim() == 1 else padding
        if padding.shape != (B, M):
            raise ValueError(f"key_padding_mask: expected shape {(B, M)}, got {tuple(padding.shape)}")
        padding = padding[:, None, None]
        return padding if attn_mask is None else attn_mask + padding

    def state_dict(self, *args: Any, prefix: str = "", **kwargs: Any) -> Any:
        """torch's state dict, with its names."""
        state = super().state_dict(*args, prefix=prefix, **kwargs)
        for name in [name for name in state if name.startswith(f"{prefix}in_proj.")]:
            state[_flat(name, prefix)] = state.pop(name)
        return state

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        for name in ("weight", "bias", "frozen"):
            inner = f"{prefix}in_proj.{name}"
            if (flat := _flat(inner, prefix)) in state_dict and "in_proj" in self._modules:
                state_dict[inner] = state_dict.pop(flat)
        super()._load_from_state_dict(state_dict, prefix, *args)


def _flat(name: str, prefix: str) -> str:
    """in_proj.weight -> in_proj_weight."""
    return prefix + name.removeprefix(prefix).replace(".", "_")


def read_attention(layer: nn.MultiheadAttention) -> dict[str, FrozenRows]:
    """The matrices that make a layer's queries, keys and values, by name: one, or three."""
    if isinstance(layer, AdaptedAttention):
        return {name: child for name, child in layer.named_children() if isinstance(child, FrozenRows)}
    if layer._qkv_same_embed_dim:
        return {"in_proj": FrozenRows.trainable(layer.in_proj_weight, layer.in_proj_bias)}
    biases = (None,) * 3 if layer.in_proj_bias is None else layer.in_proj_bias.detach().chunk(3)
    matrices = {}
    for name, bias in zip(("q_proj", "k_proj", "v_proj"), biases, strict=True):
        own = None if bias is None else bias.requires_grad_(layer.in_proj_bias.requires_grad)
        matrices[name] = FrozenRows.trainable(getattr(layer, f"{name}_weight"), own)
    return matrices
