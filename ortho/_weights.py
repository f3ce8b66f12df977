"""What every layer does with its trained matrices and its heads."""

import torch
from torch import nn

from ortho._typing import Float, Tensor


def new_weight(
    rows: int,
    columns: int,
    *,
    generator: torch.Generator | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> nn.Parameter:
    """A trained matrix (rows, columns) with Xavier's uniform initialisation (Glorot & Bengio 2010)."""
    weight = torch.empty(rows, columns, dtype=dtype, device=device)
    return nn.Parameter(nn.init.xavier_uniform_(weight, generator=generator))


def split_heads(x: Float[Tensor, "B N d"], num_heads: int) -> Float[Tensor, "B H N K"]:
    """(B, N, d) -> (B, H, N, d/H): head j takes columns j d/H to (j + 1) d/H."""
    return x.unflatten(-1, (num_heads, -1)).transpose(1, 2)
