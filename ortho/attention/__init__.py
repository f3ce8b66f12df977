"""How queries, keys and values become outputs: one file a mechanism, one line here."""

from ortho.attention import (
    alibi,
    block_selection,
    block_sparse,
    channel_gates,
    delta,
    delta_product,
    dilated,
    efficient,
    favor,
    fixed_factorised,
    forgetting,
    global_local,
    key_importance,
    linear,
    lsh,
    nsa,
    path,
    position_delta,
    rotary,
    routing,
    softmax,
    sparse_linear,
    strided,
    top_keys,
    ttt,
    window,
)
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
        delta_product.MECHANISM,
        *channel_gates.MECHANISMS,
        *ttt.MECHANISMS,
        rotary.MECHANISM,
        alibi.MECHANISM,
        forgetting.MECHANISM,
        path.MECHANISM,
        position_delta.MECHANISM,
        *window.MECHANISMS,
        *dilated.MECHANISMS,
        *strided.MECHANISMS,
        *fixed_factorised.MECHANISMS,
        *block_sparse.MECHANISMS,
        *global_local.MECHANISMS,
        top_keys.MECHANISM,
        key_importance.MECHANISM,
        lsh.MECHANISM,
        routing.MECHANISM,
        block_selection.MECHANISM,
        nsa.MECHANISM,
        sparse_linear.MECHANISM,
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
