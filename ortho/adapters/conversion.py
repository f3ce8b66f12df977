"""Freeze queries and keys in any model, in place, and back."""

import copy
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from functools import partial
from numbers import Integral
from typing import Any, TypeVar

import torch
from torch import nn

from ortho.adapters.finding import AttentionLayer, attention_layers, owned
from ortho.adapters.layouts import Layout
from ortho.adapters.probe import Prober
from ortho.adapters.rows import MARK, StopOperands, StopRows, thaw
from ortho.checks import describe, expect, one_of
from ortho.layers.frozen_qk import FrozenQKAttention
from ortho.layers.multihead import MultiheadAttention
from ortho.orthogonal import DRAWS
from ortho.projections import FrozenProjection, LearnedProjection, by_matrices

ModelT = TypeVar("ModelT", bound=nn.Module)


def freeze_qk(
    model: ModelT,
    *,
    layers: Iterable[int | str] | None = None,
    draw: str | None = "haar",
    stop_gradient: bool = False,
    generator: torch.Generator | None = None,
    layout: Layout | Sequence[Layout] = (),
    strict: bool = True,
    inputs: Any = None,
) -> ModelT:
    r"""Freeze W_Q and W_K of the attention layers of any model, in place; returns the model.

    `layers` are indices into `attention_layers(model)`, or names of modules with wildcards ("model.decoder.*"); by
    default all. With a `draw` (`ortho.orthogonal.DRAWS`) a layer gets a new W_Q and W_K, each drawn for all of its
    heads together: its rows are orthonormal, or its columns if it has more rows than columns; biases are 0. With
    `draw=None`, for pretrained models, they keep their weights. With `stop_gradient` no gradient passes through
    queries and keys to the layer's input. What a model applies after these matrices, such as norms, stays trained.

    Known layers are `ortho.MultiheadAttention`, `torch.nn.MultiheadAttention`, also in `nn.TransformerEncoderLayer`,
    and layers made of linear layers with the names in `ortho.adapters.LAYOUTS`, as in Hugging Face's models. `layout`
    describes others (`ortho.adapters.Layout`). Layers of others are tried out: a copy with random weights has to
    compute its scores from these queries and keys alone, head by head. It is called as in a call of the model with
    made-up tokens or images, or with `inputs`, a sequence or mapping of the model's arguments.

    A frozen weight is a parameter that does not require a gradient. A fused matrix becomes a frozen and a trained
    parameter (`torch.nn.utils.parametrize`): make the optimiser afterwards. A second call draws again, or changes
    `stop_gradient`. To save a model, save `to_standard(model)`, and call `freeze_qk(loaded, draw=None)` on what is
    loaded.

    Raises TypeError or ValueError, naming the argument and the layer, for a model without such layers; for a layer that
    looks like attention and is unknown, or computes something else, unless `strict=False` or `layers` leave it as it
    is; for weights that something else shares; and for an unknown draw. The model is then unchanged.
    """
    make = None if draw is None else partial(DRAWS[one_of("draw", draw, DRAWS)], generator=generator)
    found = attention_layers(model, strict=strict and layers is None, layout=layout)
    chosen = found if layers is None else _chosen(layers, found)
    prober, plans = Prober(model, chosen, inputs), []
    for layer in chosen:
        if layer.of_ortho:
            by_matrices(layer.module.projection)  # refuses custom ones
        if (problem := prober.problem(layer, stop_gradient)) is None:
            plans.append(layer)
        elif strict:
            raise ValueError(
                f"model: expected of {layer.name or 'the model'} {problem}, got {type(layer.module).__name__}: "
                "`strict=False`, or `layers=`, leaves such layers as they are"
            )
    owned(model, plans)
    for layer in plans:
        (_freeze_projection if layer.of_ortho else _freeze)(layer, make, stop_gradient)
    return model


def unfreeze_qk(model: ModelT) -> ModelT:
    """Undo `freeze_qk`, in place: queries and keys are trained again, if they were before, in layers of the original
    kind.

    The outputs are the same, and the state dict is that of the original model. All frozen projections of
    `ortho.MultiheadAttention` become learned ones. A model with nothing frozen is left as it is. Raises TypeError
    unless `model` is a module, and for a custom projection, whose weights need not define it; the model is then
    unchanged.
    """
    own = [module for module in model.modules() if isinstance(module, MultiheadAttention)]
    frozen = [module for module in own if by_matrices(module.projection).frozen]
    for module in frozen:
        _replace(module, LearnedProjection, _weights(module.projection), getattr(module.projection, MARK, {}))
    for other in list(model.modules()):
        thaw(other)
    return model


def to_standard(module: ModelT) -> ModelT:
    """A copy of any module in which every projection is a learned one with the same weights, and the same outputs.

    The copy can be saved, loaded by the standard architecture, and fine-tuned in full. Raises TypeError for a custom
    projection, whose weights need not define it.
    """
    return unfreeze_qk(copy.deepcopy(module))


def _chosen(layers: Any, found: Sequence[AttentionLayer]) -> list[AttentionLayer]:
    """The layers with these indices or names."""
    if isinstance(layers, str) or not isinstance(layers, Iterable):
        raise TypeError(f"layers: expected indices or names, got {describe(layers)}")
    chosen: set[int] = set()
    for one in layers:
        if isinstance(one, bool) or not isinstance(one, Integral | str):
            raise TypeError(f"layers: expected indices or names, got {describe(one)}")
        fits = [
            i for i, layer in enumerate(found) if one == i or (isinstance(one, str) and fnmatchcase(layer.name, one))
        ]
        expect(fits, "layers", f"indices below {len(found)} or names of known layers", repr(one))
        chosen |= {*fits}
    expect(chosen, "layers", "at least one", "none")
    return [found[i] for i in sorted(chosen)]


@torch.no_grad()
def _freeze(layer: AttentionLayer, make: Any, stop_gradient: bool) -> None:
    """Freeze the rows of queries and keys in a layer of another library."""
    thaw(layer.module)
    parts = layer.parts()
    names = {module: f"{name}." for name, module in layer.module.named_modules()}
    record = {f"{names[part.owner]}{part.name}": part.parameters()[0].requires_grad for part in parts}
    setattr(layer.module, MARK, record)
    for part in parts:
        rows = part.value().movedim(part.axis, 0)
        for own in part.rows.values() if make is not None else ():
            like = {"dtype": rows.dtype, "device": rows.device}
            rows[own] = make(len(own), rows.shape[1], **like) if rows.dim() > 1 else rows.new_zeros(())
        part.freeze()
        if stop_gradient and part.name == "weight":
            part.owner.register_forward_hook(StopRows(part.runs()))
    if stop_gradient and layer.layout is None:
        layer.module.register_forward_pre_hook(StopOperands(), with_kwargs=True)


def _freeze_projection(layer: AttentionLayer, make: Any, stop_gradient: bool) -> None:
    """Freeze the projection of a layer of this package."""
    old: Any = layer.module.projection
    if make is None and old.frozen and old.stop_gradient == stop_gradient:
        return
    weights = _weights(old)
    before = getattr(old, MARK, {} if old.frozen else {n: w.requires_grad for n, w in weights.items()})
    for name, w in weights.items() if make is not None else ():
        like = {"dtype": w.dtype, "device": w.device}
        weights[name] = make(*w.shape, **like) if w.dim() > 1 else torch.zeros_like(w)
    _replace(layer.module, FrozenProjection, weights, dict.fromkeys(weights, False), stop_gradient=stop_gradient)
    layer.module.projection.draw = "given"
    setattr(layer.module.projection, MARK, before)


def _weights(projection: Any) -> dict[str, torch.Tensor]:
    names = ("weight_q", "weight_k", "bias_q", "bias_k")
    return {name: value for name in names if (value := getattr(projection, name)) is not None}


def _replace(
    module: MultiheadAttention, kind: Any, weights: dict[str, torch.Tensor], trained: dict[str, bool], **options: Any
) -> None:
    """Give a layer a projection of this kind with these weights. A `FrozenQKAttention`, which computes no gradient of
    queries and keys, becomes a layer that does if it has to."""
    old = module.projection
    sizes: dict[str, Any] = {} if old.q_width == old.d_model else {"head_dim": old.head_dim}
    sizes |= {"num_kv_heads": old.num_kv_heads, "bias": old.bias_q is not None, "device": "meta"}
    new = kind(old.d_model, old.num_heads, **sizes, **options)
    for name, value in weights.items():
        setattr(new, name, nn.Parameter(value.detach().clone(), trained.get(name, True)))
    module.projection = new.train(old.training)
    if isinstance(module, FrozenQKAttention) and not options.get("stop_gradient", False):
        module.__class__ = MultiheadAttention  # type: ignore[assignment]
