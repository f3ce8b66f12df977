"""Costs of attention by position: it takes no matrix products; the size of its state; what heads of it save."""

import pytest
import sympy as sp
import torch

from ortho.attention.positional.patterns import Recent, Shift
from ortho.attention.positional.positional_attention import PATTERNS, positional_attention
from ortho.cost import counting
from ortho.cost.big_o import N, constants, d
from ortho.cost.layers import around, hybrid, positional_heads

HEADS = (
    *PATTERNS.values(),
    Shift("third last", -3),
    *(Recent(f"{width} {where}", width, where == "ahead") for width in (1, 2, 3, 9) for where in ("behind", "ahead")),
)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [1, 2, 100])
def test_no_products(length, causal):
    v = torch.zeros(2, len(HEADS), length, 3, requires_grad=True)
    assert counting.of(positional_attention, v, HEADS, is_causal=causal).step == 0


@pytest.mark.parametrize("length", [1, 5, 70])
def test_state(length):
    """It has the same size at every length."""
    _, state = positional_attention(torch.zeros(2, len(HEADS), length, 3), HEADS, is_causal=True, return_state=True)
    sizes = {"head_dim": 3, "patterns": HEADS}
    assert sum(t.nbytes for t in state) == positional_heads(2, length, 12, len(HEADS), **sizes).state_bytes


def test_orders():
    """Seven fixed heads of eight leave an eighth of the quadratic term, and of the parameters for queries and keys."""
    maps = around(1, N, d, d, input_grad=True, itemsize=4)
    assert positional_heads(1, N, d, 8).forward == maps.forward
    seven, none = (hybrid(1, N, d, 8, heads={"positional": h, "learned": 8 - h}) for h in (7, 0))
    assert constants(seven.forward) == {N * d**2: sp.Rational(9, 2), N**2 * d: sp.Rational(1, 2)}
    assert constants(none.forward) == {N * d**2: 8, N**2 * d: 4}
    assert sp.expand(seven.trained - sp.Rational(9, 4) * d**2) == 0
