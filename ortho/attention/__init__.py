"""The attention mechanisms: each has a file of its own, and an entry in `MECHANISMS` here.

Their functions can be imported from here: `from ortho.attention import softmax_attention, favor_attention, delta_rule`.
"""

from collections.abc import Callable
from typing import Any

from ortho import checks
from ortho.attention.call import AttentionFunction
from ortho.attention.dynamic_sparse import importance, routing, sparse_linear, top_k
from ortho.attention.dynamic_sparse.importance import importance_attention, importance_attention_reference
from ortho.attention.dynamic_sparse.routing import routing_attention, routing_attention_reference
from ortho.attention.dynamic_sparse.sparse_linear import sparse_linear_attention, sparse_linear_attention_reference
from ortho.attention.dynamic_sparse.top_k import top_k_attention, top_k_attention_reference
from ortho.attention.linear import dense_features, efficient, efficient_causal, favor, feature_maps
from ortho.attention.linear.efficient import efficient_attention, efficient_attention_reference
from ortho.attention.linear.efficient_causal import (
    causal_efficient_attention,
    causal_efficient_attention_reference,
)
from ortho.attention.linear.linear_attention import MECHANISM as LINEAR
from ortho.attention.linear.linear_attention import linear_attention, linear_attention_reference
from ortho.attention.linear.random_feature_attention import RandomFeatureAttention
from ortho.attention.mechanism import Mechanism
from ortho.attention.position_bias import alibi, forgetting_transformer, position_delta, rotary
from ortho.attention.position_bias import path_attention as path
from ortho.attention.position_bias.alibi import alibi_attention
from ortho.attention.position_bias.forgetting_transformer import forgetting_attention
from ortho.attention.position_bias.path_attention import path_attention
from ortho.attention.position_bias.position_delta import position_delta_attention
from ortho.attention.position_bias.rotary import rotary_attention
from ortho.attention.positional.positional_attention import positional_attention, positional_attention_reference
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
from ortho.attention.recurrent.ttt import ttt_attention, ttt_attention_reference
from ortho.attention.recurrent.vector_gated import vector_gated_delta
from ortho.attention.softmax import flash
from ortho.attention.softmax.flash import flash_attention
from ortho.attention.softmax.softmax_attention import MECHANISM as SOFTMAX
from ortho.attention.softmax.softmax_attention import softmax_attention, softmax_attention_reference
from ortho.attention.sparse import block_sparse, blocked_window, dilated, fixed, global_local, strided, window
from ortho.attention.sparse.block_sparse import big_bird_attention, block_sparse_attention
from ortho.attention.sparse.blocked_window import blocked_window_attention, overlapping_blocks_attention
from ortho.attention.sparse.dilated import dilated_attention, local_dilated_attention
from ortho.attention.sparse.fixed import fixed_attention, fixed_columns_attention
from ortho.attention.sparse.global_local import global_local_attention
from ortho.attention.sparse.pattern import pattern_attention
from ortho.attention.sparse.strided import local_strided_attention, strided_attention
from ortho.attention.sparse.window import window_attention
from ortho.checks import FORMS

MECHANISMS: dict[str, Mechanism] = {
    m.name: m
    for m in (
        SOFTMAX,
        flash.MECHANISM,
        LINEAR,
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
        path.MECHANISM,
        position_delta.MECHANISM,
        window.MECHANISM,
        *blocked_window.MECHANISMS,
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

# Linear attention with each of the feature maps; `linear_attention` takes any map.
linear_relu_attention = MECHANISMS["linear-relu"].fast
linear_exp_attention = MECHANISMS["linear-exp"].fast
cosformer_attention = MECHANISMS["cosformer"].fast
taylor_attention = MECHANISMS["taylor"].fast
cosine_attention = MECHANISMS["cosine"].fast
powers_attention = MECHANISMS["powers"].fast
rff_attention = MECHANISMS["rff"].fast
favor_attention = MECHANISMS["favor"].fast
favor_plus_plus_attention = MECHANISMS["favor++"].fast
saderf_attention = MECHANISMS["saderf"].fast
aderf_attention = MECHANISMS["aderf"].fast
sderf_attention = MECHANISMS["sderf"].fast


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
    "aderf_attention",
    "alibi_attention",
    "big_bird_attention",
    "block_sparse_attention",
    "blocked_window_attention",
    "causal_efficient_attention",
    "causal_efficient_attention_reference",
    "cosformer_attention",
    "cosine_attention",
    "delta_product",
    "delta_rule",
    "dilated_attention",
    "efficient_attention",
    "efficient_attention_reference",
    "favor_attention",
    "favor_plus_plus_attention",
    "fixed_attention",
    "fixed_columns_attention",
    "flash_attention",
    "forgetting_attention",
    "gated_linear_attention",
    "global_local_attention",
    "importance_attention",
    "importance_attention_reference",
    "kimi_delta_attention",
    "linear_attention",
    "linear_attention_reference",
    "linear_exp_attention",
    "linear_relu_attention",
    "local_dilated_attention",
    "local_strided_attention",
    "low_rank",
    "overlapping_blocks_attention",
    "path_attention",
    "pattern_attention",
    "position_delta_attention",
    "positional_attention",
    "positional_attention_reference",
    "powers_attention",
    "register",
    "rff_attention",
    "rotary_attention",
    "routing_attention",
    "routing_attention_reference",
    "saderf_attention",
    "sderf_attention",
    "selective_scan",
    "softmax_attention",
    "softmax_attention_reference",
    "sparse_linear_attention",
    "sparse_linear_attention_reference",
    "state_space_duality",
    "strided_attention",
    "taylor_attention",
    "top_k_attention",
    "top_k_attention_reference",
    "ttt_attention",
    "ttt_attention_reference",
    "vector_gated_delta",
    "window_attention",
]
