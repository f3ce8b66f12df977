"""Closed forms of attention by position, and of a layer with such heads."""

from collections.abc import Sequence
from itertools import groupby

from ortho._checks import checked, one_of
from ortho._cost import AttentionCost, Cost, head_width, linear_map
from ortho._typing import Size
from ortho.attention.chunking import CHUNK
from ortho.attention.untrained.patterns import EMPTY, Border, Context, Gaussian, Recent, Shift
from ortho.attention.untrained.positional_attention import SEVEN, PositionalPattern, named
from ortho.layers.positional import shared_out

__all__ = ["positional_attention", "positional_heads"]

_WIDE = 8  # bytes of a float64 or int64


@checked
def positional_attention(
    B: Size,
    N: Size,
    V: Size,
    patterns: Sequence[PositionalPattern | str] = SEVEN,
    *,
    causal: bool = False,
    empty: str = "zero",
    itemsize: int = 4,
) -> AttentionCost:
    """`ortho.attention.untrained.positional_attention` on v (B, H, N, V), a pattern a head, without masks or words.

    The fast form; v needs a gradient. With symbols, N stands for more than one token, and a Gaussian's rows, of which
    a causal call has one more than tokens, fill chunks.
    """
    one_of("empty", empty, EMPTY)
    item, found = max(itemsize, 4), named(patterns)
    # Equal heads that follow each other are one wide head.
    runs = [(pattern, len(list(equal))) for pattern, equal in groupby(found)]
    heads = [_head(pattern, B, N, count * V, causal, empty == "self", item) for pattern, count in runs]
    decoded = AttentionCost(
        # A Gaussian's row of the last token before, and of the new one
        decode=sum(4 * B * V * (2 + pattern.vectors) for pattern in found if isinstance(pattern, Gaussian)),
        state_bytes=_WIDE * B * (V * sum(1 + pattern.vectors for pattern in found) + 3),
    )
    return sum(heads, start=decoded)


def _head(p: PositionalPattern, B: Size, N: Size, V: Size, causal: bool, to_itself: bool, item: int) -> AttentionCost:
    """One head. A causal call has a position more than tokens: that of the last token before it."""
    P = N + int(causal)
    x, u = B * N * V, B * P * V  # numbers at the tokens, and at the positions
    sums = 0 if P == 1 else u  # the gradient of a sum of one is no sum
    if isinstance(p, Gaussian):
        part = _gaussian(p, B, V, x, P, causal, item)
    elif isinstance(p, Recent):
        part = _recent(p, B, V, x, u, P, causal, item)
    elif causal and not p.vectors:  # zeros, but for the current token; a context has its divisors all the same
        zeros = 0 if isinstance(p, Shift) and p.offset == 0 else x
        part = AttentionCost(0, 0, zeros + (P if isinstance(p, Context) else 0), zeros, 0)
    elif isinstance(p, Shift):
        part = AttentionCost(0, 0, 0, 0, 0)
    elif isinstance(p, Context) or not causal:
        # Cubes, a product with them, sums, squares, a division by them. Kept: cubes and squares.
        part = AttentionCost(0, 0, 3 * u + 2 * P, 2 * u + sums, 2 * _WIDE * P)
    elif isinstance(p, Border) and p.end:
        # As before; cubes of the row's own, over squares too, times the token's value, a sum
        part = AttentionCost(0, 0, 3 * u + 2 * x + 4 * P, 3 * u + 2 * x, 3 * _WIDE * P)
    elif isinstance(p, Border):
        # Four sums, a product and two sums of them, a division; own weights of 1 over squares, a product, a sum.
        # Backward also two sums where a sum is used twice.
        part = AttentionCost(0, 0, 8 * u + 2 * x + 3 * P, 8 * u + 2 * x, 2 * _WIDE * P)
    else:
        raise TypeError(f"patterns: expected those of ortho.attention.untrained.positional_attention, got {p}")
    if not to_itself or isinstance(p, Gaussian | Border | Recent) or (isinstance(p, Shift) and p.offset == 0):
        return part
    # A choice between two; backward two, and the sum of their gradients. Kept: a byte a position.
    return part + AttentionCost(0, 0, x, 3 * x, P)


def _gaussian(p: Gaussian, B: Size, V: Size, x: Size, P: Size, causal: bool, item: int) -> AttentionCost:
    sides = [p] if causal else [p, p.mirrored()]
    forward = chunks = saved = 0
    for side in sides:
        R = side.vectors
        width = min(P, max(CHUNK, R)) if isinstance(P, int) else max(CHUNK, R)
        number = -(-P // width) if isinstance(P, int) else P / width
        forward += 2 * B * V * number * width * (width + R)
        chunks += 0 if number == 1 else B * V * (number + 1) * width  # gradients of a chunk's own and next reader
        saved += item * width * (width + R)
    once, rows = 0, 0
    if p.normalise:
        # Weights summed up; a row's two sums and its own weight; a division. Causal: also of the own weights.
        once = p.vectors + p.mirrored().vectors + 2 + 2 * P + (2 * P if causal else 0)
        rows = B * V * P
        saved += item * P * (1 + causal)
    # Own weights, and the sum with each side's; the same backward
    own = x * (1 + len(sides))
    return AttentionCost(forward, forward, own + rows + once, own + rows + chunks, saved)


def _recent(p: Recent, B: Size, V: Size, x: Size, u: Size, P: Size, causal: bool, item: int) -> AttentionCost:
    """Sums of the places behind, over how many there are, and the token's own; backward the gradients of the places,
    each as long as all of them, are added up."""
    w = p.vectors + 1 if causal else p.width
    several, places = int(w > 1), max(0, w - 2) * B * V * (P + w - 1)
    if causal:  # the divisors of the own weight and of the others; the own weight, and a product with it
        own = x + 2 * P
        return AttentionCost(
            0, 0, (w - 1) * u + several * x + own, places + several * (u + x) + x, item * P * (1 + several)
        )
    return AttentionCost(0, 0, w * u, places + (1 + several) * u, item * P)


@checked
def positional_heads(
    B: Size,
    N: Size,
    d: Size,
    H: Size,
    *,
    patterns: Sequence[PositionalPattern | str] | None = None,
    head_dim: Size = None,
    causal: bool = False,
    empty: str = "zero",
    input_grad: bool = True,
    itemsize: int = 4,
) -> Cost:
    """`PositionalHeads(d, H)` in its fast form on x (B, N, d), without masks or words; H is a number.

    Symbols stand for more than one token. Raises TypeError or ValueError as the layer does.
    """
    K = head_width(d, H, head_dim)
    found = shared_out(H) if patterns is None else named(patterns)
    if len(found) != H:
        raise ValueError(f"patterns: expected one for each of {H} heads, got {len(found)}")
    attention = positional_attention(B, N, K, found, causal=causal, empty=empty, itemsize=itemsize)
    values = linear_map(B, N, d, H * K, input_grad=input_grad, itemsize=itemsize)
    merged = linear_map(B, N, H * K, d, itemsize=itemsize)
    kept = Cost(saved_bytes=itemsize * B * N * (d + H * K))  # x, the merged heads
    return values + merged + kept + attention
