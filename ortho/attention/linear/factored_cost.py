"""Closed forms of `ortho.attention.linear.factored`: what a call costs, its feature map included."""

from ortho._checks import checked
from ortho._typing import Size
from ortho.attention.chunking import CHUNK, chunks
from ortho.attention.linear.feature_maps import FeatureMap
from ortho.attention.mechanism import AttentionCost


@checked
def feature_cost(
    B: Size,
    N: Size,
    H: Size,
    K: Size,
    V: Size,
    *,
    feature_map: FeatureMap,
    form: str = "fast",
    causal: bool = False,
    qk_grad: bool = True,
    itemsize: int = 4,
    chunk: int = CHUNK,
    m: Size = None,
) -> AttentionCost:
    """Closed form of one self-attention call, in either form; `m` is the number of features, by default the map's.

    Half precision costs what float32 does. Drawing random features is left out: it is done once. With symbols, N is a
    multiple of `chunk`, and greater.
    """
    G, item, scaled = B * H, max(itemsize, 4), int(feature_map.scales_keys)
    m = feature_map.width(K) if m is None else m
    fast = form == "fast"
    if not fast:
        rest, behind = _materialised(G, N, m, V, int(causal), qk_grad, item, scaled), 0
    elif not causal or N == 1:
        rest, behind = _at_once(G, N, m, V, qk_grad, item, scaled), 0
    else:
        width, behind = chunks(N, chunk) if isinstance(N, int) else (chunk, 0)
        number = (N + behind) // width if isinstance(N, int) else N / chunk
        rest = _in_chunks(G, N, m, V, width, number, qk_grad, item, scaled)
    mapped = feature_map.cost(G, N, N, K, m)
    # The features are kept once, unless the kernel keeps a copy, with rows behind the end, and the map its own.
    twice = 2 * G * N * m if behind and mapped.keeps_features else 0
    recurrent = fast and feature_map.causal  # else the keys are kept, and mapped anew for each query
    decoded = feature_map.cost(G, 1, 1 if recurrent else N, K, m).forward
    gathered = 2 * G * m * (V + scaled) * (1 if recurrent else N)
    state = item * G * (m * (V + 1) + scaled) + 8 * int(feature_map.positional)
    return AttentionCost(
        forward=rest.forward + mapped.forward,
        backward=rest.backward + (mapped.backward if qk_grad else 0),
        elementwise_forward=rest.elementwise_forward + mapped.elementwise_forward,
        elementwise_backward=rest.elementwise_backward + (mapped.elementwise_backward if qk_grad else 0),
        saved_bytes=rest.saved_bytes + (item * (mapped.saved + twice) if qk_grad else 0),
        decode=decoded + (gathered + 2 * G * m * (V + 1) if fast else 2 * G * N * (m + V)),
        state_bytes=state if recurrent else itemsize * G * N * (K + V),
        output_bytes=item * rest.output_bytes,
    )


# Below: G = B H, the sequences; m, the features; item, bytes a number; a flag counts as 0 or 1.


def _materialised(
    G: Size, N: Size, m: Size, V: Size, causal: int, qk_grad: bool, item: int, scaled: int
) -> AttentionCost:
    rows, pairs = G * N, G * N * N
    scales = pairs if causal else rows  # exp(s_j - max): one for all rows, unless they see different keys
    # A gradient's sum over a broadcast axis is left out by autograd where that axis has length 1.
    division_backward = rows * (5 * V + 1) + (rows * V if V != 1 else 0)
    return AttentionCost(
        forward=2 * pairs * (m + V),
        backward=2 * pairs * (2 * (m + V) if qk_grad else V),
        elementwise_forward=pairs * (1 + causal)  # row sums; blocked entries
        + rows * (V + 3)  # divisors, quotients
        + scaled * (pairs + (3 + causal) * scales),  # the product with the scales; blocked, maximum, subtract, exp
        elementwise_backward=pairs * (1 + causal + scaled) + division_backward if qk_grad else rows * V,
        saved_bytes=item * (pairs + rows)  # weights and totals; if gradients reach them, also all they come from
        + (item * (rows * (2 * m + 2 * V) + scaled * scales) + rows + causal * N * N if qk_grad else 0),
        decode=None,
        state_bytes=None,
    )


def _at_once(G: Size, N: Size, m: Size, V: Size, qk_grad: bool, item: int, scaled: int) -> AttentionCost:
    rows, memory = G * N, G * m * (V + 1)
    return AttentionCost(
        forward=4 * rows * m * V + 2 * rows * m * (1 + scaled),  # gather and read S; read z; with scales, gather it
        backward=(8 if qk_grad else 4) * rows * m * V + 2 * rows * m,
        elementwise_forward=(1 - scaled) * (rows + G) * m  # z
        + rows * (3 + V)  # divisors, quotients
        + scaled * (rows * (3 + V) + memory + 3 * G),  # maximum, subtract, exp; products with values and memory
        elementwise_backward=rows * (3 * V + 4) + scaled * rows * V + ((2 * m + scaled * V) * rows if qk_grad else 0),
        saved_bytes=item * (rows * (2 * m + V + 1 + scaled) + memory),
        output_bytes=rows * V,
        decode=None,
        state_bytes=None,
    )


def _in_chunks(
    G: Size, N: Size, m: Size, V: Size, width: Size, number: Size, qk_grad: bool, item: int, scaled: int
) -> AttentionCost:
    rows, memory = G * number * width, G * number * m * (V + 1)  # with what is behind the end
    pairs = rows * width
    return AttentionCost(
        # In the chunk: weights, outputs. Memories: gather and read S, read z; with scales, gather z by a product too.
        forward=2 * pairs * (m + V) + 4 * rows * m * V + 2 * rows * m * (1 + scaled),
        backward=2 * pairs * V
        + 4 * rows * m * V
        + 2 * rows * m
        + (2 * pairs * (2 * m + V) + 4 * rows * m * V if qk_grad else 0),
        elementwise_forward=(1 - scaled) * rows * m  # z
        + memory
        + pairs  # totals within the chunk
        + rows * (V + 4)  # with those before it; divisors, quotients
        # Running maximum; subtract and exp for three scales and the fades, blocked; products with the weights, the
        # values, the memories, and what is read; the peak
        + scaled * (G + rows + 4 * pairs + rows * (5 + 2 * V) + 2 * G * number + memory + G * N + G),
        elementwise_backward=rows * (3 * V + 4)
        + memory
        + scaled * (memory + rows * (2 * V + 1))
        + (2 * rows * m + scaled * (pairs + rows * (2 * V + 1)) if qk_grad else 0),
        saved_bytes=item * (rows * (2 * m + V + 1) + pairs + memory + scaled * (pairs + 2 * rows + G * number)),
        output_bytes=rows * V,
        decode=None,
        state_bytes=None,
    )
