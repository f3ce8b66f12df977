"""Linear attention beside softmax attention: closed forms, and its orders and forms compared on random tokens."""

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import sympy
from torch import Tensor

from ortho.attention import MECHANISMS
from ortho.cost import big_o as sym
from ortho.theory import associativity
from paper import memory
from paper.claims.shared.common import normal, seeded

TOKENS, WIDTH = 64, 16
NARROW = 64  # d, where lengths are compared with it

# One head as wide as the layer, and H heads of width d / H.
ONE_HEAD = (1, sym.N, 1, sym.d, sym.d)
ALL_HEADS = (1, sym.N, sym.H, sym.d / sym.H, sym.d / sym.H)
HEAD = MECHANISMS["linear"].cost(*ONE_HEAD)
LINEAR_OF_HEADS = MECHANISMS["linear"].cost(*ALL_HEADS)
SOFTMAX = MECHANISMS["softmax"].cost(*ONE_HEAD, form="reference")
SOFTMAX_OF_HEADS = MECHANISMS["softmax"].cost(*ALL_HEADS, form="reference")
PRODUCTS = associativity.flops(sym.N, sym.d, sym.N, sym.d)  # of (Q K^T) V and of Q (K^T V)


@cache
def kept_by_head(width: Any = sym.d) -> Any:
    """Numbers that a head of linear attention of this width keeps for the backward pass, with its output."""
    N, d = sym.N, sym.d

    def call(q: Tensor, k: Tensor, v: Tensor, _: int) -> Any:
        return MECHANISMS["linear"].fast(q, k, v)

    found = memory.kept_by_call(call, N * d, N, d**2, d)
    return sympy.expand(found.subs(d, width))


def reordering(features: Callable[[Tensor], Tensor] = lambda x: x) -> associativity.Reordering:
    """How far the two orders are apart for normal tokens in float64."""
    q, k, v = normal(3, TOKENS, WIDTH)
    return associativity.reorder(features(q), features(k).mT, v)


def sums_unlike_states() -> int:
    """Entries in which causal outputs by sums differ from those by a running state, on random fractions."""
    g = seeded()
    operands = [associativity.rational(12, 4, generator=g) for _ in "qkv"]
    pairs: Iterable[Any] = zip(associativity.by_sums(*operands), associativity.by_states(*operands), strict=True)
    return sum(x != y for rows in pairs for x, y in zip(*rows, strict=True))


def lower(left: Any, right: Any, *lengths: int) -> dict[str, tuple[int, int]]:
    """The second closed form beside the first, at these lengths and the width `NARROW`."""
    found = {}
    for length in lengths:
        at = {sym.N: length, sym.d: NARROW}
        found[f"{length:,} tokens"] = int(right.subs(at)), int(left.subs(at))
    return found
