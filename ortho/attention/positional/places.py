"""The positions of tokens in a positional pattern: the rank of a token's word among the words that are there.

A position holds a word, whose value is the mean of its tokens' values; without `words` each token is a word. A masked
token has no position. A causal call starts at the position of the last word before the call, since its first tokens may
belong to that word.
"""

from dataclasses import dataclass, replace
from math import inf
from typing import Any, NamedTuple

import torch

from ortho import checks
from ortho._typing import Bool, Int, Tensor

NONE = -1  # the number of the position, and of the word, before the first


class Last(NamedTuple):
    """The last token of a call: its position, how many tokens its word has so far, and the number of the word."""

    position: Int[Tensor, "*lead h"]
    started: Int[Tensor, "*lead h"]
    word: Int[Tensor, "*lead h"]


@dataclass(frozen=True)
class Places:
    """N tokens, each at a position of its own; in a causal call these follow a first position, that of the word before.

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
        the first position's value from before the call."""
        return x if before is None else torch.cat([before[..., None], x], -1)

    def so_far(self, x: Tensor, before: Tensor) -> Tensor:
        """The mean of each token's word up to the token, (..., V, N); in time O(N V log L) for words of L tokens."""
        return x

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
    def last(self) -> Last:
        position = torch.as_tensor(self.first, device=self.device) + self.tokens
        return Last(position, torch.ones_like(position), torch.full_like(position, NONE))


@dataclass(frozen=True)
class Ranked(Places):
    """N tokens, some of which are masked or share a position.

    index (..., N): which of the positions a token stands at; there (..., N): whether it is not masked; counts (..., P):
    how many tokens stand at a position, including, at the first, the `started` (...) ones from before the call; word
    (...): the number of the last word, None if each token is a word.
    """

    index: Int[Tensor, "... N"]
    there: Bool[Tensor, "... N"]
    counts: Int[Tensor, "... P"]
    started: Int[Tensor, "..."]
    word: Int[Tensor, "..."] | None

    def pool(self, x: Tensor, before: Tensor | None) -> Tensor:
        sums = x.new_zeros(*x.shape[:-1], self.counts.shape[-1])
        if before is not None:
            sums[..., 0] = before * self.started[..., None]
        index = self.index[..., None, :].expand(x.shape)
        sums = sums.scatter_add(-1, index, x.masked_fill(~self.there[..., None, :], 0))
        return sums / self.counts[..., None, :].clamp(min=1)

    def so_far(self, x: Tensor, before: Tensor) -> Tensor:
        if self.word is None:
            return x
        index, there = self.index[..., None, :], self.there[..., None, :]
        sums, counts = x.masked_fill(~there, 0), there.to(x.dtype)
        step = 1  # each sum covers `step` tokens up to its own, or fewer if the word starts later
        while step < self.tokens and bool((same := index[..., step:] == index[..., :-step]).any()):
            sums, counts = (
                torch.cat([s[..., :step], s[..., step:] + s[..., :-step] * same], -1) for s in (sums, counts)
            )
            step *= 2
        started = self.started[..., None, None] * (index == 0)
        return (sums + before[..., None] * started) / (counts + started).clamp(min=1)

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
    def last(self) -> Last:
        at = self.index[..., -1:]
        started = self.counts.gather(-1, at)[..., 0]
        word = torch.full_like(started, NONE) if self.word is None else self.word
        return Last(self.first + at[..., 0], started, word)


def places(
    tokens: int,
    lead: tuple[int, ...],
    device: torch.device,
    *,
    is_causal: bool,
    present: Bool[Tensor, "..."] | None,
    words: Int[Tensor, "..."] | None,
    before: Last | None,
) -> Places:
    """The places of N tokens in the batch `lead`, given which are present (*lead, h, N), the numbers of their words
    (*lead, N), and the last token of the previous call. Raises ValueError as `word_starts` does."""
    first: Tensor | int = (NONE if is_causal else 0) if before is None else before.position
    if present is None and words is None:
        return Places(tokens, device, first, None if is_causal else tokens)
    h = 1 if before is None else before.position.shape[-1]
    there = torch.ones(*lead, h, tokens, dtype=torch.bool, device=device) if present is None else present
    new, word = there, None
    if words is not None:
        new, word = word_starts(words, there, None if before is None else before.word)
    index = (new.cumsum(-1) - int(not is_causal)).clamp(min=0)
    started = torch.zeros_like(index[..., 0]) if before is None else before.started
    counts = index.new_zeros(*index.shape[:-1], tokens + is_causal).scatter_add(-1, index, there.long())
    if is_causal:
        counts[..., 0] += started
    seen = None if is_causal else new.sum(-1)
    return Ranked(tokens, device, first, seen, index, there, counts, started, word)


def word_starts(
    words: Int[Tensor, "*lead N"], there: Bool[Tensor, "*lead h N"], before: Int[Tensor, "*lead h"] | None
) -> tuple[Bool[Tensor, "*lead h N"], Int[Tensor, "*lead h"]]:
    """At which tokens a word starts, and the number of the last word; `before` is the number of the word before.

    Raises ValueError, on the CPU, if the numbers of tokens that are there are below 0 or fall.
    """
    numbers = torch.where(there, words.long()[..., None, :], NONE)
    checks.within("words", "numbers of words", numbers.masked_fill(~there, 0), 0, inf)
    known = torch.full_like(numbers[..., 0], NONE) if before is None else before
    highest = torch.cat([known[..., None], numbers], -1).cummax(-1).values
    steps = (numbers - highest[..., :-1]).masked_fill(~there, 0)
    checks.within("words", "steps from a number to the next", steps, 0, inf)
    return steps > 0, highest[..., -1]
