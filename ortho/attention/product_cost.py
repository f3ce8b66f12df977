"""Closed forms of `ortho.attention.delta_product`: what a call costs, its division by lengths included."""

from typing import NamedTuple

from ortho._typing import Size
from ortho.attention.chunking import CHUNK, chunks
from ortho.attention.mechanism import AttentionCost


class _Rest(NamedTuple):
    """What comes after the division by lengths; `saved` counts numbers."""

    forward: Size
    backward: Size
    elementwise_forward: Size
    elementwise_backward: Size
    saved: Size


def delta_product_cost(
    B: Size,
    N: Size,
    H: Size,
    K: Size,
    V: Size,
    *,
    steps: Size = 2,
    form: str = "fast",
    causal: bool = False,
    qk_grad: bool = True,
    itemsize: int = 4,
    chunk: int = CHUNK,
) -> AttentionCost:
    """Closed form of one self-attention call with `beta`, and with the keys and values of so many `steps` a token.

    Those of the later steps come from gates and need a gradient, whether or not the projected queries and keys do
    (`qk_grad`). With symbols, N is a multiple of the tokens in a chunk, and no width is 1.
    """
    G, item = B * H, max(itemsize, 4)
    width = max(1, chunk // steps)  # of a chunk, in tokens
    mask = 0
    if form == "reference":
        rest, decode = _recurrent(G, N, K, V, steps, causal, qk_grad), 2 * G * K * V * (2 * steps + 1)
    else:
        if isinstance(N, int):
            width, behind = chunks(N, width)
            number = (N + behind) // width
        else:
            number = N / width
        rest = _in_chunks(G, N, K, V, steps, width, number, causal, qk_grad)
        decode = _in_chunks(G, 1, K, V, steps, 1, 1, True, qk_grad).forward
        mask = width**2 * steps if causal else 0  # the steps that a token does not see, a byte each
    keys = G * N * steps
    divided = keys + (G * N if qk_grad else 0)  # vectors that autograd divides by their lengths
    return AttentionCost(
        forward=rest.forward,
        backward=rest.backward,
        elementwise_forward=rest.elementwise_forward + (keys + G * N) * (3 * K + 2),
        # A gradient's sum over a broadcast axis is left out by autograd where that axis has length 1.
        elementwise_backward=rest.elementwise_backward + divided * (6 * K + 3 + (K if K != 1 else 0)),
        saved_bytes=item * (rest.saved + divided * (K + 1)) + mask,
        decode=decode,
        state_bytes=item * G * K * V,
    )


# Below: G = B H, the sequences; a flag counts as 0 or 1.


def _recurrent(G: Size, N: Size, K: Size, V: Size, steps: Size, causal: bool, qk_grad: bool) -> _Rest:
    """A step a row, with a read after each token's last, or after the last of all for every query."""
    rows, reads, memory = G * N * steps, G * N, G * K * V
    return _Rest(
        forward=(4 * rows + 2 * reads) * K * V,  # what a key holds, what is written; what is read
        # No gradient reaches the first memory.
        backward=(8 * rows + (4 if qk_grad else 2) * reads) * K * V - 2 * memory,
        elementwise_forward=rows * (2 * V + K * V),  # error, strength, sum
        # Strengths' two products, signs of the errors, sums; keys are used twice, and so is each memory but the last,
        # three times where it is read
        elementwise_backward=rows * (3 * V + (V if V != 1 else 0) + K)
        + (N * steps - 1) * memory
        + ((N - 1) * memory if causal else 0),
        # Queries, keys, strengths, errors before and after them; every memory, the last for the queries' gradient alone
        saved=reads * K + rows * (K + 1 + 2 * V) + (N * steps + qk_grad) * memory,
    )


def _in_chunks(
    G: Size, N: Size, K: Size, V: Size, steps: Size, width: Size, number: Size, causal: bool, qk_grad: bool
) -> _Rest:
    tokens = G * number * width  # with what is behind the end
    rows, memory = tokens * steps, G * number * K * V
    pairs, seen = rows * width * steps, rows * width  # of keys; of tokens and keys
    write = _Rest(
        # Products of keys, their inverse system, two products with it; what is erased and written, chunk after chunk.
        forward=pairs * (4 * K + 2 * V + width * steps) + 4 * rows * K * V,
        backward=pairs * (2 * K + 4 * V) + 8 * rows * K * V,
        elementwise_forward=pairs + rows * V,
        elementwise_backward=5 * pairs + rows * (3 * V + 3 * K + 1) + memory,
        saved=rows * (2 * K + 2 * V + 1) + 2 * pairs + memory,
    )
    if causal:
        read = _Rest(
            forward=2 * seen * (K + V) + 2 * tokens * K * V,
            backward=2 * seen * (K + 2 * V)
            + 2 * tokens * K * V
            + (2 * seen * K + 2 * tokens * K * V if qk_grad else 0),
            elementwise_forward=seen + tokens * V,
            # blocked; the sums of the gradients of keys and of queries
            elementwise_backward=seen + rows * K + (tokens * K if qk_grad else 0),
            saved=tokens * K + seen,
        )
    else:
        product = 2 * G * N * K * V
        read = _Rest(product, product * (1 + qk_grad), 0, 0, G * N * K + (G * K * V if qk_grad else 0))
    return _Rest(*(a + b for a, b in zip(write, read, strict=True)))
