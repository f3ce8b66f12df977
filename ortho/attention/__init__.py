"""The attention mechanisms: each has a file of its own, and an entry in `MECHANISMS` here.

Their functions can be imported from here: `from ortho.attention import softmax_attention, favor_attention, delta_rule`.
"""

from collections.abc import Callable
from typing import Any

from ortho import checks
from ortho.attention.linear import dense_features, efficient, efficient_causal, favor, feature_maps
from ortho.attention.linear.efficient import efficient_attention
from ortho.attention.linear.efficient_causal import causal_efficient_attention
from ortho.attention.linear.linear_attention import linear_attention
from ortho.attention.linear.random_feature_attention import RandomFeatureAttention
from ortho.attention.mechanism import FORMS, AttentionFunction, Mechanism
from ortho.attention.positions import alibi, forgetting_transformer, path_attention, position_delta, rotary
from ortho.attention.recurrent import delta, gla, ssd, ttt, vector_gated
from ortho.attention.recurrent import delta_product as product
from ortho.attention.recurrent import low_rank as factored
from ortho.attention.recurrent import selective_scan as mamba
from ortho.attention.recurrent.delta import delta_rule
from ortho.attention.recurrent.delta_product import delta_product
from ortho.attention.recurrent.gla import gated_linear_attention, kimi_delta_attention
from ortho.attention.recurrent.low_rank import low_rank
from ortho.attention.recurrent.selective_scan import selective_scan
from ortho.attention.recurrent.ssd import state_space_duality
from ortho.attention.recurrent.ttt import ttt_attention
from ortho.attention.recurrent.vector_gated import vector_gated_delta
from ortho.attention.selected import importance, routing, sparse_linear, top_k
from ortho.attention.softmax import flash
from ortho.attention.softmax.flash import flash_attention
from ortho.attention.softmax.softmax_attention import MECHANISM as SOFTMAX
from ortho.attention.softmax.softmax_attention import softmax_attention, softmax_attention_reference
from ortho.attention.sparse import block_sparse, dilated, fixed, global_local, strided, window

MECHANISMS: dict[str, Mechanism] = {
    m.name: m
    for m in (
        SOFTMAX,
        flash.MECHANISM,
        *feature_maps.MECHANISMS,
        efficient.MECHANISM,
        efficient_causal.MECHANISM,
        *favor.MECHANISMS,
        *dense_features.MECHANISMS,
        *delta.MECHANISMS,
        product.MECHANISM,
        factored.MECHANISM,
        ssd.MECHANISM,
        mamba.MECHANISM,
        *gla.MECHANISMS,
        vector_gated.MECHANISM,
        *ttt.MECHANISMS,
        rotary.MECHANISM,
        alibi.MECHANISM,
        forgetting_transformer.MECHANISM,
        path_attention.MECHANISM,
        position_delta.MECHANISM,
        *window.MECHANISMS,
        *dilated.MECHANISMS,
        *strided.MECHANISMS,
        *fixed.MECHANISMS,
        *block_sparse.MECHANISMS,
        *global_local.MECHANISMS,
        top_k.MECHANISM,
        importance.MECHANISM,
        routing.MECHANISM,
        sparse_linear.MECHANISM,
    )
}
# Softmax attention by FAVOR+'s random features, and by random Fourier features.
favor_attention = MECHANISMS["favor"].fast
rff_attention = MECHANISMS["trigonometric"].fast


def register(
    name: str, attention: Callable[..., Any], *, reference: Callable[..., Any] | None = None, **fields: Any
) -> Mechanism:
    """Enter a mechanism of your own under a name, for layers, caches, costs and tests; returns its entry.

    `attention` has the signature of `softmax_attention`, and options of its own; `reference` is its definition, if
    there is another function for it. `fields` are those of `Mechanism`: `cost`, `gates`, `positional`, ...

    Raises ValueError for a name that is taken.
    """
    checks.expect(name not in MECHANISMS, "name", "one that is not taken", repr(name))
    MECHANISMS[name] = Mechanism(name=name, reference=reference or attention, fast=attention, **fields)
    return MECHANISMS[name]


__all__ = [
    "FORMS",
    "MECHANISMS",
    "AttentionFunction",
    "Mechanism",
    "RandomFeatureAttention",
    "causal_efficient_attention",
    "delta_product",
    "delta_rule",
    "efficient_attention",
    "favor_attention",
    "flash_attention",
    "gated_linear_attention",
    "kimi_delta_attention",
    "linear_attention",
    "low_rank",
    "register",
    "rff_attention",
    "selective_scan",
    "softmax_attention",
    "softmax_attention_reference",
    "state_space_duality",
    "ttt_attention",
    "vector_gated_delta",
]
