"""What every layer does with its matrices and its heads."""

from math import sqrt

import torch
from torch import nn

from ortho._typing import Float, Tensor


def new_weight(
    rows: int,
    columns: int,
    *,
    fans: int | None = None,
    generator: torch.Generator | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> nn.Parameter:
    """A trained matrix (rows, columns) with Xavier's uniform initialisation (Glorot & Bengio 2010).

    `fans` is the sum of the numbers of inputs and outputs by which it is scaled, where these are not the matrix's own.
    """
    weight = torch.empty(rows, columns, dtype=dtype, device=device)
    gain = 1.0 if fans is None else sqrt((rows + columns) / fans)
    return nn.Parameter(nn.init.xavier_uniform_(weight, gain, generator=generator))


def new_bias(weight: Tensor) -> nn.Parameter:
    """What is added to each of a matrix's outputs (rows,), trained and 0 at first."""
    return nn.Parameter(weight.new_zeros(len(weight)))


def split_heads(x: Float[Tensor, "B N d"], num_heads: int) -> Float[Tensor, "B H N K"]:
    """(B, N, d) -> (B, H, N, d/H): head j takes columns j d/H to (j + 1) d/H."""
    return x.unflatten(-1, (num_heads, -1)).transpose(1, 2)


def spread_heads(x: Float[Tensor, "*batch G n K"], heads: int) -> Float[Tensor, "*batch H n K"]:
    """Each head of keys or values once for every head of queries that shares it: (..., G, n, K) -> (..., H, n, K)."""
    if x.dim() < 3 or x.shape[-3] == heads:
        return x
    G, n, width = x.shape[-3:]
    # Copied, even where one head is all there is: kernels and closed forms count on heads with memory of their own.
    return x[..., None, :, :].expand(*x.shape[:-3], G, heads // G, n, width).contiguous().flatten(-4, -3)
