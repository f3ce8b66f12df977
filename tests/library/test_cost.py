"""Declared costs equal counted ones exactly: layers, blocks and models over a grid of sizes and all variants;
mechanisms in several pieces, and with pairs left out; orders of growth; the counter itself."""

import itertools
from functools import partial
from itertools import product

import pytest
import sympy as sp
import torch
from counted import SIZES, assert_declared, assert_decodes, assert_formula
from dynamic_sparse_mechanisms import ALL, FORMS, centroids
from gradients import trained
from piecewise import K, V, operands, pieces, takes, ways
from sample import WHOLE, some
from static_patterns import Parity
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from ortho import MECHANISMS, PROJECTIONS, LanguageModel, MultiheadAttention, TransformerBlock, cost
from ortho.attention.sparse.pattern import pattern_mechanism
from ortho.attention.sparse.window import Window
from ortho.cost import big_o as sym
from ortho.cost.big_o import big_o, constants, order, symbolic
from ortho.cost.counting import Allocations, Counts, flop_counter, flops_of, optimiser_bytes, saved_bytes
from ortho.cost.mechanisms import closed_form_of

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


@pytest.mark.parametrize(("projection", "attention", "form", "causal"), some(FEW, 5))
def test_block(projection, attention, form, causal):
    variant = {"projection": projection, "attention": attention, "form": form}
    for (B, N, d, H), d_ff in zip(SIZES[:3], (None, 37, 20), strict=True):
        x, bias = torch.zeros(B, N, d, requires_grad=True), d_ff is None
        declared = cost.block(B, N, d, H, d_ff=d_ff, causal=causal, bias=bias, **variant)
        block = TransformerBlock(d, H, d_ff=d_ff, bias=bias, norm_first=not bias, **variant)
        assert_declared(declared, block, x, is_causal=causal)


@pytest.mark.parametrize("projection", PROJECTIONS)
@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("max_length", [20, None])
def test_model(projection, layers, max_length):
    for B, N, d, H in SIZES[:3]:
        kind = {"vocab_size": 11, "max_length": max_length, "projection": projection, "bias": layers == 1}
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


# ------------------------------------------------------------------------------------------------- mechanisms in pieces

NAMES = [name for name, m in MECHANISMS.items() if takes(m.fast)]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("qk_grad", [False, True])
def test_declared_equals_counted(name, qk_grad):
    """The last piece is full or not."""
    m, (B, H) = MECHANISMS[name], (2, 3)
    sizes = pieces(m.fast, 4)
    of_gates = {"bias_width": 2} if name == "position-delta" else {}
    for N, causal in product((12, 13), ways(m)):
        given = {x: y.requires_grad_(qk_grad or x not in "qk") for x, y in operands(m, B, H, length=N).items()}
        q, k, v = (given.pop(x) for x in "qkv")
        declared = m.cost(B, N, H, K, V, causal=causal, qk_grad=qk_grad, itemsize=8, **sizes, **of_gates)
        assert_declared(declared, m.fast, q, k, v, is_causal=causal, **given, **sizes)


@pytest.mark.parametrize("name", [name for name in NAMES if MECHANISMS[name].family == "recurrent"])
@pytest.mark.parametrize("form", ["reference", "fast"])
def test_formulas_equal_numbers(name, form):
    """A symbolic closed form with the sizes substituted equals the closed form called with them, if N is a multiple of
    a piece. One more token costs the same after any number of tokens."""
    m, (K, V) = MECHANISMS[name], sp.symbols("K V", positive=True)
    values = {sym.B: 2, sym.N: 48, sym.H: 3, K: 10, V: 7}
    for causal in ways(m):
        kwargs = {"form": form, "causal": causal, "itemsize": 2, **pieces(m.form(form), 16)}
        formula = m.cost(*values, **kwargs)
        assert_formula(formula, m.cost(*values.values(), **kwargs), values)
        assert sym.order(formula.decode, sym.N) == sym.order(formula.state_bytes, sym.N) == {sp.Integer(1)}


# -------------------------------------------------------------------------------------------- patterns and chosen pairs

PATTERNS = {"one key": Window(1), "near": Window(70), "all": Window(10**6), "several tilings": Parity()}
TESTED = ALL | {name: pattern_mechanism(name, type(pattern), "", **vars(pattern)) for name, pattern in PATTERNS.items()}
for name in PATTERNS:
    TESTED[name].cost = closed_form_of(TESTED[name])
GATES = {"log_linear_weight": ()}  # numbers a token


def sparse_operands(m, B, N, H, K, V, dtype=torch.float32, seed=0):
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
SPARSE_VARIANTS = product(TESTED, FORMS, [False, True], [torch.float32])


@pytest.mark.parametrize(("name", "form", "qk_grad", "dtype"), some(SPARSE_VARIANTS, 5))
def test_sparse_declared_equals_counted(name, form, qk_grad, dtype):
    """In several tiles, full and not, and for one token; with values of another width, and of width 1."""
    m = TESTED[name]
    sizes = [(1, 12, 2, 3, 3), (2, 130, 1, 2, 5), (1, 192, 1, 1, 1), (3, 1, 2, 4, 2), (1, 65, 3, 2, 3), (1, 7, 1, 3, 1)]
    for number, (size, causal) in enumerate(product(sizes, ways(m))):
        (q, k, v), gates = sparse_operands(m, *size, dtype=dtype, seed=number)
        for x in ((q, k, v) if qk_grad else (v,)) + tuple(gates.values()):
            x.requires_grad_()
        declared = m.cost(*size, form=form, causal=causal, qk_grad=qk_grad, itemsize=q.element_size())
        assert_declared(declared, m.form(form), q, k, v, is_causal=causal, **gates)


@pytest.mark.parametrize("name", [name for name, m in TESTED.items() if m.causal])
@pytest.mark.parametrize("form", FORMS)
def test_sparse_decode(name, form):
    """One more token after a state: its FLOPs, and the bytes of the state with it, of either dtype in turn."""
    m, (B, H, K, V) = TESTED[name], (2, 3, 4, 2)
    for N, dtype in zip((1, 2, 7, 64, 65, 200), 3 * (torch.bfloat16, torch.float32), strict=True):
        x, gates = sparse_operands(m, B, N, H, K, V, dtype)
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


@pytest.mark.bad_input
def test_a_pattern_without_a_closed_form_takes_no_symbols():
    with pytest.raises(ValueError, match=r"N: expected an integer, as Parity\(\) has no closed form .*, got N"):
        TESTED["several tilings"].cost(1, sym.N, 1, 4, 4)


# --------------------------------------------------------------------------------------------- counts from running code


def test_any_module():
    """PyTorch's own attention, which returns two results; a function; a module that trains nothing; one that is not a
    part of this package, by hand."""
    x = torch.zeros(2, 7, 12, requires_grad=True)
    theirs = torch.nn.MultiheadAttention(12, 3, bias=False, batch_first=True)
    declared = cost.layer(2, 7, 12, 3, form="reference")
    found = cost.of(theirs, x, x, x)
    assert (found.forward, found.trained) == (declared.forward, declared.trained)
    assert found.step == found.forward + found.backward == declared.step
    ours = cost.of(MultiheadAttention(12, 3, projection="frozen"), x)
    assert (ours.trained, ours.frozen) == (2 * 144, 2 * 144)
    network = torch.nn.Sequential(torch.nn.Linear(12, 5), torch.nn.Tanh())
    assert cost.of(network, x) == Counts(2 * 14 * 60, 4 * 14 * 60, 65, 0, 4 * 14 * (12 + 5), {})
    assert cost.of(network.requires_grad_(False), x.detach()) == Counts(2 * 14 * 60, 0, 0, 65, 0, {})
    assert cost.of(torch.matmul, x, torch.zeros(12, 4)).backward == 2 * 14 * 12 * 4


def test_saved_bytes_counts_a_storage_once():
    x = torch.zeros(4, 6, requires_grad=True)
    w = torch.zeros(6, 6, requires_grad=True)
    with saved_bytes(exclude=[w]) as total:
        y = x @ w + x[:2].repeat(2, 1) @ w  # x is kept twice, as itself and as a copy of half of it
        assert y.shape == (4, 6)
    assert total() == 2 * x.numel() * 4


def test_products_in_place_and_with_vectors():
    a, b, out = torch.ones(2, 3, 4), torch.ones(2, 4, 5), torch.ones(2, 3, 5)
    for call in (lambda: torch.bmm(a, b, out=out), lambda: out.baddbmm_(a, b), lambda: out.baddbmm(a, b)):
        assert flops_of(call) == 240
    assert flops_of(lambda: out[0].addmm_(a[0], b[0])) == flops_of(lambda: torch.mm(a[0], b[0], out=out[0])) == 120
    assert flops_of(lambda: a[0] @ b[0, :, 0]) == 24 and flops_of(lambda: a[0, 0] @ b[0, :, 0]) == 8


def test_systems_and_eigenvalues():
    """A substitution goes over half of the matrix; eigenvalues take a constant times n^3 for each matrix of a batch,
    whatever its entries (Golub & Van Loan 2013)."""
    assert flops_of(lambda: torch.linalg.solve_triangular(torch.eye(4), torch.ones(4, 3), upper=False)) == 4 * 4 * 3
    for lead, n in (((), 4), ((2, 3), 5)):
        assert flops_of(torch.linalg.eigh, torch.eye(n).expand(*lead, n, n)) == 9 * n**3 * (6 if lead else 1)


def _by_the_allocator(step):
    """(peak, largest) of all blocks that PyTorch's allocator gives out and takes back, from PyTorch's profiler."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    events = profiler.profiler.kineto_results.events()
    changes = [event.nbytes() for event in events if event.name() == "[memory]"]
    return max(itertools.accumulate(changes)), max(changes)


@pytest.mark.parametrize("name", ["softmax", "linear", "favor", "aderf"])
def test_the_count_is_the_allocator_s(name):
    """Equal up to scalars; softmax in its reference form, as its fused kernel takes blocks that no tensor has."""
    mechanism = MECHANISMS[name]
    attention = mechanism.reference if name == "softmax" else mechanism.fast
    g = torch.Generator().manual_seed(0)
    *operands, upstream = (torch.randn(1, 2, 200, 16, generator=g) for _ in range(4))
    operands = [x.requires_grad_() for x in operands]

    def step():
        o = attention(*operands, is_causal=mechanism.causal)
        torch.autograd.grad(o, operands, upstream)

    step()  # draws the default features
    with Allocations() as memory:
        step()
    assert memory.live == 0
    peak, largest = _by_the_allocator(step)
    assert memory.largest == largest > 0
    assert memory.peak == pytest.approx(peak, abs=64)
