r"""Losses that a state minimises as it learns while it reads: of a prediction $p = S^T k$ of the value v.

Each loss has its values and its derivative $\psi = \partial \ell / \partial p$; the gradient in S is $k \psi^T$.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from ortho import checks
from ortho._typing import Bool, Float, Size

__all__ = ["Contrastive", "Huber", "Squared", "TokenLoss"]


class TokenLoss(ABC):
    """A loss of predictions p (..., n, V) of the last n values of v (..., m, V), one number per prediction (..., n).

    Any values before these are the rest of the mini-batch so far. The loss of a prediction may depend on values before
    its own, but never on later ones. `hidden` (..., m) is True for values that count as absent.
    """

    # The largest eigenvalue of the loss's second derivative in p, None where it depends on the values. A step of size
    # eta along the gradient does not overshoot by more than it corrects if eta |k|^2 times this is at most 2.
    curvature: ClassVar[int | None] = 1
    looks_back: ClassVar[bool] = False  # whether it looks at the values before a prediction's own

    @abstractmethod
    def __call__(
        self,
        p: Float[Tensor, "*batch n V"],
        v: Float[Tensor, "*batch m V"],
        hidden: Bool[Tensor, "*batch m"] | None = None,
    ) -> Float[Tensor, "*batch n"]: ...

    @abstractmethod
    def gradient(
        self,
        p: Float[Tensor, "*batch n V"],
        v: Float[Tensor, "*batch m V"],
        hidden: Bool[Tensor, "*batch m"] | None = None,
    ) -> Float[Tensor, "*batch n V"]:
        """psi (..., n, V)."""

    @abstractmethod
    def flops(self, pairs: Size, V: Size) -> tuple[Size, Size]:
        """FLOPs, forward and backward, of the matrix products in calls of `gradient`, by the calls' sum of n m."""

    def into_predictions(self, pairs: Size, V: Size) -> Size:
        """The part of `flops`' backward FLOPs that is done only if predictions need a gradient."""
        return 0


def _own(p: Tensor, v: Tensor) -> Tensor:
    """The values of the predictions: the last n."""
    return v[..., v.shape[-2] - p.shape[-2] :, :]


class _OfResidual(TokenLoss):
    """A loss of the residual r = p - v."""

    @abstractmethod
    def of(self, r: Tensor) -> Tensor:
        """The loss of residuals, (..., n, V) -> (..., n)."""

    @abstractmethod
    def influence(self, r: Tensor) -> Tensor:
        """The derivative of `of`, with the shape of r."""

    def __call__(self, p: Tensor, v: Tensor, hidden: Tensor | None = None) -> Tensor:
        return self.of(p - _own(p, v))

    def gradient(self, p: Tensor, v: Tensor, hidden: Tensor | None = None) -> Tensor:
        return self.influence(p - _own(p, v))

    def flops(self, pairs: Size, V: Size) -> tuple[Size, Size]:
        return 0, 0


@dataclass(frozen=True)
class Squared(_OfResidual):
    """|r|^2 / 2, whose derivative is r: a step of gradient descent is the delta rule (Sun et al. 2024,
    arXiv:2407.04620, section 2.2; Yang et al. 2024, arXiv:2406.06484, section 2.2)."""

    def of(self, r: Tensor) -> Tensor:
        return r.square().sum(-1) / 2

    def influence(self, r: Tensor) -> Tensor:
        return r


@dataclass(frozen=True)
class Huber(_OfResidual):
    r"""Huber's loss of each number: r^2 / 2 up to `delta`, delta (|r| - delta / 2) beyond (Huber 1964); its derivative
    is r clipped to $\pm$ delta. In a memory: Yaad (Behrouz et al. 2025, arXiv:2504.13173). ValueError for delta <= 0.
    """

    delta: float = 1.0

    def __post_init__(self) -> None:
        checks.expect(self.delta > 0, "delta", "a positive number", self.delta)

    def of(self, r: Tensor) -> Tensor:
        inside = r.clamp(-self.delta, self.delta)
        return (inside * (r - inside / 2)).sum(-1)

    def influence(self, r: Tensor) -> Tensor:
        return r.clamp(-self.delta, self.delta)


@dataclass(frozen=True)
class Contrastive(TokenLoss):
    r"""$-\log \mathrm{softmax}_i(v_j^T p / \tau)$ over candidates j: InfoNCE (van den Oord et al. 2018,
    arXiv:1807.03748, equation 4) between a prediction and the values, with `temperature` $\tau$.

    A token's candidates are the values of its mini-batch up to its own, and the zero vector, whose score is 0. Without
    it, the first token of a mini-batch would have no other candidate, and write nothing. With mini-batches of one token
    the loss is $\log(1 + e^{-v^T p / \tau})$. psi is the candidates' mean under the softmax minus the token's own
    value, over tau. It sets the direction of the prediction, not its length. ValueError for temperature <= 0.
    """

    temperature: float = 1.0
    curvature = None
    looks_back = True

    def __post_init__(self) -> None:
        checks.expect(self.temperature > 0, "temperature", "a positive number", self.temperature)

    def _scores(self, p: Tensor, v: Tensor, hidden: Tensor | None) -> Tensor:
        """(..., n, 1 + m), the zero vector first."""
        n, m = p.shape[-2], v.shape[-2]
        later = torch.ones(n, m, dtype=torch.bool, device=p.device).triu(1 + m - n)
        absent = later if hidden is None else later | hidden[..., None, :]
        # The lowest finite number in place of -inf; its weight is exactly 0, as the zero vector's score is finite.
        scores = (p @ v.mT / self.temperature).masked_fill(absent, torch.finfo(p.dtype).min)
        return pad(scores, (1, 0))

    def __call__(self, p: Tensor, v: Tensor, hidden: Tensor | None = None) -> Tensor:
        n = p.shape[-2]
        return -self._scores(p, v, hidden).log_softmax(-1).diagonal(1 + v.shape[-2] - n, -2, -1)

    def gradient(self, p: Tensor, v: Tensor, hidden: Tensor | None = None) -> Tensor:
        weights = self._scores(p, v, hidden).softmax(-1)[..., 1:]
        return (weights @ v - _own(p, v)) / self.temperature

    def flops(self, pairs: Size, V: Size) -> tuple[Size, Size]:
        return 4 * pairs * V, 8 * pairs * V

    def into_predictions(self, pairs: Size, V: Size) -> Size:
        return 2 * pairs * V
