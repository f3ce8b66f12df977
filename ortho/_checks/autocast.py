"""Products in the dtype of their operands, whatever the caller's autocast says."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def no_autocast(x: Tensor) -> AbstractContextManager[object]:
    """A context in which autocast is off for the device of x; a device that has none, such as meta, needs no switch."""
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if _available(kind) else nullcontext()


@torch.compiler.assume_constant_result  # some releases' compilers do not know the question
def _available(kind: str) -> bool:
    return torch.amp.is_autocast_available(kind)
