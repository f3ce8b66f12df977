r"""Two ways to write a delta rule that forgets, and the exact map from one to the other.

The `input` form gates the old memory and the error apart (stored here as (K, V), with answers $S^T q$):

$$S_t = \gamma_t S_{t-1} + \eta_t k_t (v_t - S_{t-1}^T k_t)^T .$$

The `erasing` form is Gated DeltaNet's (Yang et al. 2024, arXiv:2412.06464): the memory fades first, and the error is
that of what is left, $S_t = (I - \beta_t k_t k_t^T)\, a_t S_{t-1} + \beta_t k_t v_t^T$. The first is the second with
$a = \gamma$, $\beta = \eta / \gamma$ and the values $\gamma v$. It multiplies the memory by $\gamma - \eta |k|^2$
along k and by $\gamma$ elsewhere, so that it contracts exactly where $|\gamma| \le 1$ and
$|\gamma - \eta |k|^2| \le 1$. Gated DeltaNet's ranges, $0 < a \le 1$ and $0 \le \beta |k|^2 \le 2$, cover of that the
part $0 < \gamma \le 1$, $0 \le \eta |k|^2 \le 2 \gamma$.

With one gate a channel, $\mathrm{Diag}(\gamma_t) S_{t-1}$, there is no such map: $\mathrm{Diag}(\gamma) - \eta k k^T$
is $(I - \eta k l^T) \mathrm{Diag}(\gamma)$ with $l = k / \gamma$, which is not parallel to k.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from ortho._checks import checked
from ortho._typing import Float, Tensor

__all__ = ["ErasingForm", "affinity_error", "as_erasing", "contracts", "gated_recurrence", "gated_step", "maps"]


class ErasingForm(NamedTuple):
    """Operands of Gated DeltaNet's form beside q and k: `v`, `beta` and `log_decay`."""

    v: Float[Tensor, "*batch N V"]
    beta: Float[Tensor, "*batch N"]
    log_decay: Float[Tensor, "*batch N"]


def gated_step(S: Tensor, k: Tensor, v: Tensor, gamma: Tensor, eta: Tensor) -> Float[Tensor, "*batch K V"]:
    """One step of the input form: S (..., K, V), k (..., K), v (..., V), gates (...) or, for gamma, (..., K)."""
    kept = gamma[..., None] if gamma.dim() == k.dim() else gamma[..., None, None]
    error = v[..., None, :] - k[..., None, :] @ S  # (..., 1, V)
    return kept * S + eta[..., None, None] * k[..., None] * error


@checked
def gated_recurrence(
    q: Float[Tensor, "*batch N K"],
    k: Float[Tensor, "*batch N K"],
    v: Float[Tensor, "*batch N V"],
    gamma: Float[Tensor, "..."],
    eta: Float[Tensor, "*batch N"],
) -> Float[Tensor, "*batch N V"]:
    """The input form over a sequence, from an empty memory; gamma is (..., N) or (..., N, K)."""
    if gamma.shape not in (k.shape[:-1], k.shape):
        wanted = f"{tuple(k.shape[:-1])} or {tuple(k.shape)}"
        raise ValueError(f"gamma: expected shape {wanted}, got {tuple(gamma.shape)}")
    S = v.new_zeros(*k.shape[:-2], k.shape[-1], v.shape[-1])
    rows = []
    for t in range(k.shape[-2]):
        kept = gamma[..., t, :] if gamma.dim() == k.dim() else gamma[..., t]
        S = gated_step(S, k[..., t, :], v[..., t, :], kept, eta[..., t])
        rows.append(q[..., t, None, :] @ S)
    return torch.cat(rows, -2)


@checked
def as_erasing(
    v: Float[Tensor, "*batch N V"], gamma: Float[Tensor, "*batch N"], eta: Float[Tensor, "*batch N"]
) -> ErasingForm:
    """The operands with which Gated DeltaNet computes what the input form does; ValueError for a gamma not above 0."""
    if not (gamma > 0).all():
        raise ValueError(f"gamma: expected numbers above 0, got {float(gamma.min()):.3g}")
    return ErasingForm(gamma[..., None] * v, eta / gamma, gamma.log())


@checked
def contracts(gamma: float, eta: float, length: float = 1.0) -> bool:
    """Whether a step with these gates and a key of this length enlarges nothing that is in the memory."""
    return abs(gamma) <= 1 and abs(gamma - eta * length**2) <= 1


@checked
def maps(gamma: float, eta: float, length: float = 1.0) -> bool:
    """Whether `as_erasing` gives gates within Gated DeltaNet's ranges, for a key of this length."""
    return 0 < gamma <= 1 and 0 <= eta * length**2 <= 2 * gamma


@checked
def affinity_error(
    step: Callable[[Tensor], Tensor], one: Float[Tensor, "*shape"], other: Float[Tensor, "*shape"]
) -> float:
    """How far a step is from affine, between two memories: the relative distance of its value half way from the mean.

    Steps $S \\to A_t S + B_t$ with $A_t$ and $B_t$ made of the input alone can be composed before S is known, which is
    what computing a sequence in parallel rests on; for such a step this is 0.
    """
    half, mean = step((one + other) / 2), (step(one) + step(other)) / 2
    return float((half - mean).norm() / mean.norm())
