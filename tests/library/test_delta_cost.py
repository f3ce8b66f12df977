"""Costs of the delta rule: declared = counted for the function alone, in several chunks, by hand, and as N grows."""

from itertools import product

import pytest
import sympy as sp
import torch
from memory_operands import FORMS

from ortho.attention import MECHANISMS
from ortho.attention.chunking import CHUNK
from ortho.cost import big_o as sym
from ortho.cost.counting import OperationCounter, count_forward, saved_bytes

NAMES = ["delta", "gated-delta"]
PARTS = ["forward", "backward", "elementwise_forward", "elementwise_backward", "saved_bytes"]
K, V = sp.symbols("K V", positive=True)


def leaves(B, N, H, K, V, name, dtype=torch.float32):
    """q, k, v and the gates."""
    operands = [torch.zeros(B, H, N, width, dtype=dtype, requires_grad=True) for width in (K, K, V)]
    return operands, {gate: torch.zeros(B, H, N, dtype=dtype, requires_grad=True) for gate in MECHANISMS[name].gates}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("qk_grad", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_declared_equals_counted(name, form, qk_grad, dtype):
    """With values of another width than the keys; in several chunks, padded and not, in one, and of one token."""
    m = MECHANISMS[name]
    sizes = [(1, 12, 2, 3, 5), (2, 13, 1, 4, 2), (1, 7, 1, 1, 1), (2, 1, 1, 3, 2), (1, 5, 1, 2, 1)]
    for (size, chunk), causal in product(zip(sizes, (4, 5, 3, 64, 1), strict=True), (False, True)):
        operands, gates = leaves(*size, name, dtype)
        if not qk_grad:
            operands = [x.requires_grad_(i == 2) for i, x in enumerate(operands)]
        kwargs = {"chunk": chunk} if form == "fast" else {}
        with OperationCounter() as ahead, saved_bytes() as kept:
            o = m.form(form)(*operands, **gates, is_causal=causal, **kwargs)
        wanted = [x for x in (*operands, *gates.values()) if x.requires_grad]
        with OperationCounter() as back:
            torch.autograd.grad(o, wanted, torch.ones_like(o))
        itemsize = operands[0].element_size()
        declared = m.cost(*size, form=form, causal=causal, qk_grad=qk_grad, itemsize=itemsize, **kwargs)
        assert ahead.flops.total() == declared.forward
        assert back.flops.total() == declared.backward
        assert ahead.elementwise.total() == declared.elementwise_forward
        assert back.elementwise.total() == declared.elementwise_backward
        assert kept() == declared.saved_bytes
        assert all(type(part) is int for part in vars(declared).values())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("form", FORMS)
def test_decode(name, form):
    """One token more, against the state before it."""
    m, size = MECHANISMS[name], (2, 7, 3, 4, 5)
    operands, gates = leaves(*size, name)
    _, state = m.form(form)(*operands, **gates, is_causal=True, return_state=True)
    declared = m.cost(*size, form=form, causal=True)
    last, last_gates = leaves(2, 1, 3, 4, 5, name)
    flops, _ = count_forward(m.form(form), *last, **last_gates, is_causal=True, initial_state=state)
    assert flops == declared.decode
    assert declared.state_bytes == sum(x.nbytes for x in state) == 4 * 2 * 3 * 4 * 5


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("causal", [False, True])
def test_growth(name, causal):
    """Every part of either form is linear in N; a token more costs, and the state holds, what does not depend on it."""
    for form in FORMS:
        cost = MECHANISMS[name].cost(sym.B, sym.N, sym.H, K, V, form=form, causal=causal)
        for part in PARTS:
            assert sym.order(getattr(cost, part), sym.N) == {sym.N}
        assert sym.order(cost.decode, sym.N) == sym.order(cost.state_bytes, sym.N) == {sp.Integer(1)}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("form", FORMS)
def test_formulas_equal_numbers(name, form):
    """A closed form with the sizes put in is the closed form called with them, where N is a multiple of the chunk."""
    values = (2, 3 * CHUNK, 3, 16, 10)
    symbols = (sym.B, sym.N, sym.H, K, V)
    for causal, qk_grad, itemsize in product((False, True), (False, True), (2, 4, 8)):
        kwargs = {"form": form, "causal": causal, "qk_grad": qk_grad, "itemsize": itemsize}
        formula, numbers = (MECHANISMS[name].cost(*sizes, **kwargs) for sizes in (symbols, values))
        for part in (*PARTS, "decode", "state_bytes"):
            substituted = sp.sympify(getattr(formula, part)).subs(dict(zip(symbols, values, strict=True)))
            assert substituted == getattr(numbers, part), part


def test_products_by_hand():
    """A token: 6 K V of the recurrence. In chunks of C: K K^T and Q K^T, T K and T V, the weights' product with what is
    written, 2 C each; the system's inverse, C^2; three products with the memory."""
    cost = MECHANISMS["delta"].cost
    N, C = 128, 32
    assert cost(1, N, 1, 8, 7, form="reference", causal=True).forward == N * 6 * 8 * 7
    within = 2 * C * (3 * 8 + 2 * 7) + C**2
    assert cost(1, N, 1, 8, 7, causal=True, chunk=C).forward == N * (within + 6 * 8 * 7)
    # One memory a chunk. A token: q and k as they came, their lengths, what is made of them and of k by the system;
    # its strength, errors and what is written; rows of three matrices of its chunk.
    saved = cost(1, N, 1, 8, 7, causal=True, chunk=C).saved_bytes
    assert saved == 4 * (N // C * 8 * 7 + N * (5 * 8 + 2 * 7 + 3 + 3 * C))
