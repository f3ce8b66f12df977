"""Functions that the compiler leaves alone, as they depend on values."""

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch

from ortho import checks

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
