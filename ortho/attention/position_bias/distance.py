r"""Softmax attention with scores $s_{ij} - |c_i - c_j|$: what ALiBi and the Forgetting Transformer share.

Each token stands at a depth c, which does not increase from token to token; the distance of two tokens' depths is
subtracted from their score. In a causal call $c_i$ shifts a whole row, which does not change the softmax, so the keys'
depths could be one more channel of a fused kernel. But at a depth of 4096 that leaves scores about four digits in
float32, and none in half precision. So depths are float64 here, and are subtracted from each other first.
"""

from typing import Any

from ortho._cost import Cost, product
from ortho._typing import Float, Tensor
from ortho.attention.call import Call
from ortho.attention.mechanism import CostedCall, closed_form
from ortho.attention.position_bias.tiles import TILE, Span, attend_in_tiles, tile_pairs
from ortho.attention.scores import masked_softmax


def distance_attention_reference(
    call: Call, q_depth: Float[Tensor, "... N"], k_depth: Float[Tensor, "... M"]
) -> Float[Tensor, "*batch N V"]:
    """Softmax attention with N x M scores minus distances of depths, materialised. A fully blocked row gives 0."""
    scores = call.q @ call.k.mT * call.factor - _distance(q_depth, k_depth, call.is_causal).to(call.q.dtype)
    return masked_softmax(scores, call.blocked, empty_rows=call.attn_mask is not None) @ call.v


def distance_attention(
    call: Call, q_depth: Float[Tensor, "... N"], k_depth: Float[Tensor, "... M"], tile: int = TILE
) -> Float[Tensor, "*batch N V"]:
    """`distance_attention_reference` a tile of queries at a time, in memory linear in N."""
    q = call.q * call.factor

    def scores(s: Span) -> Tensor:
        distance = _distance(q_depth[..., s.start : s.stop], k_depth[..., : s.end], call.is_causal)
        return q[..., s.start : s.stop, :] @ call.k[..., : s.end, :].mT - distance.to(q.dtype)

    options: dict[str, Any] = {"is_causal": call.is_causal, "attn_mask": call.attn_mask}
    return attend_in_tiles(scores, call.v, queries=q.shape[-2], tile=tile, **options)


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
