r"""The law of a score $s = x^T W_Q W_K^T y$ of one head under random $W_Q, W_K$, for fixed unit vectors x and y.

W_Q and W_K are independent (d, K) draws of `ortho.orthogonal`: K columns of a d x d draw follow the same law.
"""

from math import prod, sqrt

import torch
from torch.nn.functional import normalize

from ortho._checks import checked, one_of
from ortho._typing import Float, Tensor
from ortho.orthogonal import DRAWS

__all__ = ["head_spectrum", "moment_deviation", "sample_scores", "score_moment"]


@checked
def score_moment(draw: str, d: int, K: int, order: int) -> float:
    r"""The moment $E\,s^n$ of even or odd `order` n, exact.

    Odd moments vanish; $E\,s^{2p} = (2p-1)!!\, \prod_{i<p} (K + 2i) / D_i^2$ with $D_i = d + 2i$ for an orthogonal
    draw and $D_i = d$ for the Gaussian one. (Given $u = W_Q^T x$, $s = u^T W_K^T y$ depends on $|u|$ alone, so that the
    moment is a product of moments of $|u|$ and of one coordinate.)
    """
    one_of("draw", draw, DRAWS)
    if order % 2:
        return 0.0
    return prod((2 * i + 1) * (K + 2 * i) / (d if draw == "gaussian" else d + 2 * i) ** 2 for i in range(order // 2))


@checked
def sample_scores(
    draw: str, d: int, K: int, count: int, *, generator: torch.Generator | None = None
) -> Float[Tensor, "count"]:
    """Scores (count,) of one random pair of unit vectors, each under freshly drawn matrices, float64."""
    law = DRAWS[one_of("draw", draw, DRAWS)]
    x, y = normalize(torch.randn(2, d, generator=generator, dtype=torch.float64), dim=1)
    q, k = (torch.stack([law(d, K, generator=generator, dtype=torch.float64) for _ in range(count)]) for _ in "qk")
    return ((x @ q) * (y @ k)).sum(-1)


@checked
def moment_deviation(samples: Float[Tensor, "count"], draw: str, d: int, K: int, order: int) -> float:
    """How many standard errors lie between the samples' moment and the exact one; N(0, 1) for many samples."""
    exact = score_moment(draw, d, K, order)
    spread = sqrt((score_moment(draw, d, K, 2 * order) - exact**2) / len(samples))
    return float((samples.pow(order).mean() - exact) / spread)


@checked
def head_spectrum(draw: str, d: int, K: int, *, generator: torch.Generator | None = None) -> Float[Tensor, "K"]:
    """Singular values (K,), falling, of one head's d x d matrix W_Q W_K^T, float64."""
    law = DRAWS[one_of("draw", draw, DRAWS)]
    q, k = (law(d, K, generator=generator, dtype=torch.float64) for _ in "qk")
    return torch.linalg.svdvals(q @ k.T)[:K]
