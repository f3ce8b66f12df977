"""How queries, keys and values become outputs: one file a mechanism, one line here."""

from ortho.attention import delta, efficient, favor, linear, softmax
from ortho.attention.mechanism import FORMS, AttentionCost, AttentionFunction, Mechanism
from ortho.attention.redrawn import RandomFeatureAttention
from ortho.attention.softmax import softmax_attention, softmax_attention_reference

MECHANISMS: dict[str, Mechanism] = {
    m.name: m
    for m in (
        softmax.MECHANISM,
        *linear.MECHANISMS,
        efficient.MECHANISM,
        *favor.MECHANISMS,
        *delta.MECHANISMS,
    )
}

__all__ = [
    "FORMS",
    "MECHANISMS",
    "AttentionCost",
    "AttentionFunction",
    "Mechanism",
    "RandomFeatureAttention",
    "softmax_attention",
    "softmax_attention_reference",
]
