"""Products in the dtype of their operands, whatever the caller's autocast says."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def no_autocast(x: Tensor) -> AbstractContextManager[object]:
    """A context in which autocast is off for the device of x; a device that has none, such as meta, needs no switch.

    Some releases' compilers cannot follow the question whether a device has autocast. What they compile for has it.
    """
    kind = x.device.type
    there = torch.compiler.is_compiling() or torch.amp.is_autocast_available(kind)
    return torch.autocast(kind, enabled=False) if there else nullcontext()
