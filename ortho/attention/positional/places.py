"""The positions of tokens in a positional pattern: the rank of a token's word among the words that are there.

A position holds a word, whose value is the mean of its tokens' values; without `words` each token is a word. A masked
token has no position. A causal call starts at the position of the last token before the call, and has no words.
"""

from dataclasses import dataclass, replace
from math import inf
from typing import Any

import torch
from torch.nn.functional import pad

from ortho import checks
from ortho._typing import Bool, Int, Tensor

NONE = -1  # the number of the position, and of the word, before the first


@dataclass(frozen=True)
class Places:
    """N tokens, each at a position of its own; in a causal call these follow a first one, that of the token before.

    first: the number of the first position. seen: how many positions the rows see; None in a causal call, where rows
    see those up to their own. P, below, is the number of positions, N or N + 1. Tensors have the axes of the batch,
    followed, until `head` selects one, by an axis of heads, of size 1 if all heads are alike.
    """

    tokens: int
    device: torch.device
    first: Int[Tensor, "..."] | int
    seen: Int[Tensor, "..."] | int | None

    def head(self, number: int, axis: int) -> "Places":
        """The places of head `number`, where `axis` is the axis of heads."""

        def of(x: Any) -> Any:
            return x.select(axis, min(number, x.shape[axis] - 1)) if isinstance(x, Tensor) else x

        return replace(self, **{name: of(getattr(self, name)) for name in self.__dataclass_fields__})

    @property
    def r(self) -> Tensor:
        """The numbers of the positions, (P,) or (..., 1, P)."""
        r = torch.arange(self.tokens + (self.seen is None), device=self.device)
        return r + (self.first if isinstance(self.first, int) else self.first[..., None, None])

    def after(self, r: Tensor) -> Tensor:
        """How many positions each row sees after its own."""
        if self.seen is None:
            return torch.zeros_like(r)
        return (self.seen if isinstance(self.seen, int) else self.seen[..., None, None]) - 1 - r

    def pool(self, x: Tensor, before: Tensor | None) -> Tensor:
        """The positions' values (..., V, P) from the tokens' values (..., V, N). In a causal call `before` (..., V) is
        the first position's value."""
        return x if before is None else torch.cat([before[..., None], x], -1)

    def kept(self, o: Tensor) -> Tensor:
        """o (..., V, N) with zeros for masked tokens."""
        return o

    def spread(self, s: Tensor) -> Tensor:
        """For each token, (..., V, N), the entry of s, (..., V, P) or (P,), at its position."""
        return s[..., -self.tokens :]

    def at_last(self, s: Tensor) -> Tensor:
        """The entry, (..., V), of s, (..., V, P), at the last token's position."""
        return s[..., -1]

    def mirror(self, s: Tensor) -> Tensor:
        """s (..., V, P) with the positions in reverse order."""
        return s.flip(-1)

    @property
    def last(self) -> Tensor:
        """The number of the last token's position."""
        return torch.as_tensor(self.first, device=self.device) + self.tokens


@dataclass(frozen=True)
class Ranked(Places):
    """N tokens, some of which are masked or share a position.

    index (..., N): which of the positions a token stands at; there (..., N): whether it is not masked; counts (..., P):
    how many tokens stand at a position.
    """

    index: Int[Tensor, "... N"]
    there: Bool[Tensor, "... N"]
    counts: Int[Tensor, "... P"]

    def pool(self, x: Tensor, before: Tensor | None) -> Tensor:
        sums = x.new_zeros(*x.shape[:-1], self.counts.shape[-1])
        if before is not None:
            sums[..., 0] = before
        index = self.index[..., None, :].expand(x.shape)
        sums = sums.scatter_add(-1, index, x.masked_fill(~self.there[..., None, :], 0))
        return sums / self.counts[..., None, :].clamp(min=1)

    def kept(self, o: Tensor) -> Tensor:
        return o.masked_fill(~self.there[..., None, :], 0)

    def spread(self, s: Tensor) -> Tensor:
        lead = torch.broadcast_shapes(s.shape[:-1], (*self.index.shape[:-1], 1))
        return s.expand(*lead, -1).gather(-1, self.index[..., None, :].expand(*lead, -1))

    def at_last(self, s: Tensor) -> Tensor:
        return s.gather(-1, self.index[..., None, -1:].expand(*s.shape[:-1], 1))[..., 0]

    def mirror(self, s: Tensor) -> Tensor:
        assert isinstance(self.seen, Tensor)
        source = self.seen[..., None, None] - 1 - torch.arange(self.tokens, device=self.device)
        return s.gather(-1, source.clamp(min=0).expand(s.shape))  # arbitrary past the last position: nothing reads it

    @property
    def last(self) -> Tensor:
        return self.first + self.index[..., -1]


def places(
    tokens: int,
    lead: tuple[int, ...],
    device: torch.device,
    *,
    is_causal: bool,
    present: Bool[Tensor, "..."] | None,
    words: Int[Tensor, "..."] | None,
    before: Int[Tensor, "*lead h"] | None,
) -> Places:
    """The places of N tokens in the batch `lead`, given which are present (*lead, h, N), the numbers of their words
    (*lead, N), and the position of the last token of the previous call. Raises ValueError as `word_starts` does."""
    first: Tensor | int = (NONE if is_causal else 0) if before is None else before
    if present is None and words is None:
        return Places(tokens, device, first, None if is_causal else tokens)
    there = torch.ones(*lead, 1, tokens, dtype=torch.bool, device=device) if present is None else present
    new = there if words is None else word_starts(words, there)
    index = (new.cumsum(-1) - int(not is_causal)).clamp(min=0)
    counts = index.new_zeros(*index.shape[:-1], tokens + is_causal).scatter_add(-1, index, there.long())
    return Ranked(tokens, device, first, None if is_causal else new.sum(-1), index, there, counts)


def word_starts(words: Int[Tensor, "*lead N"], there: Bool[Tensor, "*lead h N"]) -> Bool[Tensor, "*lead h N"]:
    """At which tokens a word starts.

    Raises ValueError, on the CPU, if the numbers of tokens that are there are below 0 or fall.
    """
    numbers = torch.where(there, words.long()[..., None, :], NONE)
    checks.within("words", "numbers of words", numbers.masked_fill(~there, 0), 0, inf)
    highest = pad(numbers, (1, 0), value=NONE).cummax(-1).values
    steps = (numbers - highest[..., :-1]).masked_fill(~there, 0)
    checks.within("words", "steps from a number to the next", steps, 0, inf)
    return steps > 0
