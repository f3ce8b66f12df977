"""Freezing the queries and keys of other people's models, and the way back."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TypeVar

import torch
from torch import nn

from ortho import _checks
from ortho.adapters.choosing import by_layer, indices
from ortho.adapters.finding import AttentionLayer, Matrices, OfTorch, attention_layers, owned
from ortho.adapters.layouts import Layout
from ortho.adapters.marking import mark
from ortho.orthogonal import DRAWS

ModelT = TypeVar("ModelT", bound=nn.Module)


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
    r"""Freeze W_Q and W_K of attention layers in any model: it is changed in place, and returned.

    `layers` are indices into `attention_layers(model)`, `heads` those of their heads, by default all; a mapping has the
    heads of each layer. With a `draw` (`ortho.orthogonal.DRAWS`) the chosen heads of a layer get a new W_Q and W_K,
    orthogonal together: rows are orthonormal, or, of more rows than columns, columns; their biases are 0. With None
    they keep what they have, as is meant for a pretrained model. With `stop_gradient` no gradient passes through these
    heads' queries and keys to the layer's input. What a model applies behind these matrices, such as norms, stays
    trained.

    Known are `torch.nn.MultiheadAttention`, also within `nn.TransformerEncoderLayer`, `ortho.MultiheadAttention`, and
    layers made of linear layers with the names in `ortho.adapters.LAYOUTS`, as Hugging Face's models have them.
    `layout` says of others what they are made of (`ortho.adapters.Layout`). What looks like attention and is not known
    is refused; with `strict=False` it is left as it is.

    A head of keys that several heads of queries share is frozen with all of them. Heads that are frozen stay so in a
    second call, which draws anew those that it chooses. Frozen weights are no longer parameters, and what is trained
    of the same matrix is a new one: make the optimiser afterwards. The state dict keeps the names and shapes of the
    layers' own, and says which rows are frozen: it loads into a model of which the same are. `save_pretrained` writes
    what was done into the configuration (`ortho.adapters.restore`).

    Raises TypeError or ValueError, naming the argument, for a model without such layers or with unknown ones, for
    layers and heads that there are not, a part of the heads that share keys, weights that are shared with something
    else, an unknown draw, and a `stop_gradient` other than that of heads of the layer that are frozen already and not
    chosen. The model is then as it was.
    """
    found = attention_layers(model, strict=strict, layout=layout)
    if draw is not None:
        _checks.one_of("draw", draw, DRAWS)
    if not isinstance(stop_gradient, bool):
        raise TypeError(f"stop_gradient: expected True or False, got {_checks.describe(stop_gradient)}")
    plans = []
    for index, chosen in by_layer("heads", heads, layers, found).items():
        layer = found[index]
        _served(layer, stop_gradient)
        asking = layer.asking()
        if not asking:
            raise ValueError(f"layers: expected layers with queries and keys, got {index}, whose heads have none")
        of_layer = asking if chosen is None else indices("heads", chosen, asking)
        old = layer.read()
        new = _frozen(layer, old, of_layer, draw, stop_gradient, generator)
        if any(new[name] is not old[name] for name in old):
            plans.append((layer, new))
    owned(model, [layer for layer, _ in plans])
    for layer, matrices in plans:
        layer.write(matrices)
    if plans:
        mark(model)
    return model


def unfreeze_qk(model: ModelT) -> ModelT:
    """Undo `freeze_qk`, in place: all weights of queries and keys are trained again, in layers of the original kind.

    The outputs are the same, and the state dict is that of the model as it was made. The frozen projections of
    `ortho.MultiheadAttention` become learned ones, however they came about. Heads that are of several kinds stay so
    (`standard_heads`). A model of which nothing is frozen is left as it is. Raises TypeError for what is no module and
    for a projection of one's own, whose weights need not say what it does; the model is then as it was.
    """
    plans = []
    for layer in attention_layers(model, strict=False):
        matrices = layer.read()
        if any(matrix.freezes for matrix in matrices.values()):
            plans.append((layer, {name: matrix.unfrozen() for name, matrix in matrices.items()}))
    for layer, matrices in plans:
        layer.write(matrices)
    if plans:
        mark(model)
    return model


def _frozen(
    layer: AttentionLayer,
    matrices: Matrices,
    heads: Sequence[int],
    draw: str | None,
    stop_gradient: bool,
    generator: torch.Generator | None,
) -> Matrices:
    """The layer's matrices with the rows of these heads frozen; those of which nothing changes are the same."""
    shared = layer.num_heads // layer.num_kv_heads
    kv_heads = layer.kv_heads(heads)
    if len(heads) < shared * len(kv_heads):
        raise ValueError(
            f"heads: expected all {shared} heads that share a head of keys in {layer.name}, or none, got {list(heads)}"
        )
    matrices = dict(matrices)
    rows: dict[str, list[torch.Tensor]] = {}
    for part, chosen in (("q", heads), ("k", kv_heads)):
        name = layer.matrix(part)
        rows.setdefault(name, []).append(layer.rows(part, chosen, matrices[name]))
    for name, parts in rows.items():
        weight = matrices[name].weight
        make = None
        if draw is not None:
            make = partial(DRAWS[draw], generator=generator, dtype=weight.dtype, device=weight.device)
        matrices[name] = matrices[name].freeze(parts, make, stop_gradient)
    return matrices


def _served(layer: AttentionLayer, stop_gradient: bool) -> None:
    """ValueError for a layer of torch's whose way to compute would not be known here."""
    extra = isinstance(layer, OfTorch) and (layer.module.bias_k is not None or layer.module.add_zero_attn)
    if extra and stop_gradient:
        raise ValueError(
            f"stop_gradient: expected False with add_bias_kv or add_zero_attn, as {layer.name} has, got True"
        )
