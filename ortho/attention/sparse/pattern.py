r"""Patterns: which keys a query may attend to, by their positions alone; and attention that computes those pairs only.

A pattern is a class in one file of this folder. Its `allowed(i, j)` is the rule, and `block_masks` says in which tiles
the fast form computes the pairs. Masks, costs and attention functions, whose options are the fields of the class,
follow from these.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch

from ortho import checks
from ortho._typing import Bool, Float, Tensor
from ortho.attention.call import Call, attention_function
from ortho.attention.mechanism import Mechanism, with_made
from ortho.attention.scores import flat_mask, masked_softmax
from ortho.attention.sparse.block_mask import BlockMask, Rule, Section
from ortho.attention.sparse.tiled_attention import tiled_attention
from ortho.attention.uncompiled import uncompiled

ROWS = 256  # of a mask that are counted together


@dataclass(frozen=True)
class Pattern(ABC):
    """A set of allowed pairs (i, j) of a query's and a key's position; a causal call keeps those with j <= i."""

    def __post_init__(self) -> None:
        for size in fields(self):  # the others are checked by their class
            if size.type is int:
                checks.positive_int(size.name, getattr(self, size.name))

    @abstractmethod
    def allowed(self, i: Tensor, j: Tensor) -> Tensor:
        """Whether the query at i may attend to the key at j, causality aside; integer tensors that broadcast."""

    def pairs(self, n: int, *, is_causal: bool = False) -> int:
        """The number of allowed pairs of n tokens, counted some rows at a time."""
        starts = range(0, n, ROWS)
        return sum(int(self.mask(min(n, i + ROWS), n, first=i, is_causal=is_causal).sum()) for i in starts)

    @abstractmethod
    def block_masks(self, section: Section) -> tuple[BlockMask, ...]:
        """Disjoint block masks that together hold the allowed pairs of a section."""

    def kv_window(self) -> tuple[int, int] | None:
        """(first, last) if a causal query reads only the first `first` and the last `last` tokens, its own included;
        None if a later query may read any token."""
        return None

    def rule(self, is_causal: bool) -> Rule:
        """The rule of a call: `allowed`, and in a causal call no key after the query."""
        return (lambda i, j: self.allowed(i, j) & (j <= i)) if is_causal else self.allowed

    def computed_pairs(self, N: int, *, is_causal: bool = False, last: bool = False) -> int:
        """The number of scores that the fast form computes in a call on N tokens; with `last`, in a call on the last
        query alone, with all N keys. It is counted from the tables, so ValueError for a symbol."""
        checks.expect(isinstance(N, int), "N", f"an integer, as {self} has no closed form of its work", repr(N))
        return sum(one.computed_pairs for one in self.block_masks(Section(N - 1 if last else 0, N, N, is_causal)))

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
@attention_function()
def pattern_attention_reference(call: Call, *, pattern: Pattern) -> Float[Tensor, "*batch N V"]:
    """Softmax attention under the pattern's mask: all scores are computed, and most are thrown away.

    Keys are at positions 0, 1, ...; queries are, too, but start after the keys of the state. A query that may attend to
    nothing gets zeros. The state is (keys, values).
    """
    (N, M), past = (call.q.shape[-2], call.k.shape[-2]), call.past
    mask = pattern.mask(past + N, M, first=past, is_causal=call.is_causal, device=call.q.device)
    mask = mask if call.attn_mask is None else mask & call.attn_mask
    return masked_softmax(call.q @ call.k.mT * call.factor, ~mask, empty_rows=True) @ call.v


@uncompiled
@attention_function()
def pattern_attention(call: Call, *, pattern: Pattern) -> Float[Tensor, "*batch N V"]:
    """`pattern_attention_reference` by the pattern's block masks, in float32 at least; it cannot be differentiated
    twice.

    The backward pass keeps q, k, v, the output, and one number a query.
    """
    q, past = call.q, call.past
    block_masks = pattern.block_masks(Section(past, past + q.shape[-2], call.k.shape[-2], call.is_causal, q.device))
    mask = None if call.attn_mask is None else flat_mask(call.attn_mask, q.shape[:-2])
    flat_q, flat_k, flat_v = (x.reshape(-1, *x.shape[-2:]) for x in (q, call.k, call.v))
    o = tiled_attention(flat_q, flat_k, flat_v, block_masks, scale=call.factor, start=past, attn_mask=mask)
    return o.reshape(*q.shape[:-1], -1)


def pattern_mechanism(name: str, of: type[Pattern], source: str, **defaults: Any) -> Mechanism:
    """The entry of `MECHANISMS` for a pattern's class, whose fields, with `defaults` in place of the class's, become
    the options of its functions."""
    make = partial(of, **defaults)
    reference, fast = (
        with_made(form, "pattern", make, name) for form in (pattern_attention_reference, pattern_attention)
    )
    return Mechanism(
        name=name, family="sparse", source=source, positional=True, reference=reference, fast=fast, make=make
    )
