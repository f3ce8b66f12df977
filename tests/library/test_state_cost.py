"""Costs of mechanisms that compute in pieces: declared equals counted in several of them; formulas, numbers by hand.
`test_cost.py` tests whole layers, in one piece, and one more token."""

from itertools import product

import pytest
import sympy as sp
from counted import assert_declared, assert_formula
from piecewise import K, V, operands, pieces, takes, ways

from ortho import MECHANISMS
from ortho.cost import big_o as sym

NAMES = [name for name, m in MECHANISMS.items() if takes(m.fast)]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("qk_grad", [False, True])
def test_declared_equals_counted(name, qk_grad):
    """The last piece is full or not."""
    m, (B, H) = MECHANISMS[name], (2, 3)
    sizes = pieces(m.fast, 4)
    of_gates = {"bias_width": 2} if name == "position-delta" else {}
    for N, causal in product((12, 13), ways(m)):
        given = {x: y.requires_grad_(qk_grad or x not in "qk") for x, y in operands(m, B, H, length=N).items()}
        q, k, v = (given.pop(x) for x in "qkv")
        declared = m.cost(B, N, H, K, V, causal=causal, qk_grad=qk_grad, itemsize=8, **sizes, **of_gates)
        assert_declared(declared, m.fast, q, k, v, is_causal=causal, **given, **sizes)


@pytest.mark.parametrize("name", [name for name in NAMES if MECHANISMS[name].family == "recurrent"])
@pytest.mark.parametrize("form", ["reference", "fast"])
def test_formulas_equal_numbers(name, form):
    """A symbolic closed form with the sizes substituted equals the closed form called with them, if N is a multiple of
    a piece. One more token costs the same after any number of tokens."""
    m, (K, V) = MECHANISMS[name], sp.symbols("K V", positive=True)
    values = {sym.B: 2, sym.N: 48, sym.H: 3, K: 10, V: 7}
    for causal in ways(m):
        kwargs = {"form": form, "causal": causal, "itemsize": 2, **pieces(m.form(form), 16)}
        formula = m.cost(*values, **kwargs)
        assert_formula(formula, m.cost(*values.values(), **kwargs), values)
        assert sym.order(formula.decode, sym.N) == sym.order(formula.state_bytes, sym.N) == {sp.Integer(1)}
