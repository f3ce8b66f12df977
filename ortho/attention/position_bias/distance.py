r"""Softmax attention with scores $s_{ij} - |c_i - c_j|$: what ALiBi and the Forgetting Transformer share.

Each token stands at a depth c, which does not increase from token to token; the distance of two tokens' depths is
subtracted from their score. In a causal call $c_i$ shifts a whole row, which does not change the softmax, so the keys'
depths could be one more channel of a fused kernel. But at a depth of 4096 that leaves scores about four digits in
float32, and none in half precision. So depths are float64 here, and are subtracted from each other first.
"""

from typing import Any

from ortho._typing import Float, Tensor
from ortho.attention.call import Call
from ortho.attention.position_bias.tiles import TILE, Span, attend_in_tiles
from ortho.attention.scores import masked_softmax


def distance_attention_reference(
    call: Call, q_depth: Float[Tensor, "... N"], k_depth: Float[Tensor, "... M"], *parts: Tensor
) -> tuple[Float[Tensor, "*batch N V"], tuple[Tensor, ...]]:
    """(o, `parts` of the state) of softmax attention with N x M scores minus distances of depths, materialised. A fully
    blocked row gives 0."""
    scores = call.q @ call.k.mT * call.factor - _distance(q_depth, k_depth, call.is_causal).to(call.q.dtype)
    return masked_softmax(scores, call.blocked, empty_rows=call.attn_mask is not None) @ call.v, parts


def distance_attention(
    call: Call, q_depth: Float[Tensor, "... N"], k_depth: Float[Tensor, "... M"], *parts: Tensor, tile: int = TILE
) -> tuple[Float[Tensor, "*batch N V"], tuple[Tensor, ...]]:
    """`distance_attention_reference` `tile` queries at a time, in memory linear in N."""
    q = call.q * call.factor

    def scores(s: Span) -> Tensor:
        distance = _distance(q_depth[..., s.start : s.stop], k_depth[..., : s.end], call.is_causal)
        return q[..., s.start : s.stop, :] @ call.k[..., : s.end, :].mT - distance.to(q.dtype)

    options: dict[str, Any] = {"is_causal": call.is_causal, "attn_mask": call.attn_mask}
    return attend_in_tiles(scores, call.v, queries=q.shape[-2], tile=tile, **options), parts


def _distance(q_depth: Tensor, k_depth: Tensor, is_causal: bool) -> Float[Tensor, "... N M"]:
    """|c_i - c_j|; in a causal call without the absolute value, since the keys after a query are blocked."""
    distance = k_depth[..., None, :] - q_depth[..., None]
    return distance if is_causal else distance.abs()
