r"""Random matrices: orthogonal ones, drawn in four ways, and the Gaussian control.

Every function here draws a `(rows, cols)` matrix. The orthogonal ones have orthonormal columns if `rows >= cols` and
orthonormal rows otherwise; `haar`, `svd`, `gram_schmidt` and `householder` all follow the Haar (uniform) law on the
Stiefel manifold and differ in how they get there. Their entries have variance $1/\max(\text{rows}, \text{cols})$, and
`gaussian` uses the same, so that the control differs in nothing but orthogonality.
"""

from collections.abc import Callable
from math import sqrt
from typing import Any

import torch

from ortho._typing import Float, Tensor


def _normal(rows: int, cols: int, generator: torch.Generator | None, dtype: torch.dtype | None, device: Any) -> Tensor:
    """Standard normal entries, computed in float32 at least: no factorisations exist for narrower dtypes."""
    dtype = dtype or torch.get_default_dtype()
    working = dtype if dtype in (torch.float32, torch.float64) else torch.float32
    return torch.randn(rows, cols, generator=generator, dtype=working, device=device)


def _tall(draw: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    """Turn a map from a tall Gaussian matrix to orthonormal columns into a public draw of any shape."""

    def sample(
        rows: int,
        cols: int | None = None,
        *,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> Float[Tensor, "rows cols"]:
        cols = rows if cols is None else cols
        basis = draw(_normal(max(rows, cols), min(rows, cols), generator, dtype, device))
        return (basis if rows >= cols else basis.mT).contiguous().to(dtype or torch.get_default_dtype())

    sample.__name__ = sample.__qualname__ = draw.__name__.strip("_")
    sample.__doc__ = draw.__doc__
    return sample


@_tall
def haar(gaussian: Tensor) -> Tensor:
    r"""QR of a Gaussian matrix, with the signs of R's diagonal moved into Q.

    QR fixes Q only up to the sign of each column, and LAPACK's choice is not random: without the correction the law is
    not Haar, and averages over draws depend on the direction (Mezzadri 2007, *How to generate random matrices from the
    classical compact groups*, section 5). Returns (rows, cols); raises TypeError or ValueError for sizes below 1.
    """
    q, r = torch.linalg.qr(gaussian)
    sign = torch.where(r.diagonal() < 0, -1.0, 1.0).to(q.dtype)
    return q * sign


@_tall
def svd(gaussian: Tensor) -> Tensor:
    r"""The orthogonal polar factor $U V^T$ of a Gaussian matrix $G = U \Sigma V^T$.

    Haar because $G$ and $Q G$ have the same law and the polar factor of $Q G$ is $Q$ times that of $G$; the arbitrary
    signs of $U$ and $V$ cancel. $U$ alone would not do. Returns (rows, cols).
    """
    u, _, vh = torch.linalg.svd(gaussian, full_matrices=False)
    return u @ vh


@_tall
def gram_schmidt(gaussian: Tensor) -> Tensor:
    """Gram-Schmidt on Gaussian columns: QR with a positive diagonal, so Haar without a correction.

    Each column is projected twice off its predecessors. One pass of the classical process loses orthogonality in
    proportion to the condition number squared; a second pass restores it to rounding ("twice is enough", Giraud et al.
    2005). Returns (rows, cols).
    """
    basis = torch.empty_like(gaussian)
    for j in range(gaussian.shape[1]):
        before, rest = basis[:, :j], gaussian[:, j]
        for _ in range(2):
            rest = rest - before @ (before.mT @ rest)
        basis[:, j] = rest / rest.norm()
    return basis


@_tall
def householder(gaussian: Tensor) -> Tensor:
    r"""A product of random Householder reflections, one for each column (Stewart 1980, section 3).

    Column j's first free axis is reflected onto a uniform direction of the remaining n - j dimensions, with a random
    sign: $Q = H_1 H_2 \cdots H_c$ restricted to the first c columns. It needs no factorisation, and r reflections apply
    to a vector in 4 r n operations without ever forming Q. Returns (rows, cols).
    """
    n, cols = gaussian.shape
    q = torch.eye(n, cols, dtype=gaussian.dtype, device=gaussian.device)
    for j in reversed(range(cols)):
        direction = gaussian[j:, j]
        sign = -1.0 if direction[0] < 0 else 1.0
        mirror = direction.clone()
        mirror[0] += sign * direction.norm()  # away from cancellation
        mirror /= mirror.norm()
        q[j:, j:] -= 2 * torch.outer(mirror, mirror @ q[j:, j:])
        q[j:, j:] *= -sign  # the reflection maps e_1 to -sign * direction
    return q


def gaussian(
    rows: int,
    cols: int | None = None,
    *,
    generator: torch.Generator | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Float[Tensor, "rows cols"]:
    r"""Independent normal entries of variance $1/\max(\text{rows}, \text{cols})$: orthogonal only on average.

    Returns (rows, cols); raises TypeError or ValueError for sizes below 1.
    """
    cols = rows if cols is None else cols
    matrix = _normal(rows, cols, generator, dtype, device) / sqrt(max(rows, cols))
    return matrix.to(dtype or torch.get_default_dtype())


DRAWS: dict[str, Callable[..., Tensor]] = {
    "haar": haar,
    "svd": svd,
    "gram_schmidt": gram_schmidt,
    "householder": householder,
    "gaussian": gaussian,
}
