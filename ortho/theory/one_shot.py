r"""Several keys written at once: all errors taken from the old memory, or each from what the one before it left.

One step of the delta rule for n keys could be $S + \sum_j \beta_j k_j (v_j - S^T k_j)^T$, a sum of n outer products
made of the old memory alone: `at_once`. Or the keys are written one after the other, which DeltaProduct does (Siems et
al. 2025, arXiv:2502.10297): `in_turn`. Both add $U^T D$ with the keys as rows of U (n, K) and some errors D (n, V).
For one key they are the same. What was in the memory is multiplied by

$$I - \sum_j \beta_j k_j k_j^T \qquad \text{and} \qquad (I - \beta_n k_n k_n^T) \cdots (I - \beta_1 k_1 k_1^T).$$

The second is a product of contractions for unit keys and $0 \le \beta_j \le 2$. The first is one exactly if
$\sum_j \beta_j k_j k_j^T$ has no eigenvalue above 2. That is so for orthogonal keys, and for $\sum_j \beta_j \le 2$.
For two keys with the cosine c and the same strength $\beta$ the eigenvalues are $\beta (1 \pm c)$, and it is not so if
$\beta (1 + |c|) > 2$: what lies along nearly parallel keys is then turned round and enlarged by each token.
"""

from math import sqrt

import torch

from ortho import _checks
from ortho._checks import checked
from ortho._typing import Float, Tensor

__all__ = ["at_once", "in_turn", "pair", "pair_norm", "repeated", "transition"]


@checked
def at_once(
    S: Float[Tensor, "*batch K V"],
    k: Float[Tensor, "*batch n K"],
    v: Float[Tensor, "*batch n V"],
    beta: Float[Tensor, "*batch n"],
) -> Float[Tensor, "*batch K V"]:
    """The memory after n keys, with all errors taken from the memory S before them."""
    return S + k.mT @ (beta[..., None] * (v - k @ S))


@checked
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


UPDATES = {"at once": at_once, "in turn": in_turn}


@checked
def transition(update: str, k: Float[Tensor, "n K"], beta: Float[Tensor, "n"]) -> Float[Tensor, "K K"]:
    """What an update, 'at once' or 'in turn', multiplies the memory by."""
    function = UPDATES[_checks.one_of("update", update, UPDATES)]
    K = k.shape[-1]
    return function(torch.eye(K, dtype=k.dtype), k, k.new_zeros(len(k), K), beta)


@checked
def pair(cosine: float, *, dtype: torch.dtype = torch.float64) -> Float[Tensor, "2 2"]:
    """Two unit keys in the plane, (2, 2), with that cosine."""
    if not -1 <= cosine <= 1:
        raise ValueError(f"cosine: expected a number in [-1, 1], got {cosine}")
    return torch.tensor([[1, 0], [cosine, sqrt(1 - cosine**2)]], dtype=dtype)


@checked
def pair_norm(cosine: float, beta: float) -> float:
    """The spectral norm of `transition('at once')` for two keys of that cosine: max |1 - beta (1 +- c)|."""
    return max(abs(1 - beta * (1 + cosine)), abs(1 - beta * (1 - cosine)))


@checked
def repeated(
    update: str, k: Float[Tensor, "n K"], v: Float[Tensor, "n V"], beta: Float[Tensor, "n"], steps: int
) -> Float[Tensor, "steps"]:
    """How far the answers at the keys are from their values when one token is repeated: relative errors, (steps,).

    The token brings n keys and values; the memory is empty at first.
    """
    function = UPDATES[_checks.one_of("update", update, UPDATES)]
    S = v.new_zeros(k.shape[-1], v.shape[-1])
    errors = []
    for _ in range(_checks.positive_int("steps", steps)):
        S = function(S, k, v, beta)
        errors.append((k @ S - v).norm() / v.norm())
    return torch.stack(errors)
