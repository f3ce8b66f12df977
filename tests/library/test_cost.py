"""Declared = counted, exactly, over a grid of sizes and all variants; the orders of growth; the counter itself."""

from dataclasses import fields
from itertools import product

import pytest
import sympy as sp
import torch
from extent import WHOLE, some
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop
from torch.utils.flop_counter import FlopCounterMode

from ortho import MECHANISMS, PROJECTIONS, LanguageModel, MultiheadAttention, TransformerBlock, cost
from ortho.cost import big_o as sym
from ortho.cost.big_o import big_o, constants, order, symbolic
from ortho.cost.counting import Counts, OperationCounter, count_forward, count_step, optimiser_bytes, saved_bytes

SIZES = [(1, 5, 8, 2), (2, 7, 12, 3), (3, 16, 16, 1), (1, 1, 4, 4), (2, 33, 64, 4)]  # (B, N, d, H)
# What a mechanism costs depends on the projection by whether queries and keys want a gradient; what a projection costs,
# on no mechanism. So each mechanism has one that passes the gradient and one that stops it, and each projection three
# mechanisms; where the backward pass is not what is tested, the former one is enough.
VARIANTS = [
    (projection, name, form, causal)
    for projection, name, form, causal in product(PROJECTIONS, MECHANISMS, ["reference", "fast"], [False, True])
    if (MECHANISMS[name].causal if causal else MECHANISMS[name].bidirectional)
    and (projection in ("learned", "stopped") or name in ("softmax", "linear", "window"))
]
FEW = [variant for variant in VARIANTS if variant[0] != "stopped" or variant[1] in ("softmax", "linear", "window")]
DTYPES = [torch.float32, torch.float64]  # in turn: with the input's gradient and without, each size has both
COUNTED = [f.name for f in fields(Counts) if f.compare]


def assert_declared(counts, declared):
    assert {n: getattr(counts, n) for n in COUNTED} == {n: getattr(declared, n) for n in COUNTED}


@pytest.mark.parametrize(
    ("projection", "attention", "form", "causal", "input_grad"),
    [*((*variant, True) for variant in VARIANTS), *((*variant, False) for variant in some(FEW, 3))],
)
def test_layer(projection, attention, form, causal, input_grad):
    variant = {"projection": projection, "attention": attention, "form": form}
    for number, (B, N, d, H) in enumerate(SIZES if WHOLE else SIZES[1::3]):
        dtype = DTYPES[(number + input_grad) % 2]
        x = torch.zeros(B, N, d, dtype=dtype, requires_grad=input_grad)
        counts = count_step(MultiheadAttention(d, H, dtype=dtype, **variant), x, is_causal=causal)
        itemsize = x.element_size()
        assert_declared(
            counts, cost.layer(B, N, d, H, causal=causal, input_grad=input_grad, itemsize=itemsize, **variant)
        )


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("form", ["reference", "fast"])
@pytest.mark.parametrize(
    ("projection", "attention"),
    some([*product(PROJECTIONS, ["softmax", "linear"]), *product(["learned", "stopped"], ["delta", "window"])], 3),
)
def test_layer_with_shared_heads_and_biases(projection, attention, form, bias):
    for (B, N, d, H), input_grad in product([(1, 5, 8, 2), (2, 7, 12, 3), (2, 33, 64, 4), (3, 1, 8, 4)], [True, False]):
        for shared in (G for G in range(1, H + 1) if H % G == 0):
            kind = {"projection": projection, "attention": attention, "form": form}
            kind |= {"num_kv_heads": shared, "bias": bias}
            x = torch.zeros(B, N, d, requires_grad=input_grad)
            counts = count_step(MultiheadAttention(d, H, **kind), x, is_causal=True)
            assert_declared(counts, cost.layer(B, N, d, H, causal=True, input_grad=input_grad, **kind))


@pytest.mark.parametrize("norm_first", [True, False])
def test_block_and_model_with_biases(norm_first):
    for B, N, d, H in SIZES[:3]:
        x = torch.zeros(B, N, d, requires_grad=True)
        block = TransformerBlock(d, H, bias=True, norm_first=norm_first)
        assert_declared(count_step(block, x), cost.block(B, N, d, H, bias=True))
        model = LanguageModel(11, d, H, 2, max_length=20, bias=True, norm_first=norm_first)
        counts = count_step(model, torch.zeros(B, N, dtype=torch.long))
        assert_declared(counts, cost.model(B, N, d, H, 2, vocab_size=11, max_length=20, bias=True))


@pytest.mark.parametrize(("projection", "attention", "form", "causal"), some(FEW, 5))
def test_block(projection, attention, form, causal):
    variant = {"projection": projection, "attention": attention, "form": form}
    for (B, N, d, H), d_ff in zip(SIZES[:3], (None, 37, 20), strict=True):
        x = torch.zeros(B, N, d, requires_grad=True)
        counts = count_step(TransformerBlock(d, H, d_ff=d_ff, **variant), x, is_causal=causal)
        assert_declared(counts, cost.block(B, N, d, H, d_ff=d_ff, causal=causal, **variant))


@pytest.mark.parametrize("projection", PROJECTIONS)
@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("max_length", [20, None])
def test_model(projection, layers, max_length):
    for B, N, d, H in SIZES[:3]:
        sizes = {"vocab_size": 11, "max_length": max_length}
        model = LanguageModel(11, d, H, layers, max_length=max_length, projection=projection)
        counts = count_step(model, torch.zeros(B, N, dtype=torch.long))
        assert_declared(counts, cost.model(B, N, d, H, layers, projection=projection, **sizes))


@pytest.mark.parametrize(("projection", "attention", "form"), [variant[:3] for variant in FEW if variant[3]])
def test_decode(projection, attention, form):
    """One token more: the state's bytes before it, and the FLOPs, at every length."""
    B, d, H = 2, 12, 3
    layer = MultiheadAttention(d, H, projection=projection, attention=attention, form=form)
    state = None
    for length in range(1, 6):
        x = torch.zeros(B, 1, d)
        flops, _ = count_forward(layer, x, is_causal=True, initial_state=state)
        declared = cost.layer(B, length, d, H, projection=projection, attention=attention, form=form, causal=True)
        assert flops == declared.decode
        _, state = layer(x, is_causal=True, initial_state=state, return_state=True)
        assert sum(t.numel() * t.element_size() for t in state) == declared.state_bytes


@pytest.mark.parametrize("projection", PROJECTIONS)
def test_recompute(projection):
    """Keeping the input alone: the forward pass runs once more, and one input is saved."""
    B, N, d, H = 2, 9, 16, 4
    block = TransformerBlock(d, H, projection=projection)
    x = torch.zeros(B, N, d, requires_grad=True)
    declared = cost.block(B, N, d, H, projection=projection)
    # Left to itself PyTorch stops recomputing at the last saved tensor, one product short of the full pass.
    with set_checkpoint_early_stop(False), OperationCounter() as counter:
        y = checkpoint(block, x, use_reentrant=False)
        torch.autograd.grad(y, [x, *block.parameters()], torch.ones_like(y))
    assert counter.flops.total() == declared.step + declared.recompute


@pytest.mark.parametrize("projection", PROJECTIONS)
def test_optimiser(projection):
    block = TransformerBlock(16, 4, projection=projection)
    optimiser = torch.optim.AdamW(block.parameters())
    block(torch.ones(1, 3, 16)).sum().backward()
    optimiser.step()
    assert optimiser_bytes(optimiser) == cost.block(1, 3, 16, 4, projection=projection).optimiser_bytes


# FLOPs of the backward pass in (N d^2, N^2 d), by hand: 2 a product of a weight's gradient or of a gradient into x;
# 8, 8 and 2 are four, four and one products of N^2 d multiply-adds. With the fused kernel there are always five.
@pytest.mark.parametrize(
    ("projection", "input_grad", "by_hand"),
    [
        ("learned", True, (16, 8)),
        ("frozen", True, (12, 8)),
        ("stopped", True, (8, 2)),
        ("learned", False, (10, 8)),
        ("frozen", False, (6, 2)),
        ("stopped", False, (6, 2)),
    ],
)
def test_backward_by_hand(projection, input_grad, by_hand):
    form = symbolic(cost.layer, projection=projection, input_grad=input_grad, form="reference")
    assert constants(form.backward) == {sym.N * sym.d**2: by_hand[0], sym.N**2 * sym.d: by_hand[1]}
    fused = symbolic(cost.layer, projection=projection, input_grad=input_grad, form="fast")
    assert constants(fused.backward) == {sym.N * sym.d**2: by_hand[0], sym.N**2 * sym.d: 10}


def test_pytorch_counter_agrees_on_products():
    """On the materialised form both counters see the same products; the fused CPU kernel only ours sees."""
    x = torch.zeros(2, 7, 12, requires_grad=True)
    for form, seen in (("reference", True), ("fast", False)):
        layer = MultiheadAttention(12, 3, form=form)
        ours = count_step(layer, x)
        with FlopCounterMode(display=False) as theirs:
            layer(x).sum().backward()
        assert (theirs.get_total_flops() == ours.forward + ours.backward) is seen


def test_formulas_equal_counts():
    """A closed form with the sizes put in is the closed form called with them."""
    for kwargs in ({}, {"causal": True}, {"form": "reference", "projection": "stopped"}):
        formula = symbolic(cost.block, **kwargs)
        numbers = cost.block(1, 48, 24, 3, **kwargs)
        for name in ("forward", "backward", "elementwise_backward", "saved_bytes", "decode", "trained"):
            assert sp.sympify(getattr(formula, name)).subs({sym.N: 48, sym.d: 24, sym.H: 3}) == getattr(
                numbers, name
            ), name


def test_orders():
    N, d = sym.N, sym.d
    assert big_o(8 * N * d**2 + 4 * N**2 * d + 7 * N * d) == "O(N^{2} d + N d^{2})"
    assert order(N * d * sp.log(d) + N * d + 3 * N) == {N * d * sp.log(d)}
    assert order(N * d**2 + N * d * sp.log(d)) == {N * d**2}
    assert order(N**2 + d**2 + N * d) == {N**2, d**2}  # N d is their geometric mean
    assert order(N**2 + N * d) == {N**2, N * d}
    assert order(5 * d, N) == {sp.Integer(1)}
    assert constants(sp.Rational(1, 2) * N * (N + 1)) == {N**2: sp.Rational(1, 2), N: sp.Rational(1, 2)}


def test_saved_bytes_counts_a_storage_once():
    x = torch.zeros(4, 6, requires_grad=True)
    w = torch.zeros(6, 6, requires_grad=True)
    with saved_bytes(exclude=[w]) as total:
        y = x @ w + x[:2].repeat(2, 1) @ w  # x is kept twice, as itself and as a copy of half of it
        assert y.shape == (4, 6)
    assert total() == 2 * x.numel() * 4


ELEMENTWISE = {
    **dict.fromkeys(("add", "sub", "mul", "div"), (torch.full((3, 4), 2.0),)),
    **dict.fromkeys(("neg", "exp", "relu", "sqrt"), ()),
    "clamp": (0.0,),
    "pow": (2,),
    "masked_fill": (torch.ones(4, dtype=torch.bool), 0.0),
    "addcmul": (torch.ones(3, 1), torch.ones(4)),
    "cumsum": (0,),
}


def counted(call):
    with OperationCounter() as counter:
        call()
    return dict(counter.flops), dict(counter.elementwise)


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_in_place_counts_as_what_it_computes(name):
    """Under the same name: an operation a number, wherever the result is put."""
    arguments = ELEMENTWISE[name]
    expected = {}, {name: 12}
    assert counted(lambda: getattr(torch.ones(3, 4), name)(*arguments)) == expected
    assert counted(lambda: getattr(torch.ones(3, 4), f"{name}_")(*arguments)) == expected


def test_products_in_place():
    a, b, out = torch.ones(2, 3, 4), torch.ones(2, 4, 5), torch.ones(2, 3, 5)
    assert counted(lambda: torch.bmm(a, b, out=out)) == counted(lambda: a @ b) == ({"bmm": 240}, {})
    assert counted(lambda: out.baddbmm_(a, b)) == counted(lambda: out.baddbmm(a, b)) == ({"baddbmm": 240}, {})
    assert (
        counted(lambda: out[0].addmm_(a[0], b[0])) == counted(lambda: out[0].addmm(a[0], b[0])) == ({"addmm": 120}, {})
    )
    assert counted(lambda: torch.mm(a[0], b[0], out=out[0])) == ({"mm": 120}, {})


def test_what_only_writes_is_free():
    x, other = torch.ones(3, 4), torch.zeros(3, 4)
    for call in (lambda: x.copy_(other), lambda: x.fill_(2.0), x.zero_, x.tril_, x.triu_):
        assert counted(call) == ({}, {})


def test_in_place_without_a_rule_is_an_error():
    """Like others: no name is taken for another one's."""
    with pytest.raises(RuntimeError, match="no rule for aten.scatter"), OperationCounter():
        torch.ones(3).scatter_(0, torch.tensor([1]), torch.ones(1))


def test_what_is_added_at_some_places_counts():
    x, places, numbers = torch.ones(3, 4), torch.tensor([1, 1]), torch.ones(2, 4)
    assert counted(lambda: x.index_add(0, places, numbers)) == ({}, {"index_add": 8})
    assert counted(lambda: x.scatter_add(0, places[:, None].expand(2, 4), numbers)) == ({}, {"scatter_add": 8})
    assert counted(lambda: x.scatter_add_(0, places[:, None].expand(2, 4), numbers)) == ({}, {"scatter_add": 8})


def test_eigenvalues():
    """A constant times n^3 for each matrix of a batch, whatever is in it (Golub & Van Loan 2013)."""
    for lead, n in (((), 4), ((2, 3), 5)):
        flops, elementwise = counted(lambda: torch.linalg.eigh(torch.eye(n).expand(*lead, n, n)))  # noqa: B023
        assert list(flops.values()) == [9 * n**3 * (6 if lead else 1)] and not elementwise


@pytest.mark.bad_input
def test_errors():
    with pytest.raises(RuntimeError, match="no rule for aten.sort"), OperationCounter():
        torch.zeros(3).sort()
    with pytest.raises(ValueError, match="projection: expected one of"):
        cost.layer(1, 2, 4, 2, projection="haar")
    with pytest.raises(ValueError, match="form: expected one of"):
        cost.layer(1, 2, 4, 2, form="flash")
    with pytest.raises(ValueError, match="attention: expected one of"):
        cost.layer(1, 2, 4, 2, attention="flush")
    with pytest.raises(ValueError, match="num_kv_heads: expected a divisor of num_heads = 4, got 3"):
        cost.layer(1, 2, 8, 4, num_kv_heads=3)
    with pytest.raises(ValueError, match="num_kv_heads: expected an integer of at least 1, got 0"):
        cost.layer(1, 2, 8, 4, num_kv_heads=0)
    with pytest.raises(ValueError, match="H: expected a divisor of d = 5, got 2"):
        cost.layer(1, 4, 5, 2)
    with pytest.raises(ValueError, match="N: expected an integer of at least 1, got 0"):
        cost.block(1, 0, 4, 2)
    with pytest.raises(TypeError, match="input_grad: expected in ortho.cost.layer alone"):
        cost.block(1, 2, 4, 2, input_grad=False)
