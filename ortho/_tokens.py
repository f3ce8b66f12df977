"""What models that read tokens begin with: a check of the indices, and vectors for them."""

from typing import Any

import torch
from torch import nn

from ortho import _checks
from ortho._typing import Bool, Tensor

EMBEDDING_STD = 0.02  # as GPT-2, BERT and ViT begin


def token_indices(name: str, value: Any, count: int) -> Tensor:
    """`value` if it is a tensor (B, N) of integers from 0 to count - 1, else TypeError or ValueError."""
    if not isinstance(value, Tensor) or value.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name}: expected int32 or int64 indices, got {_checks.describe(value)}")
    if value.dim() != 2 or 0 in value.shape:
        raise ValueError(f"{name}: expected shape (B, N) with B, N >= 1, got {tuple(value.shape)}")
    _checks.indices(name, value, count)
    return value


def new_embeddings(
    count: int,
    d_model: int,
    *,
    generator: torch.Generator | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> nn.Parameter:
    """Trained vectors (count, d) with the standard deviation `EMBEDDING_STD`."""
    vectors = torch.empty(count, d_model, dtype=dtype, device=device)
    return nn.Parameter(nn.init.normal_(vectors, std=EMBEDDING_STD, generator=generator))


def tokens_there(mask: Any, length: int) -> Bool[Tensor, "b N"] | None:
    """Which of the last `length` tokens the mask of a layer has, (B or 1, N); None where it has all.

    `mask` is what `_checks.layer_mask` gives. A mask of keys leaves out a token to which no head may attend. One of
    pairs says who may attend to whom, and of no token that it is not there. What is no mask the attention refuses.
    """
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or not 0 < mask.dim() <= 4:
        return None
    mask = mask[(None,) * (4 - mask.dim())]  # (b, h, n, M)
    if mask.shape[2] != 1 or 1 < mask.shape[3] < length:
        return None
    there = mask[:, :, 0].any(1)  # (b, M)
    return there.expand(-1, length) if there.shape[1] == 1 else there[:, there.shape[1] - length :]
