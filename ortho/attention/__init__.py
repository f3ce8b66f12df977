"""The attention mechanisms: each has a file of its own, and an entry in `MECHANISMS` here."""

from ortho.attention.dynamic_sparse import importance, routing, sparse_linear, top_k
from ortho.attention.dynamic_sparse.importance import importance_attention, importance_attention_reference
from ortho.attention.dynamic_sparse.routing import routing_attention, routing_attention_reference
from ortho.attention.dynamic_sparse.sparse_linear import sparse_linear_attention, sparse_linear_attention_reference
from ortho.attention.dynamic_sparse.top_k import top_k_attention, top_k_attention_reference
from ortho.attention.linear import dense_features, efficient, favor
from ortho.attention.linear import linear_attention as linear
from ortho.attention.linear.efficient import (
    causal_efficient_attention,
    causal_efficient_attention_reference,
    efficient_attention,
    efficient_attention_reference,
)
from ortho.attention.linear.linear_attention import linear_attention, linear_attention_reference
from ortho.attention.linear.random_feature_attention import RandomFeatureAttention
from ortho.attention.mechanism import FORMS, AttentionFunction, Mechanism
from ortho.attention.position_bias import alibi, forgetting_transformer, position_delta, rotary
from ortho.attention.position_bias import path_attention as path
from ortho.attention.position_bias.alibi import alibi_attention
from ortho.attention.position_bias.forgetting_transformer import forgetting_attention
from ortho.attention.position_bias.path_attention import path_attention
from ortho.attention.position_bias.position_delta import position_delta_attention
from ortho.attention.position_bias.rotary import rotary_attention
from ortho.attention.positional.positional_attention import positional_attention, positional_attention_reference
from ortho.attention.recurrent import delta, delta_product, gla, low_rank, selective_scan, ssd, ttt, vector_gated
from ortho.attention.recurrent.ttt import ttt_attention, ttt_attention_reference
from ortho.attention.softmax import flash
from ortho.attention.softmax.softmax_attention import MECHANISM as SOFTMAX
from ortho.attention.softmax.softmax_attention import softmax_attention, softmax_attention_reference
from ortho.attention.sparse import block_sparse, dilated, fixed, global_local, strided, window
from ortho.attention.sparse.block_sparse import big_bird_attention, block_sparse_attention
from ortho.attention.sparse.dilated import dilated_attention, local_dilated_attention
from ortho.attention.sparse.fixed import fixed_attention, fixed_columns_attention
from ortho.attention.sparse.global_local import global_local_attention
from ortho.attention.sparse.pattern import pattern_attention
from ortho.attention.sparse.strided import local_strided_attention, strided_attention
from ortho.attention.sparse.window import blocked_window_attention, overlapping_blocks_attention, window_attention

MECHANISMS: dict[str, Mechanism] = {
    m.name: m
    for m in (
        SOFTMAX,
        flash.MECHANISM,
        *linear.MECHANISMS,
        *efficient.MECHANISMS,
        *favor.MECHANISMS,
        *dense_features.MECHANISMS,
        *delta.MECHANISMS,
        delta_product.MECHANISM,
        low_rank.MECHANISM,
        ssd.MECHANISM,
        selective_scan.MECHANISM,
        *gla.MECHANISMS,
        vector_gated.MECHANISM,
        *ttt.MECHANISMS,
        rotary.MECHANISM,
        alibi.MECHANISM,
        forgetting_transformer.MECHANISM,
        path.MECHANISM,
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
    "dilated_attention",
    "efficient_attention",
    "efficient_attention_reference",
    "favor_attention",
    "favor_plus_plus_attention",
    "fixed_attention",
    "fixed_columns_attention",
    "forgetting_attention",
    "global_local_attention",
    "importance_attention",
    "importance_attention_reference",
    "linear_attention",
    "linear_attention_reference",
    "linear_exp_attention",
    "linear_relu_attention",
    "local_dilated_attention",
    "local_strided_attention",
    "overlapping_blocks_attention",
    "path_attention",
    "pattern_attention",
    "position_delta_attention",
    "positional_attention",
    "positional_attention_reference",
    "powers_attention",
    "rff_attention",
    "rotary_attention",
    "routing_attention",
    "routing_attention_reference",
    "saderf_attention",
    "sderf_attention",
    "softmax_attention",
    "softmax_attention_reference",
    "sparse_linear_attention",
    "sparse_linear_attention_reference",
    "strided_attention",
    "taylor_attention",
    "top_k_attention",
    "top_k_attention_reference",
    "ttt_attention",
    "ttt_attention_reference",
    "window_attention",
]
