"""Closed forms of `ortho.attention.recurrent.householder`: PaTH, and softmax attention with such a bias."""

from ortho._checks import checked
from ortho._typing import Size
from ortho.attention.chunking import chunks
from ortho.attention.mechanism import SOFTMAX_BACKWARD, SOFTMAX_FORWARD, AttentionCost, causal_pairs
from ortho.attention.recurrent.householder import BLOCK
from ortho.attention.softmax.tiling import tile_sums


@checked
def reflections_cost(
    B: Size,
    N: Size,
    H: Size,
    K: Size,
    V: Size,
    *,
    bias_width: int | None = None,
    form: str = "fast",
    causal: bool = True,
    qk_grad: bool = True,
    itemsize: int = 4,
    block: int = BLOCK,
) -> AttentionCost:
    """Closed form of one self-attention call, in either form, which is causal, whatever `causal` says.

    With a `bias_width` the reflected scores are those of vectors of that width, added to q^T k; without one they are
    those of q and k. With symbols, N is a multiple of `block`, and greater.
    """
    G, item, bias = B * H, max(itemsize, 4), int(bias_width is not None)
    D = K if bias_width is None else bias_width
    rows = G * N
    part = _blocks if form == "fast" and N != 1 else _steps
    rest = part(G, N, K, V, D, bias, int(qk_grad), item, block)
    # Unit directions: squares, sum, add, root, product. Scaled queries: those of the bias, those of the content.
    units, units_backward = rows * (3 * D + 2), rows * (6 * D + (D if D != 1 else 0) + 3)
    scaled = rows * (D + K * bias)
    return AttentionCost(
        forward=rest.forward,
        backward=rest.backward,
        elementwise_forward=rest.elementwise_forward + units + scaled,
        elementwise_backward=rest.elementwise_backward + units_backward + (scaled if qk_grad else rows * D * bias),
        saved_bytes=rest.saved_bytes + item * rows * (D + 1) + (N * N if part is _steps else 0),
        # the keys before are reflected, then all are scored; the content; the values
        decode=4 * G * (N - 1) * D + 2 * rows * (D + K * bias + V),
        state_bytes=item * rows * D + itemsize * rows * (V + K * bias),
    )


# Below: G = B H; D, the width of what is reflected; bias says that content is added; item, bytes a number;
# a flag counts as 0 or 1.


def _steps(
    G: Size, N: Size, K: Size, V: Size, D: Size, bias: int, qk_grad: int, item: int, block: int
) -> AttentionCost:
    rows, pairs, upto = G * N, G * N * N, G * causal_pairs(N)
    before, grad = upto - rows, bias or qk_grad  # (token, earlier key) pairs; whether the vectors need a gradient
    return AttentionCost(
        forward=D * (4 * before + 2 * upto) + 2 * pairs * (V + K * bias),
        backward=D * (8 * before + (4 if grad else 2) * upto) + 4 * pairs * (V + K * bias * qk_grad),
        # b w, and what it takes from the keys; block, softmax, the content added
        elementwise_forward=D * (rows + before) + pairs * (1 + SOFTMAX_FORWARD + bias),
        # a sign and two sums of gradients for each key and step; products, sum over channels, w's two gradients added
        elementwise_backward=pairs * (1 + SOFTMAX_BACKWARD) + 3 * D * before + rows * D * (3 + int(D != 1)),
        # keys of all steps and what is along w; b, w, b w, and the queries; weights and values; the content's
        saved_bytes=item
        * (D * (upto if grad else before) + before + rows * (3 * D + 1 + V + 2 * K * bias * qk_grad) + pairs),
        decode=None,
        state_bytes=None,
    )


def _blocks(
    G: Size, N: Size, K: Size, V: Size, D: Size, bias: int, qk_grad: int, item: int, block: int
) -> AttentionCost:
    C, behind = chunks(N, block) if isinstance(N, int) else (block, 0)
    T = (N + behind) // C if isinstance(N, int) else N / C
    n, rows, grad = G * T, G * (N + behind), bias or qk_grad
    t = tile_sums(N + behind, C, True)
    apart = (causal_pairs(T) - T) * G  # pairs of a tile and an earlier block; between the two others:
    crossed = (causal_pairs(T - 1) - (T - 1)) * G
    inside = n * (16 * C * C * D + 5 * C**3 + 2 * C * D * D)  # C^3 of them the triangular system
    tiles = 2 * C * D * (C * apart + D * crossed) + 2 * G * t.pairs * K * bias
    # block, softmax, the content added
    again = G * t.pairs * (1 + SOFTMAX_FORWARD + bias)
    return AttentionCost(
        forward=inside + tiles + 2 * G * t.pairs * V,
        # Twice each product, but for the content's, and the system's, which takes another system and a product; tiles
        # again; dV and dP.
        backward=2 * inside
        + n * C**3
        - (0 if grad else 8 * n * C * C * D)
        + 3 * tiles
        - 4 * G * t.pairs * K * bias * (1 - qk_grad)
        + 4 * G * t.pairs * V,
        # A block's system, three differences and the identity's
        elementwise_forward=n * (2 * C * C + 2 * C * D + D * D) + again,
        # Of a block: what the system is made of, signs, and sums of gradients where a matrix is used again. Of a tile:
        # weights and values, queries that are used and moved; and its gradients added to the others'.
        elementwise_backward=n * (C * C * (8 + int(C != 1)) + 9 * C * D + D * D + C + (4 * C * D if grad else 0))
        + again
        + G * t.pairs * (1 + SOFTMAX_BACKWARD)
        + G * t.keys * V
        + crossed * C * D
        + rows * (T * C + 2 * (T - 1) * D + 2 * T * K * bias * qk_grad)
        + (T - 2 if T != 1 else 0) * n * D * D,
        # Of the tiles: values, scores, moved queries and keys, products, the content's. Of the blocks: six C x C; q, k,
        # w, and two more C x D; strengths.
        saved_bytes=item * (rows * (V + C + 2 * D + 2 * K * bias) + n * D * D + rows * (6 * C + 5 * D + 1)),
        decode=None,
        state_bytes=None,
    )
