r"""The delta rule as the third source prints it, section 3.

The source's S is (V, K), the transpose of the package's; the source names neither a write strength nor the keys'
length.
"""

import torch
from torch import Tensor

from paper.claims.shared.common import seeded

LENGTH, WIDTH = 100, 8


def operands(length: int = LENGTH) -> tuple[Tensor, Tensor, Tensor]:
    """Normal queries and values, and keys of uniform direction with squared lengths up to 2, (length, WIDTH)."""
    g = seeded()
    q, k, v = torch.randn(3, length, WIDTH, generator=g, dtype=torch.float64)
    squares = 2 * torch.rand(length, 1, generator=g, dtype=torch.float64)
    return q, k / k.norm(dim=-1, keepdim=True) * squares.sqrt(), v


def as_printed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    r"""$S_t = S_{t-1} + (v_t - S_{t-1} k_t) k_t^T$, $o_t = S_t q_t$, from an empty memory."""
    S, rows = v.new_zeros(v.shape[-1], k.shape[-1]), []
    for query, key, value in zip(q, k, v, strict=True):
        S = S + torch.outer(value - S @ key, key)
        rows.append(S @ query)
    return torch.stack(rows)
