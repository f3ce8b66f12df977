"""S1, sections 2.3, 2.4 and 4.2, and S2, 2.3: fixed patterns, counted and in closed form."""

from collections.abc import Callable
from typing import Any

import sympy
from torch import Tensor

from ortho.attention.sparse.pattern import Pattern, pattern_attention
from ortho.attention.sparse.window import Window
from ortho.attention.weights import weights_of
from ortho.cost import big_o, orders
from paper import memory
from paper.claims.rules import growth

TOKENS, REACH, FIRST = 256, 8, 4  # N, w or k, g
# Pairs of N tokens that are kept by windows of w tokens on either side.
EITHER_SIDE = "(2*w + 1)*N - w*(w + 1)"


def read_pairs(definition: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Which pairs a definition of attention reads, (..., N, M), as a function of q, k and the definition's options."""
    return lambda q, k, **options: weights_of(definition, q, k, **options) > 0


def closed_form(formula: str, **sizes: int) -> Any:
    """A formula in sympy's symbols, with these sizes put in."""
    return orders.parse(formula).subs({sympy.Symbol(name, positive=True): size for name, size in sizes.items()})


def time(claimed: str, pairs: str, than: str) -> Any:
    """The order of a head's products, two FLOPs for each number of a key and of a value, for N = m + `than` tokens."""
    products = 4 * big_o.d * orders.parse(pairs)
    return growth(_longer(orders.parse(claimed), than), sympy.expand(_longer(products, than)))


def space(claimed: str, pairs: str, than: str) -> Any:
    """The order of the weights that are kept."""
    return growth(_longer(orders.parse(claimed), than), sympy.expand(_longer(orders.parse(pairs), than)))


def saved() -> Any:
    """Numbers that the form in tiles, which stores no weights, keeps for the backward pass, its output included.

    The output and the logarithms have one more row each, for places without a token.
    """

    def call(q: Any, k: Any, v: Any, _: Any) -> Any:
        return pattern_attention(q, k, v, pattern=Window(REACH), is_causal=True)

    N, d = big_o.N, big_o.d
    return memory.kept_by_call(call, N * d, N, d, sympy.Integer(1))


def kept_pairs(pattern: Pattern, *, is_causal: bool = True) -> int:
    """How many pairs the pattern's mask has."""
    return int(pattern.mask(TOKENS, is_causal=is_causal).sum())


def _longer(formula: Any, than: str) -> Any:
    return formula.subs(big_o.N, orders.parse(f"m + {than}"))
