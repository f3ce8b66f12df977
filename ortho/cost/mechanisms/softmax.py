"""Softmax attention: materialised, fused, in tiles, and with the exchanged pass."""

from dataclasses import replace

from ortho._cost import Cost, causal_pairs
from ortho._typing import Size
from ortho.attention.softmax.flash import COLUMNS, ROWS, tiles
from ortho.attention.softmax.frozen_qk import channels
from ortho.cost.mechanisms.call import CostedCall, closed_form


def materialised_cost(call: CostedCall, keys: Size = None) -> Cost:
    """The cost of `softmax_attention_reference` with this number of keys, by default N."""
    G, N, _, _ = call.sizes
    return call.attending(G * N * (N if keys is None else keys)) + call.held_keys(keys)


@closed_form
def softmax_cost(call: CostedCall) -> Cost:
    """Closed-form cost of one self-attention call, in either form.

    The reference computes all N^2 scores; a causal call merely blocks half of them. The fused kernel computes only the
    causal half, and recomputes the scores backward; it returns dq and dk whether or not they are needed (Dao et al.
    2022, algorithms 1 and 4).
    """
    if call.form == "reference":
        return materialised_cost(call)
    G, N, K, V = call.sizes
    pairs = G * (causal_pairs(N) if call.causal else N * N)
    return call.held_keys() + Cost(
        forward=2 * pairs * (K + V),
        backward=2 * pairs * (3 * K + 2 * V),  # scores again, dP, dV, dQ, dK
    )


@closed_form
def flash_cost(call: CostedCall, *, rows: int = ROWS, columns: int = COLUMNS) -> Cost:
    """Closed-form cost of one self-attention call, in either form: sums over its tiles, so sizes must be numbers."""
    if call.form == "reference":
        return call.by(softmax_cost)
    G, N, K, _ = call.sizes
    pairs = G * sum(
        (queries.stop - queries.start) * (keys.stop - keys.start)
        for queries, read in tiles(N, N, call.causal, (rows, columns))
        for keys, _ in read
    )
    return call.attending(pairs) + call.held_keys() + Cost(backward=2 * pairs * K)  # scores again


@closed_form
def frozen_qk_cost(call: CostedCall) -> Cost:
    """Closed-form cost of one self-attention call, in either form; q and k have no gradient.

    V is at most K, and in the fast form the kernel reads values as wide as keys.
    """
    (G, N, K, _), c = call.sizes, channels(call.itemsize)
    if call.form == "reference":
        return call._replace(qk_grad=False).by(softmax_cost)
    forward = call._replace(V=K, qk_grad=False).by(softmax_cost)
    pairs = G * (causal_pairs(N) if call.causal else N * N)
    return replace(forward, backward=2 * pairs * (2 * K + 2 * c), state_bytes=call.by(softmax_cost).state_bytes)


COSTS = {"softmax": softmax_cost, "flash": flash_cost, "rotary": softmax_cost}  # rotating q and k takes no product
