"""Costs of attention by position: declared costs equal counted ones, exactly; their orders of growth."""

import pytest
import sympy as sp
import torch
from counted import assert_declared, assert_formula
from extent import WHOLE

from ortho.attention.positional.patterns import Gaussian, Recent, Shift
from ortho.attention.positional.positional_attention import PATTERNS, SEVEN, positional_attention
from ortho.cost.attention import positional_attention as declared_of
from ortho.cost.big_o import N, constants, d, order
from ortho.cost.counting import flops_of
from ortho.cost.layers import hybrid, positional_heads

HEADS = (
    *PATTERNS.values(),
    Gaussian("normalised", 1.0, 1.0, normalise=True),
    Gaussian("wide", -2.0, 9.0, normalise=True),
    Shift("third last", -3),
    *(Recent(f"{width} {where}", width, where == "ahead") for width in (1, 2, 3, 9) for where in ("behind", "ahead")),
)
SIZES = [(2, 7, 3), (1, 100, 4), (1, 1, 1), (2, 1, 3), (1, 2, 1), (3, 63, 2), (3, 64, 2), (1, 130, 1)]  # B, N, V


def assert_call(patterns, B, N, V, *, causal=False, empty="zero"):
    v = torch.zeros(B, len(patterns), N, V, requires_grad=True)
    declared = declared_of(B, N, V, patterns, causal=causal)
    assert_declared(declared, positional_attention, v, patterns, is_causal=causal, empty=empty)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("empty", ["zero", "self"])
@pytest.mark.parametrize("pattern", HEADS, ids=lambda p: p.name)
def test_calls(pattern, empty, causal):
    for B, length, V in SIZES if WHOLE else SIZES[1::2]:
        assert_call([pattern], B, length, V, causal=causal, empty=empty)


@pytest.mark.parametrize("empty", ["zero", "self"])
@pytest.mark.parametrize("causal", [False, True])
def test_equal_heads_are_one_wide_head(causal, empty):
    """Equal heads are computed as one if they follow each other; otherwise they are added up."""
    for pattern in HEADS:
        for heads in ([pattern] * 3, [pattern, HEADS[0], pattern], [HEADS[1], pattern, pattern, HEADS[1]]):
            assert_call(heads, *SIZES[causal], causal=causal, empty=empty)


def test_heads_add_up():
    for causal in (False, True):
        assert_call(HEADS, 2, 70, 3, causal=causal)


@pytest.mark.parametrize("length", [1, 5, 70])
def test_decode(length):
    """One token more; the state's size is the same at every length."""
    _, state = positional_attention(torch.zeros(2, len(HEADS), length, 3), HEADS, is_causal=True, return_state=True)
    declared = declared_of(2, length, 3, HEADS, causal=True)
    assert sum(t.numel() * t.element_size() for t in state) == declared.state_bytes
    v = torch.zeros(2, len(HEADS), 1, 3)
    flops = flops_of(positional_attention, v, HEADS, is_causal=True, initial_state=state)
    assert flops == declared.decode


def test_orders():
    """Products are linear in N, and only Gaussians have any. Seven fixed heads of eight leave an eighth of
    the quadratic term, and of the parameters for queries and keys."""
    for causal in (False, True):
        form = declared_of(1, N, d, HEADS, causal=causal)
        assert order(form.forward) == order(form.backward) == {N * d}
        assert declared_of(1, N, d, SEVEN, causal=causal).forward == 0
    seven, none = (hybrid(1, N, d, 8, heads={"positional": h, "learned": 8 - h}) for h in (7, 0))
    assert constants(seven.forward) == {N * d**2: sp.Rational(9, 2), N**2 * d: sp.Rational(1, 2)}
    assert constants(none.forward) == {N * d**2: 8, N**2 * d: 4}
    assert sp.expand(seven.trained - sp.Rational(9, 4) * d**2) == 0


def test_formulas_equal_counts():
    for causal in (False, True):
        length = 640 - causal  # the rows fill chunks of 64 and of 83
        heads = [p for p in HEADS if p.name != "wide"]
        formula, numbers = (declared_of(2, n, 3, heads, causal=causal) for n in (N, length))
        assert_formula(formula, numbers, {N: length})


@pytest.mark.bad_input
def test_errors():
    with pytest.raises(ValueError, match="patterns: expected one for each of 4 heads, got 7"):
        positional_heads(1, 5, 8, 4, patterns=SEVEN)
    with pytest.raises(ValueError, match="H: expected a divisor of d = 8, got 3"):
        positional_heads(1, 5, 8, 3)
    with pytest.raises(ValueError, match="patterns: expected one of .* got 'last'"):
        declared_of(1, 5, 8, ["last"])
