r"""Positional patterns: attention weights that are a function of the positions alone, with nothing to train.

A pattern gives the key at j a weight $w(i, j, n)$ in the row of the query at i, where n is how many tokens the row
sees, and the row is divided by its sum. In a causal call a row sees the tokens up to its own: it is the last row of the
same pattern on i + 1 tokens. So the weights of later keys are removed and the others renormalised, and a pattern that
counts from the end of the sequence counts from the query.

The fast forms add a row's sum over the positions before its own (`behind`) and its own term. A call that is not causal
adds the sum over the positions ahead: the sum `behind` of the mirrored pattern on the mirrored sequence. Positions are
the last axis.

The patterns are the seven of Raganato, Scherrer & Tiedemann 2020 (arXiv:2002.10260), and the mean of the last tokens.
The paper puts its patterns into encoders, seven heads beside a learned one. It prints weights of tokens 0 to n - 1 that
grow with the cube of the place, $(j + 1)^3$, and does not say what a row with nothing to attend to holds: here zeros.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ortho import checks
from ortho._typing import Float, Tensor


@dataclass(frozen=True)
class PositionalPattern(ABC):
    """What a head with fixed weights attends to.

    In the fast forms u (..., V, P) are the values at consecutive positions r, integers (P,) or (..., 1, P), and
    `after`, of the shape of r, is how many positions a row sees after its own: n - 1 - r, or 0 in a causal call.
    """

    name: str
    wide: ClassVar[bool] = False  # whether the sums need float64

    @abstractmethod
    def weight(self, i: Any, j: Any, n: Any) -> Any:
        """w(i, j, n), at least 0, before normalisation; for integers, and for tensors that broadcast."""

    @abstractmethod
    def mirrored(self) -> "PositionalPattern":
        """The pattern with start and end of the sequence exchanged."""

    @property
    @abstractmethod
    def vectors(self) -> int:
        """How many vectors a row needs from the positions before its own; 0 if it does not look there."""

    @abstractmethod
    def behind(self, u: Tensor, before: Tensor, r: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The rows' sums over the positions before their own, (..., V, P), and the vectors that each row needs for its
        sum, `vectors` times (..., V, P); `before` (..., V, vectors) are the first row's vectors."""

    @abstractmethod
    def own(self, r: Tensor) -> Tensor | float:
        """The weight of a row's own position, on the scale of the sum `behind` it: a tensor, 0.0 or 1.0."""

    def total(self, r: Tensor, after: Tensor) -> Tensor | None:
        """The divisors of the rows' sums, positive for empty rows too; None if no row needs one."""
        return None

    def whole(self, u: Tensor, r: Tensor, after: Tensor, mirror: Callable[[Tensor], Tensor]) -> Tensor:
        """The rows' sums over all positions; `mirror` puts the positions in reverse order."""
        behind, ahead = None, None
        if self.vectors:
            behind, _ = self.behind(u, u.new_zeros(*u.shape[:-1], self.vectors), r)
        if (other := self.mirrored()).vectors:
            ahead, _ = other.behind(mirror(u), u.new_zeros(*u.shape[:-1], other.vectors), r)
            ahead = mirror(ahead)
        return added(u, behind, times(self.own(r), u), ahead)

    def weights(self, n: int, *, is_causal: bool = False) -> Float[Tensor, "n n"]:
        """The definition: the n x n matrix of weights, float64. Rows sum to 1; a row without any weight is zeros.

        Raises TypeError or ValueError for n below 1.
        """
        checks.positive_int("n", n)
        i, j = torch.arange(n)[:, None], torch.arange(n)
        seen = i + 1 if is_causal else torch.full_like(i, n)
        w = (self.weight(i, j, seen) * (j < seen)).double()
        sums = w.sum(-1, keepdim=True)
        return w / sums.masked_fill(sums == 0, 1)


def windows(u: Tensor, before: Tensor) -> list[Tensor]:
    """The values R places before each position, R - 1 places before it, ..., and one place before it, if `before`
    holds R values."""
    line = torch.cat([before.to(u.dtype), u], -1)
    return [line[..., start : start + u.shape[-1]] for start in range(before.shape[-1])]


def running(first: Tensor, steps: Tensor) -> Tensor:
    """Running sums (..., V, P): `first` (..., V, 1), then with one more of the steps (..., V, P - 1) each time."""
    return torch.cat([first, steps], -1).cumsum(-1)


def times(weight: Tensor | float, x: Tensor) -> Tensor | None:
    """weight * x; x itself if the weight is the float 1, None if it is 0."""
    if isinstance(weight, float):
        return x if weight else None
    return weight * x


def added(like: Tensor, *terms: Tensor | None) -> Tensor:
    """The sum of the terms that are not None; zeros if all are None."""
    there = [term for term in terms if term is not None]
    return sum(there[1:], start=there[0]) if there else 0 * like


@dataclass(frozen=True)
class Near(PositionalPattern):
    r"""The mean of the tokens that are `first` to `last` places further on, $\mathrm{first} \le j - i \le
    \mathrm{last}$: with one distance the current, the previous or the next token, otherwise the last few.

    The fast form takes as long as one with the furthest distance more tokens. Raises ValueError if `last` is before
    `first`.
    """

    first: int
    last: int

    def __post_init__(self) -> None:
        checks.expect(self.first <= self.last, "last", f"at least first = {self.first}", self.last)

    @property
    def width(self) -> int:
        """The number of distances."""
        return self.last - self.first + 1

    def weight(self, i: Any, j: Any, n: Any) -> Any:
        return (j - i >= self.first) * (j - i <= self.last) * 1

    def mirrored(self) -> "Near":
        return Near(self.name, -self.last, -self.first)

    @property
    def vectors(self) -> int:
        return max(0, -self.first)

    def behind(self, u: Tensor, before: Tensor, r: Tensor) -> tuple[Tensor, list[Tensor]]:
        last = windows(u, before)
        return sum(last[1 : self.width], start=last[0]), last

    def own(self, r: Tensor) -> float:
        return float(self.first <= 0 <= self.last)

    def total(self, r: Tensor, after: Tensor) -> Tensor | None:
        if self.width == 1:
            return None
        return (r.clamp(max=-self.first) + after.clamp(max=self.last) + 1).clamp(min=1).double()


@dataclass(frozen=True)
class Context(PositionalPattern):
    r"""All tokens two or more places to the left, by $(j + 1)^3$ for $j \le i - 2$; or, mirrored, to the right."""

    left: bool
    wide: ClassVar[bool] = True

    def weight(self, i: Any, j: Any, n: Any) -> Any:
        return (j + 1) ** 3 * (j <= i - 2) if self.left else (n - j) ** 3 * (j >= i + 2)

    def mirrored(self) -> "Context":
        return Context(self.name, not self.left)

    @property
    def vectors(self) -> int:
        return 2 if self.left else 0

    def behind(self, u: Tensor, before: Tensor, r: Tensor) -> tuple[Tensor, list[Tensor]]:
        (last,) = windows(u, before[..., 1:])
        sums = running(before[..., :1], (cubes(r) * last)[..., :-1])  # position r - 1 joins the sum in row r + 1
        return sums, [sums, last]

    def own(self, r: Tensor) -> float:
        return 0.0

    def total(self, r: Tensor, after: Tensor) -> Tensor:
        return sum_of_cubes((r if self.left else after) - 1)


@dataclass(frozen=True)
class Border(PositionalPattern):
    r"""The whole sequence, with weights $(j + 1)^3$ that grow towards its end; or, mirrored, $(n - j)^3$."""

    end: bool
    wide: ClassVar[bool] = True

    def weight(self, i: Any, j: Any, n: Any) -> Any:
        return (j + 1) ** 3 if self.end else (n - j) ** 3

    def mirrored(self) -> "Border":
        return Border(self.name, not self.end)

    @property
    def vectors(self) -> int:
        return 1 if self.end else 4

    def behind(self, u: Tensor, before: Tensor, r: Tensor) -> tuple[Tensor, list[Tensor]]:
        if self.end:
            sums = running(before, (cubes(r + 1) * u)[..., :-1])
            return sums, [sums]
        # Sums of the values x = r - j places back, with weights 1, x, x (x + 1) / 2 and x (x + 1) (x + 2) / 6. No term
        # of (x + 1)^3 = 6 x (x + 1) (x + 2) / 6 + x + 1 is negative, so nothing cancels.
        orders = [running(before[..., :1], u[..., :-1])]
        for order in range(1, 4):
            orders.append(running(before[..., order : order + 1], orders[-1][..., 1:]))
        return 6 * orders[3] + orders[1] + orders[0], orders

    def own(self, r: Tensor) -> Tensor | float:
        return cubes(r + 1) if self.end else 1.0

    def total(self, r: Tensor, after: Tensor) -> Tensor:
        return sum_of_cubes(r + 1 + after)

    def whole(self, u: Tensor, r: Tensor, after: Tensor, mirror: Callable[[Tensor], Tensor]) -> Tensor:
        return (cubes((r if self.end else after) + 1) * u).sum(-1, keepdim=True)  # one row for all


def cubes(m: Tensor) -> Tensor:
    """m^3 for integers, float64: exact up to 2e5, and rounded once above."""
    return exact(m) ** 3


def sum_of_cubes(m: Tensor) -> Tensor:
    """1^3 + 2^3 + ... + m^3 for integers, float64, rounded once; 1 for m below 1, where there is nothing to divide."""
    m = exact(m.clamp(min=1))
    return (m * (m + 1) / 2) ** 2


def exact(m: Tensor) -> Tensor:
    """Integers in float64, of which powers can be taken.

    Rounding changes no value. It keeps `torch.compile` from computing powers of positions in the integers of indices:
    on a GPU in int32, where 1,291^3 overflows.
    """
    return m.double().round()


SEVEN = (
    Near("current", 0, 0),
    Near("previous", -1, -1),
    Near("next", 1, 1),
    Context("left", left=True),
    Context("right", left=False),
    Border("end", end=True),
    Border("start", end=False),
)
RECENT = Near("recent", -7, 0)
PATTERNS: dict[str, PositionalPattern] = {pattern.name: pattern for pattern in (*SEVEN, RECENT)}
