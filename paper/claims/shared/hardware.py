"""S1, sections 2.1, 3.1, 3.2 and 4.1: tiles, decoding with a cache, recomputation, and mixtures of experts."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from ortho.attention.softmax.flash import flash_attention
from ortho.attention.softmax.softmax_attention import softmax_attention_reference
from ortho.cost.counting import Allocations

TOKENS, WIDTH = 1000, 8  # no multiple of a tile
FORMS = {"reference": softmax_attention_reference, "tiles": flash_attention}


@cache
def largest(form: str) -> int:
    """Numbers of the largest tensor that a form of softmax attention makes, forward and backward, in float32."""
    return largest_tensor(FORMS[form])


def largest_tensor(attend: Callable[..., Any]) -> int:
    """The same for any attention."""
    q, k, v = torch.zeros(3, 1, TOKENS, WIDTH).unbind()
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    with Allocations() as memory:
        o: Any = attend(*leaves)
        torch.autograd.grad(o.sum(), leaves)
    return memory.largest // 4
