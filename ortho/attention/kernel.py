"""What functions with a hand-written backward pass share, those that depend on values, and those that draw."""

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor

from ortho import checks
from ortho.attention.call import no_autocast

F = TypeVar("F", bound=Callable[..., Any])


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


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    @once
    def backward(_: Any, gradient: Tensor) -> Tensor:
        return gradient


def differentiable_once(x: Tensor) -> Tensor:
    """x, whose gradient refuses to be differentiated: for operations whose second derivative PyTorch gets wrong."""
    return _Once.apply(x)


def drawn_once(draw: F) -> F:
    """`draw`, which draws once for each set of arguments.

    A separate thread draws: no mode of the caller (inference, a default device, counting of operations) may affect what
    outlives the call. `torch.compile` breaks its graph there, unless an earlier call has drawn.
    """
    kept: dict[Any, Any] = {}

    @wraps(draw)
    def call(*key: Any) -> Any:
        if key not in kept:
            with ThreadPoolExecutor(1) as thread:
                kept[key] = thread.submit(draw, *key).result()
        return kept[key]

    call.kept = kept  # type: ignore[attr-defined]
    return call  # type: ignore[return-value]


def uncompiled(function: F) -> F:
    """`function` as Python runs it: `torch.compile` breaks its graph before and after it, and traces nothing of it.

    For functions that depend on values, such as which keys are chosen, or on sizes as integers. The compiler, which
    takes seconds to import, is only used if something else has imported it.
    """
    plain: list[Callable[..., Any]] = []

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_exporting():
            raise RuntimeError(f"torch.export: expected a function that can be traced, got {function.__name__}")
        checks.untraced(function.__name__)
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        if not plain:
            plain.append(torch.compiler.disable(function))
        return plain[0](*args, **kwargs)

    # The marks of `torch.compiler.disable`, by which the compiler knows what to leave alone.
    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    call._torchdynamo_disable_msg = "tables are made of sizes and numbers"  # type: ignore[attr-defined]
    return call  # type: ignore[return-value]
