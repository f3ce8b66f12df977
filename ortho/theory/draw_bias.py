r"""What an estimate of the softmax kernel tends to when its rows have a law other than $N(0, I_K)$, in closed form.

Every mean is relative to the kernel, so that 1 is right. With positive or hyperbolic features and $z = x + y$, it is
$E \exp(\omega^T z)\, e^{-|z|^2/2}$ for one row $\omega$; rows of the same law all have the same mean, coupled or not.
"""

from itertools import product
from math import erfc, exp, sqrt

import numpy as np
import torch
from scipy.linalg import hadamard
from scipy.special import hyp0f1, hyp1f1

from ortho import _checks
from ortho._checks import checked
from ortho._typing import Float, Tensor
from ortho.theory.variance import same_block_pairs

__all__ = [
    "fixed_length_correlation",
    "fixed_length_error",
    "fixed_length_kernel",
    "fixed_length_mean",
    "raw_qr_mean",
    "sign_mean",
    "structured_fourth_moment",
    "structured_mean",
]


@checked
def fixed_length_mean(K: int, length: float, square: float) -> float:
    r"""For rows of one length r and uniform direction: ${}_0F_1(; K/2; r^2 |z|^2 / 4)\, e^{-|z|^2/2}$.

    `square` is $|x + y|^2$ for positive and hyperbolic features, and $-|x - y|^2$ for trigonometric ones. (A Bessel
    function: the mean of $e^{r u^T z}$ over the sphere has the even moments $(1/2)_n / (K/2)_n$ of a coordinate.)
    """
    return _product_mean(K, length, square, 1) * exp(-square / 2)


def _product_mean(K: int, length: float, square: float, squared: int) -> float:
    """The mean of exp(w.z) for a w of uniform direction and the squared length `squared` length^2."""
    return float(hyp0f1(K / 2, squared * length**2 * square / 4))


@checked
def fixed_length_kernel(x: Float[Tensor, "N K"], y: Float[Tensor, "M K"], length: float) -> Float[Tensor, "N M"]:
    r"""The kernel that positive features with such rows estimate in place of $\exp(x_i^T y_j)$: (N, M), float64."""
    x, y = x.double(), y.double()
    squares = (x[:, None] + y).square().sum(-1)
    means = hyp0f1(x.shape[-1] / 2, length**2 / 4 * squares.numpy())
    halves = x.square().sum(-1)[:, None] / 2 + y.square().sum(-1) / 2
    return torch.as_tensor(means) * (-halves).exp()


@checked
def fixed_length_correlation(K: int, length: float, square: float) -> float:
    r"""Of the estimates by two orthogonal rows of that length, whose sum has the length $\sqrt 2\, r$."""
    mean, both, same = (_product_mean(K, length, square, squared) for squared in (1, 2, 4))
    return (both - mean**2) / (same - mean**2)


@checked
def fixed_length_error(m: int, K: int, length: float, square: float) -> float:
    """The relative mean squared error of positive features with m such rows in blocks of K, the bias included.

    The right draws have theirs in `ortho.theory.variance.squared_error`.
    """
    mean, both, same = (_product_mean(K, length, square, squared) for squared in (1, 2, 4))
    pairs = same_block_pairs(m, K)
    second = (m * same + pairs * both + (m * m - m - pairs) * mean**2) / m**2
    return second * exp(-square) - 2 * mean * exp(-square / 2) + 1


@checked
def sign_mean(z: Float[Tensor, "K"]) -> float:
    r"""For rows of independent signs (`sign_rows`): $\prod_j \cosh(z_j)\, e^{-|z|^2/2}$."""
    return float(z.double().cosh().prod()) * exp(-float(z.double().square().sum()) / 2)


@checked
def raw_qr_mean(z: Float[Tensor, "K"]) -> float:
    r"""For the first row of each block of `raw_qr_rows`: $2\, \Phi(-z_1)$.

    The row is $N(0, I)$ given that its first entry is negative. Later rows have no such simple law. Trigonometric and
    hyperbolic features are even in $\omega$, and with them every row's mean is 1.
    """
    return erfc(float(z[0]) / sqrt(2))


# Width 8 takes 2^14 sign patterns, width 16 would take 2^30.
_ENUMERATED = 8


@checked
def structured_mean(z: Float[Tensor, "K"], factors: int = 3) -> float:
    r"""For `structured_features`, by enumeration of all signs: exact to rounding, for K up to 8.

    A row $r\, v$ with the length $r \sim \chi(W)$, W the padded width, has the mean
    ${}_1F_1(W/2; 1/2; (v^T z)^2 / 2)$ over r and both signs of v. Raises ValueError for a wider z.
    """
    _checks.positive_int("factors", factors)
    if not 1 <= len(z) <= _ENUMERATED:
        raise ValueError(f"z: expected 1 to {_ENUMERATED} entries, got {len(z)}")
    width = 1 << (len(z) - 1).bit_length()
    padded = np.zeros(width)
    padded[: len(z)] = z.double().numpy()
    # D_1's first sign only turns v around, which changes nothing: it stays +1.
    signs = np.array([(1, *rest) for rest in product((1, -1), repeat=width - 1)])
    sizes, shares = _sizes(width, signs, factors)
    means = hyp1f1(width / 2, 0.5, ((sizes * padded) @ signs.T) ** 2 / 2).mean(1)
    return float(shares @ means) * exp(-float(padded @ padded) / 2)


def _sizes(width: int, signs: np.ndarray, factors: int) -> tuple[np.ndarray, np.ndarray]:
    """The vectors of absolute entries that a row of the unit block takes (n, width), and their probabilities (n,)."""
    orthonormal = hadamard(width) / sqrt(width)
    sizes: np.ndarray = np.abs(orthonormal[:1])
    shares: np.ndarray = np.ones(1)
    for _ in range(factors - 1):
        # A later diagonal makes the signs random again, so that only the absolute entries need be told apart.
        following = np.abs((signs * sizes[:, None]) @ orthonormal).reshape(-1, width).round(12)
        sizes, which = np.unique(following, axis=0, return_inverse=True)
        shares = np.bincount(which.ravel(), np.repeat(shares / len(signs), len(signs)))
    return sizes, shares


@checked
def structured_fourth_moment(z: Float[Tensor, "K"]) -> float:
    r"""$E\,(\omega^T z)^4 - 3 |z|^4$ for a row of `structured_features`: 0 for $N(0, I)$, and here, exactly,

    $24\, |z|^4 / K^3 - (8 / K^2 + 16 / K^3) \sum_j z_j^4$.

    One 24th of it, times $e^{-|z|^2/2}$, is the leading term of the bias for small z: of the order $K^{-2}$ along an
    axis, $K^{-3}$ where z is spread out. The second moment is right at every K. Raises ValueError unless K is a power
    of two.
    """
    K = len(z)
    if K < 1 or K & (K - 1):
        raise ValueError(f"z: expected a power of two as its length, got {K}")
    square = z.double().square()
    return float(24 * square.sum() ** 2 / K**3 - (8 / K**2 + 16 / K**3) * square.square().sum())
