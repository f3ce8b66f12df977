"""The Transformer block, attention and a feed-forward network; and the decoder's, which also attends to a context."""

import copy
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ortho import checks
from ortho._typing import Bool, Float
from ortho.attention import MECHANISMS
from ortho.attention.cache import Cache
from ortho.heads import repeat_kv
from ortho.layers.feed_forward import FeedForward
from ortho.layers.multihead import MultiheadAttention

Settings = Mapping[str, Any]  # a layer's arguments, and its class (`layer`)


class TransformerBlock(nn.Module):
    """Attention and a feed-forward network, each added to its input.

    Pre-norm, x + attention(norm(x)), then x + feed-forward(norm(x)) (Xiong et al. 2020, arXiv:2002.04745); or, without
    `norm_first`, post-norm, norm(x + attention(x)), then norm(x + feed-forward(x)) (Vaswani et al. 2017, section 3.1).
    `layer` is the class of the attention layer, made with `kwargs`: `MultiheadAttention`, or one with the same call,
    such as `HybridAttention`. `bias` applies to all parts, norms included. While training, each number of the output of
    each half is set to 0 with probability `dropout` (Srivastava et al. 2014), by PyTorch's global generator;
    `attention_dropout` is the layer's `dropout`, of attention weights.

    Raises TypeError or ValueError for a `dropout` outside [0, 1).
    """

    attention: Any

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        *,
        layer: Callable[..., nn.Module] = MultiheadAttention,
        d_ff: int | None = None,
        norm_first: bool = True,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        bias: bool = False,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        kind: dict[str, Any] = {"bias": bias, "dtype": dtype, "device": device}
        told = {**kind, "dropout": checks.probability("attention_dropout", attention_dropout)}
        own = {name: value for name, value in told.items() if value}  # not every layer knows of biases or dropout
        self.attention = layer(d_model, num_heads, generator=generator, **own, **kwargs)
        self.feed_forward = FeedForward(d_model, d_ff, generator=generator, **kind)
        self.norm_attention = nn.LayerNorm(d_model, **kind)
        self.norm_feed_forward = nn.LayerNorm(d_model, **kind)
        self.norm_first = norm_first
        self.dropout = nn.Dropout(checks.probability("dropout", dropout))

    def forward(
        self,
        x: Float[Tensor, "B N d"],
        **kwargs: Any,
    ) -> Float[Tensor, "B N d"]:
        """x (B, N, d) -> (B, N, d); masks, `is_causal` and the `cache` are those of the attention layer."""
        if self.norm_first:
            x = x + self.dropout(self.attention(self.norm_attention(x), **kwargs))
            return x + self.dropout(self.feed_forward(self.norm_feed_forward(x)))
        x = self.norm_attention(x + self.dropout(self.attention(x, **kwargs)))
        return self.norm_feed_forward(x + self.dropout(self.feed_forward(x)))


class DecoderBlock(nn.Module):
    """Causal attention, attention to a context, and a feed-forward network, each after a norm and added to its input
    (Vaswani et al. 2017, section 3.1, but with norms before the parts).

    `attention` and `cross` hold the arguments of the two attention layers, as in `EncoderDecoder`. The `cross` layer is
    a `MultiheadAttention` whose mechanism answers each query independently of other queries and of its position:
    softmax attention, a kernel, or a module that the caller knows to do so.

    Raises TypeError or ValueError, naming the argument, for any other `cross` layer.
    """

    attention: Any
    cross: Any

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        *,
        attention: Settings | None = None,
        cross: Settings | None = None,
        d_ff: int | None = None,
        dropout: float = 0.0,
        bias: bool = False,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        kind: dict[str, Any] = {"bias": bias, "dtype": dtype, "device": device}
        drawn: dict[str, Any] = {"num_heads": num_heads, "generator": generator}
        drawn |= {name: value for name, value in kind.items() if value}  # not every layer knows of biases
        self.attention = _layer(d_model, **{**drawn, **(attention or {})})
        self.cross = _layer(d_model, **{**drawn, **(cross or {})})
        _check_cross(self.cross)
        self.feed_forward = FeedForward(d_model, d_ff, generator=generator, **kind)
        self.norm_attention, self.norm_cross, self.norm_feed_forward = (nn.LayerNorm(d_model, **kind) for _ in range(3))
        self.dropout = nn.Dropout(checks.probability("dropout", dropout))

    def forward(
        self,
        x: Float[Tensor, "B N d"],
        context: Float[Tensor, "B M d"],
        *,
        context_mask: Bool[Tensor, "..."] | None = None,
        cache: "DecoderCache | None" = None,
    ) -> Float[Tensor, "B N d"]:
        """x (B, N, d) and a context (B, M, d) -> (B, N, d); the mask broadcasts to (B, H, N, M), True = there.

        With a `cache` (`new_cache`) x follows the tokens that it has read, without gradients; the keys and values of
        the context are made in the first call alone.
        """
        checks.expect(len(context) == len(x), "context", f"batch {len(x)} like x", len(context))
        if context_mask is not None:  # checked before a cache reads the tokens
            sizes = len(x), self.cross.num_heads, x.shape[1], context.shape[1]
            checks.mask(context_mask, sizes, "context_mask", bias=True)
            checks.layer_mask(context_mask, None, *sizes, "context_mask")
        cached: dict[str, Any] = {} if cache is None else {"cache": cache.attention}
        with nullcontext() if cache is None else torch.no_grad():
            x = x + self.dropout(self.attention(self.norm_attention(x), is_causal=True, **cached))
            x = x + self.dropout(self._read(self.norm_cross(x), context, context_mask, cache))
            return x + self.dropout(self.feed_forward(self.norm_feed_forward(x)))

    def new_cache(self, capacity: int) -> "DecoderCache":
        """An empty cache for decoding beside a context, with room for `capacity` tokens."""
        return DecoderCache(self.attention.new_cache(capacity))

    def _read(self, y: Tensor, context: Tensor, mask: Tensor | None, cache: "DecoderCache | None") -> Tensor:
        """What the tokens read in the context."""
        layer = self.cross
        if cache is None:
            return layer(y, context, attn_mask=mask)
        if cache.context is None:
            layer.refuse_dropout("a cache")
            _, k, v, gates = layer._operands(context, None)
            cache.context = (*(repeat_kv(x, layer.num_heads) for x in (k, v)), gates)
        keys, values, made = cache.context
        q, _ = layer.projection(y, context[:, :1])  # queries are made along with keys, of which one suffices
        gates = {**layer._given, **made, **{name: layer.gates[name](y) for name in layer._of_queries or ()}}
        return layer._merge(layer._function(q, keys, values, is_causal=False, attn_mask=mask, **gates))


@dataclass
class DecoderCache:
    """What a block keeps for decoding: a cache of its own tokens; and the context's keys, values and gates."""

    attention: Cache
    context: tuple[Tensor, Tensor, dict[str, Tensor]] | None = None


def _check_cross(layer: Any) -> None:
    if not isinstance(layer, MultiheadAttention):
        name = type(layer).__name__
        raise TypeError(f"cross: expected a MultiheadAttention, a layer that takes a context, got {name}")
    if isinstance(layer.attention, str):
        mechanism = MECHANISMS[layer.attention]
        apart = mechanism.family in ("softmax", "linear") and mechanism.bidirectional
        if not apart or mechanism.positional or mechanism.data_dependent:
            wanted = "a mechanism that answers each query by itself, wherever it stands"
            raise ValueError(f"cross: expected {wanted}, got {layer.attention!r}")


def stack(count: int, make: Callable[..., nn.Module], **settings: Any) -> nn.ModuleList:
    """`count` blocks by `make(**settings)`. A module among the settings, a projection or an attention, is copied for
    each block, so that no two blocks share it."""
    return nn.ModuleList(make(**_copied(settings)) for _ in range(checks.positive_int("num_layers", count)))


def _copied(value: Any) -> Any:
    """A setting with all its modules copied."""
    if isinstance(value, nn.Module):
        return copy.deepcopy(value)
    if isinstance(value, Mapping):
        return {name: _copied(each) for name, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_copied(each) for each in value)
    if isinstance(value, partial):
        return partial(value.func, *_copied(value.args), **_copied(value.keywords))
    return value


def _layer(d_model: int, *, layer: Callable[..., Any] = MultiheadAttention, **kwargs: Any) -> Any:
    return layer(d_model, **kwargs)
