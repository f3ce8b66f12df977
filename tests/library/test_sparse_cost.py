"""Costs of patterns and of mechanisms that select their pairs: declared costs equal counted ones, exactly, at sizes
that leave pairs out; by hand, and as N grows; what selecting costs; how index arithmetic counts."""

from functools import partial
from itertools import product

import pytest
import sympy as sp
import torch
from counted import CALLS, assert_declared, assert_formula
from dynamic_sparse_mechanisms import ALL, ENTRIES, FORMS, centroids, qkv
from extent import some
from piecewise import ways
from static_patterns import Parity

from ortho.attention.dynamic_sparse.routing import routing_mask
from ortho.attention.dynamic_sparse.top_k import top_k_mask
from ortho.attention.sparse.block_mask import TILE
from ortho.attention.sparse.pattern import pattern_mechanism
from ortho.attention.sparse.window import Window
from ortho.cost import big_o as sym
from ortho.cost.attention import CHOOSING, choosing
from ortho.cost.counting import flops_of
from ortho.cost.mechanisms import closed_form_of

PATTERNS = {"one key": Window(1), "near": Window(70), "all": Window(10**6), "several tilings": Parity()}
TESTED = ALL | {name: pattern_mechanism(name, type(pattern), "", **vars(pattern)) for name, pattern in PATTERNS.items()}
for name in PATTERNS:
    TESTED[name].cost = closed_form_of(TESTED[name])
GATES = {"log_linear_weight": ()}  # numbers a token


def operands(m, B, N, H, K, V, dtype=torch.float32, seed=0):
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(B, H, N, width, generator=g).to(dtype) for width in (K, K, V))
    gates = {gate: torch.rand(B, H, N, *GATES[gate], generator=g).to(dtype) for gate in m.gates}
    return (q, k, v), gates


@pytest.fixture(autouse=True, scope="module")
def drawn():
    """Make in advance what is drawn only once, which is not part of a call."""
    for width in (1, 2, 3, 4):
        centroids(width)
        for dtype in (torch.float32, torch.float64):
            ALL["routing"].fast(*torch.ones(3, 1, 1, 1, width, dtype=dtype))


# Every fifth of the product has all dtypes, forms and mechanisms, each with a gradient of q and k and without.
VARIANTS = product(TESTED, FORMS, [False, True], [torch.float32])


@pytest.mark.parametrize(("name", "form", "qk_grad", "dtype"), some(VARIANTS, 5))
def test_declared_equals_counted(name, form, qk_grad, dtype):
    """In several tiles, full and not, and for one token; with values of another width, and of width 1."""
    m = TESTED[name]
    sizes = [(1, 12, 2, 3, 3), (2, 130, 1, 2, 5), (1, 192, 1, 1, 1), (3, 1, 2, 4, 2), (1, 65, 3, 2, 3), (1, 7, 1, 3, 1)]
    for number, (size, causal) in enumerate(product(sizes, ways(m))):
        (q, k, v), gates = operands(m, *size, dtype=dtype, seed=number)
        for x in ((q, k, v) if qk_grad else (v,)) + tuple(gates.values()):
            x.requires_grad_()
        declared = m.cost(*size, form=form, causal=causal, qk_grad=qk_grad, itemsize=q.element_size())
        assert_declared(declared, m.form(form), q, k, v, is_causal=causal, **gates)


@pytest.mark.parametrize("name", [name for name, m in TESTED.items() if m.causal])
@pytest.mark.parametrize("form", FORMS)
def test_decode(name, form):
    """One more token after a state: its FLOPs, and the bytes of the state with it, of either dtype in turn."""
    m, (B, H, K, V) = TESTED[name], (2, 3, 4, 2)
    for N, dtype in zip((1, 2, 7, 64, 65, 200), 3 * (torch.bfloat16, torch.float32), strict=True):
        x, gates = operands(m, B, N, H, K, V, dtype)
        state = None
        if N > 1:
            before = [part[:, :, :-1] for part in x]
            gated = {gate: value[:, :, :-1] for gate, value in gates.items()}
            _, state = m.form(form)(*before, **gated, is_causal=True, return_state=True)
        last = [part[:, :, -1:] for part in x]
        call = {gate: value[:, :, -1:] for gate, value in gates.items()} | {"is_causal": True, "initial_state": state}
        declared = m.cost(B, N, H, K, V, form=form, causal=True, itemsize=x[0].element_size())
        assert flops_of(m.form(form), *last, **call) == declared.decode, N
        _, state = m.form(form)(*last, **call, return_state=True)
        assert sum(part.nbytes for part in state) == declared.state_bytes, N


MASKS = {
    "top-k": partial(top_k_mask, is_causal=True),
    "routing": partial(routing_mask, is_causal=True),
}


@pytest.mark.parametrize("name", CHOOSING)
def test_choosing_and_attending(name):
    """Together they are the products of the cost; choosing alone is what making the mask takes, as counted."""
    m = next(m for m in ENTRIES if m.name == name)
    for length, causal in ((1, True), (50, True), (300, True), *([(300, False)] if m.bidirectional else [])):
        spent = choosing(name, length, 6, 5, causal=causal)
        assert sum(spent) == m.cost(1, length, 1, 6, 5, causal=causal).forward
        assert spent.share == spent.choosing / sum(spent)
        if name in MASKS and causal:
            q, k, _ = (x[None, None].float() for x in qkv(length=length, width=6))
            MASKS[name](q, k)  # draws what it draws once
            assert flops_of(MASKS[name], q, k) == spent.choosing


@pytest.mark.parametrize("width", [1, 2, 64, 65, 66, 128, 129, 300])
@pytest.mark.parametrize("causal", [False, True])
def test_closed_form_of_a_window_s_work(width, causal):
    """The closed form equals what the tables say, if N is a multiple of the tile and longer than the window."""
    window = Window(width)
    for last in (False, True):
        formula = window.computed_pairs(sym.N, is_causal=causal, last=last)
        for N in (320, 384, 640):
            numbers = window.computed_pairs(N, is_causal=causal, last=last)
            assert sp.sympify(formula).subs(sym.N, N) == numbers


@pytest.mark.parametrize("name", ["one key", "near"])
@pytest.mark.parametrize("causal", [False, True])
def test_formulas(name, causal):
    """With the sizes substituted, formulas equal the numbers. A window's costs are linear in N, and those of a decoded
    token do not grow, except for the state; under a mask they are quadratic."""
    K, V = sp.symbols("K V", positive=True)
    sizes, found = {sym.B: 2, sym.N: 5 * TILE, sym.H: 3, K: 10, V: 7}, {}
    for form in FORMS:
        found[form] = TESTED[name].cost(sym.B, sym.N, sym.H, K, V, form=form, causal=causal)
        numbers = TESTED[name].cost(2, 5 * TILE, 3, 10, 7, form=form, causal=causal)
        assert_formula(found[form], numbers, sizes)
    fast, reference = found["fast"], found["reference"]
    for part in CALLS:
        assert sym.order(getattr(fast, part), sym.N) == {sym.N}
        assert sym.order(getattr(reference, part), sym.N) == {sym.N**2}
    assert sym.order(fast.decode, sym.N) == {sp.Integer(1)}
    assert sym.order(fast.state_bytes, sym.N) == sym.order(reference.decode, sym.N) == {sym.N}


@pytest.mark.bad_input
def test_a_pattern_without_a_closed_form_takes_no_symbols():
    with pytest.raises(ValueError, match=r"N: expected an integer, as Parity\(\) has no closed form .*, got N"):
        TESTED["several tilings"].cost(1, sym.N, 1, 4, 4)
