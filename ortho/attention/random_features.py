r"""Random features of the softmax kernel: maps with $E\, \phi(x)^T \phi(y) = \exp(x^T y)$ over the rows of $\Omega$.

Sines, exponentials, or exponentials whose quadratic terms are fitted to the data; `feature_draws` has the rows. The
functions here are the formulas as they stand, for theory and tests; `favor` scales them so that they stay in range.
"""

from math import log, sqrt
from typing import NamedTuple

import torch

from ortho._typing import Float, Tensor
from ortho.attention.feature_draws import mirrored

__all__ = [
    "DenseParameters",
    "aderf",
    "dense_features",
    "gerf",
    "hyperbolic_features",
    "isotropic",
    "mean_square_sum",
    "optimal_a",
    "positive_features",
    "saderf",
    "sderf",
    "trigonometric_features",
]


def positive_features(x: Float[Tensor, "... N K"], omega: Float[Tensor, "... m K"]) -> Float[Tensor, "... N m"]:
    r"""$\phi(x) = m^{-1/2} \exp(\Omega x - |x|^2/2)$ (Choromanski et al. 2021, arXiv:2009.14794, lemma 1).

    Leading axes broadcast. In float32 it vanishes for $|x|$ above some 13.
    """
    return (x @ omega.mT - _half_square(x)).exp() / sqrt(omega.shape[-2])


def hyperbolic_features(x: Float[Tensor, "... N K"], omega: Float[Tensor, "... m K"]) -> Float[Tensor, "... N 2m"]:
    r"""$(2m)^{-1/2} \exp(-|x|^2/2)\, [\exp(\Omega x), \exp(-\Omega x)]$: `positive_features` of the mirrored rows.

    (Choromanski et al. 2021, arXiv:2009.14794, lemma 1.)
    """
    return positive_features(x, mirrored(omega))


def trigonometric_features(x: Float[Tensor, "... N K"], omega: Float[Tensor, "... m K"]) -> Float[Tensor, "... N 2m"]:
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
    (Likhosherstov et al. 2023, arXiv:2302.00787, section 3). With $B_k$ for keys and $B_q$ for queries they are unbiased if
    $B_q^T (I - 4A)^{-1} B_k = I$. a = 0 and B = I give `positive_features`.
    """
    a, mapped = a[..., None, :], x @ B.mT
    exponents = mapped @ omega.mT + (a * omega.square()).sum(-1)[..., None, :]
    half = (mapped.square() / (1 - 4 * a)).sum(-1, keepdim=True) / 2
    return (exponents - half + (1 - 4 * a).log().sum(-1, keepdim=True) / 4 - log(omega.shape[-2]) / 2).exp()


def _half_square(x: Tensor) -> Tensor:
    return x.square().sum(-1, keepdim=True) / 2


class DenseParameters(NamedTuple):
    r"""What fits `dense_features` to data: the diagonal of A, and $B_q$, $B_k$ with $B_q^T (I - 4A)^{-1} B_k = I$."""

    a: Float[Tensor, "*batch K"]
    B_q: Float[Tensor, "*batch K K"]
    B_k: Float[Tensor, "*batch K K"]


def optimal_a(moment: Float[Tensor, "*sizes"]) -> Float[Tensor, "*sizes"]:
    r"""The a of $A = a I$, $B = \sqrt{1 - 4a}\, I$, that minimises the mean logarithm of the features' second moment.

    `moment` is the mean of $|x + y|^2 / K$ over pairs of K-wide x and y. (FAVOR++: Likhosherstov et al. 2022,
    arXiv:2205.15317; in the form of 2023, arXiv:2302.00787, section 3.) From 0, for a moment of 0, downwards.
    """
    return (1 - 2 * moment - ((2 * moment + 1).square() + 8 * moment).sqrt()) / 16


def mean_square_sum(x: Float[Tensor, "*batch N K"], y: Float[Tensor, "*batch M K"]) -> Float[Tensor, "*batch"]:
    r"""The mean of $|x_i + y_j|^2$ over all pairs, in time linear in N and M."""
    cross = (x.mean(-2) * y.mean(-2)).sum(-1)
    return x.square().sum(-1).mean(-1) + y.square().sum(-1).mean(-1) + 2 * cross


def isotropic(a: Float[Tensor, "*batch"], K: int) -> DenseParameters:
    r"""$A = a I$, $B = \sqrt{1 - 4a}\, I$, the parameters of generalised exponential features (GERF)."""
    B = (1 - 4 * a)[..., None, None].sqrt() * torch.eye(K, dtype=a.dtype, device=a.device)
    return DenseParameters(a[..., None].expand(*a.shape, K), B, B)


def gerf(x: Float[Tensor, "*batch N K"], y: Float[Tensor, "*batch M K"]) -> DenseParameters:
    r"""FAVOR++: `isotropic`, with the a that `optimal_a` gives for these scaled queries x and keys y."""
    K = x.shape[-1]
    return isotropic(optimal_a(mean_square_sum(x, y) / K), K)


def saderf(x: Float[Tensor, "*batch N K"], y: Float[Tensor, "*batch M K"]) -> DenseParameters:
    r"""FAVOR#, simplified asymmetric: GERF on $\Psi x$ and $\Psi^{-1} y$, with the diagonal $\Psi$ that equals moments.

    (Likhosherstov et al. 2023, arXiv:2302.00787, section 3.) A coordinate that is 0 in all of x or y keeps its scale.
    """
    of_x, of_y = x.square().mean(-2), y.square().mean(-2)
    usable = (of_x > 0) & (of_y > 0)
    psi = (of_y.masked_fill(~usable, 1) / of_x.masked_fill(~usable, 1)).pow(0.25)[..., None, :]  # (..., 1, K)
    a, B, _ = gerf(x * psi, y / psi)
    return DenseParameters(a, B * psi, B / psi)


def aderf(x: Float[Tensor, "*batch N K"], y: Float[Tensor, "*batch M K"]) -> DenseParameters:
    r"""FAVOR#, asymmetric: $A = a I$ and the best $B_q$ and $B_k$, which differ.

    (Likhosherstov et al. 2023, arXiv:2302.00787, theorem 4.) $R_q$ and $R_k = R_q^{-T}$ bring the second moments of
    x and y to the same diagonal; then it is GERF.
    """
    K = x.shape[-1]
    (root_x, inverse_x), (root_y, _) = _roots(_moment(x)), _roots(_moment(y))
    U, S, _ = torch.linalg.svd(root_x @ root_y.mT)
    R_q = S[..., None].sqrt() * (U.mT @ inverse_x)
    R_k = S[..., None].rsqrt() * (U.mT @ root_x)
    a = optimal_a((2 * S.sum(-1) + 2 * (x.mean(-2) * y.mean(-2)).sum(-1)) / K)
    root = (1 - 4 * a)[..., None, None].sqrt()
    return DenseParameters(a[..., None].expand(*a.shape, K), root * R_q, root * R_k)


def sderf(x: Float[Tensor, "*batch N K"], y: Float[Tensor, "*batch M K"]) -> DenseParameters:
    r"""FAVOR#, symmetric: $B_q = B_k$, and A diagonal along the principal axes of x + y.

    (Likhosherstov et al. 2023, arXiv:2302.00787, theorem 3.)
    """
    cross = x.mean(-2)[..., None] * y.mean(-2)[..., None, :]
    moments, axes = torch.linalg.eigh(_moment(x) + _moment(y) + cross + cross.mT)
    a = optimal_a(moments.clamp(min=0))
    B = (1 - 4 * a)[..., None].sqrt() * axes.mT
    return DenseParameters(a, B, B)


# What a second moment is lifted by, relative to its mean eigenvalue: fewer tokens than dimensions leave it singular.
# Any B_q and B_k that invert each other leave the estimate unbiased, so that this costs a little variance at most.
RIDGE = 1e-6


def _moment(x: Tensor) -> Tensor:
    return x.mT @ x / x.shape[-2]


def _roots(moment: Tensor) -> tuple[Tensor, Tensor]:
    r"""$\Lambda^{1/2} Q^T$ and $\Lambda^{-1/2} Q^T$ of a moment $Q \Lambda Q^T$."""
    values, axes = torch.linalg.eigh(moment)
    mean = values.mean(-1, keepdim=True)
    root = (values.clamp(min=0) + RIDGE * mean.clamp(min=torch.finfo(mean.dtype).tiny ** 0.5)).sqrt()[..., None]
    return root * axes.mT, axes.mT / root
