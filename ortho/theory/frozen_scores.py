r"""Which scores $x^T M y$ a head with drawn matrices can make, $M = W_Q W_K^T$: as drawn, and behind a map of x.

K is the width of a head and d that of x; maps are (d, d) matrices.
"""

from collections.abc import Callable

import torch

from ortho import _checks
from ortho._checks import checked
from ortho._typing import Float, Tensor
from ortho.orthogonal import DRAWS

__all__ = ["carrying", "drawn_missed", "expected_missed", "freedoms", "missed", "rank_at"]


@checked
def missed(target: Float[Tensor, "d d"], made: Float[Tensor, "d d"]) -> float:
    r"""The share of the target's squared norm that the best multiple of `made` misses: $1 - \cos^2$ of the two."""
    scale = float((target * target).sum() * (made * made).sum())
    return 1 - float((target * made).sum()) ** 2 / scale


@checked
def expected_missed(d: int) -> float:
    r"""The mean of `missed` over draws, of any target and width of a head: $1 - 1/d^2$.

    For every law of M that turning x, or y, leaves as it is: orthogonal and Gaussian matrices alike.
    """
    return 1 - 1 / _checks.positive_int("d", d) ** 2


@checked
def drawn_missed(
    target: Float[Tensor, "d d"], K: int, count: int, *, draw: str = "haar", generator: torch.Generator
) -> Float[Tensor, "count"]:
    """`missed` by the map of a head of width K, for so many draws of its two matrices.

    Raises TypeError or ValueError for sizes below 1, and for an unknown draw.
    """
    law, d = DRAWS[_checks.one_of("draw", draw, DRAWS)], len(target)
    found = []
    for _ in range(_checks.positive_int("count", count)):
        q, k = (law(d, K, generator=generator, dtype=target.dtype) for _ in "qk")
        found.append(missed(target, q @ k.T))
    return torch.tensor(found, dtype=torch.float64)


@checked
def carrying(
    q: Float[Tensor, "d K"], k: Float[Tensor, "d K"], wanted_q: Float[Tensor, "d K"], wanted_k: Float[Tensor, "d K"]
) -> Float[Tensor, "d d"]:
    """P with P^T q = wanted_q and P^T k = wanted_k: the scores of P x and P y with drawn matrices q and k are those of
    x and y with the wanted ones. The least of all such P.

    Raises ValueError if the 2 K columns of q and k are not linearly independent, as where 2 K > d.
    """
    drawn, wanted = torch.cat([q, k], 1), torch.cat([wanted_q, wanted_k], 1)
    rank = int(torch.linalg.matrix_rank(drawn))
    if rank < drawn.shape[1]:
        raise ValueError(f"q, k: expected {drawn.shape[1]} independent columns, got rank {rank}")
    return torch.linalg.pinv(drawn).T @ wanted.T


@checked
def freedoms(d: int, K: int) -> tuple[int, int]:
    """The dimensions of what d/K heads can make together: learned, and frozen behind a linear map of x.

    Of a layer's maps M of rank K, (2 d - K) K each; and of the d^2 entries of the one map P that all heads share, which
    for two heads or more is less. Raises TypeError or ValueError for sizes below 1, and unless K divides d and is less.
    """
    if _checks.positive_int("d", d) % _checks.positive_int("K", K) or d == K:
        raise ValueError(f"K: expected a divisor of d = {d} that is less, got {K}")
    return (2 * d - K) * d, d * d


@checked
def rank_at(function: Callable[[Tensor], Tensor], point: Float[Tensor, "*shape"]) -> int:
    """The rank of a function's derivative: the dimension of what it reaches near there."""
    jacobian = torch.autograd.functional.jacobian(function, point)
    return int(torch.linalg.matrix_rank(jacobian.reshape(-1, point.numel())))
