r"""Orders of growth, read off the closed forms with sympy.

A cost is a sum of positive terms $c\, N^a d^b \log^e d$. Its order is the set of terms that no other term dominates for
all sizes at once: $8 N d^2 + 4 N^2 d$ has the order $O(N^2 d + N d^2)$, because neither term bounds the other.
"""

from collections.abc import Callable
from typing import Any

import sympy as sp

B, N, d, H, m = sp.symbols("B N d H m", positive=True)

__all__ = ["B", "H", "N", "big_o", "constants", "d", "m", "order", "symbolic"]


def symbolic(closed_form: Callable[..., Any], /, *sizes: sp.Symbol, **kwargs: Any) -> Any:
    """`closed_form(*sizes, **kwargs)`, called with symbols, by default those of this module for one sequence."""
    return closed_form(*(sizes or (1, N, d, H)), **kwargs)


def constants(expression: Any, *symbols: sp.Symbol) -> dict[sp.Expr, sp.Expr]:
    """Each monomial in `symbols` (default N and d) with its coefficient: 8Nd^2 + 4N^2 d -> {N d^2: 8, N^2 d: 4}."""
    symbols = symbols or (N, d)
    found: dict[sp.Expr, sp.Expr] = {}
    for term in sp.Add.make_args(sp.expand(sp.nsimplify(expression))):
        coefficient, monomial = term.as_independent(*symbols, as_Add=False)
        found[monomial] = found.get(monomial, 0) + coefficient
    return found


def _exponents(monomial: sp.Expr, symbols: tuple[sp.Symbol, ...]) -> tuple[tuple[Any, Any], ...]:
    """For each symbol the powers of it and of its logarithm."""
    powers = monomial.as_powers_dict()
    return tuple((powers.get(s, 0), powers.get(sp.log(s), 0)) for s in symbols)


def order(expression: Any, *symbols: sp.Symbol) -> frozenset[sp.Expr]:
    """The monomials in `symbols` (default N and d) that no other one dominates, for all sizes at least 1.

    One monomial dominates another if it has at least the power of every symbol, a logarithm counting less than any
    power. Other symbols are taken as constants.
    """
    symbols = symbols or (N, d)
    powers = {monomial: _exponents(monomial, symbols) for monomial in constants(expression, *symbols)}

    def dominated(one: sp.Expr) -> bool:
        return any(
            other != one and all(a <= b for a, b in zip(powers[one], powers[other], strict=True)) for other in powers
        )

    return frozenset(monomial for monomial in powers if not dominated(monomial))


def big_o(expression: Any, *symbols: sp.Symbol) -> str:
    """The order as LaTeX, highest power of the first symbol first: 'O(N^{2} d + N d^{2})'."""
    symbols = symbols or (N, d)
    terms = sorted(order(expression, *symbols), key=lambda t: _exponents(t, symbols), reverse=True)
    return f"O({' + '.join(sp.latex(t) for t in terms)})"
