r"""Draws of orthogonal rows that estimate another kernel than the softmax kernel, each of them in use somewhere.

All take the arguments of `ortho.attention.linear.random_features`, whose draws are the right ones; `options` are
`generator`, `dtype` and `device`. `draw_bias` has their means.
"""

from collections.abc import Callable
from math import sqrt
from typing import Any

import torch

from ortho import _checks
from ortho._checks import checked
from ortho._typing import Float, Tensor
from ortho.attention.linear.favor import orthogonal_features
from ortho.attention.linear.random_features import structured_features

__all__ = ["WRONG_DRAWS", "raw_qr_rows", "root_norm_rows", "sign_rows", "unit_norm_rows"]


@checked
def unit_norm_rows(m: int, K: int, **options: Any) -> Float[Tensor, "m K"]:
    """Orthonormal rows: Gram-Schmidt and nothing after it, as source S2 prints it (section 3.3.2).

    Returns (m, K), in blocks of K rows; raises TypeError or ValueError for sizes below 1.
    """
    rows = orthogonal_features(m, K, **options)
    return rows / rows.norm(dim=-1, keepdim=True)


@checked
def root_norm_rows(m: int, K: int, **options: Any) -> Float[Tensor, "m K"]:
    r"""Orthogonal rows of length $\sqrt K$, the root mean square of the right ones.

    They estimate the regularised softmax kernel (SMREG) of Choromanski et al. 2021 (arXiv:2009.14794, theorem 1), and
    are what their code and its descendants draw with `scaling=1`. Returns (m, K); errors as in `unit_norm_rows`.
    """
    return sqrt(K) * unit_norm_rows(m, K, **options)


@checked
def sign_rows(m: int, K: int, **options: Any) -> Float[Tensor, "m K"]:
    r"""Rows of $\sqrt K H D$ with one diagonal of random signs, the cheapest of the structured blocks: entries +-1.

    (Yu et al. 2016, arXiv:1610.09072, section 4, of a product with one factor.) Returns (m, K); raises ValueError for a
    K that is no power of two.
    """
    if _checks.positive_int("K", K) & (K - 1):
        raise ValueError(f"K: expected a power of two, got {K}")
    return structured_features(m, K, factors=1, **options).sign()


@checked
def raw_qr_rows(m: int, K: int, **options: Any) -> Float[Tensor, "m K"]:
    r"""Columns of a QR whose signs are left as LAPACK returns them, with lengths $\chi(K)$: not Haar.

    The lengths are right, the directions are not: Householder's reflections leave the first entry of the first column
    negative, always. So does the code of Choromanski et al. 2021 in JAX, and by default that of several ports of it
    (`qr_uniform_q=False`). Returns (m, K), in blocks of K rows; errors as in `unit_norm_rows`.
    """
    _checks.positive_int("m", m)
    _checks.positive_int("K", K)
    blocks = [torch.linalg.qr(torch.randn(K, K, **options)).Q.mT for _ in range(-(-m // K))]
    return torch.cat(blocks)[:m] * torch.randn(m, K, **options).norm(dim=-1, keepdim=True)


WRONG_DRAWS: dict[str, Callable[..., Tensor]] = {
    "unit norm": unit_norm_rows,
    "root norm": root_norm_rows,
    "signs": sign_rows,
    "raw QR": raw_qr_rows,
}
