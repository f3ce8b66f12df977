"""Closed forms of `ortho.attention.recurrent.delta`: what a call costs, the division by lengths included."""

from dataclasses import dataclass, fields

from ortho._checks import checked
from ortho._typing import Size
from ortho.attention.chunking import CHUNK, chunks
from ortho.attention.mechanism import AttentionCost


@checked
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

    Half precision costs what float32 does. With symbols, N is a multiple of `chunk`, and no width is 1.
    """
    G, item = B * H, max(itemsize, 4)
    if form == "reference":
        rest, decode = _recurrent(G, N, K, V, int(gated), causal, qk_grad), 6 * G * K * V
    else:
        width, behind = chunks(N, chunk) if isinstance(N, int) else (chunk, 0)
        number = (N + behind) // width if isinstance(N, int) else N / chunk
        rest = _in_chunks(G, N, K, V, width, number, int(gated), causal, qk_grad)
        decode = _in_chunks(G, 1, K, V, 1, 1, int(gated), True, qk_grad).forward
    total = rest + division_cost(2 * G * N, K, 2 * G * N if qk_grad else 0)
    return AttentionCost(
        forward=total.forward,
        backward=total.backward,
        elementwise_forward=total.elementwise_forward,
        elementwise_backward=total.elementwise_backward,
        saved_bytes=item * total.saved,
        decode=decode,
        state_bytes=item * G * K * V,
    )


@dataclass(frozen=True)
class Part:
    """What a part of a call costs; `saved` counts numbers."""

    forward: Size
    backward: Size
    elementwise_forward: Size
    elementwise_backward: Size
    saved: Size

    def __add__(self, other: "Part") -> "Part":
        return Part(*(getattr(self, part.name) + getattr(other, part.name) for part in fields(Part)))


# Below: G = B H, the sequences; a flag counts as 0 or 1.


def division_cost(vectors: Size, K: Size, differentiated: Size) -> Part:
    """`memory.unit` of so many vectors, and of those through which a gradient passes."""
    # A gradient's sum over a broadcast axis is left out by autograd where that axis has length 1.
    backward = differentiated * (6 * K + 3 + (K if K != 1 else 0))
    return Part(0, 0, vectors * (3 * K + 2), backward, differentiated * (K + 1))


def write_cost(G: Size, K: Size, V: Size, width: Size, number: Size, gated: int = 0, qk_grad: bool = True) -> Part:
    """`delta_kernels.Write` on so many chunks of that width, the last one's empty rows included."""
    rows, memory = G * number * width, G * number * K * V
    pairs = rows * width
    products = qk_grad or gated  # those that a key's gradient, or a decay's, is made of
    return Part(
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
        saved=rows * (2 * K + 2 * V + 1) + 2 * pairs + memory,
    )


def read_at_end_cost(G: Size, N: Size, K: Size, V: Size, qk_grad: bool) -> Part:
    """N queries that all read the last memory."""
    product = 2 * G * N * K * V
    return Part(product, product * (1 + qk_grad), 0, 0, G * N * K + (G * K * V if qk_grad else 0))


def _recurrent(G: Size, N: Size, K: Size, V: Size, gated: int, causal: bool, qk_grad: bool) -> Part:
    rows, memory = G * N, G * K * V
    empty = (1 - gated) * memory  # no gradient reaches the first memory, unless there is one of the decay to take
    sums = (V if V != 1 else 0) + gated * (K * V if (K, V) != (1, 1) else 0)
    return Part(
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
        # Queries, keys, strengths, errors; decays and the memories that they fade; what is written, the other memories
        saved=rows * (2 * K + 1 + V + gated) + gated * N * memory + (rows * V + (N + 1) * memory if qk_grad else 0),
    )


def _in_chunks(
    G: Size, N: Size, K: Size, V: Size, width: Size, number: Size, gated: int, causal: bool, qk_grad: bool
) -> Part:
    rows = G * number * width  # with what is behind the end
    pairs = rows * width
    write = write_cost(G, K, V, width, number, gated, qk_grad)
    decays = Part(0, 0, gated * (4 * pairs + 2 * rows), 0, gated * (pairs + rows))
    if not causal:
        return write + decays + read_at_end_cost(G, N, K, V, qk_grad)
    products = qk_grad or gated  # those that a query's gradient, or a decay's, is made of
    read = Part(
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
    return write + decays + read
