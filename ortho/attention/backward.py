"""What functions with a hand-written backward pass share: it refuses to be differentiated."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from ortho.attention.call import no_autocast


def _refuse_twice(asked: bool) -> None:
    if asked:
        raise RuntimeError(
            "create_graph: expected False: the fast form cannot be differentiated twice; its reference form can"
        )


@torch.library.custom_op("ortho::once", mutates_args=())
def _once(gradient: torch.Tensor) -> None:
    _refuse_twice(torch.is_grad_enabled() or gradient.requires_grad)  # grad mode is off where operands need gradients


@_once.register_fake
def _(gradient: torch.Tensor) -> None: ...


def once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """A backward pass that refuses to be differentiated, with autocast off.

    PyTorch's `once_differentiable` only marks the results: a second pass that also reaches the operands in another way
    never meets the mark, and leaves a part out.
    """

    @wraps(backward)
    def guarded(ctx: Any, *gradients: Tensor | None) -> Any:
        first = next(x for x in gradients if x is not None)
        if torch.compiler.is_compiling():
            torch.ops.ortho.once(first)  # checks when the graph runs
        else:
            _refuse_twice(torch.is_grad_enabled())
        with no_autocast(first):
            return backward(ctx, *gradients)

    return guarded
