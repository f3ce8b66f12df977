"""Costs of layers that stop the gradient, and of those with heads of several kinds: declared = counted, exactly."""

from dataclasses import fields, replace

import pytest
import sympy as sp
import torch

from ortho.cost import Cost
from ortho.cost.big_o import N, d
from ortho.cost.counting import Counts, count_forward, count_step
from ortho.cost.layers import COSTS, hybrid, stopped_layer
from ortho.layers.hybrid import HEADS, HybridAttention
from ortho.layers.stop_gradient import StoppedAttention

SIZES = [(1, 5, 8, 2), (2, 7, 12, 3), (3, 16, 16, 1), (1, 1, 4, 4), (2, 33, 64, 4), (3, 1, 8, 4)]  # B, N, d, H
SPLITS = [
    {"learned": 1, "positional": 3},
    {"learned": 2, "stopped": 2},
    {"positional": 1, "structured-stopped": 2, "rotary": 1},
    {"frozen": 1, "linear": 1, "window": 1, "structured": 1},
    {"structured-stopped": 4},
    {"induction": 2, "positional": 2},
]
DTYPES = [torch.float32, torch.float64]  # in turn: with the input's gradient and without, each size has both
COUNTED = [f.name for f in fields(Counts) if f.compare]
PROJECTIONS = pytest.mark.parametrize("projection", ["stopped", "structured-stopped"])
CAUSAL = pytest.mark.parametrize("causal", [False, True])
INPUT_GRAD = pytest.mark.parametrize("input_grad", [True, False])


def assert_declared(counts, declared):
    assert {n: getattr(counts, n) for n in COUNTED} == {n: getattr(declared, n) for n in COUNTED}


def test_all_kinds_have_a_closed_form():
    assert list(COSTS) == list(HEADS) and {kind for heads in SPLITS for kind in heads} == set(HEADS)


@INPUT_GRAD
@CAUSAL
@pytest.mark.parametrize("form", ["reference", "fast"])
@PROJECTIONS
def test_stopped_layer(projection, form, causal, input_grad):
    """Of all sizes, with shared heads and biases, and with heads of another width."""
    for number, (B, length, width, count) in enumerate(SIZES):
        dtype = DTYPES[(number + input_grad) % 2]
        x = torch.zeros(B, length, width, dtype=dtype, requires_grad=input_grad)
        variants = [{}, {"num_kv_heads": 1}, {"num_kv_heads": 1, "bias": True}, {"bias": True}]
        variants += [{"head_dim": 2}] if width >= 2 * count else []
        for variant in variants:
            kind = {"projection": projection, "form": form, **variant}
            counts = count_step(StoppedAttention(width, count, dtype=dtype, **kind), x, is_causal=causal)
            sizes = {"causal": causal, "input_grad": input_grad, "itemsize": dtype.itemsize}
            assert_declared(counts, stopped_layer(B, length, width, count, **kind, **sizes))


@INPUT_GRAD
@CAUSAL
@pytest.mark.parametrize("heads", SPLITS, ids=str)
def test_hybrid(heads, causal, input_grad):
    sizes = [(B, length, width) for B, length, width, _ in SIZES] + [(2, 70, 24)]
    for number, (B, length, width) in enumerate(sizes):
        dtype = DTYPES[(number + input_grad) % 2]
        x = torch.zeros(B, length, width, dtype=dtype, requires_grad=input_grad)
        counts = count_step(HybridAttention(width, 4, heads=heads, dtype=dtype), x, is_causal=causal)
        kind = {"causal": causal, "input_grad": input_grad, "itemsize": dtype.itemsize}
        assert_declared(counts, hybrid(B, length, width, 4, heads=heads, **kind))


@pytest.mark.parametrize("heads", SPLITS, ids=str)
def test_decode(heads):
    """One token more: the state's bytes before it, and the FLOPs, at every length."""
    layer, state = HybridAttention(12, 4, heads=heads), None
    for length in range(1, 6):
        x, declared = torch.zeros(2, 1, 12), hybrid(2, length, 12, 4, heads=heads, causal=True)
        assert count_forward(layer, x, is_causal=True, initial_state=state)[0] == declared.decode
        _, state = layer(x, is_causal=True, initial_state=state, return_state=True)
        assert sum(t.numel() * t.element_size() for part in state for t in part) == declared.state_bytes


def test_formulas_equal_counts():
    """A closed form with the sizes put in is the closed form called with them."""
    for heads in ({"learned": 1, "positional": 3}, {"stopped": 2, "frozen": 1, "rotary": 1}):
        formula, numbers = hybrid(2, N, d, 4, heads=heads), hybrid(2, 48, 24, 4, heads=heads)
        values = {
            f.name: int(sp.sympify(getattr(formula, f.name)).subs({N: 48, d: 24}))
            for f in fields(Cost)
            if f.name not in ("elementwise_forward", "elementwise_backward")
        }
        assert replace(numbers, **values) == numbers


@pytest.mark.bad_input
def test_errors():
    with pytest.raises(ValueError, match="heads: expected numbers that are together H = 2, got 3"):
        hybrid(1, 5, 8, 2, heads={"learned": 1, "positional": 2})
    with pytest.raises(ValueError, match="H: expected a divisor of d = 8, got 3"):
        hybrid(1, 5, 8, 3, heads={"learned": 3})
    with pytest.raises(ValueError, match="num_kv_heads: expected a divisor of num_heads = 4, got 3"):
        stopped_layer(1, 5, 8, 4, num_kv_heads=3)
    with pytest.raises(ValueError, match="projection: expected one of 'stopped', 'structured-stopped', got 'learned'"):
        stopped_layer(1, 5, 8, 4, projection="learned")
