r"""Softmax attention with scores $s_{ij} - |c_i - c_j|$: what ALiBi and the Forgetting Transformer share.

Each token stands at a depth c, which does not increase from token to token; the distance of two tokens' depths is
subtracted from their score. In a causal call $c_i$ shifts a whole row, which does not change the softmax, so the keys'
depths could be one more channel of a fused kernel. But at a depth of 4096 that leaves scores about four digits in
float32, and none in half precision. So depths are float64 here, and are subtracted from each other first.
"""

from math import sqrt

from ortho._cost import Cost, product
from ortho._typing import Float, Tensor
from ortho.attention.mechanism import SOFTMAX_BACKWARD, SOFTMAX_FORWARD, CostedCall, closed_form
from ortho.attention.scores import blocked_pairs, masked_softmax
from ortho.attention.softmax.tiling import TILE, Span, tile_sums, tiled_attention


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
    (G, N, K, V), item, fast = call.sizes, call.item, call.form == "fast"
    causal, reach = call.causal, call.reach
    rows, sets = G * N, G if gated else call.H  # sets of depths
    pairs_grad, far = int(reach or gated), int(not causal)  # far: absolute values are taken
    t = tile_sums(N, tile if fast else N, causal and fast)
    blocked = t.blocked if fast else int(causal)
    scaled = rows * K if fast else G * t.pairs
    # distances, and their absolute values; subtract, block, softmax
    once = t.pairs * (sets * (1 + far) + G * (1 + blocked + SOFTMAX_FORWARD))
    backward = reach * scaled
    if pairs_grad:
        backward += G * t.pairs * (SOFTMAX_BACKWARD + blocked)
    if gated:
        # Signs of the distance and of the queries' part, a sign and a product for the absolute value; sums over keys
        # and over queries, unless there is only one. The two parts added, and summed over tokens.
        backward += G * (t.pairs * (4 + 2 * far) - t.lone) + rows * (1 + int(N != 1))
    if fast:  # the forward pass again; each tile's gradients added to the others'
        backward += once + G * t.keys * V + t.number * rows * 2 * (K * reach + int(gated))
        saved = item * rows * (2 * K + V) + 8 * sets * N
    else:
        saved = item * (G * t.pairs + reach * 2 * rows * K + pairs_grad * rows * V)
        saved += (N * N if causal and pairs_grad else 0) + (8 * G * t.pairs if gated and far else 0)
    # The fast form computes scores again.
    products = product(G * t.pairs * V, 1 + pairs_grad) + product(G * t.pairs * K, 2 * reach + int(fast))
    held = call.held_keys() + Cost(state_bytes=item * rows if gated else 0)
    counted = Cost(elementwise_forward=scaled + sets * N + once, elementwise_backward=backward, saved_bytes=saved)
    return products + held + counted
