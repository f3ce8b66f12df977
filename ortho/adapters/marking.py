"""What was done to a model's attention layers, as JSON knows it; and the mark of it in saved models."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from ortho.adapters import huggingface
from ortho.adapters.finding import AttentionLayer, ByNames, OfTorch, attention_layers
from ortho.adapters.kinds import Kind, described

MARK = "ortho_heads"  # of a configuration
_ASKED = "attn_implementation"  # likewise: the attention that whoever loads it has to have


def layer_kinds(layer: AttentionLayer) -> tuple[Kind, ...] | None:
    """The kinds of a layer's heads, if it was told any."""
    if isinstance(layer, ByNames):
        return huggingface.kinds(layer.module)
    return getattr(layer.module, "kinds", None) if isinstance(layer, OfTorch) else None


def heads_record(model: nn.Module) -> dict[str, Any]:
    """What `freeze_qk` and `set_heads` have made of a model: names, numbers and lists, to be saved beside its weights.

    Of each layer that is not as it was, by its name: "frozen", the heads that are frozen; "stop_gradient"; "kinds", if
    it was told any. `restore` does it again.
    """
    record: dict[str, Any] = {}
    for layer in attention_layers(model, strict=False):
        heads, stops = layer.frozen()
        own = layer_kinds(layer)
        if heads or own is not None:
            record[layer.name] = {"frozen": heads, "stop_gradient": stops}
            if own is not None:
                record[layer.name]["kinds"] = described(own)
    return record


def mark(model: nn.Module) -> None:
    """Write the record into the configurations of a model of transformers, which are then its own.

    Where heads are of several kinds it asks for the attention "ortho" when it is loaded, which nothing else knows.
    """
    if not huggingface.configured(model):
        return
    huggingface.own_configurations(model)
    for part in huggingface.configured(model):
        record = heads_record(part)
        _set(part.config, MARK, {"attention": part.config._attn_implementation, "layers": record} if record else None)
        mixed = any("kinds" in layer for layer in record.values())
        _set(part.config, _ASKED, huggingface.NAME if mixed else None)


def resolved(names: Sequence[str], found: Sequence[AttentionLayer]) -> list[int]:
    """Which layers have these names, or names that end so or so much of them: a model may be a part of the one that was
    saved, or it of this. Raises ValueError for a name that is not that of one layer."""
    places = []
    for name in names:
        fits = [i for i, layer in enumerate(found) if layer.name == name] or [
            i
            for i, layer in enumerate(found)
            if f".{layer.name}".endswith(f".{name}") or name.endswith(f".{layer.name}")
        ]
        if len(fits) != 1:
            raise ValueError(f"record: expected names of attention layers of this model, got {name!r}")
        places += fits
    return places


def _set(config: Any, name: str, value: Any) -> None:
    if value is not None:
        setattr(config, name, value)
    elif name in config.__dict__:
        delattr(config, name)
