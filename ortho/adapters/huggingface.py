"""Heads of several kinds in Hugging Face's models, through the interface by which layers choose their attention.

A layer looks up its attention by the name in its configuration. A layer with heads of several kinds gets a copy of its
configuration with the name "ortho"; the model, its masks and all other layers keep what they have. The masks are those
of "sdpa" or "eager".

transformers is imported when a model is given its first kinds. "ortho" is then registered as an attention of whole
models, too. The configuration of a saved model asks for it, so that no other code loads the model silently.
"""

import ast
import copy
import inspect
import re
import textwrap
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ortho._checks import expect
from ortho.adapters.kinds import HeadKinds, Kind, as_booleans, asks, attend, placed
from ortho.heads import repeat_kv

NAME = "ortho"
_CHILD = "ortho_heads"  # of a layer: its `HeadKinds`
_HANDLE = "ortho_hook"
_IMPLEMENTATION = (
    "_attn_implementation_internal"  # of a configuration; the name without "internal" sets it for parts, too
)
_INTERFACE = "ALL_ATTENTION_FUNCTIONS"
# Arguments that layers hand to their attention, and that ours uses or may ignore.
_KNOWN = {
    "dropout",
    "scaling",
    "is_causal",
    "attention_mask",
    "sliding_window",
    "position_ids",
    "output_attentions",
    "deterministic",
}
_REFUSED = ("position_bias", "softcap", "s_aux", "cache", "output_attentions")  # they change weights, or ask for them
_OTHER_SEQUENCE = ("key_value_states", "encoder_hidden_states")  # arguments that make a call cross-attention
_CROSS = re.compile(r"cross|enc_?dec|encoder_attn", re.IGNORECASE)


def kinds(layer: nn.Module) -> tuple[Kind, ...] | None:
    """The kinds of a layer's heads; None if none were set."""
    own = getattr(layer, _CHILD, None)
    return own.kinds if isinstance(own, HeadKinds) else None


def served(name: str, layer: nn.Module, own: Sequence[Kind]) -> None:
    """Raises ValueError, naming the layer, unless it can have heads of these kinds."""
    if all(kind == "learned" for kind in own):
        return
    name = name or "the model"
    handed = _handed(layer)
    if handed is None or not hasattr(getattr(layer, "config", None), _IMPLEMENTATION):
        raise ValueError(
            f"model: expected of {name} that it chooses its attention by name (transformers' AttentionInterface), "
            f"got {type(layer).__name__}, which does not"
        )
    if unknown := sorted(handed - _KNOWN):
        raise ValueError(
            f"model: expected of {name} softmax attention without further arguments, got {type(layer).__name__}, which "
            f"hands {', '.join(unknown)} to it"
        )
    other = [kind for kind in own if kind == "linear" or placed(kind)]
    if other and slides(layer):
        raise ValueError(
            f"model: expected of {name} that all earlier keys are kept, for heads such as {other[0]!r}, got a sliding "
            "window (config.sliding_window)"
        )
    if any(placed(kind) for kind in own) and crosses(name, layer):
        raise ValueError(
            f"model: expected of {name} self-attention, for windows, other patterns and positional heads, got "
            f"cross-attention in {type(layer).__name__}: choose other `layers`"
        )


def slides(layer: Any) -> bool:
    """Whether a layer attends only to keys near the query, so that its cache forgets the others."""
    if hasattr(layer, "sliding_window"):
        return layer.sliding_window is not None
    types, index = getattr(layer.config, "layer_types", None), getattr(layer, "layer_idx", None)
    if types is not None and index is not None:
        return types[index] != "full_attention"
    return any(getattr(layer.config, key, None) is not None for key in ("sliding_window", "attention_chunk_size"))


def crosses(name: str, layer: nn.Module) -> bool:
    """Whether a layer attends from one sequence to another, judged by its names in the model and its arguments."""
    words = (type(layer).__name__, *name.split(".")[-2:])
    own = getattr(layer, "is_cross_attention", None)
    takes = inspect.signature(layer.forward).parameters
    return own or any(_CROSS.search(word) for word in words) or "hidden_states" not in takes


def set_kinds(layer: Any, own: tuple[Kind, ...]) -> None:
    """Give a layer these kinds of heads. `served` has checked that it can have them."""
    remove_kinds(layer)
    if any(kind != "learned" for kind in own):
        layer.add_module(_CHILD, HeadKinds(own, layer.config))
        layer.config = copy.copy(layer.config)
        setattr(layer.config, _IMPLEMENTATION, NAME)
        setattr(layer, _HANDLE, layer.register_forward_pre_hook(_notice, with_kwargs=True))


def remove_kinds(layer: Any) -> None:
    """Remove a layer's kinds of heads: it has its original attention again."""
    if kinds(layer) is not None:
        layer.config = getattr(layer, _CHILD).before
        delattr(layer, _CHILD)
        getattr(layer, _HANDLE).remove()
        delattr(layer, _HANDLE)


def own_configurations(model: nn.Module) -> None:
    """Give a model copies of its configurations, so that another model that shares one does not change with it."""
    copies: dict[int, Any] = {}
    for module in model.modules():
        for name, value in module.__dict__.items():
            if hasattr(value, _IMPLEMENTATION):
                module.__dict__[name] = copy.deepcopy(value, copies)


def configured(model: nn.Module) -> list[Any]:
    """The parts of a model that can be saved as transformers models: the first one for each configuration."""
    found: dict[int, Any] = {}
    for module in model.modules():
        if hasattr(module, "save_pretrained") and hasattr(getattr(module, "config", None), _IMPLEMENTATION):
            found.setdefault(id(module.config), module)
    return list(found.values())


def register() -> None:
    """Make "ortho" known to transformers."""
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

    Raises ValueError for what heads of several kinds do not support: dropout, biases of scores, masks other than those
    of "sdpa" and "eager", and a request for weights (GPT-2 does not pass it on, and gives none); and for a layer
    whose heads were given no kinds.
    """
    own = kinds(module)
    if own is None:
        raise ValueError(
            f"model: expected kinds of heads in {type(module).__name__}, got none: a model that was saved with heads "
            "of several kinds needs ortho.adapters.restore(model) after it was loaded"
        )
    for name in _REFUSED:
        if kwargs.get(name) is not None and kwargs[name] is not False:
            raise ValueError(f"{name}: expected none with heads of several kinds, got {type(kwargs[name]).__name__}")
    if kwargs.get("sliding_window") is not None and any(kind == "linear" or placed(kind) for kind in own):
        raise ValueError(f"sliding_window: expected None with such heads, got {kwargs['sliding_window']}")
    expect(not dropout, "dropout", "0 in training with heads of several kinds", dropout)
    N, M = query.shape[2], key.shape[2]
    attention_mask = _checked(attention_mask, len(own), N, M)
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    if causal and 1 < N < M and (attention_mask is None or not attention_mask[..., N:].any()):
        # The first call with a cache of fixed length, the rest of which is empty.
        key, value = key[:, :, :N], value[:, :, :N]
        attention_mask = None if attention_mask is None else attention_mask[..., :N]
    key, value = (repeat_kv(x, len(own)) for x in (key, value))
    asking = [h for h, kind in enumerate(own) if asks(kind)]
    if len(asking) < len(own):
        query, key = query[:, asking], key[:, asking]
    itself = not getattr(module, _CHILD).crosses
    given: dict[str, Any] = {"queries": N, "itself": itself, "mask": attention_mask, "is_causal": causal}
    return attend(own, query, key, value, scale=scaling, **given).transpose(1, 2).contiguous(), None


def _checked(mask: Any, heads: int, queries: int, keys: int) -> Tensor | None:
    """A mask as booleans. Raises ValueError unless it has the form of those of "sdpa" or "eager"."""
    if mask is None:
        return None
    fits = isinstance(mask, Tensor) and mask.dim() == 4 and mask.shape[1] in (1, heads)
    if not fits or mask.shape[2] not in (1, queries) or mask.shape[3] != keys:
        got = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(
            f"attention_mask: expected shape (batch, 1 or {heads}, {queries}, {keys}) with heads of several kinds, as "
            f'models with the attention "sdpa" or "eager" make it, got {got}'
        )
    return mask if mask.dtype == torch.bool else as_booleans("attention_mask", mask)


def _notice(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Note whether a call attends to another sequence's keys, which a layer does not pass on to its attention."""
    others = [kwargs.get(name) for name in _OTHER_SEQUENCE]
    if len(args) > 1:
        places = list(inspect.signature(module.forward).parameters)
        others += [value for name, value in zip(places, args, strict=False) if name in _OTHER_SEQUENCE]
    getattr(module, _CHILD).crosses = any(other is not None for other in others)


def _handed(layer: nn.Module) -> set[str] | None:
    """The names of the arguments that a layer hands to the attention that it looks up; None if it looks up none."""
    try:
        source = inspect.getsource(inspect.unwrap(type(layer).forward))
    except (OSError, TypeError):
        return None
    if _INTERFACE not in source:
        return None
    tree = ast.parse(textwrap.dedent(source))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    own = [call for call in calls if call.func.id == "attention_interface"]  # type: ignore[attr-defined]
    return {word.arg for call in own for word in call.keywords if word.arg is not None} if own else None
