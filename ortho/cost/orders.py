r"""Orders of growth of closed forms in several independent sizes.

This module makes precise what $O(N^2 d + N d^2)$ says of a formula with more than one size. A formula is reduced to the
exponents of its monomials, $N^2 d \mapsto (2, 1)$. A monomial $t$ is bounded by a multiple of the sum of monomials
$c_1, \dots, c_n$, however the sizes grow, exactly if its exponents lie below a weighted mean of theirs: writing sizes
as $x_i = e^{y_i}$, the question is whether $t \cdot y \le \max_i c_i \cdot y$ for all $y \ge 0$, and linear programming
duality turns that into $t \le \sum_i \lambda_i c_i$ for some weights $\lambda$. ($N d$ is thus within $O(N^2 + d^2)$:
it is the mean of the two.)

Two relations between sizes are built in: heads divide the width, so $H \le d$; and a logarithm grows, but slower than
any power.
"""

import re
from collections.abc import Collection, Mapping
from typing import Any

from ortho.checks import expect

Formula = Any  # sympy's Expr, or a string or number that becomes one; sympy is imported only where it is used
# An exponent smaller than any difference of exponents that occurs: log x is treated as x to this power.
_LOG = 1e-3

Exponents = dict[str, float]


def parse(formula: Formula) -> Formula:
    """A formula, 'N^2*d + N*d*log(d)' or sympy's, with positive symbols that differ by their names alone.

    ValueError for a string with other functions than log and sqrt.
    """
    import sympy

    if isinstance(formula, str):
        if functions := set(re.findall(r"(\w+)\s*\(", formula)) - {"log", "sqrt"}:
            raise ValueError(f"formula: expected log and sqrt as functions, got {min(functions)} in {formula!r}")
        names = set(re.findall(r"[A-Za-z_]\w*", formula)) - {"log", "sqrt"}
        return sympy.sympify(formula, locals={name: sympy.Symbol(name, positive=True) for name in names})
    expr = sympy.sympify(formula)
    return expr.subs({s: sympy.Symbol(s.name, positive=True) for s in expr.free_symbols})


def monomials(formula: Formula, held: Collection[str] = ()) -> dict[Formula, Exponents]:
    """Each term of the expanded formula, without its constant, and the exponents of its growing sizes.

    Sizes in `held` are constants. A negative term must be within the order of the positive ones, and is left out.
    Raises ValueError for a term that is not a product of powers and logarithms of sizes.
    """
    import sympy

    positive: dict[Formula, Exponents] = {}
    negative: dict[Formula, Exponents] = {}
    for term in sympy.Add.make_args(sympy.expand(parse(formula))):
        constant, rest = term.as_coeff_Mul()
        if constant:
            (positive if constant > 0 else negative)[rest] = _exponents(rest, held)
    for rest, exponents in negative.items():
        expect(bounded(exponents, positive.values()), "formula", "positive leading terms", f"- {rest} in {formula}")
    return positive


def _exponents(monomial: Formula, held: Collection[str]) -> Exponents:
    import sympy

    exponents: Exponents = {}
    for base, power in (factor.as_base_exp() for factor in sympy.Mul.make_args(monomial)):
        small = isinstance(base, sympy.log)
        size = base.args[0] if small else base
        if size.is_number:
            continue
        if not (size.is_Symbol and power.is_number):
            raise ValueError(f"formula: expected products of powers and logarithms of sizes, got the factor {base}")
        exponents[size.name] = exponents.get(size.name, 0.0) + float(power) * (_LOG if small else 1.0)
    if "d" in exponents and "H" not in held:
        # d = H K with K >= 1: whatever grows with d grows with H.
        exponents["H"] = exponents.get("H", 0.0) + exponents["d"]
    if "d" in held:
        exponents.pop("H", None)
    return {name: power for name, power in exponents.items() if name not in held}


def bounded(monomial: Exponents, others: Collection[Exponents]) -> bool:
    """Whether the monomial is within the order of the others' sum."""
    import numpy as np
    from scipy.optimize import linprog

    if not others:
        return False
    sizes = sorted({name for exponents in (monomial, *others) for name in exponents})
    if not sizes:
        return True
    upper = np.array([[exponents.get(size, 0.0) for exponents in others] for size in sizes])
    wanted = np.array([monomial.get(size, 0.0) for size in sizes])
    weights = linprog(
        np.zeros(len(others)), A_ub=-upper, b_ub=-wanted, A_eq=np.ones((1, len(others))), b_eq=[1.0], method="highs"
    )
    return bool(weights.success)


def excess(terms: Mapping[Formula, Exponents], over: Mapping[Formula, Exponents]) -> list[Formula]:
    """The terms that are not within the order of `over`, in a fixed order."""
    outside = [term for term, exponents in terms.items() if not bounded(exponents, list(over.values()))]
    return sorted(outside, key=str)
