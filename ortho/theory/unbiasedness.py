r"""Is $E\, \phi(x)^T \phi(y) = \exp(x^T y)$? A test for every feature map under every draw, with its rate of errors.

The test averages *ratios*: estimates of the kernel, one for each of many independent $\Omega$, divided by the kernel,
so that the right mean is 1. Their distribution has tails that grow fast with $|x + y|^2$. Up to 3 the mean of some
hundred of them is near enough to normal for the stated rates (tests show that); far above 3, no affordable
number is enough.

*Wrong draws* of orthogonal rows estimate a kernel other than the softmax kernel; each is in use somewhere. All take the
arguments of `ortho.attention.linear.random_features`, whose draws are the right ones; `options` are `generator`,
`dtype` and `device`.

*Their means*: what an estimate tends to when its rows have a law other than $N(0, I_K)$, in closed form. Every mean is
relative to the kernel, so that 1 is right. With positive features and $z = x + y$, it is $E \exp(\omega^T
z)\, e^{-|z|^2/2}$ for one row $\omega$; rows of the same law all have the same mean, coupled or not.
"""

from collections.abc import Callable
from functools import partial
from itertools import product
from math import erfc, exp, sqrt
from typing import Any

import numpy as np
import torch
from scipy.linalg import hadamard
from scipy.special import hyp0f1, hyp1f1

from ortho._typing import Float, Tensor
from ortho.attention.linear import random_features as maps
from ortho.attention.linear.favor import orthogonal_features
from ortho.checks import expect, one_of
from ortho.theory.estimates import SIGMAS, Estimate, estimate
from ortho.theory.variance import FEATURES, features, same_block_pairs

# ------------------------------------------------------------------------------------------------------------- the test


def _products(kind: str, x: Tensor, y: Tensor, omega: Tensor) -> Tensor:
    phi_x, phi_y = features(kind, x, y, omega)
    return (phi_x * phi_y).sum(-1)


# phi(x_i) . phi(y_i) for x and y (N, K) and Omega (..., m, K): (..., N). The dense maps are fitted to all of x and y.
MAPS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {kind: partial(_products, kind) for kind in FEATURES}


def pairs(
    N: int, K: int, square: float, *, generator: torch.Generator | None = None
) -> tuple[Float[Tensor, "N K"], Float[Tensor, "N K"]]:
    r"""N random pairs, x and y (N, K) in float64, the larger of $|x_i + y_i|^2$ and $|x_i - y_i|^2$ being `square`.

    x has its larger entries at one end of the axis and y at the other, so that maps which treat the two alike and maps
    which do not are fitted differently.
    """
    tilt = torch.linspace(-0.4, 0.4, K, dtype=torch.float64).exp()
    x, y = torch.randn(2, N, K, generator=generator, dtype=torch.float64)
    x, y = x * tilt, y / tilt
    size = torch.maximum((x + y).norm(dim=-1), (x - y).norm(dim=-1))[:, None] / sqrt(square)
    return x / size, y / size


def omegas(
    draw: Callable[..., Tensor], m: int, K: int, count: int, *, generator: torch.Generator | None = None
) -> Float[Tensor, "count m K"]:
    """Independent draws of Omega (count, m, K), float64."""
    return torch.stack([draw(m, K, generator=generator, dtype=torch.float64) for _ in range(count)])


def ratios(
    name: str, omega: Float[Tensor, "count m K"], x: Float[Tensor, "N K"], y: Float[Tensor, "N K"]
) -> Float[Tensor, "count"]:
    """For each Omega, the mean over the pairs of estimate / kernel: (count,). `name` is a key of `MAPS`."""
    products = MAPS[one_of("name", name, MAPS)]
    kernel = (x * y).sum(-1).exp()
    # In portions, so that the features of many Omega stay in the cache.
    return torch.cat([(products(x, y, some) / kernel).mean(-1) for some in omega.split(512)])


def unbiasedness(
    name: str,
    draw: Callable[..., Tensor],
    x: Float[Tensor, "N K"],
    y: Float[Tensor, "N K"],
    *,
    m: int,
    count: int,
    generator: torch.Generator | None = None,
) -> Estimate:
    """The mean of `count` ratios, each of m rows drawn anew, and its standard error; 1 is right."""
    return estimate(ratios(name, omegas(draw, m, x.shape[-1], count, generator=generator), x, y))


def rejects(found: Estimate, expected: float = 1.0) -> bool:
    """Whether the mean is more than SIGMAS standard errors off: by chance once in 100,000 times if it is right."""
    return abs(found.deviation(expected)) > SIGMAS


# ---------------------------------------------------------------------------------------------------------- wrong draws


def unit_norm_rows(m: int, K: int, **options: Any) -> Float[Tensor, "m K"]:
    """Orthonormal rows: Gram-Schmidt and nothing after it, as source S2 prints it (section 3.3.2).

    Returns (m, K), in blocks of K rows; raises TypeError or ValueError for sizes below 1.
    """
    rows = orthogonal_features(m, K, **options)
    return rows / rows.norm(dim=-1, keepdim=True)


def root_norm_rows(m: int, K: int, **options: Any) -> Float[Tensor, "m K"]:
    r"""Orthogonal rows of length $\sqrt K$, the root mean square of the right ones.

    They estimate the regularised softmax kernel (SMREG) of Choromanski et al. 2021 (arXiv:2009.14794, theorem 1), and
    are what their code and its descendants draw with `scaling=1`. Returns (m, K); errors as in `unit_norm_rows`.
    """
    return sqrt(K) * unit_norm_rows(m, K, **options)


def sign_rows(m: int, K: int, **options: Any) -> Float[Tensor, "m K"]:
    r"""Rows of $\sqrt K H D$ with one diagonal of random signs, the cheapest of the structured blocks: entries +-1.

    (Yu et al. 2016, arXiv:1610.09072, section 4, of a product with one factor.) Returns (m, K); raises ValueError
    unless K is a power of two.
    """
    expect(not K & (K - 1), "K", "a power of two", K)
    return maps.structured_features(m, K, factors=1, **options).sign()


def raw_qr_rows(m: int, K: int, **options: Any) -> Float[Tensor, "m K"]:
    r"""Columns of a QR whose signs are left as LAPACK returns them, with lengths $\chi(K)$: not Haar.

    The lengths are right, the directions are not: Householder's reflections leave the first entry of the first column
    negative, always. The JAX code of Choromanski et al. 2021 draws like this, and so do several ports of it by default
    (`qr_uniform_q=False`). Returns (m, K), in blocks of K rows; errors as in `unit_norm_rows`.
    """
    blocks = [torch.linalg.qr(torch.randn(K, K, **options)).Q.mT for _ in range(-(-m // K))]
    return torch.cat(blocks)[:m] * torch.randn(m, K, **options).norm(dim=-1, keepdim=True)


# ---------------------------------------------------------------------------------------------------------- their means


def fixed_length_mean(K: int, length: float, square: float) -> float:
    r"""The mean for rows of one length r and uniform direction: ${}_0F_1(; K/2; r^2 |z|^2 / 4)\, e^{-|z|^2/2}$.

    `square` is $|x + y|^2$ for positive features, and $-|x - y|^2$ for trigonometric ones. (A Bessel
    function: the mean of $e^{r u^T z}$ over the sphere has the even moments $(1/2)_n / (K/2)_n$ of a coordinate.)
    """
    return _product_mean(K, length, square, 1) * exp(-square / 2)


def _product_mean(K: int, length: float, square: float, squared: int) -> float:
    """The mean of exp(w.z) for a w of uniform direction and squared length `squared` times length^2."""
    return float(hyp0f1(K / 2, squared * length**2 * square / 4))


def fixed_length_kernel(x: Float[Tensor, "N K"], y: Float[Tensor, "M K"], length: float) -> Float[Tensor, "N M"]:
    r"""The kernel that positive features with such rows estimate in place of $\exp(x_i^T y_j)$: (N, M), float64."""
    x, y = x.double(), y.double()
    squares = (x[:, None] + y).square().sum(-1)
    means = hyp0f1(x.shape[-1] / 2, length**2 / 4 * squares.numpy())
    halves = x.square().sum(-1)[:, None] / 2 + y.square().sum(-1) / 2
    return torch.as_tensor(means) * (-halves).exp()


def fixed_length_correlation(K: int, length: float, square: float) -> float:
    r"""The correlation of estimates from two orthogonal rows of length r, whose sum has the length $\sqrt 2\, r$."""
    mean, both, same = (_product_mean(K, length, square, squared) for squared in (1, 2, 4))
    return (both - mean**2) / (same - mean**2)


def fixed_length_error(m: int, K: int, length: float, square: float) -> float:
    """The relative mean squared error of positive features with m such rows in blocks of K, the bias included.

    For the right draws it is `ortho.theory.variance.squared_error`.
    """
    mean, both, same = (_product_mean(K, length, square, squared) for squared in (1, 2, 4))
    pairs = same_block_pairs(m, K)
    second = (m * same + pairs * both + (m * m - m - pairs) * mean**2) / m**2
    return second * exp(-square) - 2 * mean * exp(-square / 2) + 1


def sign_mean(z: Float[Tensor, "K"]) -> float:
    r"""The mean for rows of independent signs (`sign_rows`): $\prod_j \cosh(z_j)\, e^{-|z|^2/2}$."""
    return float(z.double().cosh().prod()) * exp(-float(z.double().square().sum()) / 2)


def raw_qr_mean(z: Float[Tensor, "K"]) -> float:
    r"""The mean for the first row of each block of `raw_qr_rows`: $2\, \Phi(-z_1)$.

    The row is $N(0, I)$ given that its first entry is negative. Later rows have no such simple law. Trigonometric
    features are even in $\omega$, so for them every row's mean is 1.
    """
    return erfc(float(z[0]) / sqrt(2))


# Width 8 takes 2^14 sign patterns, width 16 would take 2^30.
_ENUMERATED = 8


def structured_mean(z: Float[Tensor, "K"], factors: int = 3) -> float:
    r"""The mean for `structured_features`, by enumeration of all signs: exact to rounding, for K up to 8.

    A row $r\, v$ with the length $r \sim \chi(W)$, W the padded width, has the mean
    ${}_1F_1(W/2; 1/2; (v^T z)^2 / 2)$ over r and both signs of v. Raises ValueError for a wider z.
    """
    expect(1 <= len(z) <= _ENUMERATED, "z", f"1 to {_ENUMERATED} entries", len(z))
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


def structured_fourth_moment(z: Float[Tensor, "K"]) -> float:
    r"""$E\,(\omega^T z)^4 - 3 |z|^4$ for a row of `structured_features`: 0 for $N(0, I)$, and here, exactly,

    $24\, |z|^4 / K^3 - (8 / K^2 + 16 / K^3) \sum_j z_j^4$.

    One 24th of it, times $e^{-|z|^2/2}$, is the leading term of the bias for small z: of the order $K^{-2}$ along an
    axis, $K^{-3}$ where z is spread out. The second moment is right at every K. Raises ValueError unless K is a power
    of two.
    """
    K = len(z)
    expect(not K & (K - 1), "z", "a power of two as its length", K)
    square = z.double().square()
    return float(24 * square.sum() ** 2 / K**3 - (8 / K**2 + 16 / K**3) * square.square().sum())


WRONG_DRAWS: dict[str, Callable[..., Tensor]] = {
    "unit norm": unit_norm_rows,
    "root norm": root_norm_rows,
    "signs": sign_rows,
    "raw QR": raw_qr_rows,
}
