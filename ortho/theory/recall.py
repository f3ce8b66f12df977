r"""How far back a causal attention head can look with K features: the task is to copy, $o_t = v_{t-r}$.

A head with K features has the weights $A_{tj} = \phi(q_t)^T \phi(k_j) / n_t$ for $j \le t$. Between the tokens up to c
and the rows from c on nothing is masked: that block of A has rank K at most. In it, the $r + 1$ rows from c on must
tell as many tokens apart, those from $c - r$ to c.
"""

import torch

from ortho import _checks
from ortho._checks import checked
from ortho._typing import Float, Tensor
from ortho.attention.linear.feature_maps import Exp
from ortho.attention.linear.linear_attention import kernel_weights

__all__ = ["causal_weights", "copy_error", "copying", "fitted_error", "least_error", "tokens"]

SHARPNESS = 12.0  # a token that is not wanted has at most about exp(-12) of the weight of the one that is
GROUPS = 4
STEPS, RATE = 400, 0.3


@checked
def least_error(distance: int, features: int) -> float:
    """What `copy_error` is at least, for any queries, keys and features: 1 - K / (r + 1), or 0 where that is negative.

    The nearest matrix of rank K misses r + 1 - K of the r + 1 singular values of the identity (Eckart and Young 1936).
    """
    return max(0.0, 1 - _checks.positive_int("features", features) / (_checks.positive_int("distance", distance) + 1))


@checked
def tokens(distance: int, groups: int = GROUPS) -> int:
    """The length of a sequence with r tokens that have nothing to copy, and so many groups of r + 1 that have."""
    return _checks.positive_int("distance", distance) + _checks.positive_int("groups", groups) * (distance + 1)


@checked
def copy_error(weights: Float[Tensor, "N N"], distance: int) -> Tensor:
    r"""The mean of $|A_t - e_{t-r}|^2$ over the rows $t \ge r$, of which there are whole groups of r + 1.

    For values of independent random signs it is the expected square error, as a share of the target's square.
    """
    rows = len(weights) - _checks.positive_int("distance", distance)
    if rows < 1 or rows % (distance + 1):
        wanted = f"{distance} tokens and a multiple of {distance + 1}"
        raise ValueError(f"weights: expected {wanted}, got {len(weights)}")
    wanted_rows = torch.eye(len(weights), dtype=weights.dtype)[:rows]
    return (weights[distance:] - wanted_rows).square().sum(-1).mean()


@checked
def causal_weights(q: Float[Tensor, "N K"], k: Float[Tensor, "N K"]) -> Float[Tensor, "N N"]:
    """The weights of causal linear attention with the features exp(q) and exp(k): any positive ones."""
    weights = kernel_weights(Exp(), q, k, is_causal=True)
    return weights / weights.sum(-1, keepdim=True)


@checked
def copying(N: int, distance: int, features: int) -> tuple[Float[Tensor, "N K"], Float[Tensor, "N K"]]:
    """Queries and keys with which `causal_weights` copies from a distance below the number of features.

    Token j goes to slot j modulo K, louder than all before it, so that a query to the slot hears its last token. Of the
    tokens after the wanted one, at most K - 1, none is in its slot.
    """
    if not 0 < distance < _checks.positive_int("features", features):
        raise ValueError(f"distance: expected 1 to {features - 1} with {features} features, got {distance}")
    position = torch.arange(N, dtype=torch.float64)[:, None]
    slot = torch.arange(features)
    growth = SHARPNESS / features  # of the logarithm, a token
    apart = growth * distance + SHARPNESS  # more than the later tokens are louder
    k = growth * position - apart * (position % features != slot)
    q = -apart * ((position - distance) % features != slot).double()
    return q, k


@checked
def fitted_error(distance: int, features: int, *, generator: torch.Generator | None = None) -> float:
    """`copy_error` of `causal_weights` whose queries and keys, one each a position, gradient descent has fitted."""
    N = tokens(distance)
    q, k = torch.randn(2, N, features, generator=generator, dtype=torch.float64).unbind()
    q.requires_grad_(), k.requires_grad_()
    optimiser = torch.optim.Adam([q, k], RATE)
    for _ in range(STEPS):
        optimiser.zero_grad()
        copy_error(causal_weights(q, k), distance).backward()
        optimiser.step()
    return float(copy_error(causal_weights(q.detach(), k.detach()), distance))
