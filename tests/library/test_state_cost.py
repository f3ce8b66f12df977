"""Costs of mechanisms with a recurrent state, or with positions: declared equals counted for the functions alone, in
several chunks or tiles; one more token; by hand; as N grows. `test_cost.py` tests whole layers, in one chunk."""

from itertools import product

import pytest
import sympy as sp
import torch
from counted import CALLS, assert_declared, assert_formula
from extent import WHOLE

from ortho import MECHANISMS
from ortho.attention.position_bias.position_delta import BiasVectors
from ortho.attention.recurrence import CHUNK
from ortho.attention.recurrent.gla import ChannelDecay
from ortho.cost import big_o as sym
from ortho.cost.counting import flops_of

FORMS = ["reference", "fast"]
RECURRENT = [name for name, m in MECHANISMS.items() if m.family == "recurrent"]
TTT = [name for name in RECURRENT if name.startswith("ttt")]
POSITIONS = ["rotary", "alibi", "fox", "path", "position-delta"]
NAMES = RECURRENT + POSITIONS
K, V = sp.symbols("K V", positive=True)


def pieces(name, form, size):
    """The argument that says how many tokens are computed together; for test-time training part of the definition."""
    if name in TTT:
        return {"batch": size}
    if form == "reference" or name == "rotary":
        return {}
    return {{"alibi": "tile", "fox": "tile", "path": "block", "position-delta": "block"}.get(name, "chunk"): size}


def gates(name, B, H, N, K, V, dtype=torch.float32):
    """What a layer's gates would make, by name; two steps a token."""
    shapes = {"more_keys": (1, K), "more_values": (1, V)}
    if name == "delta-product":
        shapes["beta"] = (2,)
    if MECHANISMS[name].gates.get("log_decay") is ChannelDecay:
        shapes["log_decay"] = (K,)
    if name == "path":
        shapes["directions"] = (K,)
    if name == "position-delta":
        shapes |= dict.fromkeys(("bias_queries", "bias_keys", "directions"), (BiasVectors.width,))
    wanted = MECHANISMS[name].gates
    return {g: torch.zeros(B, H, N, *shapes.get(g, ()), dtype=dtype, requires_grad=True) for g in wanted}


# (B, N, H, K, V, size of a piece): in several pieces, the last one full and not, in one piece, and for one token.
SIZES = [(1, 12, 2, 3, 5, 4), (2, 13, 1, 4, 2, 5), (1, 33, 1, 1, 1, 64), (3, 1, 2, 4, 2, 64)]
SIZES += [(1, 3, 2, 5, 1, 1), (2, 2, 1, 1, 3, 2), (1, 8, 1, 2, 2, 4), (2, 11, 2, 1, 3, 4)] if WHOLE else []
DTYPES = [torch.bfloat16, torch.float32, torch.float64]  # in turn


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("qk_grad", [False, True])
def test_declared_equals_counted(name, form, qk_grad):
    m = MECHANISMS[name]
    for number, (((B, N, H, K, V, size), causal)) in enumerate(product(SIZES, (False, True))):
        dtype = DTYPES[number % 2]
        if not (causal or m.bidirectional):
            continue
        V = K if name == "rotary" else V
        q, k, v = (torch.zeros(B, H, N, w, dtype=dtype) for w in (K, K, V))
        given, kwargs = gates(name, B, H, N, K, V, dtype), pieces(name, form, size)
        for x in (q, k, v) if qk_grad else (v,):
            x.requires_grad_()
        options = {"form": form, "causal": causal, "qk_grad": qk_grad, "itemsize": dtype.itemsize}
        declared = m.cost(B, N, H, K, V, **options, **kwargs)
        assert_declared(declared, m.form(form), q, k, v, is_causal=causal, **given, **kwargs)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("form", "dtype"), [("reference", torch.bfloat16), ("fast", torch.float32)])
def test_decode(name, form, dtype):
    """One more token after a state: its FLOPs, and the bytes of the state with it; also in a new mini-batch."""
    (B, H, K, V), kwargs, state = (2, 3, 4, 4 if name == "rotary" else 5), pieces(name, form, 3), None
    for N in range(1, 8):
        q, k, v = (torch.zeros(B, H, 1, w, dtype=dtype) for w in (K, K, V))
        rest = gates(name, B, H, 1, K, V, dtype) | {"is_causal": True, "initial_state": state} | kwargs
        flops = flops_of(MECHANISMS[name].form(form), q, k, v, **rest)
        _, state = MECHANISMS[name].form(form)(q, k, v, **rest, return_state=True)
        declared = MECHANISMS[name].cost(B, N, H, K, V, form=form, causal=True, itemsize=dtype.itemsize, **kwargs)
        assert (flops, sum(x.nbytes for x in state)) == (declared.decode, declared.state_bytes), N


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("form", FORMS)
def test_formulas_equal_numbers(name, form):
    """A symbolic closed form with the sizes substituted equals the closed form called with them, if N is a multiple of
    a piece. With a recurrent state every part is linear in N, and the cost of one more token does not depend on N."""
    m = MECHANISMS[name]
    values = {sym.B: 2, sym.N: 48, sym.H: 3, K: 10, V: 10 if name == "rotary" else 7}
    symbols = (sym.B, sym.N, sym.H, K, K if name == "rotary" else V)
    for causal, qk_grad in product((False, True)[1 - m.bidirectional :], (False, True)):
        kwargs = {"form": form, "causal": causal, "qk_grad": qk_grad, "itemsize": 2, **pieces(name, form, 16)}
        formula, numbers = m.cost(*symbols, **kwargs), m.cost(*(values[s] for s in symbols), **kwargs)
        assert_formula(formula, numbers, values)
        if name in RECURRENT:
            found = [getattr(formula, part) for part in CALLS]
            assert all(sym.order(one, sym.N) == {sym.N} for one in found if one != 0)  # sums have no backward pass
            assert sym.order(formula.decode, sym.N) == sym.order(formula.state_bytes, sym.N) == {sp.Integer(1)}


@pytest.mark.parametrize("name", POSITIONS[1:])
def test_growth_of_softmax_attention_with_positions(name):
    """Work is quadratic in N."""
    sizes = (sym.B, sym.N, sym.H, K, V)
    fast, reference = (MECHANISMS[name].cost(*sizes, form=form, causal=True) for form in ("fast", "reference"))
    for part in CALLS:
        assert sym.order(getattr(fast, part), sym.N) == sym.order(getattr(reference, part), sym.N) == {sym.N**2}


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


def test_two_steps_write_twice_and_read_once():
    """They are compared at the same chunk; what is left is the triangular part."""
    one, two = (MECHANISMS[n].cost(1, 4096, 1, 64, 64, causal=True).forward for n in ("delta", "delta-product"))
    assert 1.5 < two / one < 2


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
