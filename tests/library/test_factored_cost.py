"""Costs of attention from feature maps: declared = counted for the function alone, by hand, and as N grows."""

from itertools import product

import pytest
import sympy as sp
import torch
from kernel_mechanisms import ALL, CASES, FITTED, FORMS, HELD, WIDTH

from ortho.attention import MECHANISMS
from ortho.attention.chunking import CHUNK
from ortho.attention.linear.feature_maps import Cosine, Powers, Taylor
from ortho.attention.linear.linear_attention import kernel_mechanism
from ortho.cost import big_o as sym
from ortho.cost.counting import OperationCounter, count_forward, saved_bytes

OTHERS = [Cosine(), Powers(1), Powers(3), Taylor(1), Taylor(3)]
COSTED = ALL | {str(each): kernel_mechanism("", each, "") for each in OTHERS}


@pytest.mark.parametrize("name", COSTED)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("qk_grad", [False, True])
def test_declared_equals_counted(name, form, qk_grad):
    """With values of another width than the keys; in several chunks, padded and not, in one, and of one token."""
    m, widths = COSTED[name], (WIDTH, WIDTH, WIDTH) if name in HELD else (3, 2, 1)
    cases = zip([(1, 12, 2), (2, 13, 1), (1, 1, 1)], widths, (5, 1, 1), (4, 5, 64), strict=True)
    for ((B, N, H), K, V, chunk), causal in product(cases, (False, True)[: 1 + m.causal]):
        leaves = [torch.zeros(B, H, N, w) for w in (K, K, V)]
        wanted = [x.requires_grad_() for x in (leaves if qk_grad else leaves[2:])]
        kwargs = {"chunk": chunk} if form == "fast" else {}
        with OperationCounter() as ahead, saved_bytes() as kept:
            o = m.form(form)(*leaves, is_causal=causal, **kwargs)
        with OperationCounter() as back:
            torch.autograd.grad(o, wanted, torch.ones_like(o))
        declared = m.cost(B, N, H, K, V, form=form, causal=causal, qk_grad=qk_grad, **kwargs)
        assert ahead.flops.total() == declared.forward
        assert back.flops.total() == declared.backward
        assert ahead.elementwise.total() == declared.elementwise_forward
        assert back.elementwise.total() == declared.elementwise_backward
        assert kept() == declared.saved_bytes + declared.output_bytes
        assert all(type(part) is int for part in vars(declared).values())


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("form", FORMS)
def test_decode(name, form):
    """One query more: against the keys that are kept, or against the state before it."""
    m, (B, N, H, K, V) = ALL[name], (2, 7, 3, WIDTH, 4)
    declared = m.cost(B, N, H, K, V, form=form)
    q, k, v = torch.zeros(B, H, 1, K), torch.zeros(B, H, N, K), torch.zeros(B, H, N, V)
    if m.fitted or form == "reference":
        assert count_forward(m.form(form), q, k, v)[0] == declared.decode
        assert declared.state_bytes == k.nbytes + v.nbytes
        return
    _, state = m.fast(k[:, :, :-1], k[:, :, :-1], v[:, :, :-1], is_causal=True, return_state=True)
    last = (q, k[:, :, -1:], v[:, :, -1:])
    assert count_forward(m.fast, *last, is_causal=True, initial_state=state)[0] == declared.decode
    assert declared.state_bytes == sum(x.nbytes for x in state)


@pytest.mark.parametrize(("name", "causal"), CASES)
def test_growth(name, causal):
    """Every part of the fast form's cost is linear in N, of the reference's quadratic; what decodes recurrently has a
    state that does not grow, and a fit, which a new key changes, needs all keys again."""
    K, V = sp.symbols("K V", positive=True)
    sizes = (sym.B, sym.N, sym.H, K, V)
    fast, reference = (ALL[name].cost(*sizes, form=form, causal=causal) for form in ("fast", "reference"))
    for part in ("forward", "backward", "elementwise_forward", "elementwise_backward", "saved_bytes"):
        assert sym.order(getattr(fast, part), sym.N) == {sym.N}
        assert sym.order(getattr(reference, part), sym.N) == {sym.N**2}
    expected = {sym.N} if name in FITTED else {sp.Integer(1)}
    assert sym.order(fast.decode, sym.N) == sym.order(fast.state_bytes, sym.N) == expected


def test_formulas_equal_numbers():
    """A closed form with the sizes put in is the closed form called with them, where N is a multiple of the chunk."""
    sizes = {sym.B: 2, sym.N: 3 * CHUNK, sym.H: 3, sym.d: 16, sym.m: 10}
    for name, m in ALL.items():
        if name in HELD:
            continue
        width = {"m": sym.m} if m.fast.keywords["feature_map"].scales_keys else {}
        for form, causal in product(FORMS, (False, True)[: 1 + m.causal]):
            formula = m.cost(sym.B, sym.N, sym.H, sym.d, sym.d, form=form, causal=causal, **width)
            numbers = m.cost(2, 3 * CHUNK, 3, 16, 16, form=form, causal=causal, **({"m": 10} if width else {}))
            for part in ("forward", "backward", "elementwise_forward", "elementwise_backward", "saved_bytes", "decode"):
                assert sp.sympify(getattr(formula, part)).subs(sizes) == getattr(numbers, part), (name, form, part)


def test_products_by_hand():
    """2 (K + V + 1) C within the chunk, 4 K (V + 1) for the memory, a token; without the memory's, a single chunk."""
    cost = MECHANISMS["linear"].cost
    assert cost(1, 128, 1, 8, 7, causal=True).forward == 128 * (2 * (8 + 7) * CHUNK + 4 * 8 * 7 + 2 * 8)
    assert cost(1, 128, 1, 8, 7).forward == 128 * (4 * 8 * 7 + 2 * 8)
    assert cost(1, 128, 1, 8, 7, form="reference").forward == 2 * 128**2 * (8 + 7)
    # FAVOR+ with m = 10 projects each query and key on the rows, and gathers z by a product with the keys' scales.
    favor = MECHANISMS["favor"].cost(1, 128, 1, 8, 7, m=10)
    assert favor.forward == 2 * (128 + 128) * 8 * 10 + 128 * (4 * 10 * 7 + 2 * 2 * 10)
