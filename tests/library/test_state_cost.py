"""Costs of mechanisms that compute in pieces: declared equals counted in several of them; formulas, numbers by hand.
`test_cost.py` tests whole layers, in one piece, and one more token."""

from itertools import product

import pytest
import sympy as sp
from counted import assert_declared, assert_formula
from piecewise import K, V, operands, pieces, takes, ways

from ortho import MECHANISMS
from ortho.attention.recurrence import CHUNK
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


def test_delta_by_hand():
    """For each token: 6 K V by the recurrence. In chunks of C: 2 C each for K K^T and Q K^T, T K and T V, and the
    weights' product with what is written; C^2 for the system's inverse; three products with the state."""
    cost = MECHANISMS["delta"].cost
    N, C = 128, 32
    assert cost(1, N, 1, 8, 7, form="reference", causal=True).forward == N * 6 * 8 * 7
    within = 2 * C * (3 * 8 + 2 * 7) + C**2
    assert cost(1, N, 1, 8, 7, causal=True, chunk=C).forward == N * (within + 6 * 8 * 7)


def test_channel_decays_by_hand():
    """For each token: K (C + 1) for what a reader finds in its chunk, 2 V C to answer by it; (K + V) C to solve a
    chunk's system; 2 K V each to write to the state, to read it and to find in it what is erased."""
    gla, kda = (MECHANISMS[name].cost for name in ("gla", "kda"))
    K, V, C = 8, 7, CHUNK
    assert gla(1, 2 * C, 1, K, V, causal=True).forward == 2 * C * (K * (C + 1) + 2 * V * C + 4 * K * V)
    read = 2 * K * (C + 1) + 2 * V * C
    assert kda(1, 2 * C, 1, K, V, causal=True).forward == 2 * C * (read + (K + V) * C + 6 * K * V)
    assert gla(1, 2 * C, 1, K, V).forward == 2 * C * 4 * K * V


def test_positions_by_hand():
    """For one sequence of N = 256 in two tiles, K = V = 64, in multiply-adds."""
    N, C, K = 256, 128, 64
    pairs = C * C * 3  # the two tiles on the diagonal and the one beside them
    alibi = MECHANISMS["alibi"].cost(1, N, 1, K, K, causal=True, tile=C)
    assert alibi.forward == 2 * pairs * (K + K)
    assert alibi.backward == 2 * pairs * (3 * K + 2 * K)  # as the fused kernel's: scores again, dP, dV, dQ, dK
    # A block: eight products of C x C with K, four of C x C x C and the system, one of K x C x K. Beside them the
    # scores of the tile across, whose queries have no further block to move over, and all values.
    path = MECHANISMS["path"].cost(1, N, 1, K, K, causal=True, block=C)
    inside = 8 * C * C * K + 2 * C**3 + C**3 // 2 + C * K * K
    assert path.forward == 2 * (2 * inside + C * C * K + pairs * K)
