r"""Draws of $\Omega$, the rows that random features project on: each row $N(0, I_K)$, or nearly so.

Rows may be independent, or coupled within blocks of K, which leaves each row's law as it is and lowers the variance of
estimates that average over rows.
"""

from collections.abc import Callable
from math import sqrt

import torch

from ortho import _checks
from ortho._checks import checked
from ortho._typing import Float, Tensor
from ortho.orthogonal import haar

__all__ = ["FEATURE_DRAWS", "iid_features", "mirrored", "orthogonal_features", "structured_features"]


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
    _checks.positive_int("m", m)
    _checks.positive_int("K", K)
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
    _checks.positive_int("m", m)
    _checks.positive_int("K", K)
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
    _checks.positive_int("m", m)
    _checks.positive_int("K", K)
    _checks.positive_int("factors", factors)
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
