r"""What a positional pattern is: attention weights that are a function of the positions alone, with nothing to train.

A pattern gives the key at j a weight $w(i, j, n)$ in the row of the query at i, where n is how many tokens the row
sees, and the row is divided by its sum. In a causal call a row sees the tokens up to its own: it is the last row of the
same pattern on i + 1 tokens. So the weights of later keys are removed and the others renormalised, and what counts from
the end of the sequence counts from the query.

The fast forms add up what lies behind a position and its own term; in a call that is not causal also what lies ahead,
which is what lies behind in the mirrored pattern on the mirrored sequence. Positions are their last axis.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ortho import _checks
from ortho._typing import Float, Tensor

EMPTY = ("zero", "self")


@dataclass(frozen=True)
class PositionalPattern(ABC):
    """What a head with fixed weights attends to.

    In the fast forms u (..., V, P) are the values at positions r, integers (P,) or (..., 1, P) which follow each other,
    and `after`, of the same shape, is how many positions a row sees behind its own: n - 1 - r, or 0 in a causal call.
    """

    name: str
    wide: ClassVar[bool] = False  # whether the sums need float64

    @abstractmethod
    def weight(self, i: Any, j: Any, n: Any) -> Any:
        """w(i, j, n), at least 0, before normalisation; for integers, and for tensors that broadcast."""

    @abstractmethod
    def mirrored(self) -> "PositionalPattern":
        """The pattern in which start and end have changed places."""

    @property
    def normalised(self) -> bool:
        """Whether rows are divided by their sums."""
        return True

    @property
    @abstractmethod
    def memory(self) -> int:
        """How many vectors a row needs of the positions behind it; 0 if it does not look there."""

    @abstractmethod
    def behind(self, u: Tensor, before: Tensor, r: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The rows' sums over the positions behind their own, (..., V, P); and the vectors that each row needs for it,
        `memory` times (..., V, P), of which `before` (..., V, memory) are the first row's."""

    @abstractmethod
    def own(self, r: Tensor) -> Tensor | float:
        """The weight of a row's own position, beside what is `behind` it."""

    def total(self, r: Tensor, after: Tensor) -> Tensor | None:
        """What the rows' sums are to be divided by, positive for empty rows too; None if by nothing."""
        return None

    def empty(self, r: Tensor, after: Tensor) -> Tensor | None:
        """Which rows have no weight at all; None if there are no such rows."""
        return None

    def whole(self, u: Tensor, r: Tensor, after: Tensor, mirror: Callable[[Tensor], Tensor]) -> Tensor:
        """The rows' sums over all positions; `mirror` puts the positions in reverse order."""
        behind, ahead = None, None
        if self.memory:
            behind, _ = self.behind(u, u.new_zeros(*u.shape[:-1], self.memory), r)
        if (other := self.mirrored()).memory:
            ahead, _ = other.behind(mirror(u), u.new_zeros(*u.shape[:-1], other.memory), r)
            ahead = mirror(ahead)
        return added(u, behind, times(self.own(r), u), ahead)

    def weights(self, n: int, *, is_causal: bool = False, empty: str = "zero") -> Float[Tensor, "n n"]:
        """The definition: the n x n matrix of weights, float64. Rows sum to 1, but for empty ones and for Gaussians
        that are not normalised.

        Empty rows are rows of zeros; with `empty="self"` their weight is on the token itself. Raises TypeError or
        ValueError for n below 1 and for another policy.
        """
        _checks.positive_int("n", n)
        _checks.one_of("empty", empty, EMPTY)
        i, j = torch.arange(n)[:, None], torch.arange(n)
        seen = i + 1 if is_causal else torch.full_like(i, n)
        w = (self.weight(i, j, seen) * (j < seen)).double()
        if not self.normalised:
            return w
        sums = w.sum(-1, keepdim=True)
        w = w / sums.masked_fill(sums == 0, 1)
        return w + torch.eye(n) * (sums == 0) if empty == "self" else w


def windows(u: Tensor, before: Tensor) -> list[Tensor]:
    """The values so many places behind each position as there are in `before`, and of fewer, down to one."""
    line = torch.cat([before.to(u.dtype), u], -1)
    return [line[..., start : start + u.shape[-1]] for start in range(before.shape[-1])]


def running(first: Tensor, steps: Tensor) -> Tensor:
    """`first` (..., V, 1), and it with more and more of the steps (..., V, P - 1) added: (..., V, P)."""
    return torch.cat([first, steps], -1).cumsum(-1)


def times(weight: Tensor | float, x: Tensor) -> Tensor | None:
    """The product, without multiplying by 1; None for 0."""
    if isinstance(weight, float):
        return None if weight == 0 else x if weight == 1 else weight * x
    return weight * x


def added(like: Tensor, *terms: Tensor | None) -> Tensor:
    """The sum of what there is of the terms; zeros if there is nothing."""
    there = [term for term in terms if term is not None]
    return sum(there[1:], start=there[0]) if there else 0 * like
