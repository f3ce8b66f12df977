"""Closed forms of `ortho.attention.recurrent.delta_product`: what a call costs, its division by lengths included."""

from ortho._checks import checked
from ortho._typing import Size
from ortho.attention.chunking import CHUNK, chunks
from ortho.attention.mechanism import AttentionCost
from ortho.attention.recurrent.delta_cost import Part, division_cost, read_at_end_cost, write_cost


@checked
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
    keys = G * N * steps
    width = max(1, chunk // steps)  # of a chunk, in tokens
    mask = 0
    if form == "reference":
        rest, decode = _recurrent(G, N, K, V, steps, causal, qk_grad), 2 * G * K * V * (2 * steps + 1)
    else:
        width, behind = chunks(N, width) if isinstance(N, int) else (width, 0)
        number = (N + behind) // width if isinstance(N, int) else N / width
        rest = _in_chunks(G, N, K, V, steps, width, number, causal, qk_grad)
        decode = _in_chunks(G, 1, K, V, steps, 1, 1, True, qk_grad).forward
        mask = width**2 * steps if causal else 0  # the steps that a token does not see, a byte each
    total = rest + division_cost(keys + G * N, K, keys + (G * N if qk_grad else 0))
    return AttentionCost(
        forward=total.forward,
        backward=total.backward,
        elementwise_forward=total.elementwise_forward,
        elementwise_backward=total.elementwise_backward,
        saved_bytes=item * total.saved + mask,
        decode=decode,
        state_bytes=item * G * K * V,
    )


# Below: G = B H, the sequences; a flag counts as 0 or 1.


def _recurrent(G: Size, N: Size, K: Size, V: Size, steps: Size, causal: bool, qk_grad: bool) -> Part:
    """A step a row, with a read after each token's last, or after the last of all for every query."""
    rows, reads, memory = G * N * steps, G * N, G * K * V
    return Part(
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
) -> Part:
    tokens = G * number * width  # with what is behind the end
    rows = tokens * steps
    seen = rows * width  # pairs of a token and a key
    write = write_cost(G, K, V, width * steps, number)
    if not causal:
        return write + read_at_end_cost(G, N, K, V, qk_grad)
    return write + Part(
        forward=2 * seen * (K + V) + 2 * tokens * K * V,
        backward=2 * seen * (K + 2 * V) + 2 * tokens * K * V + (2 * seen * K + 2 * tokens * K * V if qk_grad else 0),
        elementwise_forward=seen + tokens * V,
        # blocked; the sums of the gradients of keys and of queries
        elementwise_backward=seen + rows * K + (tokens * K if qk_grad else 0),
        saved=tokens * K + seen,
    )
