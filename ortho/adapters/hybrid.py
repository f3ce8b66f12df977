"""Heads of several kinds in other people's models, and the way back."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from ortho.adapters import huggingface
from ortho.adapters.choosing import by_layer
from ortho.adapters.finding import ByNames, OfTorch, attention_layers, owned
from ortho.adapters.kinds import SOFTMAX, Kind, asks, kinds_of, placed
from ortho.adapters.layouts import Layout
from ortho.adapters.marking import layer_kinds, mark
from ortho.adapters.rows import FrozenRows
from ortho.adapters.torch_attention import AdaptedAttention

ModelT = TypeVar("ModelT", bound=nn.Module)


def set_heads(
    model: ModelT,
    kinds: Sequence[Kind] | Mapping[int, Sequence[Kind]],
    *,
    layers: Sequence[int] | None = None,
    layout: Layout | Sequence[Layout] = (),
    strict: bool = True,
) -> ModelT:
    """Say of each head of a model's attention layers which kind it is: the model is changed in place, and returned.

    `kinds` has a kind for each head: "learned", the softmax attention that it was; "stopped", the same with constant
    queries and keys; "linear"; a pattern, such as `Window(64)`; or a positional pattern, or its name. Either all of the
    chosen `layers` (indices into `attention_layers(model)`) have the same, or a mapping has those of each. "stopped"
    is a matter of the gradient: weights of such heads are kept from weight decay by `freeze_qk`. `layout` and `strict`
    are those of `freeze_qk`.

    In a `torch.nn.MultiheadAttention`, which is then called with need_weights=False, positional heads lose their rows
    of W_Q and W_K. Hugging Face's layers are served if they choose their attention by name (transformers'
    `AttentionInterface`), and keep all weights. Both have the kinds in their state dicts, which load where they are the
    same; `save_pretrained` writes them into the configuration (`ortho.adapters.restore`). In both, masks must be of
    keys, causal or not, where a head is positional or linear, and dropout of attention weights in training is refused
    when the layer is called.

    Raises TypeError or ValueError, naming the argument, for a model without such layers or with unknown ones, layers
    of this package, which has its own, layers whose attention cannot be chosen, or has biases of its scores; windows,
    other patterns and positional heads in cross-attention; these, and linear heads, in layers with a sliding window;
    unknown kinds, too few or many of them, and a kind with queries for a head that has lost its own. The model is then
    as it was.
    """
    found = attention_layers(model, strict=strict, layout=layout)
    of_layers = by_layer("kinds", kinds, layers, found)
    wanted = {index: kinds_of("kinds", value, found[index].num_heads) for index, value in of_layers.items()}
    of_torch, by_names = [], []
    decoders = [module for module in model.modules() if isinstance(module, nn.TransformerDecoderLayer)]
    for index, own in wanted.items():
        layer = found[index]
        if isinstance(layer, OfTorch):
            other = layer.matrix("q") != "in_proj" or any(layer.module is m.multihead_attn for m in decoders)
            if other and any(placed(kind) for kind in own):
                raise ValueError(
                    f"model: expected of {layer.name} self-attention, for windows, other patterns and positional "
                    "heads, got cross-attention: choose other `layers`"
                )
            of_torch.append((layer, own, _matrices(layer, own)))
        elif isinstance(layer, ByNames):
            huggingface.served(layer.name, layer.module, own)
            by_names.append((layer, own))
        else:
            raise ValueError(f"model: expected layers of torch or of Hugging Face, got ortho's at {layer.name}")
    owned(model, [layer for layer, *_ in of_torch])
    if by_names:
        huggingface.register()
    for layer, own, matrices in of_torch:
        AdaptedAttention.adapt(layer.module, matrices, own)
    for layer, own in by_names:
        huggingface.set_kinds(layer.module, own)
        layer.remember()
    _nesting(model)
    mark(model)
    return model


def standard_heads(model: ModelT) -> ModelT:
    """Undo `set_heads`, in place, where that gives the same outputs: heads that are learned or stopped.

    A stopped head passes gradients again, unless it is frozen so. A model whose heads are all of one kind is left as it
    is. Raises TypeError for what is no module; and ValueError for heads of other kinds, of which no standard layer has
    the outputs: the model is then as it was.
    """
    found = attention_layers(model, strict=False)
    changed = [(layer, own) for layer in found if (own := layer_kinds(layer)) is not None]
    for layer, own in changed:
        other = [h for h, kind in enumerate(own) if kind not in SOFTMAX]
        if other:
            raise ValueError(
                f"model: expected heads that are learned or stopped, got {own[other[0]]!r} at head {other[0]} of "
                f"{layer.name}, which no standard layer has"
            )
    for layer, _ in changed:
        if isinstance(layer, OfTorch):
            AdaptedAttention.adapt(layer.module, {}, None)
        else:
            huggingface.remove_kinds(layer.module)
    if changed:
        _nesting(model)
        mark(model)
    return model


def _matrices(layer: OfTorch, kinds: Sequence[Kind]) -> dict[str, FrozenRows]:
    """The layer's matrices, of queries and keys with the rows of the heads that ask."""
    module = layer.module
    if module.bias_k is not None or module.add_zero_attn:
        raise ValueError(f"model: expected no add_bias_kv and no add_zero_attn, got one at {layer.name}")
    asking = [h for h, kind in enumerate(kinds) if asks(kind)]
    lost = [h for h in asking if h not in layer.asking()]
    if lost:
        raise ValueError(
            f"kinds: expected positional ones of heads that have lost their queries, got {kinds[lost[0]]!r}"
        )
    matrices = layer.read()
    rows: dict[str, list[torch.Tensor]] = {}
    for part in "qk":
        name = layer.matrix(part)
        rows.setdefault(name, []).append(layer.rows(part, asking, matrices[name]))
    if "in_proj" in matrices:  # whose last rows are those of the values
        first = matrices["in_proj"].out_features - module.embed_dim
        rows["in_proj"].append(torch.arange(first, first + module.embed_dim, device=rows["in_proj"][0].device))
    return {name: matrices[name].select(torch.cat(own)) for name, own in rows.items()}


def _nesting(model: nn.Module) -> None:
    """Bar `nn.TransformerEncoder` from nested tensors, which torch's fast path alone can read, while it has to be."""
    for encoder in (m for m in model.modules() if isinstance(m, nn.TransformerEncoder)):
        own: dict[str, Any] = encoder.__dict__
        mixed = any(isinstance(m, AdaptedAttention) and m.kinds is not None for m in encoder.modules())
        if mixed and "_use_nested_tensor" not in own:
            own["_use_nested_tensor"], encoder.use_nested_tensor = encoder.use_nested_tensor, False
        elif not mixed and "_use_nested_tensor" in own:
            encoder.use_nested_tensor = own.pop("_use_nested_tensor")
