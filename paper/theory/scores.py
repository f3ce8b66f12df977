r"""The score of one head under drawn matrices: its law, and which scores the head can make.

*The law* of a score $s = x^T W_Q W_K^T y$ of one head under random $W_Q, W_K$, for fixed unit vectors x and y.

W_Q and W_K are independent (d, K) draws of `ortho.orthogonal`: K columns of a d x d draw follow the same law.

*What can be made*: scores $x^T M y$ with $M = W_Q W_K^T$, as drawn and after a map of x. K is the width of a head and d
that of x; maps are (d, d) matrices.
"""

from collections.abc import Callable
from math import prod, sqrt

import torch
from torch.nn.functional import normalize

from ortho._typing import Float, Tensor
from ortho.checks import expect, one_of
from ortho.orthogonal import DRAWS

# -------------------------------------------------------------------------------------------------------------- the law


def score_moment(draw: str, d: int, K: int, order: int) -> float:
    r"""The moment $E\,s^n$ of even or odd `order` n, exact.

    Odd moments vanish; $E\,s^{2p} = (2p-1)!!\, \prod_{i<p} (K + 2i) / D_i^2$ with $D_i = d + 2i$ for an orthogonal
    draw and $D_i = d$ for the Gaussian one. (Given $u = W_Q^T x$, $s = u^T W_K^T y$ depends on $|u|$ alone, so that the
    moment is a product of moments of $|u|$ and of one coordinate.) Raises ValueError for an unknown draw and for K > d,
    whose columns are not orthonormal.
    """
    one_of("draw", draw, DRAWS)
    expect(d >= K, "K", f"at most d = {d}", K)
    if order % 2:
        return 0.0
    return prod((2 * i + 1) * (K + 2 * i) / (d if draw == "gaussian" else d + 2 * i) ** 2 for i in range(order // 2))


def sample_scores(
    draw: str, d: int, K: int, count: int, *, generator: torch.Generator | None = None
) -> Float[Tensor, "count"]:
    """Scores (count,) of one random pair of unit vectors, each under freshly drawn matrices, float64."""
    law = DRAWS[one_of("draw", draw, DRAWS)]
    x, y = normalize(torch.randn(2, d, generator=generator, dtype=torch.float64), dim=1)
    q, k = (torch.stack([law(d, K, generator=generator, dtype=torch.float64) for _ in range(count)]) for _ in "qk")
    return ((x @ q) * (y @ k)).sum(-1)


def moment_deviation(samples: Float[Tensor, "count"], draw: str, d: int, K: int, order: int) -> float:
    """How many standard errors lie between the samples' moment and the exact one; N(0, 1) for many samples."""
    exact = score_moment(draw, d, K, order)
    spread = sqrt((score_moment(draw, d, K, 2 * order) - exact**2) / len(samples))
    return float((samples.pow(order).mean() - exact) / spread)


# ----------------------------------------------------------------------------------------------------- what can be made


def missed(target: Float[Tensor, "d d"], made: Float[Tensor, "d d"]) -> float:
    r"""The share of the target's squared norm that the best multiple of `made` misses: $1 - \cos^2$ of the two."""
    scale = float((target * target).sum() * (made * made).sum())
    return 1 - float((target * made).sum()) ** 2 / scale


def expected_missed(d: int) -> float:
    r"""The mean of `missed` over draws, for any target and any width of a head: $1 - 1/d^2$.

    It holds for every law of M that a rotation of x, or of y, leaves unchanged: orthogonal and Gaussian matrices alike.
    """
    return 1 - 1 / d**2


def drawn_missed(
    target: Float[Tensor, "d d"], K: int, count: int, *, draw: str = "haar", generator: torch.Generator
) -> Float[Tensor, "count"]:
    """`missed` by the map of a head of width K, for `count` draws of its two matrices.

    Raises TypeError or ValueError for sizes below 1, and for an unknown draw.
    """
    law, d = DRAWS[one_of("draw", draw, DRAWS)], len(target)
    found = []
    for _ in range(count):
        q, k = (law(d, K, generator=generator, dtype=target.dtype) for _ in "qk")
        found.append(missed(target, q @ k.T))
    return torch.tensor(found, dtype=torch.float64)


def carrying(
    q: Float[Tensor, "d K"], k: Float[Tensor, "d K"], wanted_q: Float[Tensor, "d K"], wanted_k: Float[Tensor, "d K"]
) -> Float[Tensor, "d d"]:
    """B with B^T q = wanted_q and B^T k = wanted_k: the scores of B x and B y with drawn matrices q and k are those of
    x and y with the wanted ones. The least of all such B.

    Raises ValueError if the 2 K columns of q and k are not linearly independent, as where 2 K > d.
    """
    drawn, wanted = torch.cat([q, k], 1), torch.cat([wanted_q, wanted_k], 1)
    rank = int(torch.linalg.matrix_rank(drawn))
    if rank < drawn.shape[1]:
        raise ValueError(f"q, k: expected {drawn.shape[1]} independent columns, got rank {rank}")
    return torch.linalg.pinv(drawn).T @ wanted.T


def freedoms(d: int, K: int) -> tuple[int, int]:
    """The dimensions of what d/K heads can make together: learned, and frozen after a linear map of x.

    Learned heads have a map M of rank K each, with (2 d - K) K dimensions. Frozen heads share one map B with d^2
    entries, which are fewer. Raises TypeError or ValueError for sizes below 1, and unless K is a divisor of d below d.
    """
    expect(d > K and d % K == 0, "K", f"a divisor of d = {d} that is less", K)
    return (2 * d - K) * d, d * d


def rank_at(function: Callable[[Tensor], Tensor], point: Float[Tensor, "*shape"]) -> int:
    """The rank of a function's derivative: the dimension of what it reaches near there."""
    jacobian = torch.autograd.functional.jacobian(function, point)
    return int(torch.linalg.matrix_rank(jacobian.reshape(-1, point.numel())))
