"""Closed forms of `ortho.attention.recurrent.gla`: what a call costs."""

from functools import partial
from typing import NamedTuple

from ortho._checks import checked
from ortho._typing import Size
from ortho.attention.chunking import CHUNK
from ortho.attention.mechanism import AttentionCost
from ortho.attention.recurrent.gla_kernels import chunk_width


@checked
def _cost(
    B: Size,
    N: Size,
    H: Size,
    K: Size,
    V: Size,
    *,
    erase: int,
    form: str = "fast",
    causal: bool = False,
    qk_grad: bool = True,
    itemsize: int = 4,
    chunk: int = CHUNK,
) -> AttentionCost:
    """Closed form of one self-attention call with its gates given, in either form.

    What autograd keeps of `log_decay` itself is a matter of the gate that made it. Half precision costs what float32
    does. With symbols, N is a multiple of `chunk`, a power of two, and greater.
    """
    G, item, wanted = B * H, max(itemsize, 4), int(qk_grad)
    if form == "reference":
        rest, behind = _recurrent(G, N, K, V, erase, int(causal), wanted), 0
        decode = 2 * (2 + erase) * G * K * V
    else:
        width = chunk_width(N if isinstance(N, int) else chunk, chunk)
        number, behind = (-(-N // width), -N % width) if isinstance(N, int) else (N / width, 0)
        rest = _in_chunks(G, N, K, V, width, number, erase, int(causal), wanted)
        decode = _in_chunks(G, 1, K, V, 1, 1, erase, 1, wanted).forward
    strengths = erase * G * (N + behind)
    made = _units(2 * G * N, K, wanted) if erase else _Cost(0, 0, G * N * K, wanted * G * N * K, 0)  # or a scale
    total = _Cost(*map(sum, zip(rest, made, strict=True)))
    return AttentionCost(
        forward=total.forward,
        backward=total.backward,
        elementwise_forward=total.elementwise_forward,
        elementwise_backward=total.elementwise_backward,
        saved_bytes=item * (total.saved + strengths),
        decode=decode,
        state_bytes=item * G * K * V,
    )


gla_cost, kda_cost = partial(_cost, erase=0), partial(_cost, erase=1)


class _Cost(NamedTuple):
    forward: Size
    backward: Size
    elementwise_forward: Size
    elementwise_backward: Size
    saved: Size  # numbers


# Below: G = B H, the sequences; a flag counts as 0 or 1. A gradient's sum over a broadcast axis is left out by autograd
# where that axis has length 1.


def _sum(axis: Size, numbers: Size) -> Size:
    """The scalar operations of summing so many numbers over an axis."""
    return 0 if axis == 1 else numbers


def _units(vectors: Size, K: Size, wanted: int) -> _Cost:
    """Vectors divided by their lengths."""
    return _Cost(
        forward=0,
        backward=0,
        elementwise_forward=vectors * (3 * K + 2),
        elementwise_backward=wanted * vectors * (6 * K + 3 + _sum(K, K)),
        saved=wanted * vectors * (K + 1),
    )


def _in_chunks(G: Size, N: Size, K: Size, V: Size, C: int, n: Size, erase: int, causal: int, wanted: int) -> _Cost:
    parts = [
        _merged(G * n, K, C, erase, causal, wanted, int(n == 1)),
        _passed_on(G, K, V, C, n, erase, causal, wanted),
    ]
    if erase:
        parts.append(_solved(G * n * C, K, V, C, wanted))
    if not causal:
        product = 2 * G * N * K * V
        parts.append(_Cost(product, product * (1 + wanted), 0, 0, G * N * K + wanted * G * K * V))
    return _Cost(*map(sum, zip(*parts, strict=True)))


def _merged(chunks: Size, K: Size, C: int, erase: int, causal: int, wanted: int, lone: int) -> _Cost:
    """From tokens to blocks of C. What a lone chunk leaves behind is not read in a causal call, and has no gradient."""
    levels, rows, readers = C.bit_length() - 1, chunks * C * K, causal + erase
    # Each level multiplies half the keys and half of each reader by fades: numbers on one level, and on all. The fades
    # themselves halve from level to level.
    half, halves, fades = chunks * (C // 2) * K, chunks * (levels * C // 2) * K, chunks * (C - 1) * K
    unread = int(lone and causal)
    sums = readers - int(unread and C == 1)  # of the gradients of a decay, and of a key: one less than it has uses
    backward = (
        rows * (1 + causal * (1 + 2 * wanted) + 3 * erase)  # exp; readers times decays, and their gradients' sums
        + rows * (sums + wanted * (sums + erase))
        # Two products each, over the levels, whose fades' part is summed over the block but for blocks of one; sums.
        + readers * (4 * halves - half)
        + (3 + readers) * (halves + fades)
        - half
    )
    if not wanted:  # keys of blocks of one
        backward -= (1 + readers) * half
    if unread and C > 1:  # the last level's keys and fades
        backward -= (1 + int(C > 2) + 2 * int(wanted or C > 2)) * half + 4 * chunks * K
    # Decays, keys, what is to read; then keys from level to level, and queries and erasers with their first decay.
    kept = 2 + readers + levels + causal * (levels + 1 - lone) + erase * levels
    return _Cost(
        forward=readers * rows * (C + 1),  # each pair of a reader and a key up to its own once
        backward=2 * rows * (2 * causal * wanted + erase * (1 + wanted))  # own keys
        + readers * (2 * rows * (C - 1) - (0 if wanted or C == 1 else rows)),
        elementwise_forward=rows * (1 + readers) + (1 + readers) * halves + fades,
        elementwise_backward=backward,
        saved=rows * kept + fades - (chunks * K if lone and C > 1 else 0) + causal * chunks * C * C,
    )


def _passed_on(G: Size, K: Size, V: Size, C: int, n: Size, erase: int, causal: int, wanted: int) -> _Cost:
    """What chunks find in the memory and write to it; in a causal call also what they answer."""
    rows, memory, products = G * n * C, G * K * V, int(wanted or C > 1)  # whether products with keys have a gradient
    # Chunks with another one behind them; whose memory is read; that have one before and hand its memory on.
    heirs = n - 1
    writers = heirs if causal else n
    between = heirs if not causal or n == 1 else heirs - 1
    return _Cost(
        forward=2 * rows * K * V * (1 + causal + erase) + 2 * causal * rows * C * V,
        backward=2 * G * C * K * V * (writers * (1 + products) + (causal + erase) * (n + heirs))
        + 2 * causal * rows * C * V * (1 + products),
        elementwise_forward=2 * n * memory + (causal + erase) * rows * V,
        # Sums of the gradients of what is written and of memories; the sign of what is found; both products with fades.
        elementwise_backward=causal * G * heirs * C * V
        + memory * (erase * heirs + causal * between)
        + erase * rows * V
        + memory * (writers + between)
        + _sum(V, writers * memory),
        saved=n * memory + products * rows * V,
    )


def _solved(rows: Size, K: Size, V: Size, C: int, wanted: int) -> _Cost:
    """Keys and values times beta, and the system of each chunk."""
    return _Cost(
        forward=rows * C * (K + V),
        backward=3 * rows * C * (K + V),
        elementwise_forward=rows * (K + V),
        elementwise_backward=rows * (C + (1 + wanted) * K + 2 * V + 1) + _sum(K, rows * K) + _sum(V, rows * V),
        saved=rows * (C + K + 2 * V),
    )


def _recurrent(G: Size, N: Size, K: Size, V: Size, erase: int, causal: int, wanted: int) -> _Cost:
    rows, memory, products = G * N, G * K * V, 2 + erase  # what is written, read and, with `erase`, held
    return _Cost(
        forward=2 * products * rows * K * V,
        backward=2 * products * rows * K * V * (1 + wanted),
        elementwise_forward=rows * (K + 2 * K * V + 2 * erase * V),  # exp, decay, sum; error, strength
        # The decay's two products, of which none reaches the first memory; gradients of memories used more than once.
        elementwise_backward=rows * K
        + (2 * N - 1) * memory
        + _sum(V, N * memory)
        + erase * (N * memory + rows * 3 * V + _sum(V, rows * V) + wanted * rows * K)
        + causal * (N - 1) * memory,
        saved=rows * (3 * K + (erase + wanted) * V) + N * (1 + erase * wanted) * memory + wanted * memory,
    )
