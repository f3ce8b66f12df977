"""Closed forms of `ortho.attention.selected.nsa`."""

from dataclasses import replace

from ortho._checks import checked
from ortho.attention.mechanism import SOFTMAX_BACKWARD, SOFTMAX_FORWARD, AttentionCost
from ortho.attention.selected.moba import block_work, past_blocks
from ortho.attention.selected.nsa_sizes import SIZES, Sizes
from ortho.attention.selected.selection_cost import Flops, best_cost, flops
from ortho.attention.sparse.tiled_attention import masked_cost, tiled_cost
from ortho.attention.sparse.tiling import TILE, Work
from ortho.attention.sparse.window import Window


def nsa_flops(N: int, K: int, V: int, *, sizes: Sizes = SIZES, causal: bool = True) -> Flops:
    """What the fast form spends on choosing and on attending, a sequence. To choose blocks the scores of compressed
    tokens are computed once more than to attend to them."""
    return flops(_choosing(N, sizes) * N * K, [part for branch in _branches(N, sizes) for part in branch], K, V)


def _choosing(N: int, sizes: Sizes) -> int:
    """FLOPs in K of choosing for a query."""
    return 2 * sizes.compressed(N) if past_blocks(N, sizes.block) else 0


def _branches(N: int, sizes: Sizes, last: bool = False) -> list[list[Work]]:
    """What the parts of each branch compute, without a first one that has nothing to read."""
    window = list(Window(sizes.window).work(N, is_causal=True, last=last))
    branches = [block_work(N, block=sizes.block, count=sizes.count - 1, last=last), window]
    if not sizes.compressed(N):
        return branches
    tile = 1 if last or N == 1 else TILE
    ends = [N] if last else [min(N, start + tile) for start in range(0, N, tile)]
    blocks = [-(-sizes.compressed(end) // TILE) for end in ends]
    return [[Work(sum(map(bool, blocks)), sum(blocks), tile, TILE)], *branches]


@checked
def nsa_cost(
    B: int,
    N: int,
    H: int,
    K: int,
    V: int,
    *,
    sizes: Sizes = SIZES,
    form: str = "fast",
    causal: bool = True,
    qk_grad: bool = True,
    itemsize: int = 4,
) -> AttentionCost:
    """Closed form of one self-attention call with `gates`, in either form, for a number of tokens."""
    G, item, reach, few = B * H, max(itemsize, 4), int(qk_grad), sizes.compressed(N)
    rows, work = G * N, _branches(N, sizes)
    n = len(work)
    operands = rows * (2 * K + V)
    if form == "reference":
        each = [masked_cost(G, N, K, V, masks=G, qk_grad=qk_grad, itemsize=item)] * 2
        each += [_masked_few(G, N, few, K, V, qk_grad, item)] if few else []
        saved = sum(cost.saved_bytes for cost in each) - reach * item * operands  # which two branches share
    else:
        both = zip(work, _branches(N, sizes, last=True), strict=True)
        each = [tiled_cost(B, N, H, K, V, work=w, last=last, qk_grad=qk_grad, itemsize=item) for w, last in both]
        if few:  # of compressed tokens there are fewer than of others, and so of their gradients
            fewer = reach * (rows - G * few) * K
            each[0] = replace(each[0], elementwise_backward=each[0].elementwise_backward - fewer)
        # Beside keys and values the scaled queries and a logarithm of each branch; and the compressed tokens
        saved = item * (operands + (n - 1) * rows * K + n * rows + G * few * (K + V))
    pooled, pooled_backward = _pooling(few, sizes)
    again = n - 1  # uses of an operand whose gradients are added up
    return AttentionCost(
        forward=sum(cost.forward for cost in each) + _choosing(N, sizes) * rows * K,
        backward=sum(cost.backward for cost in each),
        # Branches times their gates, and added
        elementwise_forward=sum(cost.elementwise_forward for cost in each)
        + G * (_comparing(N, few, sizes) + pooled * (K + V))
        + (2 * n - 1) * rows * V,
        # Both products, and the sum over a row for the gates
        elementwise_backward=sum(cost.elementwise_backward for cost in each)
        + G * pooled_backward * (reach * K + V)
        + again * rows * (2 * reach * K + V)
        + n * rows * V * (2 if V == 1 else 3),
        saved_bytes=saved + item * rows * (n * V + 3),  # branches and gates
        decode=sum(cost.decode for cost in each) + _choosing(N, sizes) * G * K,
        state_bytes=itemsize * rows * (K + V),
    )


def _pooling(few: int, sizes: Sizes) -> tuple[int, int]:
    """Scalar operations a channel to compress: sums of strides, these added up, divided; and backward."""
    if not few:
        return 0, 0
    steps = sizes.length // sizes.stride
    strides = few + steps - 1
    return strides * sizes.stride + steps * few, (steps - 1) * strides + few


def _comparing(N: int, few: int, sizes: Sizes) -> int:
    """Scalar operations of choosing: scale, block, softmax, block; strides, and their sums; what is always read and
    what is not past, and the highest."""
    P = past_blocks(N, sizes.block)
    if not P:
        return 0
    strides, steps = sizes.block // sizes.stride, sizes.length // sizes.stride
    weights = few * (3 + SOFTMAX_FORWARD + steps) + P * (strides + 1) if few else 0
    return N * (weights + P + best_cost(P, min(sizes.count - 1, P)))


def _masked_few(G: int, N: int, few: int, K: int, V: int, qk_grad: bool, item: int) -> AttentionCost:
    """As `masked_cost`, of the compressed tokens; the queries are kept by the other branches."""
    pairs, reach = G * N * few, int(qk_grad)
    return AttentionCost(
        forward=2 * pairs * (K + V),
        backward=2 * pairs * (V + reach * (2 * K + V)),
        elementwise_forward=pairs * (3 + SOFTMAX_FORWARD),
        elementwise_backward=reach * pairs * (3 + SOFTMAX_BACKWARD),
        saved_bytes=item * (pairs + reach * (pairs + G * few * (K + V))) + reach * pairs,
        decode=2 * G * few * (K + V),
        state_bytes=0,
    )
