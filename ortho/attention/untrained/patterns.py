r"""The seven positional patterns of Raganato, Scherrer & Tiedemann 2020 (arXiv:2002.10260), the mean of the last
tokens, and the list of all.

The paper puts them into encoders, seven heads beside a learned one. It prints weights of tokens 0 to n - 1 that grow
with the cube of the place, $(j + 1)^3$, and does not say what the rows hold that have nothing to attend to.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from ortho import _checks
from ortho._checks import checked
from ortho._typing import Tensor
from ortho.attention.untrained.gaussian import GAUSSIANS
from ortho.attention.untrained.pattern import PositionalPattern, running, windows


@checked
@dataclass(frozen=True)
class Shift(PositionalPattern):
    r"""All weight on the token `offset` places further on, $\delta_{j, i + o}$: current, previous or next token.

    The fast form takes as long as for |offset| tokens more. Raises TypeError for an offset that is not an integer.
    """

    offset: int

    def __post_init__(self) -> None:
        if isinstance(self.offset, bool) or not isinstance(self.offset, int):
            raise TypeError(f"offset: expected an integer, got {_checks.describe(self.offset)}")

    def weight(self, i: Any, j: Any, n: Any) -> Any:
        return (j == i + self.offset) * 1

    def mirrored(self) -> "Shift":
        return Shift(self.name, -self.offset)

    @property
    def memory(self) -> int:
        return max(0, -self.offset)

    def behind(self, u: Tensor, before: Tensor, r: Tensor) -> tuple[Tensor, list[Tensor]]:
        last = windows(u, before)
        return last[0], last

    def own(self, r: Tensor) -> float:
        return float(self.offset == 0)

    def empty(self, r: Tensor, after: Tensor) -> Tensor | None:
        return (r if self.offset < 0 else after) < abs(self.offset) if self.offset else None


@checked
@dataclass(frozen=True)
class Context(PositionalPattern):
    r"""What lies two places or more to the left, $(j + 1)^3$ for $j \le i - 2$; or, mirrored, to the right."""

    left: bool
    wide: ClassVar[bool] = True

    def weight(self, i: Any, j: Any, n: Any) -> Any:
        return (j + 1) ** 3 * (j <= i - 2) if self.left else (n - j) ** 3 * (j >= i + 2)

    def mirrored(self) -> "Context":
        return Context(self.name, not self.left)

    @property
    def memory(self) -> int:
        return 2 if self.left else 0

    def behind(self, u: Tensor, before: Tensor, r: Tensor) -> tuple[Tensor, list[Tensor]]:
        (last,) = windows(u, before[..., 1:])
        sums = running(before[..., :1], (cubes(r) * last)[..., :-1])  # position r - 1 joins the sum in row r + 1
        return sums, [sums, last]

    def own(self, r: Tensor) -> float:
        return 0.0

    def total(self, r: Tensor, after: Tensor) -> Tensor:
        return sum_of_cubes((r if self.left else after) - 1)

    def empty(self, r: Tensor, after: Tensor) -> Tensor:
        return (r if self.left else after) < 2


@checked
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
    def memory(self) -> int:
        return 1 if self.end else 4

    def behind(self, u: Tensor, before: Tensor, r: Tensor) -> tuple[Tensor, list[Tensor]]:
        if self.end:
            sums = running(before, (cubes(r + 1) * u)[..., :-1])
            return sums, [sums]
        # Of the values x = r - j places back, sums with weights 1, x, x (x + 1) / 2 and x (x + 1) (x + 2) / 6. No terms
        # of (x + 1)^3 = 6 x (x + 1) (x + 2) / 6 + x + 1 are negative, so that nothing cancels.
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


@checked
@dataclass(frozen=True)
class Recent(PositionalPattern):
    """The mean of a token and of the `width` - 1 before it; or, `ahead`, of those behind it.

    Raises TypeError or ValueError for a width below 1.
    """

    width: int
    ahead: bool = False

    def __post_init__(self) -> None:
        _checks.positive_int("width", self.width)

    def weight(self, i: Any, j: Any, n: Any) -> Any:
        places = j - i if self.ahead else i - j
        return (places >= 0) * (places < self.width) * 1

    def mirrored(self) -> "Recent":
        return Recent(self.name, self.width, not self.ahead)

    @property
    def memory(self) -> int:
        return 0 if self.ahead else self.width - 1

    def behind(self, u: Tensor, before: Tensor, r: Tensor) -> tuple[Tensor, list[Tensor]]:
        last = windows(u, before)
        return sum(last[1:], start=last[0]), last

    def own(self, r: Tensor) -> float:
        return 1.0

    def total(self, r: Tensor, after: Tensor) -> Tensor:
        return ((after if self.ahead else r) + 1).clamp(1, self.width).double()


def cubes(m: Tensor) -> Tensor:
    """m^3 for integers, float64: exact up to 2e5, and rounded once above."""
    return m.double() ** 3


def sum_of_cubes(m: Tensor) -> Tensor:
    """1^3 + 2^3 + ... + m^3 for integers, float64, rounded once; 1 for m below 1, where there is nothing to divide."""
    m = m.clamp(min=1)
    return (m * (m + 1) // 2).double() ** 2


SEVEN = (
    Shift("current", 0),
    Shift("previous", -1),
    Shift("next", 1),
    Context("left", left=True),
    Context("right", left=False),
    Border("end", end=True),
    Border("start", end=False),
)
RECENT = Recent("recent", 8)
PATTERNS: dict[str, PositionalPattern] = {pattern.name: pattern for pattern in (*SEVEN, *GAUSSIANS, RECENT)}
