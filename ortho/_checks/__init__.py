"""Checks of what a caller hands in: every error names the argument, what came, and what was expected."""

from ortho._checks.arguments import checked
from ortho._checks.names import unknown
from ortho._checks.values import (
    FORMS,
    describe,
    finite,
    float_tensor,
    heads,
    indices,
    layer_mask,
    mask,
    one_of,
    positive_int,
    qkv,
    reads_values,
    scale_factor,
    sequence,
    share,
    shows_values,
    state,
    unchecked_values,
    within,
)

__all__ = [
    "FORMS",
    "checked",
    "describe",
    "finite",
    "float_tensor",
    "heads",
    "indices",
    "layer_mask",
    "mask",
    "one_of",
    "positive_int",
    "qkv",
    "reads_values",
    "scale_factor",
    "sequence",
    "share",
    "shows_values",
    "state",
    "unchecked_values",
    "unknown",
    "within",
]
