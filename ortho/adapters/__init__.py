"""Freeze heads and change their kinds, in models of torch, of Hugging Face, and of this package."""

from ortho.adapters.conversion import (
    freeze_qk,
    from_pretrained,
    heads_record,
    restore,
    set_heads,
    standard_heads,
    to_standard,
    unfreeze_qk,
)
from ortho.adapters.finding import AttentionLayer, attention_layers
from ortho.adapters.layouts import LAYOUTS, Layout, Source
from ortho.adapters.rows import FrozenRows
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
    "to_standard",
    "unfreeze_qk",
]
