"""Closed forms of `ortho.attention.factored`: what a call costs apart from its feature map."""

from ortho._typing import Size
from ortho.attention.factored import CHUNK, chunks
from ortho.attention.mechanism import AttentionCost


def feature_cost(
    B: Size,
    N: Size,
    H: Size,
    m: Size,
    V: Size,
    *,
    form: str,
    causal: bool,
    qk_grad: bool,
    itemsize: int,
    log_k: bool = False,
    chunk: int = CHUNK,
) -> tuple[AttentionCost, Size]:
    """What a self-attention call costs without its feature map, and how many queries (and as many keys) that one maps.

    `log_k` says whether the map scales keys. `state_bytes` is the fast form's. Half precision costs what float32 does.
    With symbols, N is a multiple of `chunk`, and greater.
    """
    item, scaled = max(itemsize, 4), int(log_k)
    sizes = (B * H, N, m, V + 1)
    if form == "reference":
        return _materialised(*sizes, int(causal), qk_grad, item, scaled), B * H * N
    if not causal or N == 1:
        return _at_once(*sizes, qk_grad, item, scaled), B * H * N
    if isinstance(N, int):
        width, behind = chunks(N, chunk)
        number = (N + behind) // width
    else:
        width, number = chunk, N / chunk
    return _in_chunks(*sizes, width, number, qk_grad, item, scaled), B * H * number * width


# Below: G = B H, the sequences; W = V + 1, the values and the column of ones; a flag counts as 0 or 1.


def _division(rows: Size, V: Size) -> tuple[Size, Size]:
    """Scalar operations of numerators / totals, forward and backward, both to the numerators and to the totals."""
    # A gradient's sum over a broadcast axis is left out by autograd where that axis has length 1.
    return rows * (V + 2), rows * (5 * V + 1) + (rows * V if V != 1 else 0)


def _materialised(
    G: Size, N: Size, m: Size, W: Size, causal: int, qk_grad: bool, item: int, log_k: int
) -> AttentionCost:
    rows, pairs, V = G * N, G * N * N, W - 1
    division, division_backward = _division(rows, V)
    scales = pairs if causal else rows  # exp(s_j - max): one for all rows, unless they see different keys
    return AttentionCost(
        forward=2 * pairs * (m + V),
        backward=2 * pairs * (2 * (m + V) if qk_grad else V),
        elementwise_forward=pairs * (1 + causal)  # row sums; blocked entries
        + division
        + log_k * (pairs + (3 + causal) * scales),  # the product with the scales; blocked, maximum, subtract, exp
        elementwise_backward=pairs * (1 + causal + log_k) + division_backward if qk_grad else rows * V,
        saved_bytes=item * (pairs + rows)  # weights and totals; if gradients reach them, also all they come from
        + (item * (rows * (2 * m + 2 * V) + log_k * scales) + rows + causal * N * N if qk_grad else 0),
        decode=2 * rows * (m + V),
        state_bytes=item * G * (m * W + log_k),
    )


def _at_once(G: Size, N: Size, m: Size, W: Size, qk_grad: bool, item: int, log_k: int) -> AttentionCost:
    rows, memory = G * N, G * m * W
    division, division_backward = _division(rows, W - 1)
    return AttentionCost(
        forward=4 * rows * m * W,  # gather, read
        backward=(8 if qk_grad else 4) * rows * m * W,
        elementwise_forward=division
        + memory  # added to the initial one
        + log_k * (rows * (3 + W) + memory + 3 * G),  # maximum, subtract, exp; products with values and memory
        elementwise_backward=division_backward + log_k * rows * W,
        saved_bytes=rows
        + item * rows * (W + 1 + 2 * m + log_k)  # numerators, totals twice; features and scales
        + (item * (rows * W + memory) if qk_grad else 0),
        decode=4 * memory,
        state_bytes=item * G * (m * W + log_k),
    )


def _in_chunks(
    G: Size, N: Size, m: Size, W: Size, width: Size, number: Size, qk_grad: bool, item: int, log_k: int
) -> AttentionCost:
    rows = G * number * width  # with those behind the end
    pairs, memory = rows * width, G * m * W
    several = int(number != 1)  # with one chunk, what it gathers is read by none
    division, division_backward = _division(G * N, W - 1)
    links = number - 2 if several else 0  # memories, after the first chunk's, that are both read and passed on
    return AttentionCost(
        forward=2 * pairs * (m + W) + 4 * rows * m * W,  # in the chunk: weights, outputs; memories: gather, read
        backward=4 * pairs * (m + W) + (2 + 6 * several) * rows * m * W
        if qk_grad
        else 2 * pairs * W + 4 * several * rows * m * W,
        elementwise_forward=division
        + number * memory
        + rows * W  # sum of both parts
        # running maximum; subtract and exp for three scales and the fades; blocked, products with weights, values,
        # what is read, and memories
        + log_k * (G + rows + 4 * pairs + rows * (4 + 2 * W) + number * (2 * G + memory)),
        elementwise_backward=division_backward
        + several * rows * W
        + links * memory * (1 + log_k)
        + (rows * m * (1 + several) if qk_grad else 0)
        + log_k * (2 * several * rows * W + ((pairs + (1 - several) * rows * W) if qk_grad else 0)),
        saved_bytes=G * N
        + item * (G * N + rows * W)  # totals; numerators and totals
        + item * (pairs + rows * m * (1 + several) + log_k * (rows + several * (rows + G * number)))
        + (
            item * (rows * (m * (1 - several) + W) + number * memory + log_k * (pairs + rows * (W + 1 - several)))
            if qk_grad
            else 0
        ),
        decode=4 * memory,
        state_bytes=item * G * (m * W + log_k),
    )
