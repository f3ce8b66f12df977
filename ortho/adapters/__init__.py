"""Frozen heads, and heads of several kinds, in models of torch, of Hugging Face, and of this package."""

from ortho.adapters.finding import AttentionLayer, attention_layers
from ortho.adapters.freezing import freeze_qk, unfreeze_qk
from ortho.adapters.hybrid import set_heads, standard_heads
from ortho.adapters.layouts import LAYOUTS, Layout, Source
from ortho.adapters.marking import heads_record
from ortho.adapters.rows import FrozenRows
from ortho.adapters.saving import from_pretrained, restore
from ortho.adapters.torch_attention import AdaptedAttention

__all__ = [
    "LAYOUTS",
    "AdaptedAttention",
    "AttentionLayer",
    "FrozenRows",
    "Layout",
    "Source",
    "attention_layers",
    "freeze_qk",
    "from_pretrained",
    "heads_record",
    "restore",
    "set_heads",
    "standard_heads",
    "unfreeze_qk",
]
