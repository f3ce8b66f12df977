"""What layers share: making weights, splitting and spreading heads, reading masks."""

from math import sqrt
from typing import Any

import torch
from torch import nn

from ortho._checks import reads_values
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


def frozen(values: Tensor) -> nn.Parameter:
    """A parameter that is not trained: sharding, broadcasting, casting and offloading treat it as they do a weight."""
    return nn.Parameter(values, requires_grad=False)


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


def tokens_there(
    attn_mask: Any, padding: Tensor | None, length: int, *, cut: bool = False
) -> Bool[Tensor, "b N"] | None:
    """Which of the last `length` tokens a layer's masks keep, (B or 1, N); None if they keep all.

    `padding` is its `key_padding_mask`. An `attn_mask` of keys, with one row for all queries, leaves out a token to
    which no head may attend; a mask of pairs leaves out no token. Anything that is not a mask gives None; the attention
    refuses it.

    Raises ValueError for a single token of a sequence that is `cut` if an `attn_mask` hides the token from itself, but
    not from padding: such a row may be one of a mask of pairs, or a mask of keys.
    """
    there = None if padding is None else ~padding[:, padding.shape[1] - length :]
    if not isinstance(attn_mask, Tensor) or attn_mask.dtype != torch.bool or not 0 < attn_mask.dim() <= 4:
        return there
    mask = attn_mask[(None,) * (4 - attn_mask.dim())]  # (b, h, n, M)
    if mask.shape[2] != 1 or 1 < mask.shape[3] < length:
        return there
    keys = mask[:, :, 0].any(1)  # (b, M)
    keys = keys.expand(-1, length) if keys.shape[1] == 1 else keys[:, keys.shape[1] - length :]
    if cut and length == 1 and reads_values(keys) and not (keys if there is None else keys | ~there).all():
        wanted = "a mask that lets a single token attend to itself, or the token's absence by key_padding_mask"
        raise ValueError(f"attn_mask: expected {wanted}, got shape {tuple(attn_mask.shape)} that hides it")
    return keys if there is None else keys & there
