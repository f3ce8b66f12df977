"""The weights of an attention function, for looking at them."""

from collections.abc import Callable
from typing import Any

import torch

from ortho._typing import Float, Tensor


def weights_of(
    attention: Callable[..., Any], q: Float[Tensor, "*batch N K"], k: Float[Tensor, "*batch M K"], **options: Any
) -> Float[Tensor, "*batch N M"]:
    """The weights by which a call would multiply values, (..., N, M): its outputs for the identity as values.

    `options` are those of the function. It must take values of any width, as definitions do (`Mechanism.reference`),
    and be weights times values (`Mechanism.has_weights`). A mechanism that selects pairs gives the others 0.
    """
    M = k.shape[-2]
    return attention(q, k, torch.eye(M, dtype=q.dtype, device=q.device).expand(*k.shape[:-2], M, M), **options)
