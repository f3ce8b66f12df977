"""What layers share: making weights, splitting and repeating heads, reading masks of tokens."""

from math import sqrt

import torch
from torch import Tensor, nn

from ortho._typing import Bool, Float


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
    """A parameter that does not require a gradient: an optimiser leaves it alone, all else treats it as a weight."""
    return nn.Parameter(values, requires_grad=False)


def split_heads(x: Float[Tensor, "B N d"], num_heads: int) -> Float[Tensor, "B H N K"]:
    """(B, N, d) -> (B, H, N, d/H): head j takes columns j d/H to (j + 1) d/H."""
    B, N, d = x.shape
    return x.reshape(B, N, num_heads, d // num_heads).transpose(1, 2)


def merge_heads(o: Float[Tensor, "B H N K"]) -> Float[Tensor, "B N d"]:
    """(B, H, N, K) -> (B, N, H K), the reverse of `split_heads`."""
    return o.transpose(1, 2).flatten(2)


def repeat_kv(x: Float[Tensor, "*batch G n K"], heads: int) -> Float[Tensor, "*batch H n K"]:
    """Each head of keys or values, once for every head of queries that shares it: (..., G, n, K) -> (..., H, n, K)."""
    if x.dim() < 3 or x.shape[-3] == heads:
        return x
    G, n, width = x.shape[-3:]
    # Copied, even if there is only one head: kernels and closed forms count on heads with memory of their own.
    return x[..., None, :, :].expand(*x.shape[:-3], G, heads // G, n, width).contiguous().flatten(-4, -3)


def token_mask(attn_mask: Tensor | None, padding: Tensor | None, length: int) -> Bool[Tensor, "b N"] | None:
    """Which of the last `length` tokens a layer's masks keep, (B or 1, N), True = attend; None if they keep all.

    `padding` is its `key_padding_mask`. An `attn_mask` of keys, with one row for all queries, leaves out a token to
    which no head may attend; a mask of pairs leaves out no token. Anything that is not a mask gives None; the attention
    refuses it.
    """
    tokens = None if padding is None else ~padding[:, padding.shape[1] - length :]
    if attn_mask is None or attn_mask.dtype != torch.bool or not 0 < attn_mask.dim() <= 4:
        return tokens
    mask = attn_mask[(None,) * (4 - attn_mask.dim())]  # (b, h, n, M)
    if mask.shape[2] != 1 or 1 < mask.shape[3] < length:
        return tokens
    keys = mask[:, :, 0].any(1)  # (b, M)
    keys = keys.expand(-1, length) if keys.shape[1] == 1 else keys[:, keys.shape[1] - length :]
    return keys if tokens is None else keys & tokens
