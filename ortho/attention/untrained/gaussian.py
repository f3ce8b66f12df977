r"""Hard-coded Gaussian attention (You, Sun & Iyyer 2020, arXiv:2005.00742): a normal law about a neighbouring token."""

from dataclasses import dataclass
from math import ceil, exp, isfinite, pi, sqrt
from typing import Any

import torch
from torch.nn.functional import embedding, pad

from ortho import _checks
from ortho._checks import checked
from ortho._typing import Tensor
from ortho.attention.chunking import CHUNK
from ortho.attention.untrained.pattern import PositionalPattern, windows

# Standard deviations at which the weights are cut off. What lies further out, on one side, sums to less than the
# integral, erfc(9 / sqrt 2) / 2 = 1.2e-19, the thousandth part of what rounding a row's sum to float64 may change.
REACH = 9
FURTHEST = 8  # standard deviations from a token to the centre, where rows are divided by their sums


@checked
@dataclass(frozen=True)
class Gaussian(PositionalPattern):
    r"""The density $e^{-(j - i - o)^2 / 2 \sigma^2} / (\sigma \sqrt{2 \pi})$ of a normal law about the token `offset`
    places further on.

    As published rows are not divided by their sums: they lose what lies beyond the ends of the sequence and, in causal
    calls, in the future. `normalise` divides them. The paper's encoder has heads with offsets -1 and 1, its decoder
    with -1 and 0.

    The fast form leaves out keys further than `REACH` sigma from the centre, or from the token where that lies further
    out; up to there it reads zeros where there are no keys. Raises TypeError or ValueError for an offset that is not
    finite and for sigma not above 0; with `normalise` also for a centre more than `FURTHEST` sigma from the token,
    since rows near an end would then divide by next to 0.
    """

    offset: float | int = 0.0
    sigma: float | int = 1.0
    normalise: bool = False

    def __post_init__(self) -> None:
        for name, value in (("offset", self.offset), ("sigma", self.sigma)):
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise TypeError(f"{name}: expected a number, got {_checks.describe(value)}")
            if not isfinite(value):
                raise ValueError(f"{name}: expected a finite number, got {value}")
        least = abs(self.offset) / FURTHEST if self.normalise else 0
        if self.sigma <= 0 or self.sigma < least:
            wanted = f"at least |offset| / {FURTHEST} = {least:.3g}" if least else "a positive number"
            raise ValueError(f"sigma: expected {wanted}, got {self.sigma}")

    @property
    def normalised(self) -> bool:
        return self.normalise

    def weight(self, i: Any, j: Any, n: Any) -> Any:
        places = torch.as_tensor(j - i, dtype=torch.float64)
        return torch.exp(-(((places - self.offset) / self.sigma) ** 2) / 2) / (self.sigma * sqrt(2 * pi))

    def mirrored(self) -> "Gaussian":
        return Gaussian(self.name, -self.offset, self.sigma, self.normalise)

    @property
    def memory(self) -> int:
        return ceil(REACH * self.sigma + max(0.0, -self.offset))

    def behind(self, u: Tensor, before: Tensor, r: Tensor) -> tuple[Tensor, list[Tensor]]:
        R, P = self.memory, u.shape[-1]
        width = min(P, max(CHUNK, R))
        number = -(-P // width)
        line = torch.cat([before.to(u.dtype), u], -1)
        if number > 1:  # a chunk of rows reads its own places and R before them
            blocks = pad(line, (0, (number + 1) * width - R - P)).unflatten(-1, (number + 1, width))
            line = torch.cat([blocks[..., :-1, :], blocks[..., 1:, :R]], -1)  # (..., V, number, width + R)
        sums = line @ self._band(width).to(u)
        return (sums.flatten(-2)[..., :P] if number > 1 else sums), windows(u, before)

    def _band(self, width: int) -> Tensor:
        """(R + width, width): the weight that row q of a chunk gives to place s, q - s + R places behind it."""
        line = [0.0] * width + [self._density(-x) for x in range(1, self.memory + 1)] + [0.0] * (width - 1)
        return torch.tensor(line, dtype=torch.float64).unfold(0, width, 1).flip(0)

    def _density(self, place: int) -> float:
        return exp(-(((place - self.offset) / self.sigma) ** 2) / 2) / (self.sigma * sqrt(2 * pi))

    def own(self, r: Tensor) -> float:
        return self._density(0)

    def total(self, r: Tensor, after: Tensor) -> Tensor | None:
        return self._density(0) + self._sums(r) + self.mirrored()._sums(after) if self.normalise else None

    def _sums(self, count: Tensor) -> Tensor:
        """The sum of the weights of so many positions behind a row."""
        taps = torch.tensor([0.0, *(self._density(-x) for x in range(1, self.memory + 1))], dtype=torch.float64)
        return embedding(count.clamp(0, self.memory), taps.cumsum(0)[:, None].to(count.device))[..., 0]


GAUSSIANS = (Gaussian("gaussian -1", -1.0), Gaussian("gaussian 0"), Gaussian("gaussian +1", 1.0))
