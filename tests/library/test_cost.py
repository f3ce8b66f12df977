"""Declared costs equal counted ones exactly, over a grid of sizes and all variants; orders of growth; the counter."""

from functools import partial
from itertools import product

import pytest
import sympy as sp
import torch
from counted import SIZES, assert_declared, assert_decodes, assert_formula
from extent import WHOLE, some
from gradients import trained
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from ortho import MECHANISMS, PROJECTIONS, LanguageModel, MultiheadAttention, TransformerBlock, cost
from ortho.cost import big_o as sym
from ortho.cost.big_o import big_o, constants, order, symbolic
from ortho.cost.counting import flop_counter, optimiser_bytes

# The cost of a mechanism depends on the projection only by whether queries and keys need a gradient; the cost of a
# projection does not depend on the mechanism. So each mechanism is tested with one projection that passes the gradient
# and one that stops it, and each projection with three mechanisms. Where the backward pass is not what is tested, the
# projection that passes the gradient is enough.
VARIANTS = [
    (projection, name, form, causal)
    for projection, name, form, causal in product(PROJECTIONS, MECHANISMS, ["reference", "fast"], [False, True])
    if (MECHANISMS[name].causal if causal else MECHANISMS[name].bidirectional)
    and (projection in ("learned", "stopped") or name in ("softmax", "linear", "window"))
]
FEW = [variant for variant in VARIANTS if variant[0] != "stopped" or variant[1] in ("softmax", "linear", "window")]
DTYPES = [torch.float32, torch.float64]  # in turn: each size has both, one with the input's gradient and one without


@pytest.mark.parametrize(
    ("projection", "attention", "form", "causal", "input_grad"),
    [*((*variant, True) for variant in VARIANTS), *((*variant, False) for variant in some(FEW, 3))],
)
def test_layer(projection, attention, form, causal, input_grad):
    variant = {"projection": projection, "attention": attention, "form": form}
    # Two sizes in turn, so that each mechanism has both.
    chosen = range(5) if WHOLE else [4 if (form == "fast") == causal else 1]
    for number, (B, N, d, H) in ((number, SIZES[number]) for number in chosen):
        dtype = DTYPES[(number + input_grad) % 2]
        x = torch.zeros(B, N, d, dtype=dtype, requires_grad=input_grad)
        layer = MultiheadAttention(d, H, dtype=dtype, **variant)
        declared = cost.layer(B, N, d, H, causal=causal, input_grad=input_grad, itemsize=dtype.itemsize, **variant)
        assert_declared(declared, layer, x, is_causal=causal)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("form", ["reference", "fast"])
@pytest.mark.parametrize(
    ("projection", "attention"),
    some([*product(PROJECTIONS, ["softmax", "linear"]), *product(["learned", "stopped"], ["delta", "window"])], 3),
)
def test_layer_with_shared_heads_and_biases(projection, attention, form, bias):
    for number, (B, N, d, H) in enumerate([(1, 5, 8, 2), (2, 7, 12, 3), (2, 33, 64, 4), (3, 1, 8, 4)]):
        input_grad = bool(number % 2) == bias  # with biases and without, each size has both
        for shared in (G for G in range(1, H + 1) if H % G == 0):
            kind = {"projection": projection, "attention": attention, "form": form}
            kind |= {"num_kv_heads": shared, "bias": bias}
            x = torch.zeros(B, N, d, requires_grad=input_grad)
            declared = cost.layer(B, N, d, H, causal=True, input_grad=input_grad, **kind)
            assert_declared(declared, MultiheadAttention(d, H, **kind), x, is_causal=True)


@pytest.mark.parametrize("norm_first", [True, False])
def test_block_and_model_with_biases(norm_first):
    for B, N, d, H in SIZES[:3]:
        x = torch.zeros(B, N, d, requires_grad=True)
        kind = {"bias": True, "norm_first": norm_first}
        assert_declared(cost.block(B, N, d, H, bias=True), TransformerBlock(d, H, **kind), x)
        declared = cost.model(B, N, d, H, 2, vocab_size=11, max_length=20, bias=True)
        model = LanguageModel(11, d, H, 2, max_length=20, **kind)
        assert_declared(declared, model, torch.zeros(B, N, dtype=torch.long))


@pytest.mark.parametrize(("projection", "attention", "form", "causal"), some(FEW, 5))
def test_block(projection, attention, form, causal):
    variant = {"projection": projection, "attention": attention, "form": form}
    for (B, N, d, H), d_ff in zip(SIZES[:3], (None, 37, 20), strict=True):
        x = torch.zeros(B, N, d, requires_grad=True)
        declared = cost.block(B, N, d, H, d_ff=d_ff, causal=causal, **variant)
        assert_declared(declared, TransformerBlock(d, H, d_ff=d_ff, **variant), x, is_causal=causal)


@pytest.mark.parametrize("projection", PROJECTIONS)
@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("max_length", [20, None])
def test_model(projection, layers, max_length):
    for B, N, d, H in SIZES[:3]:
        kind = {"vocab_size": 11, "max_length": max_length, "projection": projection}
        model = LanguageModel(d_model=d, num_heads=H, num_layers=layers, **kind)
        assert_declared(cost.model(B, N, d, H, layers, **kind), model, torch.zeros(B, N, dtype=torch.long))


@pytest.mark.parametrize(("projection", "attention", "form"), [variant[:3] for variant in FEW if variant[3]])
def test_decode(projection, attention, form):
    kind = {"projection": projection, "attention": attention, "form": form}
    declared = partial(cost.layer, d=12, H=3, causal=True, **kind)
    assert_decodes(declared, MultiheadAttention(12, 3, **kind), 12)


@pytest.mark.parametrize("projection", PROJECTIONS)
def test_recompute(projection):
    """Only the input is kept: the forward pass runs once more, and one input is saved."""
    block, declared = TransformerBlock(16, 4, projection=projection), cost.block(2, 9, 16, 4, projection=projection)
    x = torch.zeros(2, 9, 16, requires_grad=True)
    # Left to itself PyTorch stops recomputing at the last saved tensor, one product short of the full pass.
    with set_checkpoint_early_stop(False), flop_counter() as counter:
        y = checkpoint(block, x, use_reentrant=False)
        torch.autograd.grad(y, [x, *trained(block).values()], torch.ones_like(y))
    assert counter.get_total_flops() == declared.step + declared.recompute


@pytest.mark.parametrize("projection", PROJECTIONS)
def test_optimiser(projection):
    block = TransformerBlock(16, 4, projection=projection)
    optimiser = torch.optim.AdamW(block.parameters())
    block(torch.ones(1, 3, 16)).sum().backward()
    optimiser.step()
    assert optimiser_bytes(optimiser) == cost.block(1, 3, 16, 4, projection=projection).optimiser_bytes


def test_formulas_equal_counts():
    """A symbolic closed form with the sizes substituted equals the closed form called with the sizes."""
    for kwargs in ({}, {"causal": True}, {"form": "reference", "projection": "stopped"}):
        formula = symbolic(cost.block, **kwargs)
        numbers = cost.block(1, 48, 24, 3, **kwargs)
        assert_formula(formula, numbers, {sym.N: 48, sym.d: 24, sym.H: 3})


def test_orders():
    N, d = sym.N, sym.d
    assert big_o(8 * N * d**2 + 4 * N**2 * d + 7 * N * d) == "O(N^{2} d + N d^{2})"
    assert order(N * d * sp.log(d) + N * d + 3 * N) == {N * d * sp.log(d)}
    assert order(N * d**2 + N * d * sp.log(d)) == {N * d**2}
    assert order(N**2 + d**2 + N * d) == {N**2, d**2}  # N d is their geometric mean
    assert order(N**2 + N * d) == {N**2, N * d}
    assert order(5 * d, N) == {sp.Integer(1)}
    assert constants(sp.Rational(1, 2) * N * (N + 1)) == {N**2: sp.Rational(1, 2), N: sp.Rational(1, 2)}


@pytest.mark.bad_input
def test_errors():
    with pytest.raises(ValueError, match="num_kv_heads: expected a divisor of num_heads = 4, got 3"):
        cost.layer(1, 2, 8, 4, num_kv_heads=3)
    with pytest.raises(ValueError, match="H: expected a divisor of d = 5, got 2"):
        cost.layer(1, 4, 5, 2)
    with pytest.raises(TypeError, match="input_grad: expected in ortho.cost.layer alone"):
        cost.block(1, 2, 4, 2, input_grad=False)


def test_no_cost_of_a_call_that_is_refused():
    with pytest.raises(ValueError, match="causal: expected False"):
        MECHANISMS["efficient"].cost(1, 8, 1, 4, 4, causal=True)
