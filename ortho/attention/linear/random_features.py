r"""Random features of the softmax kernel: maps with $E\, \phi(x)^T \phi(y) = \exp(x^T y)$ over the rows of $\Omega$.

First the draws of $\Omega$: each row is $N(0, I_K)$, or nearly so. Rows may be independent, or coupled within blocks
of K, which leaves each row's law as it is and lowers the variance of estimates that average over rows. Then the maps,
by sines, by exponentials, and by exponentials whose quadratic terms are fitted to the data: the formulas as they stand,
for theory and tests. `favor` scales them so that they stay in range.
"""

from collections.abc import Callable
from math import log, sqrt
from typing import NamedTuple

import torch

from ortho._checks import checked
from ortho._typing import Bool, Float, Tensor
from ortho.orthogonal import haar


@checked
def iid_features(
    m: int,
    K: int,
    *,
    generator: torch.Generator | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Float[Tensor, "m K"]:
    """m independent rows, each $N(0, I_K)$: (m, K). TypeError or ValueError for sizes below 1."""
    return torch.randn(m, K, generator=generator, dtype=dtype, device=device)


@checked
def orthogonal_features(
    m: int,
    K: int,
    *,
    generator: torch.Generator | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Float[Tensor, "m K"]:
    r"""m rows, each $N(0, I_K)$, orthogonal to each other within each block of K of them (Choromanski et al. 2021).

    A block is Haar, and its rows are scaled by independent lengths of the law $\chi(K)$, a Gaussian vector's. Rows of a
    fixed length, or of a QR whose signs are left as they come, make the estimate of the kernel biased.

    Returns (m, K); raises TypeError or ValueError for sizes below 1.
    """
    blocks = [haar(K, generator=generator, dtype=dtype, device=device) for _ in range(-(-m // K))]
    lengths = torch.randn(m, K, generator=generator, dtype=dtype, device=device).norm(dim=-1, keepdim=True)
    return torch.cat(blocks)[:m] * lengths


@checked
def structured_features(
    m: int,
    K: int,
    *,
    generator: torch.Generator | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    factors: int = 3,
) -> Float[Tensor, "m K"]:
    r"""m rows in blocks $H D_3 H D_2 H D_1$ of Hadamard matrices and random signs, with lengths $\chi(K)$.

    (Yu et al. 2016, arXiv:1610.09072, section 4, who leave the lengths at $\sqrt{K}$.) A block is described by 3 K
    signs and multiplies a vector in 3 K log2 K additions. It is orthogonal but not exactly Haar: the estimate of the
    kernel is unbiased only in the limit of large K, and with one factor far from it. Where K is no power of two, blocks
    have the next one's width; the columns beyond K are left out, after which rows are orthogonal only on average.

    Returns (m, K); raises TypeError or ValueError for sizes below 1.
    """
    width = 1 << (K - 1).bit_length()
    like = torch.empty(0, dtype=dtype, device=device)
    blocks = []
    for _ in range(-(-m // width)):
        block = torch.eye(width, dtype=like.dtype, device=like.device)
        for _ in range(factors):
            signs = 2 * torch.randint(2, (width,), generator=generator, device=like.device).to(like.dtype) - 1
            block = _hadamard(block) * signs
        blocks.append(block)
    # Lengths of the law chi(width): what is left of a row after its padding is cut has then K columns like N(0, 1).
    lengths = torch.randn(m, width, generator=generator, dtype=dtype, device=device).norm(dim=-1, keepdim=True)
    return (torch.cat(blocks)[:m] * lengths)[:, :K].contiguous()


def _hadamard(x: Tensor) -> Tensor:
    """x H of the orthonormal Hadamard matrix, along the last axis of a width 2^p, in p additions an entry."""
    width, step = x.shape[-1], 1
    while step < width:
        pairs = x.unflatten(-1, (-1, 2, step))
        a, b = pairs.unbind(-2)
        x = torch.stack([a + b, a - b], -2).flatten(-3)
        step *= 2
    return x / sqrt(width)


FEATURE_DRAWS: dict[str, Callable[..., Tensor]] = {
    "iid": iid_features,
    "orthogonal": orthogonal_features,
    "structured": structured_features,
}


@checked
def mirrored(omega: Float[Tensor, "... m K"]) -> Float[Tensor, "... 2*m K"]:
    """The rows and their opposites, below each other."""
    return torch.cat([omega, -omega], -2)


@checked
def positive_features(x: Float[Tensor, "... N K"], omega: Float[Tensor, "... m K"]) -> Float[Tensor, "... N m"]:
    r"""$\phi(x) = m^{-1/2} \exp(\Omega x - |x|^2/2)$ (Choromanski et al. 2021, arXiv:2009.14794, lemma 1).

    Leading axes broadcast. In float32 it vanishes for $|x|$ above some 13.
    """
    return (x @ omega.mT - _half_square(x)).exp() / sqrt(omega.shape[-2])


@checked
def hyperbolic_features(x: Float[Tensor, "... N K"], omega: Float[Tensor, "... m K"]) -> Float[Tensor, "... N 2*m"]:
    r"""$(2m)^{-1/2} \exp(-|x|^2/2)\, [\exp(\Omega x), \exp(-\Omega x)]$: `positive_features` of the mirrored rows.

    (Choromanski et al. 2021, arXiv:2009.14794, lemma 1.)
    """
    return positive_features(x, mirrored(omega))


@checked
def trigonometric_features(x: Float[Tensor, "... N K"], omega: Float[Tensor, "... m K"]) -> Float[Tensor, "... N 2*m"]:
    r"""$m^{-1/2} \exp(|x|^2/2)\, [\sin \Omega x, \cos \Omega x]$ (Rahimi & Recht 2007, for the softmax kernel).

    Their products estimate a positive kernel and may be negative all the same.
    """
    angles = x @ omega.mT
    return torch.cat([angles.sin(), angles.cos()], -1) * _half_square(x).exp() / sqrt(omega.shape[-2])


def dense_features(
    x: Float[Tensor, "... N K"],
    omega: Float[Tensor, "... m K"],
    a: Float[Tensor, "... K"],
    B: Float[Tensor, "... K K"],
) -> Float[Tensor, "... N m"]:
    r"""Dense-exponential features, $m^{-1/2} D \exp(w^T A w + w^T B x + x^T C x)$ for each row w of $\Omega$.

    $A = \mathrm{diag}(a)$ with a < 1/8, $C = -\frac12 B^T (I - 4A)^{-1} B$ and $D = \det(I - 4A)^{1/4}$
    (Likhosherstov et al. 2023, arXiv:2302.00787, section 3). With $B_k$ for keys and $B_q$ for queries they are
    unbiased if $B_q^T (I - 4A)^{-1} B_k = I$. a = 0 and B = I give `positive_features`.
    """
    a, mapped = a[..., None, :], x @ B.mT
    exponents = mapped @ omega.mT + (a * omega.square()).sum(-1)[..., None, :]
    half = (mapped.square() / (1 - 4 * a)).sum(-1, keepdim=True) / 2
    return (exponents - half + (1 - 4 * a).log().sum(-1, keepdim=True) / 4 - log(omega.shape[-2]) / 2).exp()


def _half_square(x: Tensor) -> Tensor:
    return x.square().sum(-1, keepdim=True) / 2


class DenseParameters(NamedTuple):
    r"""What fits `dense_features` to data: the diagonal of A, and $B_q$, $B_k$ with $B_q^T (I - 4A)^{-1} B_k = I$.

    `axes` (columns) are the coordinates that A is diagonal in, None for those of x. Rows taken in these axes,
    $\Omega$ times `axes`, have the same law, and give features that do not depend on the axes' signs.
    """

    a: Float[Tensor, "*batch K"]
    B_q: Float[Tensor, "*batch K K"]
    B_k: Float[Tensor, "*batch K K"]
    axes: Float[Tensor, "*batch K K"] | None = None


@checked
def optimal_a(moment: Float[Tensor, "*sizes"]) -> Float[Tensor, "*sizes"]:
    r"""The a of $A = a I$, $B = \sqrt{1 - 4a}\, I$, that minimises the mean logarithm of the features' second moment.

    `moment` is the mean of $|x + y|^2 / K$ over pairs of K-wide x and y. (FAVOR++: Likhosherstov et al. 2022,
    arXiv:2205.15317; in the form of 2023, arXiv:2302.00787, section 3.) From 0, for a moment of 0, downwards.
    """
    return (1 - 2 * moment - ((2 * moment + 1).square() + 8 * moment).sqrt()) / 16


@checked
def mean_square_sum(
    x: Float[Tensor, "*batch N K"],
    y: Float[Tensor, "*batch M K"],
    *,
    keep_x: Bool[Tensor, "*batch N"] | None = None,
    keep_y: Bool[Tensor, "*batch M"] | None = None,
) -> Float[Tensor, "*batch"]:
    r"""The mean of $|x_i + y_j|^2$ over all pairs, in time linear in N and M.

    Here and below, means are over the tokens in `keep_x` and `keep_y`, by default over all.
    """
    cross = (_mean(x, keep_x) * _mean(y, keep_y)).sum(-1)
    return _mean(x.square(), keep_x).sum(-1) + _mean(y.square(), keep_y).sum(-1) + 2 * cross


@checked
def isotropic(a: Float[Tensor, "*batch"], K: int) -> DenseParameters:
    r"""$A = a I$, $B = \sqrt{1 - 4a}\, I$, the parameters of generalised exponential features (GERF)."""
    B = (1 - 4 * a)[..., None, None].sqrt() * torch.eye(K, dtype=a.dtype, device=a.device)
    return DenseParameters(a[..., None].expand(*a.shape, K), B, B)


@checked
def gerf(
    x: Float[Tensor, "*batch N K"],
    y: Float[Tensor, "*batch M K"],
    *,
    keep_x: Bool[Tensor, "*batch N"] | None = None,
    keep_y: Bool[Tensor, "*batch M"] | None = None,
) -> DenseParameters:
    r"""FAVOR++: `isotropic`, with the a that `optimal_a` gives for these scaled queries x and keys y."""
    K = x.shape[-1]
    return isotropic(optimal_a(mean_square_sum(x, y, keep_x=keep_x, keep_y=keep_y) / K), K)


@checked
def saderf(
    x: Float[Tensor, "*batch N K"],
    y: Float[Tensor, "*batch M K"],
    *,
    keep_x: Bool[Tensor, "*batch N"] | None = None,
    keep_y: Bool[Tensor, "*batch M"] | None = None,
) -> DenseParameters:
    r"""FAVOR#, simplified asymmetric: GERF on $\Psi x$ and $\Psi^{-1} y$, with the diagonal $\Psi$ that equals moments.

    (Likhosherstov et al. 2023, arXiv:2302.00787, section 3.) A coordinate that is 0 in all of x or y keeps its scale.
    """
    of_x, of_y = _mean(x.square(), keep_x), _mean(y.square(), keep_y)
    unusable = (of_x == 0) | (of_y == 0)
    # Fourth roots apart: the quotient itself may leave the range of the dtype.
    root_y, root_x = (of.masked_fill(unusable, 1).pow(0.25) for of in (of_y, of_x))
    psi = (root_y / root_x)[..., None, :]  # (..., 1, K)
    fitted = gerf(x * psi, y / psi, keep_x=keep_x, keep_y=keep_y)
    return DenseParameters(fitted.a, fitted.B_q * psi, fitted.B_k / psi)


@checked
def aderf(
    x: Float[Tensor, "*batch N K"],
    y: Float[Tensor, "*batch M K"],
    *,
    keep_x: Bool[Tensor, "*batch N"] | None = None,
    keep_y: Bool[Tensor, "*batch M"] | None = None,
) -> DenseParameters:
    r"""FAVOR#, asymmetric: $A = a I$ and the best $B_q$ and $B_k$, which differ.

    (Likhosherstov et al. 2023, arXiv:2302.00787, section 3.) $R_q$ and $R_k = R_q^{-T}$ bring the second moments of
    x and y to the same matrix; then it is GERF. Of all such pairs, which differ by a rotation, this is the symmetric
    one: $R_q^2$ is the geometric mean of $M_x^{-1}$ and $M_y$, and continuous in the data, as a pair from a
    decomposition, whose signs are arbitrary, would not be.
    """
    K = x.shape[-1]
    of_x, of_y = (_moment(each, keep).double() for each, keep in ((x, keep_x), (y, keep_y)))
    root_x, inverse_x = _roots(_lifted(of_x, of_y))
    values, axes = torch.linalg.eigh(root_x @ _lifted(of_y, of_x) @ root_x)
    S = values.clamp(min=0).sqrt()  # the moments' common singular values
    R_q, R_k = _roots(inverse_x @ (axes * S[..., None, :]) @ axes.mT @ inverse_x)
    cross = (_mean(x, keep_x) * _mean(y, keep_y)).sum(-1)
    a = optimal_a(2 * (S.to(x.dtype).sum(-1) + cross) / K)
    root = (1 - 4 * a)[..., None, None].sqrt()
    return DenseParameters(a[..., None].expand(*a.shape, K), root * R_q.to(x.dtype), root * R_k.to(x.dtype))


@checked
def sderf(
    x: Float[Tensor, "*batch N K"],
    y: Float[Tensor, "*batch M K"],
    *,
    keep_x: Bool[Tensor, "*batch N"] | None = None,
    keep_y: Bool[Tensor, "*batch M"] | None = None,
) -> DenseParameters:
    r"""FAVOR#, symmetric: $B_q = B_k$, and A diagonal along the principal axes of x + y.

    (Likhosherstov et al. 2023, arXiv:2302.00787, section 3.)
    """
    cross = _mean(x, keep_x)[..., None] * _mean(y, keep_y)[..., None, :]
    moments, axes = torch.linalg.eigh((_moment(x, keep_x) + _moment(y, keep_y) + cross + cross.mT).double())
    a = optimal_a(moments.clamp(min=0)).to(x.dtype)
    axes = axes.to(x.dtype)
    B = (1 - 4 * a)[..., None].sqrt() * axes.mT
    return DenseParameters(a, B, B, axes)


def _mean(x: Tensor, keep: Tensor | None) -> Tensor:
    """The mean token (..., K); 0 where none is kept."""
    if keep is None:
        return x.mean(-2)
    return (x * keep[..., None]).sum(-2) / keep.sum(-1, keepdim=True).clamp(min=1)


def _moment(x: Tensor, keep: Tensor | None) -> Tensor:
    """The mean of x x^T (..., K, K); 0 where no token is kept."""
    if keep is None:
        return x.mT @ x / x.shape[-2]
    return (x * keep[..., None]).mT @ x / keep.sum(-1).clamp(min=1)[..., None, None]


# What a second moment is lifted by, relative to its mean eigenvalue: fewer tokens than dimensions leave it singular.
# Any B_q and B_k that invert each other leave the estimate unbiased, so that this costs a little variance at most.
RIDGE = 1e-4
# And its least mean eigenvalue, relative to the other side's: balanced with less, queries of 0 would leave no digits of
# the keys, and get a gradient of nothing but roundings.
BALANCE = 1e-12


def _lifted(moment: Tensor, other: Tensor) -> Tensor:
    """A second moment made positive definite, beside that of the other side; both float64, for it is inverted, and
    there are but K x K numbers of it."""
    mean, beside = (each.diagonal(dim1=-2, dim2=-1).mean(-1) for each in (moment, other))
    mean = torch.maximum(mean, BALANCE * beside).clamp(min=torch.finfo(moment.dtype).tiny ** 0.25)
    return moment + RIDGE * mean[..., None, None] * torch.eye(moment.shape[-1]).to(moment)


def _roots(moment: Tensor) -> tuple[Tensor, Tensor]:
    """The symmetric root of a positive definite matrix, and its inverse."""
    values, axes = torch.linalg.eigh(moment)
    root = values.clamp(min=torch.finfo(values.dtype).tiny).sqrt()[..., None, :]
    return (axes * root) @ axes.mT, (axes / root) @ axes.mT
