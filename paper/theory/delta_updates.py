r"""Other steps than the delta rule's: several keys at once, and gates on the memory and on the error.

*Several keys at once*: all errors are taken from the old memory, or each from the memory that the key before it left.
One step of the delta rule for n keys could be $S + \sum_j \beta_j k_j (v_j - S^T k_j)^T$, a sum of n outer products
made of the old memory alone: `at_once`. Or the keys are written one after the other, which DeltaProduct does (Siems et
al. 2025, arXiv:2502.10297): `in_turn`. Both add $U^T D$ with the keys as rows of U (n, K) and some errors D (n, V). For
one key they are the same. What was in the memory is multiplied by

$$I - \sum_j \beta_j k_j k_j^T \qquad \text{and} \qquad (I - \beta_n k_n k_n^T) \cdots (I - \beta_1 k_1 k_1^T).$$

The second is a product of contractions for unit keys and $0 \le \beta_j \le 2$. The first is one exactly if
$\sum_j \beta_j k_j k_j^T$ has no eigenvalue above 2. That is so for orthogonal keys, and for $\sum_j \beta_j \le 2$.
For two keys with the cosine c and the same strength $\beta$ the eigenvalues are $\beta (1 \pm c)$, so the condition
fails if $\beta (1 + |c|) > 2$: each token then flips and enlarges what lies along nearly parallel keys.

*Gated forms*: two ways to write a delta rule that forgets, and the exact map from one to the other. The `input` form
gates the old memory and the error separately (stored here as (K, V), with answers $S^T q$):

$$S_t = \gamma_t S_{t-1} + \eta_t k_t (v_t - S_{t-1}^T k_t)^T .$$

The `erasing` form is Gated DeltaNet's (Yang et al. 2024, arXiv:2412.06464): the memory fades first, and the error is
taken from what is left, $S_t = (I - \beta_t k_t k_t^T)\, a_t S_{t-1} + \beta_t k_t v_t^T$. The input form is the
erasing form with $a = \gamma$, $\beta = \eta / \gamma$ and the values $\gamma v$. It multiplies the memory by
$\gamma - \eta |k|^2$ along k and by $\gamma$ elsewhere, so that it contracts exactly where $|\gamma| \le 1$ and
$|\gamma - \eta |k|^2| \le 1$. Gated DeltaNet's ranges, $0 < a \le 1$ and $0 \le \beta |k|^2 \le 2$, cover this part of
it: $0 < \gamma \le 1$, $0 \le \eta |k|^2 \le 2 \gamma$.

With one gate for each channel, $\mathrm{Diag}(\gamma_t) S_{t-1}$, there is no such map:
$\mathrm{Diag}(\gamma) - \eta k k^T$ is $(I - \eta k l^T) \mathrm{Diag}(\gamma)$ with $l = k / \gamma$, which is not
parallel to k. The mechanism 'vector-gated' is this form.
"""

from collections.abc import Callable
from math import sqrt
from typing import NamedTuple

import torch

from ortho._typing import Float, Tensor
from ortho.checks import expect, one_of


def at_once(
    S: Float[Tensor, "*batch K V"],
    k: Float[Tensor, "*batch n K"],
    v: Float[Tensor, "*batch n V"],
    beta: Float[Tensor, "*batch n"],
) -> Float[Tensor, "*batch K V"]:
    """The memory after n keys, with all errors taken from the memory S before them."""
    return S + k.mT @ (beta[..., None] * (v - k @ S))


def in_turn(
    S: Float[Tensor, "*batch K V"],
    k: Float[Tensor, "*batch n K"],
    v: Float[Tensor, "*batch n V"],
    beta: Float[Tensor, "*batch n"],
) -> Float[Tensor, "*batch K V"]:
    """The memory after n keys, written one after the other."""
    for j in range(k.shape[-2]):
        one = slice(j, j + 1)
        S = at_once(S, k[..., one, :], v[..., one, :], beta[..., one])
    return S


def transition(update: str, k: Float[Tensor, "n K"], beta: Float[Tensor, "n"]) -> Float[Tensor, "K K"]:
    """What an update, 'at once' or 'in turn', multiplies the memory by."""
    function = UPDATES[one_of("update", update, UPDATES)]
    K = k.shape[-1]
    return function(torch.eye(K, dtype=k.dtype), k, k.new_zeros(len(k), K), beta)


def pair(cosine: float) -> Float[Tensor, "2 2"]:
    """Two unit keys in the plane, (2, 2), with that cosine."""
    expect(-1 <= cosine <= 1, "cosine", "a number in [-1, 1]", cosine)
    return torch.tensor([[1, 0], [cosine, sqrt(1 - cosine**2)]], dtype=torch.float64)


UPDATES = {"at once": at_once, "in turn": in_turn}


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


def as_erasing(
    v: Float[Tensor, "*batch N V"], gamma: Float[Tensor, "*batch N"], eta: Float[Tensor, "*batch N"]
) -> ErasingForm:
    """The operands with which Gated DeltaNet computes what the input form does; ValueError for a gamma not above 0."""
    expect((gamma > 0).all(), "gamma", "numbers above 0", f"{float(gamma.min()):.3g}")
    return ErasingForm(gamma[..., None] * v, eta / gamma, gamma.log())


def contracts(gamma: float, eta: float, length: float = 1.0) -> bool:
    """Whether a step with these gates and a key of this length enlarges nothing that is in the memory."""
    return abs(gamma) <= 1 and abs(gamma - eta * length**2) <= 1


def maps(gamma: float, eta: float, length: float = 1.0) -> bool:
    """Whether `as_erasing` gives gates within Gated DeltaNet's ranges, for a key of this length."""
    return 0 < gamma <= 1 and 0 <= eta * length**2 <= 2 * gamma


def affinity_error(
    step: Callable[[Tensor], Tensor], one: Float[Tensor, "*shape"], other: Float[Tensor, "*shape"]
) -> float:
    """How far a step is from affine, between two memories: the relative distance of its value at the midpoint from the
    mean of its values.

    Steps $S \\to A_t S + B_t$ with $A_t$ and $B_t$ made of the input alone can be composed before S is known, which
    computing a sequence in parallel relies on; for such a step this is 0.
    """
    half, mean = step((one + other) / 2), (step(one) + step(other)) / 2
    return float((half - mean).norm() / mean.norm())
