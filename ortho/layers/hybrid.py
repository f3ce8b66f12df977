"""Layers whose heads are of several kinds."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn

from ortho import checks
from ortho._typing import Bool, Float
from ortho.attention import MECHANISMS
from ortho.attention.cache import Cache, PartsCache
from ortho.layers.frozen_qk import FrozenQKAttention
from ortho.layers.induction import SINK, InductionHeads
from ortho.layers.multihead import MultiheadAttention
from ortho.layers.positional import PositionalHeads

__all__ = ["HEADS", "HybridAttention"]

# Each takes (d_model, num_heads, *, head_dim, form, generator, dtype, device) and is called like a layer.
HEADS: dict[str, Callable[..., nn.Module]] = {
    "learned": MultiheadAttention,
    "frozen": partial(MultiheadAttention, projection="frozen"),
    "structured": partial(MultiheadAttention, projection="structured"),
    "stopped": partial(FrozenQKAttention, projection="stopped"),
    "structured-stopped": FrozenQKAttention,
    "induction": InductionHeads,
    "selective-induction": partial(InductionHeads, tokens=2, sink=SINK),
    "positional": PositionalHeads,
    **{name: partial(MultiheadAttention, attention=name) for name in MECHANISMS},
}
Kind = str | Callable[..., nn.Module]
Heads = Mapping[str, int] | Sequence[tuple[Any, ...]]  # numbers by kinds, or (kind, number) and (kind, number, options)


class HybridAttention(nn.Module):
    """Multi-head attention with heads of several kinds; each kind computes only what it needs.

    `heads` gives the number of heads of each kind. A kind is a name in `HEADS`, which has every mechanism, or a class
    or function that makes a layer; options of its own may follow: `{"learned": 1, "positional": 11}`,
    `[("softmax", 1), ("window", 3, {"width": 64}), (partial(PositionalHeads, patterns=...), 8)]`.
    The output is the sum of one layer for each kind (`groups`), with its own rows of W_V and columns of W_O, and its
    own q and k, if it has any. The weights of a kind start as in a layer of that kind alone.

    Raises TypeError or ValueError, naming the argument, for unknown kinds, for d_model not divisible by num_heads, and
    for numbers that do not sum to num_heads.
    """

    groups: Any  # a list of layers

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        *,
        heads: Heads,
        form: str = "fast",
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.d_model, self.num_heads = checks.heads(d_model, num_heads)
        kinds = split(heads, num_heads)
        kind: dict[str, Any] = {"form": form, "generator": generator, "dtype": dtype, "device": device}
        kind["head_dim"] = d_model // num_heads
        self.groups = nn.ModuleList(_made(of, d_model, count, **kind, **options) for of, count, options in kinds)
        self.counts = [count for _, count, _ in kinds]

    def forward(
        self,
        x: Float[Tensor, "B N d"],
        *,
        attn_mask: Bool[Tensor, "..."] | Float[Tensor, "..."] | None = None,
        key_padding_mask: Bool[Tensor, "B M"] | None = None,
        is_causal: bool = False,
        cache: PartsCache | None = None,
    ) -> Float[Tensor, "B N d"]:
        """x (B, N, d) -> (B, N, d).

        `attn_mask` broadcasts to (B, H, N, N), True = attend; heads whose state sums up the keys take only masks of
        keys, and only softmax attention takes numbers. `key_padding_mask` (B, N) is True = padding. With a `cache`
        (`new_cache`) x follows the tokens that it has read.
        """
        B, N, H = len(x), x.shape[1], self.num_heads
        checks.sequence("x", x, self.d_model)
        checks.layer_mask(attn_mask, key_padding_mask, B, H, N, N if cache is None else None)
        if isinstance(attn_mask, Tensor):  # a group would take an axis as long as its own heads for these
            checks.mask(attn_mask, (B, H, N, N), bias=True)
        # Each group reads both masks itself: only padding says which tokens are absent, beside a mask of pairs.
        kwargs: dict[str, Any] = {"is_causal": is_causal}
        kwargs |= {} if key_padding_mask is None else {"key_padding_mask": key_padding_mask}
        groups = zip(self.groups, self._masks(attn_mask), self._parts(cache), strict=True)
        outputs = [group(x, attn_mask=mask, **part, **kwargs) for group, mask, part in groups]
        return sum(outputs[1:], start=outputs[0])

    def new_cache(self, capacity: int | None = None) -> PartsCache:
        """An empty cache for decoding with this layer, with room for `capacity` tokens: one for each group."""
        return PartsCache("HybridAttention", [group.new_cache(capacity) for group in self.groups], capacity)

    def _parts(self, cache: PartsCache | None) -> list[dict[str, Cache]]:
        """Each group's part of a cache, as its argument."""
        if cache is None:
            return [{} for _ in self.groups]
        cache.fits("HybridAttention")
        checks.expect(len(cache.parts) == len(self.groups), "cache", f"{len(self.groups)} parts", len(cache.parts))
        return [{"cache": part} for part in cache.parts]

    def _masks(self, mask: Tensor | None) -> Sequence[Tensor | None]:
        """Each group's mask: its heads' part if the mask differs between heads, else the whole mask. It has all four
        axes, so that none is ambiguous."""
        if not isinstance(mask, Tensor) or mask.dim() > 4:
            return [mask] * len(self.groups)
        mask = mask[(None,) * (4 - mask.dim())]
        return mask.split(self.counts, 1) if mask.shape[1] == self.num_heads > 1 else [mask] * len(self.groups)

    def extra_repr(self) -> str:
        return f"d_model={self.d_model}, num_heads={self.num_heads}"


def split(heads: Heads, num_heads: int) -> list[tuple[Kind, int, dict[str, Any]]]:
    """Each kind with its number of heads and its options; kinds without heads are left out.

    Raises TypeError or ValueError, naming the argument, for unknown kinds, for numbers that are not integers of at
    least 0, and for numbers that do not sum to num_heads.
    """
    found: list[tuple[Kind, int, dict[str, Any]]] = []
    for row in heads.items() if isinstance(heads, Mapping) else heads:
        if not isinstance(row, tuple | list) or not 2 <= len(row) <= 3:
            raise TypeError(f"heads: expected (kind, number) or (kind, number, options), got {checks.describe(row)}")
        kind, count, *options = row
        if isinstance(kind, str):
            checks.one_of("heads", kind, {**HEADS, **MECHANISMS})
        elif not callable(kind):
            raise TypeError(f"heads: expected a kind's name or what makes it, got {checks.describe(kind)}")
        if isinstance(count, bool) or not isinstance(count, Integral) or count < 0:
            raise ValueError(f"heads: expected numbers of at least 0, got {checks.describe(count)}")
        found += [(kind, int(count), dict(*options))] if count else []
    total = sum(count for _, count, _ in found)
    checks.expect(total == num_heads, "heads", f"numbers that are together num_heads = {num_heads}", total)
    return found


def _made(kind: Kind, *sizes: int, **settings: Any) -> nn.Module:
    """The layer of a kind; a mechanism that was registered later is one, too."""
    if isinstance(kind, str):
        kind = HEADS.get(kind) or partial(MultiheadAttention, attention=kind)
    return kind(*sizes, **settings)
