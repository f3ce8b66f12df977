"""What layers share: making weights, splitting and spreading heads, reading masks."""

from math import sqrt
from typing import Any

import torch
from torch import nn

from ortho._typing import Bool, Float, Tensor


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

    `fans` is the sum of the numbers of inputs and outputs that sets the scale, if not the matrix's own.
    """
    weight = torch.empty(rows, columns, dtype=dtype, device=device)
    gain = 1.0 if fans is None else sqrt((rows + columns) / fans)
    return nn.Parameter(nn.init.xavier_uniform_(weight, gain, generator=generator))


def new_bias(weight: Tensor) -> nn.Parameter:
    """A trained bias (rows,) for a matrix's outputs, 0 at first."""
    return nn.Parameter(weight.new_zeros(len(weight)))


def split_heads(x: Float[Tensor, "B N d"], num_heads: int) -> Float[Tensor, "B H N K"]:
    """(B, N, d) -> (B, H, N, d/H): head j takes columns j d/H to (j + 1) d/H."""
    return x.unflatten(-1, (num_heads, -1)).transpose(1, 2)


def spread_heads(x: Float[Tensor, "*batch G n K"], heads: int) -> Float[Tensor, "*batch H n K"]:
    """Each head of keys or values, once for every head of queries that shares it: (..., G, n, K) -> (..., H, n, K)."""
    if x.dim() < 3 or x.shape[-3] == heads:
        return x
    G, n, width = x.shape[-3:]
    # Copied, even if there is only one head: kernels and closed forms count on heads with memory of their own.
    return x[..., None, :, :].expand(*x.shape[:-3], G, heads // G, n, width).contiguous().flatten(-4, -3)


def tokens_there(mask: Any, length: int) -> Bool[Tensor, "b N"] | None:
    """Which of the last `length` tokens the mask of a layer keeps, (B or 1, N); None if it keeps all.

    `mask` is what `_checks.layer_mask` returns. A mask of keys leaves out a token to which no head may attend. A mask
    of pairs leaves out no token. Anything that is not a mask gives None; the attention refuses it.
    """
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or not 0 < mask.dim() <= 4:
        return None
    mask = mask[(None,) * (4 - mask.dim())]  # (b, h, n, M)
    if mask.shape[2] != 1 or 1 < mask.shape[3] < length:
        return None
    there = mask[:, :, 0].any(1)  # (b, M)
    return there.expand(-1, length) if there.shape[1] == 1 else there[:, there.shape[1] - length :]
