"""From one kind of layer to another: what is frozen made to train, and the other way about."""

import copy
from typing import Any, TypeVar

from torch import nn

from ortho.layers import MultiheadAttention
from ortho.projections import LearnedProjection, by_matrices

__all__ = ["to_standard"]

ModuleT = TypeVar("ModuleT", bound=nn.Module)


def to_standard(module: ModuleT) -> ModuleT:
    """A copy of any module in which every projection is a learned one with the same weights: same outputs, all trained.

    The copy's layers are what the standard architecture loads and what a trainer may fine-tune in full. Raises
    TypeError for a projection of one's own, whose weights need not say what it does.
    """
    module = copy.deepcopy(module)
    for layer in [m for m in module.modules() if isinstance(m, MultiheadAttention)]:
        old = by_matrices(layer.projection)
        sizes: dict[str, Any] = {"num_kv_heads": old.num_kv_heads, "bias": old.bias_q is not None}
        if old.q_width != old.d_model:
            sizes["head_dim"] = old.head_dim
        new = LearnedProjection(old.d_model, old.num_heads, **sizes, device="meta")  # no draw: its weights are the old
        for name in ("weight_q", "weight_k", "bias_q", "bias_k"):
            value = getattr(old, name)
            if value is not None:
                setattr(new, name, nn.Parameter(value.detach().clone()))
        layer.projection = new.train(old.training)
    return module
