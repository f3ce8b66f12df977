r"""Random features of the softmax kernel as their formulas read: $E\, \phi(x)^T \phi(y) = \exp(x^T y)$ over draws.

The first part has draws of the rows $\Omega$, each $N(0, I_K)$ or nearly so, besides the orthogonal ones of `favor`.
Rows may be independent, or coupled within blocks of K; coupling keeps each row's law and lowers the variance of
estimates that average over rows. The second part has the maps by exponentials and by sines, for theory and tests;
`favor` scales them so that they stay in range.
"""

from collections.abc import Callable
from math import sqrt

import torch

from ortho._typing import Float, Tensor
from ortho.attention.linear.favor import orthogonal_features


def iid_features(
    m: int,
    K: int,
    *,
    generator: torch.Generator | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Float[Tensor, "m K"]:
    """m independent rows, each $N(0, I_K)$: (m, K)."""
    return torch.randn(m, K, generator=generator, dtype=dtype, device=device)


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
    kernel is unbiased only in the limit of large K, and far from unbiased with one factor. If K is not a power of two,
    blocks have the next power's width and the columns past K are cut off; rows are then orthogonal only on average.

    Returns (m, K).
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
    # Lengths of law chi(width): the K columns that are left of a row after the cut are then like N(0, 1).
    lengths = torch.randn(m, width, generator=generator, dtype=dtype, device=device).norm(dim=-1, keepdim=True)
    return (torch.cat(blocks)[:m] * lengths)[:, :K].contiguous()


def _hadamard(x: Tensor) -> Tensor:
    """x H for the orthonormal Hadamard matrix H, along the last axis, of width 2^p, in p additions per entry."""
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


def positive_features(x: Float[Tensor, "... N K"], omega: Float[Tensor, "... m K"]) -> Float[Tensor, "... N m"]:
    r"""$\phi(x) = m^{-1/2} \exp(\Omega x - |x|^2/2)$ (Choromanski et al. 2021, arXiv:2009.14794, lemma 1).

    Leading axes broadcast. In float32 the features vanish for $|x|$ above about 13.
    """
    return (x @ omega.mT - _half_square(x)).exp() / sqrt(omega.shape[-2])


def rff_features(x: Float[Tensor, "... N K"], omega: Float[Tensor, "... m K"]) -> Float[Tensor, "... N 2*m"]:
    r"""$m^{-1/2} \exp(|x|^2/2)\, [\sin \Omega x, \cos \Omega x]$ (Rahimi & Recht 2007, for the softmax kernel).

    Their products estimate a positive kernel but may be negative.
    """
    angles = x @ omega.mT
    return torch.cat([angles.sin(), angles.cos()], -1) * _half_square(x).exp() / sqrt(omega.shape[-2])


def _half_square(x: Tensor) -> Tensor:
    return x.square().sum(-1, keepdim=True) / 2
