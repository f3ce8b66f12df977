"""Find a model's attention layers, and the weights that make their queries and keys.

Layers are recognised by what they are made of: torch's and this package's by class, those of other libraries by the
names of their linear layers (`ortho.adapters.layouts`). A module that looks like attention but is not recognised is
refused.
"""

import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ortho._checks import checked, describe, expect
from ortho._typing import Int, Tensor
from ortho.adapters import huggingface
from ortho.adapters.kinds import Kind
from ortho.adapters.layouts import COUNTS, KV_COUNTS, LAYOUTS, WIDTHS, Layout, Source
from ortho.adapters.rows import FrozenRows, read_projection, written_projection
from ortho.adapters.torch_attention import AdaptedAttention, read_attention
from ortho.layers.frozen_qk import FrozenQKAttention
from ortho.layers.multihead import MultiheadAttention

Matrices = dict[str, FrozenRows]

_OWN = "ortho_layout"  # attribute of a layer whose layout a caller gave
_ATTENTION = re.compile("attention|attn", re.IGNORECASE)  # in names of classes
_ASKS = re.compile(r"qkv|query|(^|_)w?qk?(_|$)", re.IGNORECASE)  # in names of linear layers: of queries,
_ANSWERS = re.compile(r"qkv|key|(^|_)w?q?kv?(_|$)", re.IGNORECASE)  # and of keys
_SHOWN = 3  # how many layers an error describes at most


@dataclass
class AttentionLayer(ABC):
    """An attention layer of a model: its name there, the module, its sizes, and the source of its queries and keys."""

    name: str
    module: Any
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layout: Layout

    @abstractmethod
    def read(self) -> Matrices:
        """The matrices that make its queries and keys, by name."""

    @abstractmethod
    def write(self, matrices: Matrices) -> None:
        """Replace them by these, of the same sizes; where nothing is frozen, by plain layers."""

    @abstractmethod
    def weights(self) -> list[Any]:
        """The modules and parameters that `write` replaces."""

    def asking(self) -> tuple[int, ...]:
        """The heads that have queries and keys."""
        return tuple(range(self.num_heads))

    def rows(self, part: str, heads: Sequence[int], matrix: FrozenRows) -> Int[Tensor, "rows"]:
        """The rows of queries, "q", or keys, "k", of these heads, in their matrix."""
        asking = self.asking()  # the others have lost their rows
        sizes = (len(asking), len(asking) * self.num_kv_heads // self.num_heads, self.head_dim)
        found = [self.layout.source(part).rows(part, asking.index(head), sizes) for head in heads]
        return torch.tensor([row for rows in found for row in rows], dtype=torch.int64, device=matrix.frozen.device)

    def matrix(self, part: str) -> str:
        """The name of the matrix with the rows of that part."""
        return self.layout.source(part).name

    def by_matrix(self, matrices: Matrices, q_heads: Sequence[int], k_heads: Sequence[int]) -> dict[str, list[Tensor]]:
        """For each matrix, by its name, the rows of these heads of queries and of these heads of keys."""
        rows: dict[str, list[Tensor]] = {}
        for part, heads in (("q", q_heads), ("k", k_heads)):
            name = self.matrix(part)
            rows.setdefault(name, []).append(self.rows(part, heads, matrices[name]))
        return rows

    def kinds(self) -> tuple[Kind, ...] | None:
        """The kinds of its heads; None if none were set."""
        return None

    def kv_heads(self, heads: Sequence[int]) -> list[int]:
        """The heads of keys that these heads of queries read."""
        shared = self.num_heads // self.num_kv_heads
        return sorted({head // shared for head in heads})

    def frozen(self) -> tuple[list[int], bool]:
        """The heads that are frozen, and whether gradients stop at them."""
        matrix = self.read()[self.matrix("q")]
        heads = [head for head in self.asking() if matrix.frozen[self.rows("q", [head], matrix)].all()]
        return heads, bool(heads) and matrix.stop_gradient


class ByNames(AttentionLayer):
    """A layer with one of the `LAYOUTS`."""

    def read(self) -> Matrices:
        return {name: FrozenRows.of(getattr(self.module, name)) for name in self.layout.names()}

    def write(self, matrices: Matrices) -> None:
        for name, matrix in matrices.items():
            setattr(self.module, name, matrix.plain().train(self.module.training))
        self.remember()

    def kinds(self) -> tuple[Kind, ...] | None:
        return huggingface.kinds(self.module)

    def remember(self) -> None:
        """Keep a layout that a caller gave, so that the layer is found again."""
        if self.layout not in LAYOUTS:
            setattr(self.module, _OWN, self.layout)

    def weights(self) -> list[Any]:
        layers = [getattr(self.module, name) for name in self.layout.names()]
        return layers + [weight for layer in layers for weight in layer.parameters()]


class OfTorch(AttentionLayer):
    """A `torch.nn.MultiheadAttention`, original or adapted."""

    def read(self) -> Matrices:
        matrices = read_attention(self.module)
        return {name: matrices[name] for name in self.layout.names()}

    def write(self, matrices: Matrices) -> None:
        AdaptedAttention.adapt(self.module, matrices, self.kinds())

    def kinds(self) -> tuple[Kind, ...] | None:
        return self.module.kinds if isinstance(self.module, AdaptedAttention) else None

    def weights(self) -> list[Any]:
        own = [self.module, *self.module.children()] if isinstance(self.module, AdaptedAttention) else [self.module]
        return [p for m in own if m is not self.module.out_proj for p in m.parameters(recurse=False)]

    def asking(self) -> tuple[int, ...]:
        return self.module.asking() if isinstance(self.module, AdaptedAttention) else super().asking()


class OfOrtho(AttentionLayer):
    """An `ortho.MultiheadAttention`."""

    def read(self) -> Matrices:
        return read_projection(self.module.projection)

    def write(self, matrices: Matrices) -> None:
        self.module.projection = new = written_projection(self.module.projection, matrices)
        if isinstance(self.module, FrozenQKAttention) and not getattr(new, "stop_gradient", False):
            # FrozenQKAttention treats queries and keys as constants.
            self.module.__class__ = MultiheadAttention  # type: ignore[assignment]

    def weights(self) -> list[Any]:
        return [self.module.projection, *self.module.projection.parameters()]


_PACKED = Layout(Source("in_proj", "qkv"))
_SEPARATE = Layout(Source("q_proj", "q"), Source("k_proj", "k"))
_ORTHO = Layout(Source("q", "q"), Source("k", "k"))


@checked
def attention_layers(
    model: nn.Module, *, strict: bool = True, layout: Layout | Sequence[Layout] = ()
) -> list[AttentionLayer]:
    """The attention layers of any model that have projections of queries and keys, in the order of its modules.

    `layout` gives layouts that are not known here; they are tried before the known ones. Raises TypeError if `model` is
    not a module or `layout` is not a layout. If `strict`, raises ValueError for a model without such layers, and for
    modules that look like attention but are of an unknown kind, which the error names. With `strict=False` such modules
    are left out.
    """
    given = (layout,) if isinstance(layout, Layout) else layout
    found: dict[str, AttentionLayer] = {}
    unknown: dict[str, str] = {}
    for name, module in model.named_modules():
        layer = _recognised(name, module, (*given, *LAYOUTS))
        if isinstance(layer, AttentionLayer):
            found[name] = layer
        elif layer is not None:
            unknown[name] = layer
    # A module that contains attention layers, or is a part of one, may be called attention, too.
    apart = {name: said for name, said in unknown.items() if not any(_nested(name, own) for own in found)}
    if strict and apart:
        more = f"; and {len(apart) - _SHOWN} more such layers" if len(apart) > _SHOWN else ""
        raise ValueError(
            f"model: {'; '.join(list(apart.values())[:_SHOWN])}{more}. Say `layout=` what these layers are made of, "
            "or `strict=False` to leave them as they are"
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
    owners = Counter(
        id(part)
        for module in model.modules()
        for parts in (module._parameters, module._modules)
        for part in parts.values()
    )
    for layer in layers:
        if any(owners[id(part)] > 1 for part in layer.weights()):
            raise ValueError(f"model: expected weights of queries and keys of its own in {layer.name}, got shared ones")


def _nested(one: str, other: str) -> bool:
    """Whether one of the modules with these names is a part of the other."""
    return not one or not other or f"{one}.".startswith(f"{other}.") or f"{other}.".startswith(f"{one}.")


def _recognised(name: str, module: nn.Module, layouts: Sequence[Layout]) -> AttentionLayer | str | None:
    """The layer; or a message that says what is unknown about it; or None if it does not look like attention."""
    if isinstance(module, MultiheadAttention):
        return OfOrtho(name, module, module.num_heads, module.num_kv_heads, module.head_dim, _ORTHO)
    if isinstance(module, nn.MultiheadAttention):
        if type(module) not in (nn.MultiheadAttention, AdaptedAttention):
            return _said(name, "nn.MultiheadAttention itself", module)
        H, whole = module.num_heads, module.kdim == module.vdim == module.embed_dim
        return OfTorch(name, module, H, H, module.head_dim, _PACKED if whole else _SEPARATE)
    children = dict(module.named_children())
    own = getattr(module, _OWN, None)
    for layout in layouts if own is None else (own,):
        if (not layout.classes or type(module).__name__ in layout.classes) and children.keys() >= set(layout.names()):
            return _by_names(name, module, layout, children)
    if type(module).__module__.partition(".")[0] == "ortho" or isinstance(module, FrozenRows):
        return None  # other modules of this package have no projections of queries and keys
    asks, answers = (any(pattern.search(child) for child in children) for pattern in (_ASKS, _ANSWERS))
    if (asks and answers) or _ATTENTION.search(type(module).__name__):
        return _said(name, "a known layout of queries and keys", module, f" of {', '.join(children) or 'no layers'}")
    return None


def _by_names(
    name: str, module: nn.Module, layout: Layout, children: dict[str, nn.Module]
) -> AttentionLayer | str | None:
    for child in layout.names():
        if problem := FrozenRows.problem(children[child]):
            return _said(f"{name}.{child}".removeprefix("."), problem, children[child])
    known = {*layout.names(), *layout.beside}
    others = [n for n, m in children.items() if n not in known and re.search("query|key", n) and hasattr(m, "weight")]
    if others and "query_key_value" not in known:
        return _said(
            name,
            f"no projections of queries or keys beside {', '.join(layout.names())}",
            module,
            f" with {', '.join(others)}",
        )
    outputs = {child: FrozenRows.outputs(children[child]) for child in layout.names()}
    sizes = layout.sizes(module, outputs)
    if sizes is None:
        has = " and ".join(f"{count} outputs of {child}" for child, count in outputs.items())
        wanted = f"a width of heads ({', '.join(WIDTHS)}) or their number ({', '.join((*COUNTS, *KV_COUNTS))})"
        return _said(name, f"{wanted} that fits {has}", module)
    return ByNames(name, module, *sizes, layout)


def _said(name: str, expected: str, got: nn.Module, more: str = "") -> str:
    kind = type(got)
    place = "" if kind.__module__.startswith("torch.nn.") else f"{kind.__module__}."
    return f"expected of {name or 'the model'} {expected}, got {place}{kind.__qualname__}{more}"


def indices(name: str, value: Any, allowed: Sequence[int]) -> list[int]:
    """`value` sorted, if it holds distinct integers among `allowed`, else TypeError or ValueError."""
    if isinstance(value, str) or not isinstance(value, Sequence | range | set | frozenset):
        raise TypeError(f"{name}: expected indices, got {describe(value)}")
    for index in value:
        if isinstance(index, bool) or not isinstance(index, int):
            raise TypeError(f"{name}: expected integers, got {describe(index)}")
        expect(index in allowed, name, f"a part of {list(allowed)}", index)
    expect(value and len(set(value)) >= len(value), name, "at least one index, and none twice", list(value))
    return sorted(value)


def by_layer(name: str, value: Any, layers: Any, found: Sequence[AttentionLayer]) -> dict[int, Any]:
    """A value for each chosen layer, by its index: the same for all, or its own from a mapping."""
    every = range(len(found))
    if not isinstance(value, Mapping):
        return dict.fromkeys(every if layers is None else indices("layers", layers, every), value)
    expect(layers is None, "layers", f"None beside a mapping of {name}, whose keys are layers", repr(layers))
    return {index: value[index] for index in indices(name, list(value), every)}
