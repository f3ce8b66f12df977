"""How queries, keys and values become outputs: one file a mechanism, one line here."""

from ortho.attention import (
    alibi,
    channel_gates,
    delta,
    delta_product,
    efficient,
    favor,
    flash,
    forgetting,
    linear,
    path,
    position_delta,
    rotary,
    softmax,
    ttt,
)
from ortho.attention.dynamic import (
    block_selection,
    key_importance,
    lsh,
    nsa,
    routing,
    sparse_linear,
    top_keys,
)
from ortho.attention.mechanism import FORMS, AttentionCost, AttentionFunction, Mechanism
from ortho.attention.patterns import block_sparse, dilated, fixed_factorised, global_local, strided, window
from ortho.attention.redrawn import RandomFeatureAttention
from ortho.attention.softmax import softmax_attention, softmax_attention_reference

MECHANISMS: dict[str, Mechanism] = {
    m.name: m
    for m in (
        softmax.MECHANISM,
        flash.MECHANISM,
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
