"""From one kind of layer to another: what is frozen made to train, and the other way about."""

import copy
from typing import TypeVar

from torch import nn

from ortho._checks import checked
from ortho.adapters import standard_heads, unfreeze_qk

__all__ = ["to_standard"]

ModuleT = TypeVar("ModuleT", bound=nn.Module)


@checked
def to_standard(module: ModuleT) -> ModuleT:
    """A copy of any module in which every projection is a learned one with the same weights: same outputs, all trained.

    The copy's layers are what the standard architecture loads and what a trainer may fine-tune in full. Raises
    TypeError for a projection of one's own, whose weights need not say what it does; and ValueError for layers of other
    libraries with heads of kinds that no standard layer has (`ortho.adapters.standard_heads`).
    """
    return unfreeze_qk(standard_heads(copy.deepcopy(module)))
