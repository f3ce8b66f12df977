"""Costs of attention that knows positions: declared = counted for the functions alone, by hand, and as N grows.

Whole layers are held to theirs by `tests/library/test_cost.py`, in which no call is longer than a tile.
"""

from itertools import product

import pytest
import sympy as sp
import torch

from ortho.attention import MECHANISMS
from ortho.attention.positions.position_delta import BiasVectors
from ortho.cost import big_o as sym
from ortho.cost.counting import OperationCounter, count_forward, saved_bytes

FORMS = ["reference", "fast"]
NAMES = ["rotary", "alibi", "fox", "path", "position-delta"]
TILED = NAMES[1:]
TILE = {"alibi": "tile", "fox": "tile", "path": "block", "position-delta": "block"}  # what its argument is called
PARTS = ["forward", "backward", "elementwise_forward", "elementwise_backward", "saved_bytes"]


def gates(name, B, H, N, K, dtype=torch.float32):
    """The operands that a layer's gates would make, by name."""
    D = BiasVectors.width
    shapes = {
        "fox": {"log_forget": ()},
        "path": {"directions": (K,), "beta": ()},
        "position-delta": {"bias_queries": (D,), "bias_keys": (D,), "directions": (D,), "beta": ()},
    }.get(name, {})
    assert set(shapes) == set(MECHANISMS[name].gates)
    return {gate: torch.zeros(B, H, N, *shape, dtype=dtype, requires_grad=True) for gate, shape in shapes.items()}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("qk_grad", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_declared_equals_counted(name, form, qk_grad, dtype):
    """In several tiles, the last one full and not, in one, and of one token; with values of another width."""
    mechanism = MECHANISMS[name]
    if name == "rotary" and dtype == torch.bfloat16:
        return  # its fused kernel keeps another type beside the operands'; the softmax's own cost says no more
    cases = [(1, 12, 2, 3, 3, 4), (2, 13, 1, 2, 5, 5), (1, 33, 1, 1, 1, 64), (3, 1, 2, 4, 2, 64), (1, 3, 2, 5, 1, 1)]
    for (B, N, H, K, V, tile), causal in product(cases, (False, True)):
        if not (causal or mechanism.bidirectional):
            continue
        V = K if name == "rotary" else V
        kwargs = {TILE[name]: tile} if form == "fast" and name in TILE else {}
        q, k, v = (torch.zeros(B, H, N, w, dtype=dtype) for w in (K, K, V))
        given = gates(name, B, H, N, K, dtype)
        wanted = [x.requires_grad_() for x in ([q, k, v] if qk_grad else [v])] + list(given.values())
        with OperationCounter() as ahead, saved_bytes() as kept:
            o = mechanism.form(form)(q, k, v, is_causal=causal, **given, **kwargs)
        with OperationCounter() as back:
            torch.autograd.grad(o, wanted, torch.ones_like(o))
        itemsize = q.element_size()
        declared = mechanism.cost(B, N, H, K, V, form=form, causal=causal, qk_grad=qk_grad, itemsize=itemsize, **kwargs)
        counted = {
            "forward": ahead.flops.total(),
            "backward": back.flops.total(),
            "elementwise_forward": ahead.elementwise.total(),
            "elementwise_backward": back.elementwise.total(),
        }
        assert {part: getattr(declared, part) for part in counted} == counted
        if itemsize >= 4:
            assert kept() == declared.saved_bytes + declared.output_bytes
        assert all(type(part) is int for part in vars(declared).values())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_decode(name, form, dtype):
    """One token more, behind a state: its FLOPs, and the bytes of the state with it."""
    mechanism, (B, H, N, K) = MECHANISMS[name], (2, 3, 7, 4)
    q, k, v = (torch.zeros(B, H, N, K, dtype=dtype) for _ in range(3))
    given = gates(name, B, H, N, K, dtype)

    def tokens(start, stop):
        parts = {gate: x[:, :, start:stop].detach() for gate, x in given.items()}
        return parts | {"q": q[:, :, start:stop], "k": k[:, :, start:stop], "v": v[:, :, start:stop]}

    _, state = mechanism.form(form)(**tokens(0, N - 1), is_causal=True, return_state=True)
    last = tokens(N - 1, N) | {"is_causal": True, "initial_state": state}
    declared = mechanism.cost(B, N, H, K, K, form=form, causal=True, itemsize=q.element_size())
    assert count_forward(mechanism.form(form), **last)[0] == declared.decode
    _, state = mechanism.form(form)(**last, return_state=True)
    assert sum(x.nbytes for x in state) == declared.state_bytes


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("form", FORMS)
def test_formulas_equal_numbers(name, form):
    """A closed form with the sizes put in is the closed form called with them, where N is a multiple of the tile."""
    mechanism, K = MECHANISMS[name], sp.Symbol("K", positive=True)
    kwargs = {TILE[name]: 16} if form == "fast" and name in TILE else {}
    sizes = {sym.B: 2, sym.N: 48, sym.H: 3, K: 10}
    for causal in (False, True)[1 - mechanism.bidirectional :]:
        formula = mechanism.cost(sym.B, sym.N, sym.H, K, K, form=form, causal=causal, **kwargs)
        numbers = mechanism.cost(2, 48, 3, 10, 10, form=form, causal=causal, **kwargs)
        for part in (*PARTS, "decode", "state_bytes"):
            assert sp.sympify(getattr(formula, part)).subs(sizes) == getattr(numbers, part), (part, causal)


@pytest.mark.parametrize("name", TILED)
def test_growth(name):
    """Work is quadratic in N, as softmax attention's; what is kept is linear in the fast form alone."""
    K, V = sp.symbols("K V", positive=True)
    sizes = (sym.B, sym.N, sym.H, K, V)
    fast, reference = (MECHANISMS[name].cost(*sizes, form=form, causal=True) for form in ("fast", "reference"))
    for part in PARTS[:4]:
        assert sym.order(getattr(fast, part), sym.N) == sym.order(getattr(reference, part), sym.N) == {sym.N**2}
    assert sym.order(fast.saved_bytes, sym.N) == {sym.N}
    assert sym.order(reference.saved_bytes, sym.N) == {sym.N**2}


def test_products_by_hand():
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
