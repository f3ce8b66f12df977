r"""Orders of growth, read off the closed forms with sympy.

A cost is a sum of positive terms $c\, N^a d^b \log^e d$. Its order is the set of terms that no other term dominates for
all sizes at once: $8 N d^2 + 4 N^2 d$ has the order $O(N^2 d + N d^2)$, because neither term bounds the other
(`ortho.cost.orders` says when one does).
"""

from collections.abc import Callable
from typing import Any

import sympy as sp

from ortho.cost import orders

B, N, d, H, m = sp.symbols("B N d H m", positive=True)


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


def order(expression: Any, *symbols: sp.Symbol) -> frozenset[sp.Expr]:
    """The monomials in `symbols` (default N and d) that are not within the order of the others together.

    Other symbols are taken as constants; `ortho.cost.orders` says how monomials are compared.
    """
    terms = orders.monomials(sum(constants(expression, *symbols)))
    return frozenset(one for one in terms if not orders.bounded(terms[one], [terms[o] for o in terms if o != one]))


def big_o(expression: Any, *symbols: sp.Symbol) -> str:
    """The order as LaTeX, highest power of the first symbol first: `O(N^{2} d + N d^{2})`."""
    first = (symbols or (N, d))[0]
    terms = sorted(order(expression, *symbols), key=lambda t: (sp.degree(t, first), sp.latex(t)), reverse=True)
    return f"O({' + '.join(sp.latex(t) for t in terms)})"
