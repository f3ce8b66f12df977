"""What `torch.compile`, `torch.func` and forward differentiation may do to a function, and what they may not."""

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad

from ortho._checks.autocast import no_autocast

REFUSAL = (
    "torch.func: expected a plain call, as the fast form has no transforms and no forward derivatives; its reference "
    "form has"
)
F = TypeVar("F", bound=Callable[..., Any])


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
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        if not plain:
            plain.append(torch.compiler.disable(function))
        return plain[0](*args, **kwargs)

    # The marks of `torch.compiler.disable`, by which the compiler knows what to leave alone.
    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    call._torchdynamo_disable_msg = "tables are made of sizes and numbers"  # type: ignore[attr-defined]
    return call  # type: ignore[return-value]


def transformed() -> bool:
    """Whether this runs under a transform of `torch.func`, or where numbers may carry a forward derivative."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def untransformed(*operands: Any) -> None:
    """RuntimeError under a transform, for numbers with a forward derivative, and where `torch.export` is to keep the
    gradient or leave a size open: fused kernels, and functions with a backward pass of their own, serve none of these.
    """
    if torch.compiler.is_exporting():
        _exportable([x for x in operands if isinstance(x, Tensor)])
    if transformed() and torch._C._are_functorch_transforms_active():
        raise RuntimeError(REFUSAL)
    no_forward_derivative(*operands)


class Kernel(Function):
    """A function with a hand-written backward pass, for first derivatives only: no transform can differentiate it."""

    @classmethod
    def apply(cls, *args: Any, **kwargs: Any) -> Any:
        """RuntimeError where `untransformed` raises one."""
        untransformed(*args)
        return super().apply(*args, **kwargs)


def _exportable(operands: list[Tensor]) -> None:
    if torch.is_grad_enabled() and any(x.requires_grad for x in operands):
        raise RuntimeError("torch.export: expected a fast form under torch.no_grad, got a call that needs gradients")
    if not all(isinstance(size, int) for x in operands for size in x.shape):
        shapes = ", ".join(str(tuple(x.shape)) for x in operands)
        raise RuntimeError(f"torch.export: expected fixed sizes, by which a fast form is cut, got {shapes}")


def no_forward_derivative(*operands: Any) -> None:
    """RuntimeError for numbers that carry a forward derivative, which a fused kernel does not have."""
    if transformed() and forward_ad._current_level >= 0 and any(map(_is_dual, operands)):
        raise RuntimeError(REFUSAL)


def _is_dual(x: Any) -> bool:
    return isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None


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
    """A backward pass that refuses to be differentiated. (`once_differentiable` only marks the results: a second pass
    that also reaches the operands in another way never meets the mark, and leaves a part out.)"""

    @wraps(backward)
    def guarded(ctx: Any, *gradients: Tensor) -> Any:
        if torch.compiler.is_compiling():
            torch.ops.ortho.once(gradients[0])  # checks when the graph runs
        else:
            _refuse_twice(torch.is_grad_enabled())
        with no_autocast(gradients[0]):  # the caller's autocast may be on
            return backward(ctx, *gradients)

    return guarded
