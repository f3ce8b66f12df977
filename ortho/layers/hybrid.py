"""Layers whose heads are of several kinds."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from ortho import _checks
from ortho._checks import checked
from ortho._typing import Bool, Float, State, Tensor
from ortho.attention.cache import Cache
from ortho.layers.induction import SINK, InductionHeads
from ortho.layers.multihead import MultiheadAttention
from ortho.layers.positional import PositionalHeads
from ortho.layers.stop_gradient import StoppedAttention

__all__ = ["HEADS", "HybridAttention", "HybridCache"]

# Each takes (d_model, num_heads, *, head_dim, form, generator, dtype, device) and is called like a layer.
HEADS: dict[str, Callable[..., nn.Module]] = {
    "learned": MultiheadAttention,
    "rotary": partial(MultiheadAttention, attention="rotary"),
    "frozen": partial(MultiheadAttention, projection="frozen"),
    "structured": partial(MultiheadAttention, projection="structured"),
    "stopped": partial(StoppedAttention, projection="stopped"),
    "structured-stopped": StoppedAttention,
    "induction": InductionHeads,
    "selective-induction": partial(InductionHeads, tokens=2, sink=SINK),
    "positional": PositionalHeads,
    "window": partial(MultiheadAttention, attention="window"),
    "linear": partial(MultiheadAttention, attention="linear"),
}


class HybridAttention(nn.Module):
    """Multi-head attention with heads of several kinds; each kind computes only what it needs.

    `heads` gives the number of heads of each kind. A kind is a name in `HEADS`, or a class or function that makes a
    layer: `{"learned": 1, "positional": 11}`, `[("learned", 1), (partial(PositionalHeads, patterns=...), 11)]`.
    The output is the sum of one layer for each kind (`groups`), with its own rows of W_V and columns of W_O, and its
    own q and k, if it has any. The weights of a kind start as in a layer of that kind alone.

    Raises TypeError or ValueError, naming the argument, for unknown kinds, for d_model not divisible by num_heads, and
    for numbers that do not sum to num_heads.
    """

    @checked(own=("heads",))
    def __init__(
        self,
        d_model: int,
        num_heads: int,
        *,
        heads: Mapping[str, int] | Sequence[tuple[str | Callable[..., nn.Module], int]],
        form: str = "fast",
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.d_model, self.num_heads = _checks.heads(d_model, num_heads)
        kinds = split(heads, num_heads)
        kind: dict[str, Any] = {"form": form, "generator": generator, "dtype": dtype, "device": device}
        width = d_model // num_heads
        self.groups = nn.ModuleList(make(d_model, count, head_dim=width, **kind) for make, count in kinds)
        self.counts = [count for _, count in kinds]

    @checked(shapes=False)
    def forward(
        self,
        x: Float[Tensor, "B N d"],
        *,
        attn_mask: Bool[Tensor, "..."] | None = None,
        key_padding_mask: Bool[Tensor, "B M"] | None = None,
        is_causal: bool = False,
        initial_state: tuple[State, ...] | None = None,
        return_state: bool = False,
        cache: "HybridCache | None" = None,
    ) -> Float[Tensor, "B N d"] | tuple[Float[Tensor, "B N d"], tuple[State, ...]]:
        """x (B, N, d) -> (B, N, d).

        `attn_mask` broadcasts to (B, H, N, N), True = may attend; heads whose state sums up the keys take only
        masks of keys. `key_padding_mask` (B, N) is True = padding. With `initial_state` and `return_state` a causal
        sequence can be cut anywhere; a state holds the groups' states. A `cache` (`new_cache`) does so in place.
        """
        if cache is not None and (initial_state is not None or return_state):
            raise ValueError("cache: expected None beside initial_state or return_state")
        parts = self._parts(initial_state, cache)
        if x.dim() != 3:
            raise ValueError(f"x: expected shape (B, N, {self.d_model}), got {tuple(x.shape)}")
        keys = None if initial_state is not None else x.shape[1]
        _checks.layer_mask(attn_mask, key_padding_mask, len(x), self.num_heads, x.shape[1], keys)
        if isinstance(attn_mask, Tensor):  # a group would take an axis as long as its own heads for these
            M = attn_mask.shape[-1] if keys is None and attn_mask.dim() else keys or 1
            _checks.mask(attn_mask, (len(x), self.num_heads, x.shape[1], M))
        # Each group reads both masks itself: only padding says which tokens are absent, beside a mask of pairs.
        kwargs: dict[str, Any] = {"is_causal": is_causal}
        kwargs |= {} if key_padding_mask is None else {"key_padding_mask": key_padding_mask}
        outputs, states = [], []
        for group, mask, part in zip(self.groups, self._masks(attn_mask), parts, strict=True):
            if cache is not None:
                outputs.append(group(x, attn_mask=mask, cache=part, **kwargs))
                continue
            y = group(x, attn_mask=mask, initial_state=part, return_state=return_state, **kwargs)
            outputs.append(y[0] if return_state else y)
            states += [y[1]] if return_state else []
        y = sum(outputs[1:], start=outputs[0])
        return (y, tuple(states)) if return_state else y

    @checked
    def new_cache(self, capacity: int | None = None) -> "HybridCache":
        """An empty cache for decoding with this layer, with room for `capacity` tokens: one for each group."""
        return HybridCache(self, self.groups, capacity)

    def _parts(self, state: Any, cache: Any) -> Sequence[Any]:
        """Each group's part of a state or a cache."""
        if cache is not None:
            _checks.expect(cache.attention is self, "cache", "one of this layer", "another's")
            return cache.parts
        if state is None:
            return [None] * len(self.groups)
        if not isinstance(state, tuple | list) or len(state) != len(self.groups):
            wanted = f"a tuple of {len(self.groups)} states, one a group"
            raise ValueError(f"initial_state: expected {wanted}, got {_checks.describe(state)}")
        return state

    def _masks(self, mask: Tensor | None) -> Sequence[Tensor | None]:
        """Each group's mask: its heads' part if the mask differs between heads, else the whole mask. It has all four
        axes, so that none is ambiguous."""
        if not isinstance(mask, Tensor) or mask.dim() > 4:
            return [mask] * len(self.groups)
        mask = mask[(None,) * (4 - mask.dim())]
        return mask.split(self.counts, 1) if mask.shape[1] == self.num_heads > 1 else [mask] * len(self.groups)

    def extra_repr(self) -> str:
        return f"d_model={self.d_model}, num_heads={self.num_heads}"


class HybridCache(Cache):
    """The caches of a layer's parts, read by a call of the layer."""

    def __init__(self, layer: nn.Module, parts: Iterable[Any], capacity: int | None) -> None:
        super().__init__(layer, capacity)
        self._parts: list[Cache] = [part.new_cache(capacity) for part in parts]

    @property
    def parts(self) -> list[Cache]:
        """One cache for each part. Raises ValueError where a call has failed in a later part."""
        lengths = [part.length for part in self._parts]
        _checks.expect(len(set(lengths)) <= 1, "cache", "parts that have read as many tokens", lengths)
        return self._parts

    @property
    def length(self) -> int:  # type: ignore[override]
        """The number of tokens read. Raises ValueError as `parts` does."""
        return self.parts[0].length

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self._parts)

    def _own(self) -> None:
        self._parts = [part.copy() for part in self._parts]

    def _attend(self, *_: Any) -> Tensor:
        name = type(self.attention).__name__
        raise TypeError(f"cache: expected to be read by a {name}, whose parts have q, k and v of their own")


def split(
    heads: Mapping[str, int] | Sequence[tuple[str | Callable[..., nn.Module], int]], num_heads: int
) -> list[tuple[Callable[..., nn.Module], int]]:
    """For each kind, what makes it and its number of heads; kinds without heads are left out.

    Raises TypeError or ValueError, naming the argument, for unknown kinds, for numbers that are not integers of at
    least 0, and for numbers that do not sum to num_heads.
    """
    pairs = list(heads.items()) if isinstance(heads, Mapping) else heads
    if not isinstance(pairs, list | tuple) or not all(isinstance(p, tuple | list) and len(p) == 2 for p in pairs):
        raise TypeError(f"heads: expected numbers of heads by their kind, got {_checks.describe(heads)}")
    found = []
    for kind, count in pairs:
        make = HEADS[_checks.one_of("heads", kind, HEADS)] if isinstance(kind, str) else kind
        if not callable(make):
            raise TypeError(f"heads: expected a kind's name or what makes it, got {_checks.describe(kind)}")
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise ValueError(f"heads: expected numbers of at least 0, got {_checks.describe(count)}")
        found += [(make, count)] if count else []
    total = sum(count for _, count in found)
    _checks.expect(total == num_heads, "heads", f"numbers that are together num_heads = {num_heads}", total)
    return found
