"""Closed forms of `ortho.attention.delta`: what a call costs, the division by lengths included."""

from typing import NamedTuple

from ortho._typing import Size
from ortho.attention.chunking import CHUNK, chunks
from ortho.attention.mechanism import AttentionCost


def delta_cost(
    B: Size,
    N: Size,
    H: Size,
    K: Size,
    V: Size,
    *,
    gated: bool = False,
    form: str = "fast",
    causal: bool = False,
    qk_grad: bool = True,
    itemsize: int = 4,
    chunk: int = CHUNK,
) -> AttentionCost:
    """Closed form of one self-attention call with `beta` given, and if `gated` with `log_decay`, in either form.

    What autograd keeps of `beta` itself is a matter of the gate that made it; a copy in float32, beside half precision,
    or one that fills the last chunk is counted. Half precision costs what float32 does. With symbols, N is a multiple
    of `chunk`, and no width is 1.
    """
    G, item = B * H, max(itemsize, 4)
    copied = G * N if itemsize < item else 0
    if form == "reference":
        rest, decode = _recurrent(G, N, K, V, int(gated), causal, qk_grad, item), 6 * G * K * V
    else:
        width, behind = chunks(N, chunk) if isinstance(N, int) else (chunk, 0)
        number = (N + behind) // width if isinstance(N, int) else N / chunk
        rest = _in_chunks(G, N, K, V, width, number, int(gated), causal, qk_grad, item)
        decode = _in_chunks(G, 1, K, V, 1, 1, int(gated), True, qk_grad, item).forward
        copied = G * number * width if behind else copied  # with what is behind the end
    vectors = 2 * G * N
    return AttentionCost(
        forward=rest.forward,
        backward=rest.backward,
        elementwise_forward=rest.elementwise_forward + vectors * (3 * K + 2),
        # A gradient's sum over a broadcast axis is left out by autograd where that axis has length 1.
        elementwise_backward=rest.elementwise_backward
        + (vectors * (6 * K + 3 + (K if K != 1 else 0)) if qk_grad else 0),
        saved_bytes=rest.saved + (item * vectors * (K + 1) if qk_grad else 0) + item * copied,
        decode=decode,
        state_bytes=item * G * K * V,
    )


class _Rest(NamedTuple):
    """What comes after the division by lengths."""

    forward: Size
    backward: Size
    elementwise_forward: Size
    elementwise_backward: Size
    saved: Size


# Below: G = B H, the sequences; item, bytes a number; a flag counts as 0 or 1.


def _recurrent(G: Size, N: Size, K: Size, V: Size, gated: int, causal: bool, qk_grad: bool, item: int) -> _Rest:
    rows, memory = G * N, G * K * V
    empty = (1 - gated) * memory  # no gradient reaches the first memory, unless there is one of the decay to take
    sums = (V if V != 1 else 0) + gated * (K * V if (K, V) != (1, 1) else 0)
    return _Rest(
        forward=6 * rows * K * V,  # what a key holds, what is written, what is read
        backward=(12 if qk_grad else 6) * rows * K * V - 2 * empty,
        elementwise_forward=rows * (2 * V + K * V) + gated * rows * (1 + K * V),  # error, strength, sum; exp, decay
        # Strengths' two products, signs of the errors, sums; keys are used twice, and so is each memory but the last,
        # three times where it is read. With decays the products with them, exp; none reaches the first memory's.
        elementwise_backward=rows * (3 * V + sums)
        - (0 if qk_grad or gated else G * V)
        + (rows * K if qk_grad else 0)
        + (N - 1) * memory * (1 + causal)
        + gated * (rows * (1 + K * V) + N * memory),
        # Queries, keys, errors; decays and the memories that they fade; what is written, and the other memories
        saved=item
        * (rows * (2 * K + V + gated) + gated * N * memory + (rows * V + (N + 1) * memory if qk_grad else 0)),
    )


def _in_chunks(
    G: Size, N: Size, K: Size, V: Size, width: Size, number: Size, gated: int, causal: bool, qk_grad: bool, item: int
) -> _Rest:
    rows, memory = G * number * width, G * number * K * V  # with what is behind the end
    pairs = rows * width
    products = qk_grad or gated  # those that a key's gradient, or a decay's, is made of
    write = _Rest(
        # Products of keys, their inverse system, two products with it; what is erased and written, chunk after chunk.
        forward=pairs * (4 * K + 2 * V + width) + 4 * rows * K * V,
        backward=4 * pairs * V
        + 4 * rows * K * V
        + (4 * rows * K * V if products else 0)
        + (2 * pairs * K if qk_grad else 0),
        elementwise_forward=pairs + rows * V + gated * (pairs + 2 * rows * K + memory),
        elementwise_backward=3 * pairs
        + rows * (3 * V + 1)
        + memory
        + (pairs + rows * K if products else 0)
        + (pairs + 2 * rows * K if qk_grad else 0)
        + gated * (4 * pairs + rows * (7 * K + 5) + 3 * memory + 3 * G * number),
        saved=rows * (2 * K + 2 * V) + 2 * pairs + memory,
    )
    decays = gated * (4 * pairs + 2 * rows), gated * (pairs + rows)  # scalar operations; numbers kept
    if causal:
        read = _Rest(
            forward=2 * pairs * (K + V) + 2 * rows * K * V,
            backward=2 * pairs * V
            + 2 * rows * K * V
            + (2 * pairs * V + 2 * rows * K * V if products else 0)
            + (4 * pairs * K if qk_grad else 0),
            elementwise_forward=gated * (pairs + rows * K),
            # and the sums of two gradients, of keys and of decays
            elementwise_backward=(2 * rows * K if qk_grad else 0) + gated * (4 * pairs + rows * (4 * K + 4)),
            saved=rows * K + pairs,
        )
    else:
        product = 2 * G * N * K * V
        read = _Rest(product, product * (1 + qk_grad), 0, 0, G * N * K + (G * K * V if qk_grad else 0))
    return _Rest(
        forward=write.forward + read.forward,
        backward=write.backward + read.backward,
        elementwise_forward=write.elementwise_forward + read.elementwise_forward + decays[0],
        elementwise_backward=write.elementwise_backward + read.elementwise_backward,
        saved=item * (write.saved + read.saved + decays[1]),
    )
