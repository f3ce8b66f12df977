r"""Patterns: which keys a query may attend to, by their positions alone; and attention that computes those pairs only.

A pattern is a class in one file of this folder. Its `allowed(i, j)` is the rule, `pairs` counts the allowed pairs in
closed form, and `tilings` gives the tiles in which the fast form computes them. Masks and costs follow from these.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import partial
from math import sqrt
from typing import Any

import torch

from ortho._checks import attention_form, checked, past_length, uncompiled
from ortho._cost import Cost
from ortho._typing import Bool, Float, Size, State, Tensor
from ortho.attention.mechanism import CostedCall, Mechanism, closed_form
from ortho.attention.scores import flat_mask, masked_softmax
from ortho.attention.softmax.softmax_attention import materialised_cost
from ortho.attention.sparse.tiled_attention import tiled_attention, tiled_cost
from ortho.attention.sparse.tiling import Rule, Section, Tiling, Work


@dataclass(frozen=True)
class Pattern(ABC):
    """A set of allowed pairs (i, j) of a query's and a key's position; a causal call keeps those with j <= i."""

    @abstractmethod
    def allowed(self, i: Tensor, j: Tensor) -> Tensor:
        """Whether the query at i may attend to the key at j, causality aside; integer tensors that broadcast."""

    def causal_pairs(self, n: int) -> int:
        """The number of allowed pairs of n tokens in a causal call, in closed form."""
        raise NotImplementedError

    @checked(shapes=False)
    def pairs(self, n: int, *, is_causal: bool = False) -> int:
        """The number of allowed pairs of n tokens, in closed form.

        Computed from `causal_pairs` for a symmetric rule that allows every (i, i); other patterns override this.
        """
        causal = self.causal_pairs(n)
        return causal if is_causal else 2 * causal - n

    @abstractmethod
    def tilings(self, section: Section) -> tuple[Tiling, ...]:
        """Disjoint tilings that together hold the allowed pairs of a section."""

    def remembered(self) -> tuple[int, int] | None:
        """(first, last) if a causal query reads only the first `first` and the last `last` tokens, its own included;
        None if a later query may read any token."""
        return None

    def rule(self, is_causal: bool) -> Rule:
        """The rule of a call: `allowed`, and in a causal call no key after the query."""
        return (lambda i, j: self.allowed(i, j) & (j <= i)) if is_causal else self.allowed

    def work(self, N: Size, *, is_causal: bool = False, last: bool = False) -> tuple[Work, ...]:
        """What each tiling computes in a call on N tokens; with `last`, in a call on the last query alone, with all N
        keys.

        This default builds the tilings and counts from their tables; a pattern with a closed form takes symbols too.
        """
        if not isinstance(N, int):
            raise TypeError(f"N: expected an integer, as {self} has no closed form of its work, got {N!r}")
        return tuple(tiling.work for tiling in self.tilings(Section(N - 1 if last else 0, N, N, is_causal)))

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
        """True where a query from `first` to `stop`, exclusive, may attend to a key; `keys` is `stop` by default."""
        i = torch.arange(first, stop, device=device)[:, None]
        j = torch.arange(stop if keys is None else keys, device=device)
        return self.rule(is_causal)(i, j)


@uncompiled
@attention_form()
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
    """Softmax attention under the pattern's mask: all scores are computed, and most are thrown away.

    Keys are at positions 0, 1, ...; queries are, too, but start after the keys of the state. A query that may attend to
    nothing gets zeros. The state is (keys, values).
    """
    scale, first = 1 / sqrt(q.shape[-1]) if scale is None else scale, past_length(initial_state)
    mask = pattern.mask(first + q.shape[-2], k.shape[-2], first=first, is_causal=is_causal, device=q.device)
    mask = mask if attn_mask is None else mask & attn_mask
    return masked_softmax(q @ k.mT * scale, ~mask, empty_rows=True) @ v


@uncompiled
@attention_form()
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
    """`pattern_attention_reference` by the pattern's tilings, in float32 at least; it cannot be differentiated twice.

    The backward pass keeps q, k, v, the output, and one number a query.
    """
    scale, first = 1 / sqrt(q.shape[-1]) if scale is None else scale, past_length(initial_state)
    tilings = pattern.tilings(Section(first, first + q.shape[-2], k.shape[-2], is_causal, q.device))
    mask = None if attn_mask is None else flat_mask(attn_mask, q.shape[:-2])
    flat_q, flat_k, flat_v = (x.reshape(-1, *x.shape[-2:]) for x in (q, k, v))
    o = tiled_attention(flat_q, flat_k, flat_v, tilings, scale=scale, start=first, attn_mask=mask)
    return o.reshape(*q.shape[:-1], v.shape[-1])


@checked
def pattern_mechanism(name: str, pattern: Pattern, source: str) -> Mechanism:
    """Softmax attention over the pairs of a pattern, as an entry of `MECHANISMS`."""
    return Mechanism(
        name=name,
        family="sparse",
        source=source,
        reference=partial(pattern_attention_reference, pattern=pattern),
        fast=partial(pattern_attention, pattern=pattern),
        positional=True,
        cost=partial(pattern_cost, pattern=pattern),
    )


def pattern_of(mechanism: Mechanism, **options: Any) -> Pattern | None:
    """The pattern of a mechanism made by `pattern_mechanism`, with these options; None for other mechanisms."""
    keywords = mechanism.fast.keywords if isinstance(mechanism.fast, partial) else {}
    pattern = {**keywords, **options}.get("pattern")
    return pattern if isinstance(pattern, Pattern) else None


@closed_form
def pattern_cost(call: CostedCall, *, pattern: Pattern) -> Cost:
    """The cost of one self-attention call in closed form, for either form; takes symbols if `pattern.work` does."""
    if call.form == "reference":
        return materialised_cost(call)
    return tiled_cost(call, *(pattern.work(call.N, is_causal=call.causal, last=last) for last in (False, True)))
