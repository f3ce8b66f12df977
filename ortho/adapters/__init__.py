"""Frozen heads, and heads of several kinds, in models of torch, of Hugging Face, and of this package."""

from ortho.adapters.finding import LAYOUTS, AttentionLayer, attention_layers
from ortho.adapters.freezing import freeze_qk, unfreeze_qk
from ortho.adapters.hybrid import set_heads, standard_heads
from ortho.adapters.rows import FrozenRows
from ortho.adapters.torch_attention import AdaptedAttention

__all__ = [
    "LAYOUTS",
    "AdaptedAttention",
    "AttentionLayer",
    "FrozenRows",
    "attention_layers",
    "freeze_qk",
    "set_heads",
    "standard_heads",
    "unfreeze_qk",
]
