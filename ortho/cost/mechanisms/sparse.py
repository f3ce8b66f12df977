"""Softmax attention over some pairs, chosen by position or by content."""

from dataclasses import replace

from ortho._cost import Cost, product
from ortho._typing import Size
from ortho.attention.dynamic_sparse.groups import tile_width
from ortho.attention.dynamic_sparse.importance import TILE
from ortho.attention.dynamic_sparse.routing import CLUSTERS, WIDTH, _is_balanced
from ortho.attention.dynamic_sparse.selection import tile_count
from ortho.attention.dynamic_sparse.sparse_linear import FEATURES, WINDOW, Band
from ortho.attention.dynamic_sparse.top_k import NUM_KEYS
from ortho.attention.linear.feature_map import FeatureMap
from ortho.attention.recurrence import CHUNK
from ortho.attention.sparse.pattern import Pattern
from ortho.cost.mechanisms.call import CostedCall, closed_form
from ortho.cost.mechanisms.softmax import materialised_cost


def tiled_cost(call: CostedCall, pairs: Size, last_pairs: Size) -> Cost:
    """The cost of `tiled_attention` where a sequence's block masks compute so many `pairs`, and those for the last
    query alone `last_pairs`. The state is the keys and values."""
    G, N, K, V = call.sizes
    return call.attending(G * pairs) + Cost(
        backward=2 * G * pairs * K,  # scores again
        decode=2 * G * (K + V) * last_pairs,
        state_bytes=call.itemsize * G * N * (K + V),
    )


@closed_form
def pattern_cost(call: CostedCall, *, pattern: Pattern) -> Cost:
    """The cost of one self-attention call, in either form; N must be a number in the fast form, not a symbol."""
    if call.form == "reference":
        G, N, _, _ = call.sizes
        return call.attending(G * N * N) + call.held_keys()
    pairs, last = (pattern.computed_pairs(call.N, is_causal=call.causal, last=last) for last in (False, True))
    return tiled_cost(call, pairs, last)


def chosen_cost(
    call: CostedCall,
    work: Size,
    last: Size,
    *,
    choosing: Size = 0,
    last_choosing: Size = 0,
    keys: Size = None,
    beside: int = 0,
) -> Cost:
    """The cost of FLOPs for `choosing` the pairs of a sequence, and of attending to them.

    The reference form attends to all pairs, the fast form to `work` of them; `last` and `last_choosing` are for the
    last query alone. The state is `keys` keys and values, by default N, with `beside` bytes for each; the positions
    that say what was selected are not counted.
    """
    G, N, K, V = call.sizes
    attending = tiled_cost(call, work, last) if call.form == "fast" else materialised_cost(call)
    held = G * (N if keys is None else keys) * (call.itemsize * (K + V) + beside)
    return replace(attending, state_bytes=held) + Cost(forward=G * choosing, decode=G * last_choosing)


@closed_form
def top_k_cost(call: CostedCall, *, num_keys: Size = NUM_KEYS) -> Cost:
    """Closed form of one self-attention call, in either form; a symbol N stands for more than `num_keys`."""
    _, N, K, _ = call.sizes
    kept = min(num_keys, N) if isinstance(N, int) else num_keys
    return chosen_cost(call, N * kept, kept, choosing=2 * N * N * K, last_choosing=2 * N * K)


@closed_form
def importance_cost(call: CostedCall, *, num_keys: int = NUM_KEYS) -> Cost:
    """Closed form of one self-attention call, in either form; N must be a number, not a symbol."""
    N, kept = call.N, min(num_keys, call.N)
    work, last = N * kept, kept
    if call.causal:  # a tile's own keys, and those that are kept before it
        tiles = ((start, min(TILE, N - start)) for start in range(0, N, TILE))
        work, last = sum(n * (n + min(kept, start)) for start, n in tiles), 1 + min(num_keys, N - 1)
    return chosen_cost(call, work, last, keys=kept if call.form == "fast" else N, beside=call.item)


@closed_form
def routing_cost(
    call: CostedCall, *, clusters: int = CLUSTERS, width: int = WIDTH, balanced: bool | None = None
) -> Cost:
    """Closed form of one self-attention call, in either form; sizes must be numbers, not symbols."""
    G, N, K, V = call.sizes
    a_token = 2 * K * clusters  # products of a normalised query or key with each centroid
    if not _is_balanced(balanced, call.causal):  # chunks that are full in the worst case
        work, last = (group_work(n, N, count=clusters, width=width) for n in (N, 1))
        return chosen_cost(call, work, last, choosing=2 * N * a_token, last_choosing=2 * a_token, beside=8)
    if call.form == "reference":
        attending = materialised_cost(call)
    else:
        w = min(width, N)
        work, last = (clusters * n * w for n in (w, 1))
        attending = tiled_cost(call._replace(N=clusters * w), work, last)
    return replace(attending, state_bytes=call.itemsize * G * N * (K + V)) + Cost(
        forward=G * 2 * N * a_token,
        decode=G * (1 + N) * a_token,  # a query and all keys
    )


def group_work(N: int, M: int, *, count: int, width: int) -> int:
    """The pairs computed for N queries and M keys of a sequence, in groups with labels below `count`."""
    width = min(width, M)
    size = tile_width(width, N)
    T = tile_count(N, tile_count(M, count, width), size)
    return 2 * T * size * width


@closed_form
def sparse_linear_cost(
    call: CostedCall, *, window: int = WINDOW, feature_map: FeatureMap = FEATURES, chunk: int = CHUNK
) -> Cost:
    """Closed form of one self-attention call with `log_linear_weight`, in either form; sizes must be numbers."""
    (G, N, K, V), item, itemsize = call.sizes, call.item, call.itemsize
    form, m, reach = call.form, feature_map.width(K), call.reach
    mapped = Cost(*feature_map.flops(G, N, N, K, m))
    back = mapped if form == "reference" or N > 1 else Cost(*feature_map.flops(G, 1, 0, K, m))  # a lone key is not far
    if form == "reference":
        rest = _reference_cost(call, m)
        decode, state = feature_map.flops(G, 1, N, K, m)[0] + 2 * G * N * (K + m + V), itemsize * G * N * (K + V)
    else:
        near = min(N, window)
        if N == 1:
            rest = _lone_cost(call, m)
        else:
            rest = _chunked_cost(call, m, Band(window, chunk, call.causal, -(-N // chunk)))
        decode = feature_map.flops(G, 1, near, K, m)[0] + 2 * G * (near * (K + V) + m * (V + 1))
        state = G * (itemsize * min(N, window - 1) * (K + V) + item * m * (V + 1))
    return rest + Cost(forward=mapped.forward, backward=reach * back.backward, decode=decode, state_bytes=state)


def _reference_cost(call: CostedCall, m: int) -> Cost:
    (G, N, K, V), reach = call.sizes, call.reach
    pairs = G * N * N
    return Cost(forward=2 * pairs * (K + m + V), backward=2 * pairs * (2 * V + reach * 2 * (K + m)))


def _lone_cost(call: CostedCall, m: int) -> Cost:
    """The cost of one query and one key."""
    (G, _, K, V), reach = call.sizes, call.reach
    return Cost(forward=2 * G * (K + V + m * (V + 1)), backward=2 * G * (V + reach * (V + 2 * K + m * (V + 1))))


def _chunked_cost(call: CostedCall, m: int, band: Band) -> Cost:
    """The cost of softmax attention over the band of near keys, of far keys in chunks that also have near ones, and of
    a memory of the features of far chunks, gathered and read."""
    G, V, reach = call.B * call.H, call.V, call.reach
    rows = G * band.chunks * band.chunk
    near, mixed = (rows * len(offsets) * band.chunk for offsets in (band.offsets, band.mixed))
    memory = product(2 * rows * m * V, 1 + reach) + product(rows * m, 2 * reach)
    return call.attending(near) + call.attending(mixed, m) + memory


COSTS = {
    "top-k": top_k_cost,
    "importance": importance_cost,
    "routing": routing_cost,
    "sparse-linear": sparse_linear_cost,
}
