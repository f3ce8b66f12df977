"""Find a model's attention layers, and the rows of weights that make their queries and keys.

PyTorch's and this package's layers are recognised by class, those of other libraries by the names of their linear
layers (`ortho.adapters.layouts`); `ortho.adapters.probe` then shows by a call whether a layer is what it looks like. A
module that looks like attention but is not recognised is refused.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from ortho.adapters.layouts import COUNTS, KV_COUNTS, LAYOUTS, WIDTHS, Layout, Source
from ortho.adapters.rows import Part, foreign_hooks, frozen_rows, original_class
from ortho.layers.multihead import MultiheadAttention

_ATTENTION = re.compile("attention|attn", re.IGNORECASE)  # in names of classes
_ASKS = re.compile(r"qkv|query|(^|_)w?qk?(_|$)", re.IGNORECASE)  # in names of linear layers: of queries,
_ANSWERS = re.compile(r"qkv|key|(^|_)w?q?kv?(_|$)", re.IGNORECASE)  # and of keys
_SHOWN = 3  # how many layers an error describes at most
_BIASES = {"q": "q_bias", "k": "k_bias"}  # what some layers add to queries and keys besides a linear layer's bias

_LINEAR = {  # linear layers, and the axis of their weight along which outputs lie
    "torch.nn.modules.linear.Linear": 0,
    "transformers.pytorch_utils.Conv1D": 1,
    "transformers.models.falcon.modeling_falcon.FalconLinear": 0,
}


@dataclass
class AttentionLayer:
    """An attention layer of a model: its name there, the module, its sizes, and where its queries and keys come from,
    unless it is PyTorch's or this package's own."""

    name: str
    module: Any
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layout: Layout | None = None

    @property
    def of_ortho(self) -> bool:
        """Whether it is this package's layer."""
        return isinstance(self.module, MultiheadAttention)

    def rows(self, source: Source, part: str) -> list[list[int]]:
        """The rows of each head of queries, "q", or keys, "k", in a matrix."""
        sizes = self.num_heads, self.num_kv_heads, self.head_dim
        return [list(source.rows(part, head, sizes)) for head in range(sizes["qk".index(part)])]

    def parts(self, module: Any = None) -> list[Part]:
        """The tensors with rows of queries and keys, in this layer's module or in a copy of it."""
        module = self.module if module is None else module
        if self.of_ortho:
            return [Part(module.projection, name, 0, {}) for name, _ in module.projection.named_parameters()]
        if self.layout is None:
            d = range(module.embed_dim)
            both = {"q": list(d), "k": [module.embed_dim + row for row in d]}
            apart = [Part(module, f"{part}_proj_weight", 0, {part: list(d)}) for part in "qk"]
            weights = [Part(module, "in_proj_weight", 0, both)] if module._qkv_same_embed_dim else apart
            return weights + ([] if module.in_proj_bias is None else [Part(module, "in_proj_bias", 0, both)])
        found = []
        for name in self.layout.names():
            child, sources = getattr(module, name), {part: self.layout.source(part) for part in "qk"}
            rows = {
                part: [row for head in self.rows(of, part) for row in head]
                for part, of in sources.items()
                if of.name == name
            }
            found += [Part(child, "weight", axis_of(child) or 0, rows)]
            found += [Part(child, "bias", 0, rows)] if child.bias is not None else []
        own = {part: module._parameters.get(name) for part, name in _BIASES.items()}
        return found + [Part(module, _BIASES[p], 0, {p: list(range(len(b)))}) for p, b in own.items() if b is not None]


def attention_layers(
    model: nn.Module, *, strict: bool = True, layout: Layout | Sequence[Layout] = ()
) -> list[AttentionLayer]:
    """The attention layers of any model that have projections of queries and keys, in the order of its modules.

    `layout` gives layouts that are not known here; they are tried before the known ones. If `strict`, raises ValueError
    for a model without such layers, and for modules that look like attention but are of an unknown kind, which the
    error names. With `strict=False` such modules are left out.
    """
    layouts = (*((layout,) if isinstance(layout, Layout) else layout), *LAYOUTS)
    every = {name: _recognised(name, module, layouts) for name, module in model.named_modules()}
    found = {name: layer for name, layer in every.items() if isinstance(layer, AttentionLayer)}
    # A module that contains attention layers, or is a part of one, may be called attention, too.
    said = [
        words for name, words in every.items() if isinstance(words, str) and not any(_nested(name, n) for n in found)
    ]
    if strict and said:
        more = f"; and {len(said) - _SHOWN} more such layers" if len(said) > _SHOWN else ""
        raise ValueError(
            f"model: {'; '.join(said[:_SHOWN])}{more}. Say `layout=` what these layers are made of, or `strict=False` "
            "to leave them as they are"
        )
    if strict and not found:
        known = "; ".join(dict.fromkeys(", ".join(layout.names()) for layout in LAYOUTS))
        raise ValueError(
            "model: expected attention layers with projections of queries and keys (MultiheadAttention of torch or "
            f"ortho, or linear layers named {known}), got {type(model).__name__} with none"
        )
    return list(found.values())


def owned(model: nn.Module, layers: Sequence[AttentionLayer]) -> None:
    """Raise ValueError if something else in the model shares the weights of these layers' queries and keys."""
    held = [(*module._parameters.values(), *module._modules.values()) for module in model.modules()]
    owners = Counter(id(part) for parts in held for part in parts)
    for layer in layers:
        own = {id(one) for part in layer.parts() for one in (part.owner, *part.parameters())}
        if any(owners[part] > 1 for part in own):
            raise ValueError(f"model: expected weights of queries and keys of its own in {layer.name}, got shared ones")


def axis_of(layer: nn.Module) -> int | None:
    """The axis of a linear layer's weight along which outputs lie; None for other layers."""
    kind = original_class(layer)
    return _LINEAR.get(f"{kind.__module__}.{kind.__qualname__}")


def _nested(one: str, other: str) -> bool:
    """Whether one of the modules with these names is a part of the other."""
    return not one or not other or f"{one}.".startswith(f"{other}.") or f"{other}.".startswith(f"{one}.")


def _recognised(name: str, module: nn.Module, layouts: Sequence[Layout]) -> AttentionLayer | str | None:
    """The layer; or a message that says what is unknown about it; or None if it does not look like attention."""
    kind = original_class(module)
    if isinstance(module, MultiheadAttention):
        return AttentionLayer(name, module, module.num_heads, module.num_kv_heads, module.head_dim)
    if isinstance(module, nn.MultiheadAttention):
        layer = AttentionLayer(name, module, module.num_heads, module.num_heads, module.head_dim)
        stored = {*module._parameters, *frozen_rows(module)}
        plain = kind is nn.MultiheadAttention and all(part.name in stored for part in layer.parts())
        return layer if plain else _said(name, "nn.MultiheadAttention itself, not pruned or parametrized", module)
    children = dict(module.named_children())
    for layout in layouts:
        if (not layout.classes or kind.__name__ in layout.classes) and children.keys() >= set(layout.names()):
            return _by_names(name, module, layout, children)
    if type(module).__module__.partition(".")[0] == "ortho":
        return None  # other modules of this package have no projections of queries and keys
    asks, answers = (any(pattern.search(child) for child in children) for pattern in (_ASKS, _ANSWERS))
    if (asks and answers) or _ATTENTION.search(kind.__name__):
        return _said(name, "a known layout of queries and keys", module, f" of {', '.join(children) or 'no layers'}")
    return None


def _by_names(name: str, module: nn.Module, layout: Layout, children: dict[str, Any]) -> AttentionLayer | str:
    names = layout.names()
    for child in names:
        layer, where = children[child], f"{name}.{child}".removeprefix(".")
        stored = {key for key, p in layer._parameters.items() if p is not None} | frozen_rows(layer).keys()
        if axis_of(layer) is None or foreign_hooks(layer) or not {"weight"} <= stored <= {"weight", "bias"}:
            wanted = (
                "nn.Linear or transformers' Conv1D without hooks, pruning, parametrizations, adapters or quantisation"
            )
            return _said(where, wanted, layer)
    known = {*names, *layout.beside, "query_key_value"}
    others = [n for n, m in children.items() if n not in known and re.search("query|key", n) and hasattr(m, "weight")]
    if others and "query_key_value" not in names:
        wanted = f"no projections of queries or keys beside {', '.join(names)}"
        return _said(name, wanted, module, f" with {', '.join(others)}")
    outputs = {child: children[child].weight.shape[axis_of(children[child])] for child in names}
    if (sizes := layout.sizes(module, outputs)) is None:
        has = " and ".join(f"{count} outputs of {child}" for child, count in outputs.items())
        wanted = f"a width of heads ({', '.join(WIDTHS)}) or their number ({', '.join((*COUNTS, *KV_COUNTS))})"
        return _said(name, f"{wanted} that fits {has}", module)
    return AttentionLayer(name, module, *sizes, layout)


def _said(name: str, expected: str, got: nn.Module, more: str = "") -> str:
    kind = original_class(got)
    place = "" if kind.__module__.startswith("torch.nn.") else f"{kind.__module__}."
    return f"expected of {name or 'the model'} {expected}, got {place}{kind.__qualname__}{more}"
