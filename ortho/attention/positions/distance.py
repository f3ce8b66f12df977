r"""Softmax attention with scores $s_{ij} - |c_i - c_j|$: what ALiBi and the Forgetting Transformer share.

Each token stands at a depth c, which does not increase from token to token; the distance of two tokens' depths is
subtracted from their score. In a causal call $c_i$ shifts a whole row, which does not change the softmax, so the keys'
depths could be one more channel of a fused kernel. But at a depth of 4096 that leaves scores about four digits in
float32, and none in half precision. So depths are float64 here, and are subtracted from each other first.
"""

from math import sqrt

from ortho._cost import Cost, product
from ortho._typing import Float, Tensor
from ortho.attention.mechanism import CostedCall, closed_form
from ortho.attention.scores import blocked_pairs, masked_softmax
from ortho.attention.softmax.tiling import TILE, Span, tile_pairs, tiled_attention


def distance_attention_reference(
    q: Float[Tensor, "*batch N K"],
    k: Float[Tensor, "*batch M K"],
    v: Float[Tensor, "*batch M V"],
    q_depth: Float[Tensor, "... N"],
    k_depth: Float[Tensor, "... M"],
    *,
    is_causal: bool,
    attn_mask: Tensor | None,
    scale: float | None,
) -> Float[Tensor, "*batch N V"]:
    """Softmax attention with N x M scores minus distances of depths, materialised. A fully blocked row gives 0."""
    scores = q @ k.mT * _factor(q, scale) - _distance(q_depth, k_depth, is_causal).to(q.dtype)
    blocked = blocked_pairs(q.shape[-2], k.shape[-2], is_causal, attn_mask, q.device)
    return masked_softmax(scores, blocked, empty_rows=attn_mask is not None) @ v


def distance_attention(
    q: Float[Tensor, "*batch N K"],
    k: Float[Tensor, "*batch M K"],
    v: Float[Tensor, "*batch M V"],
    q_depth: Float[Tensor, "... N"],
    k_depth: Float[Tensor, "... M"],
    *,
    is_causal: bool,
    attn_mask: Tensor | None,
    scale: float | None,
    tile: int = TILE,
) -> Float[Tensor, "*batch N V"]:
    """`distance_attention_reference` a tile of queries at a time, in memory linear in N."""

    def scores(s: Span, q: Tensor, k: Tensor, q_depth: Tensor, k_depth: Tensor) -> Tensor:
        distance = _distance(q_depth[..., s.start : s.stop], k_depth[..., : s.end], is_causal)
        return q[..., s.start : s.stop, :] @ k[..., : s.end, :].mT - distance.to(q.dtype)

    operands = (q * _factor(q, scale), k, q_depth, k_depth)
    return tiled_attention(
        scores, operands, v, queries=q.shape[-2], tile=tile, is_causal=is_causal, attn_mask=attn_mask
    )


def _factor(q: Tensor, scale: float | None) -> float:
    return 1 / sqrt(q.shape[-1]) if scale is None else scale


def _distance(q_depth: Tensor, k_depth: Tensor, is_causal: bool) -> Float[Tensor, "... N M"]:
    """|c_i - c_j|; in a causal call without the absolute value, since the keys after a query are blocked."""
    distance = k_depth[..., None, :] - q_depth[..., None]
    return distance if is_causal else distance.abs()


@closed_form
def distance_cost(call: CostedCall, *, gated: bool, tile: int = TILE) -> Cost:
    """Closed-form cost of one self-attention call, in either form; a symbolic N is a greater multiple of `tile`.

    `gated` says that depths are the sums of a gate's numbers, which need a gradient; else the whole batch shares them.
    """
    (G, N, K, V), fast, reach = call.sizes, call.form == "fast", call.reach
    pairs = G * tile_pairs(N, tile if fast else N, call.causal and fast)
    # The fast form computes scores again.
    products = product(pairs * V, 1 + int(reach or gated)) + product(pairs * K, 2 * reach + int(fast))
    return products + call.held_keys() + Cost(state_bytes=call.item * G * N if gated else 0)
