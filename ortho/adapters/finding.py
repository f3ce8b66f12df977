"""Where a model has attention layers, and which rows of which matrices make the queries and keys of a head.

Layers are recognised by what they are made of. torch's and this package's are known by class; those of other libraries
by the names of their linear layers, `LAYOUTS`, of which one more is one more line.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ortho import _checks
from ortho._typing import Int, Tensor
from ortho.adapters.ortho_projection import read_projection, written_projection
from ortho.adapters.rows import FrozenRows
from ortho.adapters.torch_attention import AdaptedAttention, read_attention
from ortho.layers import MultiheadAttention
from ortho.stopped import StoppedAttention

Matrices = dict[str, FrozenRows]


@dataclass(frozen=True)
class Source:
    """One of `parts` equal parts of a linear layer's outputs: of the layer `name`, the part with number `part`.

    With `by_head` each head has its parts side by side, and else each part its heads.
    """

    name: str
    part: int = 0
    parts: int = 1
    by_head: bool = False

    def rows(self, head: int, width: int, outputs: int) -> range:
        """The outputs that are this part of a head."""
        first = (head * self.parts + self.part) * width if self.by_head else self.part * (outputs // self.parts)
        return range(first, first + width) if self.by_head else range(first + head * width, first + (head + 1) * width)


@dataclass(frozen=True)
class Layout:
    """Where a layer's queries and keys come from."""

    q: Source
    k: Source


LAYOUTS = (  # the first that fits a layer holds
    Layout(Source("q_proj"), Source("k_proj")),  # Llama and its kin, OPT, BART, CLIP, ViT
    Layout(Source("query"), Source("key")),  # BERT, RoBERTa
    Layout(Source("q_lin"), Source("k_lin")),  # DistilBERT
    Layout(Source("q"), Source("k")),  # T5
    Layout(Source("q_attn"), Source("c_attn", 0, 2)),  # GPT-2's attention to an encoder
    Layout(Source("c_attn", 0, 3), Source("c_attn", 1, 3)),  # GPT-2
    Layout(Source("query_key_value", 0, 3, True), Source("query_key_value", 1, 3, True)),  # GPT-NeoX
)
WIDTHS = ("head_dim", "attention_head_size", "key_value_proj_dim", "head_size")  # what layers call K
COUNTS = ("num_attention_heads", "num_heads", "n_heads", "n_head")  # H
KV_COUNTS = ("num_key_value_heads", "num_kv_heads")  # and G, where they or their configurations say it


@dataclass
class AttentionLayer(ABC):
    """An attention layer of a model: its name there, itself, and its sizes."""

    name: str
    module: Any
    num_heads: int
    num_kv_heads: int
    head_dim: int

    @abstractmethod
    def read(self) -> Matrices:
        """What makes its queries and keys."""

    @abstractmethod
    def write(self, matrices: Matrices) -> None:
        """Put others of the same sizes in their place: plain layers where nothing is frozen."""

    @abstractmethod
    def weights(self) -> list[Any]:
        """The modules and parameters that `write` replaces."""

    def asking(self) -> tuple[int, ...]:
        """The heads that have queries and keys."""
        return tuple(range(self.num_heads))

    def rows(self, part: str, heads: Sequence[int], matrix: FrozenRows) -> Int[Tensor, "rows"]:
        """The rows of queries, "q", or keys, "k", of these heads, in their matrix."""
        found = [self._source(part).rows(head, self.head_dim, matrix.out_features) for head in heads]
        return torch.tensor([row for rows in found for row in rows], dtype=torch.int64, device=matrix.order.device)

    def _source(self, part: str) -> Source:
        return Source(part)

    def matrix(self, part: str) -> str:
        """The name of the matrix with the rows of that part."""
        return self._source(part).name


class ByNames(AttentionLayer):
    """A layer with one of the `LAYOUTS`."""

    layout: Layout

    def read(self) -> Matrices:
        return {name: FrozenRows.of(getattr(self.module, name)) for name in self._names()}

    def write(self, matrices: Matrices) -> None:
        for name, matrix in matrices.items():
            setattr(self.module, name, matrix.plain().train(self.module.training))

    def weights(self) -> list[Any]:
        layers = [getattr(self.module, name) for name in self._names()]
        return layers + [weight for layer in layers for weight in layer.parameters()]

    def _names(self) -> list[str]:
        return list(dict.fromkeys((self.layout.q.name, self.layout.k.name)))

    def _source(self, part: str) -> Source:
        return self.layout.q if part == "q" else self.layout.k


class OfTorch(AttentionLayer):
    """A `torch.nn.MultiheadAttention`, as it was or adapted."""

    def read(self) -> Matrices:
        q, k, _ = read_attention(self.module)
        return {"q": q, "k": k}

    def write(self, matrices: Matrices) -> None:
        AdaptedAttention.adapt(self.module, matrices["q"], matrices["k"], getattr(self.module, "kinds", None))

    def weights(self) -> list[Any]:
        if isinstance(self.module, AdaptedAttention):
            return [*self.module.rows_q.parameters(), *self.module.rows_k.parameters()]
        return list(self.module.parameters(recurse=False))

    def asking(self) -> tuple[int, ...]:
        return self.module.asking() if isinstance(self.module, AdaptedAttention) else super().asking()

    def rows(self, part: str, heads: Sequence[int], matrix: FrozenRows) -> Int[Tensor, "rows"]:
        return super().rows(part, [self.asking().index(head) for head in heads], matrix)


class OfOrtho(AttentionLayer):
    """An `ortho.MultiheadAttention`."""

    def read(self) -> Matrices:
        return read_projection(self.module.projection)

    def write(self, matrices: Matrices) -> None:
        self.module.projection = new = written_projection(self.module.projection, matrices)
        if isinstance(self.module, StoppedAttention) and not getattr(new, "stop_gradient", False):
            # It takes queries and keys for constants.
            self.module.__class__ = MultiheadAttention  # type: ignore[assignment]

    def weights(self) -> list[Any]:
        return [self.module.projection, *self.module.projection.parameters()]


def attention_layers(model: nn.Module, *, strict: bool = True) -> list[AttentionLayer]:
    """The attention layers of any model that have projections of queries and keys, in the order of its modules.

    Raises TypeError for what is no module; and ValueError, if `strict`, for a model without such layers, and for one
    with a layer that looks like one and is of an unknown kind.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected an nn.Module, got {_checks.describe(model)}")
    found = [layer for name, module in model.named_modules() if (layer := _recognised(name, module, strict))]
    if strict and not found:
        known = "; ".join(f"{layout.q.name}, {layout.k.name}" for layout in LAYOUTS)
        raise ValueError(
            "model: expected attention layers with projections of queries and keys (MultiheadAttention of torch or "
            f"ortho, or linear layers named {known}), found none in {type(model).__name__}"
        )
    return found


def owned(model: nn.Module, layers: Sequence[AttentionLayer]) -> None:
    """ValueError if weights of these layers' queries and keys are also those of something else in the model."""
    owners = Counter(
        id(part)
        for module in model.modules()
        for parts in (module._parameters, module._modules)
        for part in parts.values()
    )
    for layer in layers:
        if any(owners[id(part)] > 1 for part in layer.weights()):
            raise ValueError(f"model: expected weights of queries and keys of its own in {layer.name}, got shared ones")


def _recognised(name: str, module: nn.Module, strict: bool) -> AttentionLayer | None:
    if isinstance(module, MultiheadAttention):
        return OfOrtho(name, module, module.num_heads, module.num_kv_heads, module.head_dim)
    if isinstance(module, nn.MultiheadAttention) and type(module) in (nn.MultiheadAttention, AdaptedAttention):
        return OfTorch(name, module, module.num_heads, module.num_heads, module.head_dim)
    if isinstance(module, nn.MultiheadAttention):
        _unknown(strict, name, "nn.MultiheadAttention itself", module)
        return None
    children = dict(module.named_children())
    for layout in LAYOUTS:
        if layout.q.name in children and layout.k.name in children:
            return _by_names(name, module, layout, children, strict)
    return None


def _by_names(
    name: str, module: nn.Module, layout: Layout, children: Mapping[str, nn.Module], strict: bool
) -> AttentionLayer | None:
    q, k = children[layout.q.name], children[layout.k.name]
    strict = strict and "Attention" in type(module).__name__  # names such as `key` are not only those of attention
    for source, layer in ((layout.q, q), (layout.k, k)):
        if not _is_linear(layer):
            _unknown(strict, f"{name}.{source.name}", "nn.Linear or transformers' Conv1D", layer)
            return None
    widths = [FrozenRows.of(layer).out_features / source.parts for source, layer in ((layout.q, q), (layout.k, k))]
    sizes = _sizes(module, *widths)
    if sizes is None:
        wanted = (
            f"a width of heads ({', '.join(WIDTHS)}) or their number ({', '.join((*COUNTS, *KV_COUNTS))}) that fits"
        )
        _unknown(strict, name, f"{wanted} {widths[0]:g} outputs of queries and {widths[1]:g} of keys", module)
        return None
    found = ByNames(name, module, *sizes)
    found.layout = layout
    return found


def _sizes(module: nn.Module, q_width: float, k_width: float) -> tuple[int, int, int] | None:
    """(H, G, K) of a layer with so many outputs; None if they do not fit what it says, or if it says nothing."""
    owners = module, getattr(module, "config", None)
    H, G = (next((n for owner in owners for n in _integers(owner, names)), None) for names in (COUNTS, KV_COUNTS))
    width = next(_integers(module, WIDTHS), None) or (q_width // H if H else None)
    if not width or q_width % width or k_width % width:
        return None
    heads, kv_heads = int(q_width // width), int(k_width // width)
    fits = H in (None, heads) and G in (None, kv_heads) and kv_heads > 0 and heads % kv_heads == 0
    return (heads, kv_heads, int(width)) if fits else None


def _integers(owner: Any, names: Sequence[str]) -> Iterator[int]:
    """What the owner has by these names, where that is a number."""
    return (size for name in names if isinstance(size := getattr(owner, name, None), int) and size)


def _is_linear(layer: nn.Module) -> bool:
    if type(layer) in (nn.Linear, FrozenRows):
        return True
    return type(layer).__name__ == "Conv1D" and hasattr(layer, "nf")  # no convolution: (in, out) linear


def _unknown(strict: bool, name: str, expected: str, got: nn.Module) -> None:
    if strict:
        raise ValueError(f"model: expected of {name or 'the model'} {expected}, got {type(got).__name__}")
