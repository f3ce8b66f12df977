"""Heads of several kinds in Hugging Face's models, through the interface by which they choose their attention.

transformers is imported when a model is given its first kinds. The attention "ortho" is then registered, and with it
the function that makes its masks: without one a model would make no mask, and padding would be attended to.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from ortho._weights import spread_heads
from ortho.adapters.kinds import Kind, asks, attend

NAME = "ortho"
_KINDS, _BEFORE = "ortho_heads", "ortho_before"  # attributes of a layer; of a model, the attention that it had
_REFUSED = ("position_bias", "softcap", "s_aux", "cache", "output_attentions")  # changes of weights, or asking for them


def kinds(layer: nn.Module) -> tuple[Kind, ...] | None:
    """The kinds of a layer's heads, if it was told any."""
    own: tuple[Kind, ...] | None = getattr(layer, _KINDS, None)
    return own


def set_kinds(model: nn.Module, new: Sequence[tuple[Any, tuple[Kind, ...]]]) -> None:
    """Give layers of a model these kinds of heads. Raises ValueError, and changes nothing, unless all can have them."""
    _register()
    owners: list[Any] = []
    for layer, _ in new:
        owner = next((m for m in model.modules() if _chooses(m) and m.config is getattr(layer, "config", None)), None)
        if owner is None:
            raise ValueError(
                f"model: expected around {type(layer).__name__} a model of transformers that chooses its attention by "
                "name (_supports_attention_backend), got none"
            )
        if owner not in owners:
            owners.append(owner)
    before = [owner.config._attn_implementation for owner in owners]
    try:
        for owner in owners:
            owner.set_attn_implementation(NAME)
            if owner.config._attn_implementation != NAME:
                raise ValueError(
                    f"model: expected one that can have the attention {NAME!r}, got {type(owner).__name__}"
                )
    except BaseException:
        for owner, name in zip(owners, before, strict=True):
            owner.set_attn_implementation(name)
        raise
    for owner, name in zip(owners, before, strict=True):
        if name != NAME:
            setattr(owner, _BEFORE, name)
    for layer, own in new:
        setattr(layer, _KINDS, own)


def reset(model: nn.Module) -> None:
    """Take all kinds of heads back, and give the models the attention that they had."""
    for module in model.modules():
        if hasattr(module, _KINDS):
            delattr(module, _KINDS)
        if hasattr(module, _BEFORE):
            module.set_attn_implementation(getattr(module, _BEFORE))  # type: ignore[operator]
            delattr(module, _BEFORE)


def _chooses(module: Any) -> bool:
    """Whether this is a model that takes its attention from the interface."""
    return (
        hasattr(module, "set_attn_implementation")
        and getattr(module, "_supports_attention_backend", False)
        and module._can_set_attn_implementation()
    )


def _register() -> None:
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import sdpa_mask
    except ImportError as error:
        raise ImportError("transformers: expected version 5, as pip install ortho[hf] installs it") from error
    AttentionInterface.register(NAME, ortho_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def ortho_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention of transformers' interface: query (B, H, N, K), key, value (B, G, M, K) -> ((B, N, H, K), None).

    A layer that was told no kinds of its heads has the attention "sdpa". Raises ValueError for what heads of other
    kinds do not know: dropout, biases of scores, masks that are not boolean, and weights that are asked for.
    """
    own = kinds(module)
    if own is None or all(kind == "learned" for kind in own):
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        given = (module, query, key, value, attention_mask)
        return sdpa_attention_forward(*given, dropout=dropout, scaling=scaling, is_causal=is_causal, **kwargs)
    for name in _REFUSED:
        if kwargs.get(name) is not None and kwargs[name] is not False:
            raise ValueError(f"{name}: expected none with heads of several kinds, got {type(kwargs[name]).__name__}")
    if dropout:
        raise ValueError(f"dropout: expected 0 in training with heads of several kinds, got {dropout}")
    if attention_mask is not None and attention_mask.dtype.is_floating_point:
        raise ValueError(f"attention_mask: expected booleans with heads of several kinds, got {attention_mask.dtype}")
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    N, M = query.shape[2], key.shape[2]
    if causal and 1 < N < M and (attention_mask is None or not attention_mask[..., N:].any()):
        # The first call with a cache of fixed length, the rest of which is empty.
        key, value = key[:, :, :N], value[:, :, :N]
        attention_mask = None if attention_mask is None else attention_mask[..., :N]
    key, value = (spread_heads(x, len(own)) for x in (key, value))
    asking = [h for h, kind in enumerate(own) if asks(kind)]
    if len(asking) < len(own):
        query, key = query[:, asking], key[:, asking]
    o = attend(own, query, key, value, queries=N, mask=attention_mask, is_causal=causal, scale=scaling)
    return o.transpose(1, 2).contiguous(), None
