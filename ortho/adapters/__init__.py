"""Freeze queries and keys in models of torch, of Hugging Face and of this package, and undo it."""

from ortho.adapters.conversion import freeze_qk, to_standard, unfreeze_qk
from ortho.adapters.finding import AttentionLayer, attention_layers
from ortho.adapters.layouts import LAYOUTS, Layout, Source
from ortho.adapters.rows import FrozenRows

__all__ = [
    "LAYOUTS",
    "AttentionLayer",
    "FrozenRows",
    "Layout",
    "Source",
    "attention_layers",
    "freeze_qk",
    "to_standard",
    "unfreeze_qk",
]
