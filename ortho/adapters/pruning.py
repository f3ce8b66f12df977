"""Remove heads from trained layers, and measure what each head is worth."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
from torch import nn

from ortho._checks import checked, expect
from ortho._typing import Tensor
from ortho.adapters.finding import AttentionLayer, Matrices, OfOrtho, OfTorch, attention_layers, by_layer, indices
from ortho.adapters.rows import written_projection
from ortho.attention import RandomFeatureAttention
from ortho.layers.hybrid import HybridAttention
from ortho.layers.short_convolution import ConvolvedAttention
from ortho.projections import Projection

ModelT = TypeVar("ModelT", bound=nn.Module)

BY_NUMBER = ("alibi",)  # mechanisms in which a head's outputs depend on its index in the layer


@checked(own=("heads", "layers"))
def prune_heads(
    model: ModelT, heads: Sequence[int] | Mapping[int, Sequence[int]], *, layers: Sequence[int] | None = None
) -> ModelT:
    """Remove heads from attention layers of this package, in place; returns the model.

    `layers` are indices into `ortho.adapters.attention_layers(model)`, by default all. `heads` are indices of the heads
    that each of them loses, or a mapping from layers to their heads. `model` may also be a single layer. The outputs
    are those of the model with the outputs of these heads set to zero (`without_head`). A head takes its K rows of W_Q,
    W_K and W_V and its K columns of W_O with it; the cost is the closed form of a layer with the remaining heads of
    `head_dim` K.

    If heads share keys and values, all groups must lose the same number of heads; a group may also go as a whole. What
    was frozen stays frozen; structured projections become frozen matrices with the same values. The weights
    are new parameters: make the optimiser afterwards. The pruned model's state dict loads into a model without the same
    heads.

    Raises TypeError or ValueError, naming the argument, for layers of torch and of Hugging Face, whose heads cannot be
    narrower than their share of d (`MultiheadAttention.from_torch` makes a layer of this package); for layers with
    gates; for attention that depends on a head's index (ALiBi) or is a custom module; for layers and heads that do not
    exist; for all heads of a layer; for unequal numbers of heads that share keys; for a custom projection; and for
    weights that are shared with something else. The model is then unchanged.

    Source: Voita et al. 2019 (arXiv:1905.09418) and Michel et al. 2019 (arXiv:1905.10650), who mask heads.
    """
    found = attention_layers(model)
    plans = []
    for index, chosen in by_layer("heads", heads, layers, found).items():
        layer = found[index]
        _served(model, layer)
        removed = indices("heads", chosen, range(layer.num_heads))
        plans.append((layer, _remaining(layer, removed), layer.read()))
    for layer, remaining, matrices in plans:
        _prune(layer, remaining, matrices)
    for module in reversed(list(model.modules())):  # a module that contains a layer comes after it
        if isinstance(module, HybridAttention):
            module.counts = [cast(Any, group).num_heads for group in module.groups]
            module.num_heads = sum(module.counts)
        elif isinstance(module, ConvolvedAttention):
            module.num_heads = module.attention.num_heads
    return model


@torch.no_grad()
@checked(own=("layers",))
def head_importance(
    model: ModelT, loss: Callable[[ModelT], Tensor | float], *, layers: Sequence[int] | None = None
) -> dict[int, list[float]]:
    """How much `loss(model)` rises when each head alone is removed, by the layer's index: larger is more needed.

    `layers` are indices into `ortho.adapters.attention_layers(model)`, by default all; they may be of this package and
    of torch. `loss` is called without gradients, once with the whole model and once for each head; call `model.eval()`
    first, and use the same data each time.

    Raises TypeError or ValueError for `layers` as `prune_heads` does, and for layers of Hugging Face.

    Source: Michel et al. 2019 (arXiv:1905.10650), section 3.2: ablation of one head at a time.
    """
    found = attention_layers(model)
    chosen = by_layer("layers", None, layers, found)
    for index in chosen:
        _output(found[index])
    whole = float(loss(model))
    rises: dict[int, list[float]] = {}
    for index in chosen:
        rises[index] = []
        for head in range(found[index].num_heads):
            with without_head(found[index], head):
                rises[index].append(float(loss(model)) - whole)
    return rises


@contextmanager
def without_head(layer: AttentionLayer, head: int) -> Iterator[None]:
    """A context in which a head's columns of W_O, and so its outputs, are zero, in one of
    `ortho.adapters.attention_layers`.

    Raises ValueError for a head that does not exist, and for a layer of Hugging Face.
    """
    (head,) = indices("head", [head], range(layer.num_heads))
    columns = _output(layer).data[:, head * layer.head_dim : (head + 1) * layer.head_dim]
    kept = columns.clone()
    columns.zero_()
    try:
        yield
    finally:
        columns.copy_(kept)


def _output(layer: AttentionLayer) -> Tensor:
    """W_O (d, H K)."""
    if isinstance(layer, OfOrtho):
        weight: Tensor = layer.module.weight_o
    elif isinstance(layer, OfTorch):
        weight = layer.module.out_proj.weight
    else:
        raise ValueError(f"model: expected layers of ortho or torch, got another at {layer.name}")
    return weight


def _served(model: nn.Module, layer: AttentionLayer) -> None:
    """Raise ValueError for a layer that would not compute the same with fewer heads."""
    if not isinstance(layer, OfOrtho):
        wanted = "layers of ortho (MultiheadAttention.from_torch makes one of torch's)"
        raise ValueError(f"model: expected {wanted}, got {type(layer.module).__name__} at {layer.name or 'the top'}")
    module = layer.module
    expect(not module.gates, "model", "layers without gates, which are those of all heads", module.attention)
    known = isinstance(module.attention, str) and module.attention not in BY_NUMBER
    if not known and not isinstance(module.attention, RandomFeatureAttention):
        got = module.attention if isinstance(module.attention, str) else type(module.attention).__name__
        raise ValueError(f"model: expected attention that treats all heads alike, got {got}")
    parts: list[Any] = [of for m in model.modules() for of in (*m._parameters.values(), *m._modules.values())]
    owners = Counter(map(id, parts))
    if any(owners[id(part)] > 1 for part in (module.projection, *module.parameters())):
        raise ValueError(f"model: expected weights of its own in {layer.name}, got shared ones")


def _remaining(layer: AttentionLayer, removed: Sequence[int]) -> list[int]:
    """The heads that stay. Raises ValueError if none does, or if groups that stay keep different numbers of them."""
    remaining = [head for head in range(layer.num_heads) if head not in removed]
    expect(remaining, "heads", "at least one that stays in each layer", f"all {layer.num_heads}")
    shared = layer.num_heads // layer.num_kv_heads
    if len(set(Counter(head // shared for head in remaining).values())) > 1:
        wanted = f"as many heads of each {shared} that share keys, or all of them"
        raise ValueError(f"heads: expected {wanted}, got {list(removed)}")
    return remaining


@torch.no_grad()
def _prune(layer: AttentionLayer, remaining: Sequence[int], matrices: Matrices) -> None:
    """Reduce a layer to these heads."""
    module, of_keys = layer.module, layer.kv_heads(remaining)
    rows = {"q": layer.rows("q", remaining, matrices["q"]), "k": layer.rows("k", of_keys, matrices["k"])}
    sizes: dict[str, Any] = {"head_dim": layer.head_dim, "num_kv_heads": len(of_keys)}
    like = Projection(module.d_model, len(remaining), **sizes).train(module.training)
    module.projection = written_projection(like, {name: matrices[name].select(rows[name]) for name in rows})
    module.weight_v = _part(module.weight_v, rows["k"], 0)
    module.bias_v = None if module.bias_v is None else _part(module.bias_v, rows["k"], 0)
    module.weight_o = _part(module.weight_o, rows["q"], 1)
    module.num_heads, module.num_kv_heads = len(remaining), len(of_keys)


def _part(weight: nn.Parameter, chosen: Tensor, axis: int) -> nn.Parameter:
    """A parameter with these rows or columns, trained if the whole was."""
    return nn.Parameter(weight.detach().index_select(axis, chosen).contiguous(), weight.requires_grad)
