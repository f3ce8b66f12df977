"""The input of models that read tokens: embeddings of tokens and positions, and checks of indices and masks."""

from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn

from ortho import checks
from ortho._typing import Bool, Int
from ortho.layers.positional import sinusoidal_positions

EMBEDDING_STD = 0.02  # as in GPT-2, BERT and ViT
POSITIONS = ("learned", "sinusoidal")


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


def add_positions(
    module: nn.Module, name: str, positions: str, max_length: int | None, d_model: int, **vectors: Any
) -> None:
    """Give a module embeddings of `max_length` places (max_length, d) under `name`: a parameter if learned; a buffer if
    sinusoidal, scaled to the initial length of token embeddings; None without a `max_length`.

    Raises ValueError for unknown positions, and for sinusoidal ones without a `max_length`.
    """
    if checks.one_of("positions", positions, POSITIONS) == "learned":
        setattr(module, name, None if max_length is None else new_embeddings(max_length, d_model, **vectors))
    elif max_length is None:
        raise ValueError("max_length: expected a number beside sinusoidal positions, got None")
    else:  # sines and cosines have a mean square of 1/2
        waves = sinusoidal_positions(max_length, d_model, dtype=vectors["dtype"], device=vectors["device"])
        module.register_buffer(name, waves * (EMBEDDING_STD * sqrt(2)))


def token_indices(name: str, value: Int[Tensor, "B N"]) -> None:
    """Raise ValueError unless these are tokens (B, N); the embedding refuses what is no index into it."""
    checks.expect(value.dim() == 2 and 0 not in value.shape, name, "shape (B, N) with B, N >= 1", tuple(value.shape))


def check_token(name: str, token: int, count: int) -> None:
    """Raise ValueError unless the token is a number from 0 to count - 1."""
    checks.expect(0 <= token < count, name, f"an index in 0..{count - 1}", token)


def check_length(name: str, length: int, past: int, max_length: int | None) -> None:
    """Raise ValueError if `length` tokens after `past` others are more than `max_length`."""
    if max_length is not None and past + length > max_length:
        raise ValueError(f"{name}: expected at most {max_length - past} positions, got {length}")


def mask_of_tokens(
    name: str, mask: Bool[Tensor, "B N"] | None, like: str, shape: tuple[int, ...]
) -> Bool[Tensor, "B 1 1 N"] | None:
    """A mask of tokens (B, N) as a mask of keys, (B, 1, 1, N), for every head and query."""
    if mask is None:
        return None
    if mask.dtype != torch.bool or mask.shape != shape:
        wanted = f"a boolean tensor of shape {tuple(shape)} like {like}"
        raise ValueError(f"{name}: expected {wanted}, got {checks.describe(mask)}")
    return mask[:, None, None]
