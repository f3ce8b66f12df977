"""Convert other people's models in place, and back: freeze queries and keys, or set heads of several kinds.

Both changes are recorded as JSON in the configuration of a transformers model; `restore` repeats them on a loaded
model.
"""

import copy
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from ortho._checks import checked, expect, one_of
from ortho.adapters import huggingface
from ortho.adapters.finding import (
    AttentionLayer,
    ByNames,
    Matrices,
    OfTorch,
    attention_layers,
    by_layer,
    indices,
    owned,
)
from ortho.adapters.kinds import SOFTMAX, Kind, asks, described, from_description, kinds_of, placed
from ortho.adapters.layouts import Layout
from ortho.adapters.torch_attention import AdaptedAttention
from ortho.orthogonal import DRAWS

ModelT = TypeVar("ModelT", bound=nn.Module)

MARK = "ortho_heads"  # the attribute of a configuration that holds the record
_ASKED = "attn_implementation"  # and the one that names the attention that a loader must know


@checked(own=("layers", "heads"))
def freeze_qk(
    model: ModelT,
    *,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | Mapping[int, Sequence[int]] | None = None,
    draw: str | None = "haar",
    stop_gradient: bool = False,
    generator: torch.Generator | None = None,
    layout: Layout | Sequence[Layout] = (),
    strict: bool = True,
) -> ModelT:
    r"""Freeze W_Q and W_K of the attention layers of any model, in place; returns the model.

    `layers` are indices into `attention_layers(model)`; `heads` are indices of heads, by default all, or a mapping from
    layers to their heads. With a `draw` (`ortho.orthogonal.DRAWS`) the chosen heads of a layer get a new W_Q and W_K,
    each drawn for all of these heads together: its rows are orthonormal, or its columns if it has more rows than
    columns; biases are 0. With `draw=None`, for pretrained models, they keep their weights. With `stop_gradient` no
    gradient passes through these heads' queries and keys to the layer's input. What a model applies after these
    matrices, such as norms, stays trained.

    Known layers are `ortho.MultiheadAttention`, `torch.nn.MultiheadAttention`, also in `nn.TransformerEncoderLayer`,
    and layers made of linear layers with the names in `ortho.adapters.LAYOUTS`, as in Hugging Face's models. `layout`
    describes others (`ortho.adapters.Layout`). A layer that looks like attention but is not known is refused; with
    `strict=False` it is left as it is.

    A head of keys that several heads of queries share is frozen with all of them. A second call leaves frozen heads
    frozen and draws the chosen ones again. Frozen weights are no longer parameters, and the trained rest of the same
    matrix is a new parameter: make the optimiser afterwards. Write to these parameters, or load a state dict; what is
    written to a whole matrix, such as `in_proj_weight`, may be lost.

    The state dict says which rows are frozen and loads into a model with the same frozen rows. It keeps the names and
    shapes of other libraries' layers; a partly frozen `ortho.MultiheadAttention` has `rows_q.weight` and
    `rows_k.weight` instead. `save_pretrained` writes the conversion into the configuration (`ortho.adapters.restore`).

    Raises TypeError or ValueError, naming the argument, for a model without such layers or with unknown ones; for
    layers and heads that do not exist; for only some of the heads that share keys; for weights that are shared with
    something else; for an unknown draw; and if frozen heads of the layer that are not chosen have another
    `stop_gradient`. The model is then unchanged.
    """
    if draw is not None:
        one_of("draw", draw, DRAWS)
    found = attention_layers(model, strict=strict, layout=layout)
    chosen = by_layer("heads", heads, layers, found)
    return _written(model, _freezing(model, found, chosen, draw, stop_gradient, generator))


def _freezing(
    model: nn.Module,
    found: Sequence[AttentionLayer],
    heads: Mapping[int, Sequence[int] | None],
    draw: str | None,
    stop_gradient: bool,
    generator: torch.Generator | None,
) -> list[tuple[AttentionLayer, Matrices]]:
    """What `freeze_qk` writes into which of these layers, whose chosen heads are given by index, None for all."""
    plans = []
    for index, chosen in heads.items():
        layer = found[index]
        _served(layer, stop_gradient)
        asking = layer.asking()
        expect(asking, "layers", "layers with queries and keys", f"{index}, whose heads have none")
        of_layer = asking if chosen is None else indices("heads", chosen, asking)
        old = layer.read()
        new = _frozen(layer, old, of_layer, draw, stop_gradient, generator)
        if any(new[name] is not old[name] for name in old):
            plans.append((layer, new))
    owned(model, [layer for layer, _ in plans])
    return plans


def unfreeze_qk(model: ModelT) -> ModelT:
    """Undo `freeze_qk`, in place: all weights of queries and keys are trained again, in layers of the original kind.

    The outputs are the same, and the state dict is that of the original model. All frozen projections of
    `ortho.MultiheadAttention` become learned ones. Kinds of heads stay (`standard_heads` undoes them). A model with
    nothing frozen is left as it is. Raises TypeError unless `model` is a module, and for a custom projection, whose
    weights need not define it; the model is then unchanged.
    """
    plans = []
    for layer in attention_layers(model, strict=False):
        matrices = layer.read()
        if any(matrix.freezes for matrix in matrices.values()):
            plans.append((layer, {name: matrix.unfrozen() for name, matrix in matrices.items()}))
    return _written(model, plans)


def _written(model: ModelT, plans: Sequence[tuple[AttentionLayer, Matrices]]) -> ModelT:
    """Write these matrices into the layers; returns the model."""
    for layer, matrices in plans:
        layer.write(matrices)
    if plans:
        _mark(model)
    return model


def _frozen(
    layer: AttentionLayer,
    matrices: Matrices,
    heads: Sequence[int],
    draw: str | None,
    stop_gradient: bool,
    generator: torch.Generator | None,
) -> Matrices:
    """The layer's matrices with the rows of these heads frozen; unchanged matrices are the same objects."""
    shared = layer.num_heads // layer.num_kv_heads
    kv_heads = layer.kv_heads(heads)
    if len(heads) < shared * len(kv_heads):
        raise ValueError(
            f"heads: expected all {shared} heads that share a head of keys in {layer.name}, or none, got {list(heads)}"
        )
    matrices = dict(matrices)
    for name, parts in layer.by_matrix(matrices, heads, kv_heads).items():
        weight = matrices[name].weight
        make = None
        if draw is not None:
            make = partial(DRAWS[draw], generator=generator, dtype=weight.dtype, device=weight.device)
        matrices[name] = matrices[name].freeze(parts, make, stop_gradient)
    return matrices


def _served(layer: AttentionLayer, stop_gradient: bool) -> None:
    """Raise ValueError for `stop_gradient` in a torch layer with add_bias_kv or add_zero_attn: not supported here."""
    extra = isinstance(layer, OfTorch) and (layer.module.bias_k is not None or layer.module.add_zero_attn)
    if extra and stop_gradient:
        raise ValueError(
            f"stop_gradient: expected False with add_bias_kv or add_zero_attn, as {layer.name} has, got True"
        )


def set_heads(
    model: ModelT,
    kinds: Sequence[Kind] | Mapping[int, Sequence[Kind]],
    *,
    layers: Sequence[int] | None = None,
    layout: Layout | Sequence[Layout] = (),
    strict: bool = True,
) -> ModelT:
    """Set the kind of each head of a model's attention layers, in place; returns the model.

    `kinds` has a kind for each head: "learned", the layer's softmax attention; "stopped", the same with constant
    queries and keys; "linear"; a pattern, such as `Window(64)`; or a positional pattern, or its name. All chosen
    `layers` (indices into `attention_layers(model)`) get the same kinds, unless a mapping gives each layer its own.
    "stopped" only stops the gradient; use `freeze_qk` to keep such weights from weight decay, too. `layout` and
    `strict` are those of `freeze_qk`.

    A `torch.nn.MultiheadAttention` must then be called with need_weights=False; its positional heads lose their rows of
    W_Q and W_K. Layers of Hugging Face's models keep all weights; they can be converted if they choose their attention
    by name (transformers' `AttentionInterface`). The state dicts of both contain the kinds and load into layers with
    the same kinds; `save_pretrained` writes them into the configuration (`ortho.adapters.restore`). If a head is
    positional or linear, a mask must be a mask of keys, causal or not. Calls in training refuse dropout of attention
    weights.

    Raises TypeError or ValueError, naming the argument, for a model without such layers or with unknown ones; for
    layers of this package (use `HybridAttention`); for layers whose attention cannot be chosen or adds biases to its
    scores; for patterns and positional heads in cross-attention; for these, and linear heads, in layers with a sliding
    window; for unknown kinds, or too few or many; and for a kind with queries for a head that has lost its own. The
    model is then unchanged.
    """
    of_torch, by_names = _kinds_of_layers(model, attention_layers(model, strict=strict, layout=layout), kinds, layers)
    if by_names:
        huggingface.register()
    for of_pytorch, own, matrices in of_torch:
        AdaptedAttention.adapt(of_pytorch.module, matrices, own)
    for layer, own in by_names:
        huggingface.set_kinds(layer.module, own)
        layer.remember()
    _nesting(model)
    _mark(model)
    return model


def _kinds_of_layers(
    model: nn.Module,
    found: Sequence[AttentionLayer],
    kinds: Sequence[Kind] | Mapping[int, Sequence[Kind]],
    layers: Sequence[int] | None,
) -> tuple[list[tuple[OfTorch, Any, Any]], list[tuple[ByNames, Any]]]:
    """What `set_heads` sets: layers of PyTorch with their kinds and matrices, layers by names with their kinds."""
    of_layers = by_layer("kinds", kinds, layers, found)
    wanted = {index: kinds_of("kinds", value, found[index].num_heads) for index, value in of_layers.items()}
    of_torch: list[tuple[OfTorch, Any, Any]] = []
    by_names: list[tuple[ByNames, Any]] = []
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
    return of_torch, by_names


def standard_heads(model: ModelT) -> ModelT:
    """Undo `set_heads`, in place, for heads that are learned or stopped; the outputs are the same.

    A stopped head passes gradients again, unless it was frozen with `stop_gradient`. A model that
    `set_heads` did not change is left as it is. Raises TypeError unless `model` is a module, and ValueError for heads
    of other kinds, whose outputs no standard layer gives: the model is then unchanged.
    """
    found = attention_layers(model, strict=False)
    changed = [(layer, own) for layer in found if (own := layer.kinds()) is not None]
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
        _mark(model)
    return model


def _matrices(layer: OfTorch, kinds: Sequence[Kind]) -> Matrices:
    """The layer's matrices; those of queries and keys keep only the rows of heads that have them."""
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
    rows = layer.by_matrix(matrices, asking, asking)
    if "in_proj" in matrices:  # its last rows are those of the values
        first = matrices["in_proj"].out_features - module.embed_dim
        rows["in_proj"].append(torch.arange(first, first + module.embed_dim, device=rows["in_proj"][0].device))
    return {name: matrices[name].select(torch.cat(own)) for name, own in rows.items()}


def _nesting(model: nn.Module) -> None:
    """Keep `nn.TransformerEncoder` from nested tensors, which only torch's fast path reads, while heads have kinds."""
    for encoder in (m for m in model.modules() if isinstance(m, nn.TransformerEncoder)):
        own: dict[str, Any] = encoder.__dict__
        mixed = any(isinstance(m, AdaptedAttention) and m.kinds is not None for m in encoder.modules())
        if mixed and "_use_nested_tensor" not in own:
            own["_use_nested_tensor"], encoder.use_nested_tensor = encoder.use_nested_tensor, False
        elif not mixed and "_use_nested_tensor" in own:
            encoder.use_nested_tensor = own.pop("_use_nested_tensor")


@checked
def to_standard(module: ModelT) -> ModelT:
    """A copy of any module in which every projection is a learned one with the same weights: same outputs, all trained.

    The copy can be loaded by the standard architecture and fine-tuned in full. Raises TypeError for a custom
    projection, whose weights need not define it; and ValueError for layers of other libraries with heads of kinds that
    no standard layer has (`ortho.adapters.standard_heads`).
    """
    return unfreeze_qk(standard_heads(copy.deepcopy(module)))


def heads_record(model: nn.Module) -> dict[str, Any]:
    """A record of what `freeze_qk` and `set_heads` changed in a model: names, numbers and lists to save with it.

    For each changed layer, by its name: "frozen", the heads that are frozen; "stop_gradient"; and "kinds", if any were
    set. `restore` repeats the changes.
    """
    record: dict[str, Any] = {}
    for layer in attention_layers(model, strict=False):
        heads, stops = layer.frozen()
        own = layer.kinds()
        if heads or own is not None:
            record[layer.name] = {"frozen": heads, "stop_gradient": stops}
            if own is not None:
                record[layer.name]["kinds"] = described(own)
    return record


def _mark(model: nn.Module) -> None:
    """Write the record into the configurations of a transformers model, after giving it copies of its own.

    If heads are of several kinds, the configuration asks a loader for the attention "ortho", which nothing else knows.
    """
    if not huggingface.configured(model):
        return
    huggingface.own_configurations(model)
    for part in huggingface.configured(model):
        record = heads_record(part)
        _set(part.config, MARK, {"attention": part.config._attn_implementation, "layers": record} if record else None)
        mixed = any("kinds" in layer for layer in record.values())
        _set(part.config, _ASKED, huggingface.NAME if mixed else None)


def _resolved(names: Sequence[str], found: Sequence[AttentionLayer]) -> list[int]:
    """The indices of the layers with these names. One name may be the end of the other, as the model may be a part of
    the saved one, or contain it. Raises ValueError for a name that fits no layer, or several."""
    places = []
    for name in names:
        fits = [i for i, layer in enumerate(found) if layer.name == name] or [
            i
            for i, layer in enumerate(found)
            if f".{layer.name}".endswith(f".{name}") or name.endswith(f".{layer.name}")
        ]
        expect(len(fits) == 1, "record", "names of attention layers of this model", repr(name))
        places += fits
    return places


def _set(config: Any, name: str, value: Any) -> None:
    if value is not None:
        setattr(config, name, value)
    elif name in config.__dict__:
        delattr(config, name)


@checked
def restore(
    model: ModelT, record: Mapping[str, Mapping[str, Any]] | None = None, *, layout: Layout | Sequence[Layout] = ()
) -> ModelT:
    """Apply a record (`heads_record`) to a model, in place: freeze heads as they are, and set their kinds.

    Without a `record`, the one in the model's configuration is used, which `save_pretrained` wrote and
    `from_pretrained` read. Load a state dict after this call; `from_pretrained` has loaded its weights before it. Give
    layouts that are not known here as to `freeze_qk`. Raises TypeError or ValueError if the record does not fit this
    model, which is then unchanged.
    """
    attention = None
    if record is None:
        mark = getattr(getattr(model, "config", None), MARK, None)
        if mark is None:
            raise ValueError(
                f"record: expected one, or {MARK} in the configuration of {type(model).__name__}, got none"
            )
        attention, record = mark["attention"], mark["layers"]
    found = attention_layers(model, strict=False, layout=layout)
    for name, own in record.items():
        _check_record(name, own)
    places = dict(zip(_resolved(list(record), found), record, strict=True))
    kinds = {i: _described(name, record[name]["kinds"]) for i, name in places.items() if "kinds" in record[name]}
    plans = []
    for stops in (False, True):
        heads = {i: record[name]["frozen"] for i, name in places.items() if record[name]["stop_gradient"] == stops}
        heads = {i: own for i, own in heads.items() if own}
        if heads:
            plans += _freezing(model, found, by_layer("heads", heads, None, found), None, stops, None)
    if kinds:
        _kinds_of_layers(model, found, kinds, None)  # refuses kinds that do not fit before anything is changed
    if attention is not None:
        for part in huggingface.configured(model):
            if part.config._attn_implementation == huggingface.NAME:
                part.set_attn_implementation(attention)
    _written(model, plans)
    return set_heads(model, kinds, layout=layout, strict=False) if kinds else model


def _check_record(name: str, own: Any) -> None:
    wanted = f"a list of `frozen` heads and `stop_gradient`, True or False, for {name!r}"
    if not isinstance(own, Mapping) or not {"frozen", "stop_gradient"} <= own.keys():
        raise ValueError(f"record: expected {wanted}, got {own!r:.80}")
    if not isinstance(own["frozen"], list | tuple) or not isinstance(own["stop_gradient"], bool):
        raise TypeError(f"record: expected {wanted}, got {own!r:.80}")


def _described(name: str, kinds: Any) -> Any:
    try:
        return from_description(kinds)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"record: expected kinds as `heads_record` writes them for {name!r}, got {kinds!r:.80}"
        ) from error


def from_pretrained(cls: Any, *args: Any, layout: Layout | Sequence[Layout] = (), **kwargs: Any) -> Any:
    """Load a model with `cls.from_pretrained(*args, **kwargs)` of transformers, and `restore` it if it was converted
    before it was saved."""
    huggingface.register()
    model = cls.from_pretrained(*args, **kwargs)
    return restore(model, layout=layout) if getattr(model.config, MARK, None) else model
