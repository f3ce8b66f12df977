"""Softmax attention with a bias of positions, or with reflected keys."""

from functools import partial

from ortho._cost import Cost, causal_pairs, product
from ortho._typing import Size
from ortho.attention.position_bias.path_attention import BLOCK
from ortho.attention.position_bias.position_delta import BiasVectors
from ortho.attention.position_bias.tiles import TILE, spans
from ortho.cost.mechanisms.call import CostedCall, closed_form, equal_parts


def tile_pairs(N: Size, tile: Size, is_causal: bool) -> Size:
    """The pairs of all tiles of a call with N queries and keys; a symbolic N is a greater multiple of `tile`."""
    if not isinstance(N, int):
        return N * (N + tile) / 2 if is_causal else N * N
    return sum((s.stop - s.start) * s.end for s in spans(N, N, tile, is_causal))


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


@closed_form
def reflections_cost(call: CostedCall, *, bias_width: int | None = None, block: int = BLOCK) -> Cost:
    """Closed-form cost of one self-attention call, in either form; it is causal, whatever `call.causal` says.

    With a `bias_width`, vectors of that width give the reflected scores, which are added to q^T k; without one, q and k
    give them. A symbolic N stands for a multiple of `block` greater than `block`.
    """
    (G, N, K, V), item, bias = call.sizes, call.item, int(bias_width is not None)
    D = K if bias_width is None else bias_width
    rows = G * N
    rest = _blocks(call, D, bias, block) if call.form == "fast" and N != 1 else _steps(call, D, bias)
    return rest + Cost(
        # earlier keys are reflected, then all keys are scored; the content; the values
        decode=4 * G * (N - 1) * D + 2 * rows * (D + K * bias + V),
        state_bytes=item * rows * D + call.itemsize * rows * (V + K * bias),
    )


def _steps(call: CostedCall, D: Size, bias: int) -> Cost:
    (G, N, K, V), reach = call.sizes, call.reach
    pairs, upto = G * N * N, G * causal_pairs(N)
    before, grad = upto - G * N, max(bias, reach)  # (token, earlier key) pairs; whether the vectors need a gradient
    # A key's component along each later w, and that times w; scores; values; the content
    reflecting = product(2 * before * D) + product(upto * D, 1 + grad)
    return reflecting + product(pairs * V) + product(bias * pairs * K, 2 * reach)


def _blocks(call: CostedCall, D: Size, bias: int, block: int) -> Cost:
    """The cost of T blocks of C tokens, and of the tiles of one block's queries and another's keys."""
    C, T = equal_parts(call.N, block)
    n, grad = call.sizes[0] * T, max(bias, call.reach)
    products = n * (16 * C * C * D + 5 * C**3 + 2 * C * D * D)  # C^3 of them for the triangular system
    # Of a block alone only the scores are read; nothing moves across the first of two blocks, or the last one.
    unread = n * (int(T in (1, 2)) * 2 * C * D * (C + D) + int(T == 1) * 6 * C * C * D)
    blocks = Cost(
        forward=products,
        # Twice each product that is read, except the system, which takes another system and a product
        backward=2 * (products - unread) + n * C**3 - (1 - grad) * 8 * n * C * C * D,
    )
    return blocks + _tiles(call, D, bias, C, T)


def _tiles(call: CostedCall, D: Size, bias: int, C: Size, T: Size) -> Cost:
    (G, _, K, V), reach = call.sizes, call.reach
    pairs = G * tile_pairs(T * C, C, True)
    apart = (causal_pairs(T) - T) * G  # pairs of a tile and an earlier block; blocks crossed in between:
    crossed = (causal_pairs(T - 1) - (T - 1)) * G
    scores = 2 * C * D * (C * apart + D * crossed) + 2 * pairs * K * bias
    return Cost(
        forward=scores + 2 * pairs * V,
        backward=3 * scores - 4 * pairs * K * bias * (1 - reach) + 4 * pairs * V,  # scores again; dV and dP
    )


COSTS = {
    "alibi": partial(distance_cost, gated=False),
    "fox": partial(distance_cost, gated=True),
    "path": reflections_cost,
    "position-delta": partial(reflections_cost, bias_width=BiasVectors.width),
}
