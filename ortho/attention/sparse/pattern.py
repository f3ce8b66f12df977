r"""Patterns: which keys a query may attend to, by their positions alone; and attention that computes those pairs only.

A pattern says so once, by `allowed(i, j)`. Of that are made its mask, which one can draw, the number of its pairs, and
the parts by which the fast form skips all other work (`ortho.attention.sparse.parts`).
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import partial
from math import sqrt
from typing import Any

import torch

from ortho import _checks
from ortho._autocast import no_autocast
from ortho._checks import checked
from ortho._typing import Bool, Float, Size, State, Tensor
from ortho.attention.indexing import indexing
from ortho.attention.mechanism import Mechanism
from ortho.attention.operands import with_past, working
from ortho.attention.softmax.softmax_attention import softmax_attention_reference
from ortho.attention.sparse.parts import Part, attention_by_parts
from ortho.attention.sparse.pattern_cost import Work, pattern_cost, work_of
from ortho.attention.transforms import uncompiled


@dataclass(frozen=True)
class Pattern(ABC):
    """Pairs (i, j) of a query's and a key's position; a causal call keeps those with j <= i."""

    @abstractmethod
    def allowed(self, i: Tensor, j: Tensor) -> Tensor:
        """Whether the query at i may attend to the key at j, causality aside; integer tensors that broadcast."""

    @abstractmethod
    def pairs(self, n: int, *, is_causal: bool = False) -> int:
        """How many pairs of n tokens are kept, in closed form."""

    @abstractmethod
    def parts(self, first: int, stop: int, keys: int, *, is_causal: bool, device: torch.device) -> tuple[Part, ...]:
        """Disjoint parts that together hold the kept pairs of the queries from `first` to `stop`, without the last, and
        of so many keys."""

    def remembered(self) -> tuple[int, int] | None:
        """(first, last) if a causal query reads none but the first so many tokens and the last so many, its own
        included; None if a later one may read any."""
        return None

    def work(self, N: Size, *, is_causal: bool = False, last: bool = False) -> tuple[Work, ...]:
        """What each part of a call on N tokens computes; or of one on the `last` query alone, behind the others' keys.

        Here counted from the parts, whose tables are made; a pattern with a closed form takes symbols too.
        """
        if not isinstance(N, int):
            raise TypeError(f"N: expected an integer, as {self} has no closed form of its work, got {N!r}")
        parts = self.parts(N - 1 if last else 0, N, N, is_causal=is_causal, device=torch.device("cpu"))
        return tuple(map(work_of, parts))

    @checked(shapes=False)
    def mask(
        self,
        stop: int,
        keys: int | None = None,
        *,
        first: int = 0,
        is_causal: bool = False,
        device: torch.device | str | None = None,
    ) -> Bool[Tensor, "N M"]:
        """True where a query from `first` to `stop`, without the last, may attend to a key; by default stop keys."""
        i = torch.arange(first, stop, device=device)[:, None]
        j = torch.arange(stop if keys is None else keys, device=device)
        return self.kept(i, j, is_causal=is_causal)

    def kept(self, i: Tensor, j: Tensor, *, is_causal: bool) -> Tensor:
        """`allowed`, and in a causal call not behind the query."""
        return self.allowed(i, j) & (j <= i) if is_causal else self.allowed(i, j)


@checked(shapes=False)
@uncompiled
@indexing()
def pattern_attention_reference(
    q: Float[Tensor, "*batch N K"],
    k: Float[Tensor, "*batch M K"],
    v: Float[Tensor, "*batch M V"],
    *,
    pattern: Pattern,
    is_causal: bool = False,
    attn_mask: Bool[Tensor, "..."] | None = None,
    scale: float | None = None,
    initial_state: State | None = None,
    return_state: bool = False,
) -> Float[Tensor, "*batch N V"] | tuple[Float[Tensor, "*batch N V"], State]:
    """`softmax_attention_reference` under the pattern's mask: all pairs are computed, and most of them thrown away.

    Keys stand at positions 0, 1, ..., and queries too, behind the keys of the state. A query that may attend to nothing
    gets zeros. The state is (keys, values).
    """
    keys, _ = with_past(q, k, v, is_causal, attn_mask, initial_state)
    known_pattern(pattern)
    first = keys.shape[-2] - k.shape[-2]
    mask = pattern.mask(first + q.shape[-2], keys.shape[-2], first=first, device=q.device)
    return softmax_attention_reference(
        q,
        k,
        v,
        is_causal=is_causal,
        attn_mask=mask if attn_mask is None else mask & attn_mask,
        scale=scale,
        initial_state=initial_state,
        return_state=return_state,
    )


@checked(shapes=False)
@uncompiled
@indexing()
def pattern_attention(
    q: Float[Tensor, "*batch N K"],
    k: Float[Tensor, "*batch M K"],
    v: Float[Tensor, "*batch M V"],
    *,
    pattern: Pattern,
    is_causal: bool = False,
    attn_mask: Bool[Tensor, "..."] | None = None,
    scale: float | None = None,
    initial_state: State | None = None,
    return_state: bool = False,
) -> Float[Tensor, "*batch N V"] | tuple[Float[Tensor, "*batch N V"], State]:
    """`pattern_attention_reference` by the pattern's parts, in float32 at least; it cannot be differentiated twice.

    Kept for the backward pass are q, k, v, the output, and one number a query.
    """
    keys, values = with_past(q, k, v, is_causal, attn_mask, initial_state)
    known_pattern(pattern)
    _checks.scale_factor(scale)
    scale = 1 / sqrt(q.shape[-1]) if scale is None else scale
    N, M = q.shape[-2], keys.shape[-2]
    first = M - k.shape[-2]
    parts = pattern.parts(first, first + N, M, is_causal=is_causal, device=q.device)
    with no_autocast(q):
        operands = (working(x).flatten(0, -3) if x.dim() > 2 else working(x)[None] for x in (q, keys, values))
        flat_q, flat_k, flat_v = operands
        mask = None if attn_mask is None else flat_mask(attn_mask, q.shape[:-2])
        o = attention_by_parts(flat_q, flat_k, flat_v, parts, scale=scale, start=first, attn_mask=mask)
    o = o.reshape(*q.shape[:-1], v.shape[-1]).to(q.dtype)
    return (o, (keys, values)) if return_state else o


def pattern_mechanism(name: str, pattern: Pattern, source: str) -> Mechanism:
    """Softmax attention over the pairs of a pattern, as an entry of `MECHANISMS`."""
    known_pattern(pattern)
    return Mechanism(
        name=name,
        family="pattern",
        source=source,
        reference=partial(pattern_attention_reference, pattern=pattern),
        fast=partial(pattern_attention, pattern=pattern),
        causal=True,
        exact=False,
        positional=True,
        cost=partial(pattern_cost, pattern=pattern),
    )


def pattern_of(mechanism: Mechanism) -> Pattern | None:
    """The pattern of a mechanism that `pattern_mechanism` has made; None of others."""
    keywords = mechanism.fast.keywords if isinstance(mechanism.fast, partial) else {}
    pattern = keywords.get("pattern")
    return pattern if isinstance(pattern, Pattern) else None


def known_pattern(pattern: Any) -> Pattern:
    """`pattern` if it is one, else TypeError."""
    if not isinstance(pattern, Pattern):
        raise TypeError(f"pattern: expected a Pattern, got {_checks.describe(pattern)}")
    return pattern


def flat_mask(mask: Bool[Tensor, "..."], lead: torch.Size) -> Bool[Tensor, "G N M"]:
    """A mask that broadcasts to (*lead, N, M) with its leading axes in one, of size 1 where all sequences share it."""
    mask = mask[(None,) * (2 - mask.dim())] if mask.dim() < 2 else mask
    if mask.dim() == 2 or all(size == 1 for size in mask.shape[:-2]):
        return mask.reshape(1, *mask.shape[-2:])
    return mask.expand(*lead, *mask.shape[-2:]).reshape(-1, *mask.shape[-2:])
