"""Memories with a decay a channel at the edges: any decay, half precision, errors, compiling; and what they cost."""

from itertools import product

import pytest
import sympy as sp
import torch
from channel_memories import FUNCTIONS, NAMES, arguments
from memory_operands import FORMS, call, close, draw, with_gradients

from ortho.attention.chunking import CHUNK
from ortho.attention.recurrent.gla import MECHANISMS
from ortho.cost import big_o as sym
from ortho.cost.counting import OperationCounter, count_forward, saved_bytes

COSTS = {m.name: m.cost for m in MECHANISMS}
CALLS = list(product(NAMES, [False, True]))


@pytest.mark.parametrize(("name", "causal"), CALLS)
@pytest.mark.parametrize("rate", [0.0, -1e-3, -5.0, -1e4, -1e30, "any"])
def test_any_decay(name, causal, rate):
    """Of all tokens, or of one in three beside weak ones: as the recurrence has it, to 1e-12, with all gradients.

    Over a chunk of 64 the decay e^-5 multiplies up to e^-320, by which keys could not be divided in float32.
    """
    given = arguments(name, 2, length=130)
    if rate == "any":
        exponents = torch.randint(-3, 301, given["k"].shape, generator=torch.Generator().manual_seed(1)).double()
        strong = draw(*given["k"].shape, seed=2) > 0.4
        given["log_decay"] = torch.where(strong, -(10**exponents), -draw(*given["k"].shape, seed=3).abs() / 9)
    else:
        given["log_decay"] = torch.full_like(given["k"], rate)
        given["log_decay"][:, 1::3] = -0.1
    expected = with_gradients(FUNCTIONS[name]["reference"], given, is_causal=causal)
    assert all(x.isfinite().all() for x in expected)
    close(with_gradients(FUNCTIONS[name]["fast"], given, is_causal=causal), expected)


@pytest.mark.parametrize(("name", "causal"), CALLS)
@pytest.mark.parametrize("form", FORMS)
def test_float32(name, causal, form):
    """Near the float64 result with all gradients. Its largest numbers are some 1e2 after sums of some 1e2 rounded
    terms, which is 1e4 eps; weights in which digits were lost would be off by 0.1."""
    given = {x: y.float() for x, y in arguments(name, 2, length=130).items()}
    given["log_decay"][:, 5::7] = torch.finfo(torch.float32).min  # of which two have no sum
    given["log_decay"][:, 6::7] = -0.1

    def in_double(function):  # and so with the same gradients of the outputs
        def called(**kwargs):
            o, (S,) = function(**kwargs, is_causal=causal)
            assert o.dtype == S.dtype == kwargs["q"].dtype
            return o.double(), (S.double(),)

        return called

    found = with_gradients(in_double(FUNCTIONS[name][form]), given)
    exact = with_gradients(in_double(FUNCTIONS[name]["reference"]), {x: y.double() for x, y in given.items()})
    for one, other in zip(found, exact, strict=True):
        torch.testing.assert_close(one.double(), other, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("log_decay", [-1e4, -1e30, torch.finfo(torch.float32).min])
def test_a_strong_decay_takes_no_digit(form, log_decay):
    """What is written behind it fades as without it, and what was before it is gone: here bit for bit."""
    v, rate = torch.arange(1.0, 9)[:, None], torch.full((8, 1), -0.1)
    q, k = torch.ones(8, 1), torch.ones(8, 1)
    function = FUNCTIONS["gla"][form]
    after = function(q[3:], k[3:], v[3:], log_decay=rate[3:], is_causal=True)
    rate[3] = log_decay
    o = function(q, k, v, log_decay=rate, is_causal=True)
    torch.testing.assert_close(o[3:], after, atol=0, rtol=4e-7)  # three roundings; sums in another order
    assert torch.equal(o[3], v[3])


@pytest.mark.parametrize(("name", "causal"), CALLS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("gates", [torch.float32, None])
def test_half_precision(name, causal, dtype, gates):
    """Only operands and output are rounded to `dtype`, the latter by eps / 2; what is in between, and the state, is of
    float32, whatever the gates are and whether autocast is on or not."""
    given = {x: y.to(dtype) for x, y in arguments(name, 2, length=70, state=False).items()}
    for gate in ("log_decay", "beta"):
        if gate in given:
            lowest = torch.finfo(dtype).min
            given[gate] = given[gate].clamp_min(lowest).to(dtype if gates is None else gates)
    exact, _ = call(FUNCTIONS[name]["reference"], {x: y.double() for x, y in given.items()}, is_causal=causal)
    for form, autocast in product(FORMS, (False, True)):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            o, S = call(FUNCTIONS[name][form], given, is_causal=causal)
        assert o.dtype == dtype and S.dtype == torch.float32
        # Sums of 70 terms of size 10, 1e-5 in float32.
        assert ((o - exact).abs() <= torch.finfo(dtype).eps / 2 * exact.abs() + 1e-4).all()


@pytest.mark.unchecked
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # of a class that dynamo makes
def test_compiles(name):
    """In one graph, forward and backward, bit for bit."""
    torch.compiler.reset()
    given, function = arguments(name, 2, length=70), FUNCTIONS[name]["fast"]
    compiled = torch.compile(function, backend="eager", fullgraph=True)
    assert all(map(torch.equal, *(with_gradients(f, given, is_causal=True) for f in (function, compiled))))


@pytest.mark.bad_input
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("form", FORMS)
def test_errors(name, form):
    given = arguments(name, 2, length=5, state=False)
    k, rates = given["k"], given["log_decay"]
    bad = [
        ("log_decay", rates[..., 0], ValueError, r"expected shape \(2, 5, 4\) like the keys, got \(2, 5\)"),
        ("log_decay", rates[:, :4], ValueError, r"expected shape \(2, 5, 4\) like the keys, got \(2, 4, 4\)"),
        ("log_decay", rates + 2, ValueError, "expected logarithms of decays within -1.8e"),
        ("log_decay", rates * torch.inf, ValueError, "expected logarithms of decays within -1.8e"),
        ("log_decay", -0.1, TypeError, "expected a floating-point tensor, got float -0.1"),
        ("log_decay", rates.to("meta"), TypeError, "expected a tensor on cpu like the keys, got one on meta"),
        ("scale", torch.inf, ValueError, "expected a finite number, got inf"),
        ("k", k * torch.nan, ValueError, "expected finite numbers, got 40 NaN or infinite of 40"),
        ("k", k[:, :4], ValueError, "expected as many queries as keys, got 5 and 4"),
        ("attn_mask", torch.ones(5, 5, dtype=torch.bool), ValueError, "expected a mask of keys"),
        ("initial_state", (), ValueError, r"expected a tuple of tensors \(S\), got tuple of 0"),
        ("initial_state", (k,), ValueError, r"expected S float64 \(2, 4, 3\), got a float64 tensor of shape"),
    ]
    if name == "kda":
        beta = given["beta"]
        bad += [
            ("beta", beta[..., None], ValueError, r"expected shape \(2, 5\) like the keys, got \(2, 5, 1\)"),
            ("beta", beta + 2, ValueError, "expected write strengths within 0 and 2, got 2"),
            ("beta", -beta, ValueError, "expected write strengths within 0 and 2, got -"),
        ]
    if form == "fast":
        bad += [("chunk", 0, ValueError, "expected an integer of at least 1, got 0")]
        bad += [("chunk", 2.0, TypeError, "expected an integer of at least 1, got float 2.0")]
    for argument, value, error, message in bad:
        # A shorter k is found out by v, whose length it ought to have, and with a v like it by the queries.
        changed = (
            given | {argument: value} | ({"v": given["v"][:, :4]} if message.startswith("expected as many") else {})
        )
        who = "is_causal" if message.startswith("expected as many") else argument
        if who == "is_causal":
            changed = {x: y[:, :4] if x != "q" else y for x, y in changed.items()}
        with pytest.raises(error, match=f"^{who}: {message}"):
            FUNCTIONS[name][form](**changed, is_causal=True)


@pytest.mark.bad_input
@pytest.mark.parametrize("form", FORMS)
def test_long_keys(form):
    """KDA refuses what would enlarge its memory, where keys are not normalised; GLA takes keys of any length."""
    given = arguments("kda", 2, length=5, state=False)
    given["k"] = 2 * given["k"] / given["k"].norm(dim=-1, keepdim=True)
    given["beta"] = torch.full((2, 5), 0.6, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"^k: expected beta \|k\|\^2 within 0 and 2, got 2.4 to 2.4"):
        FUNCTIONS["kda"][form](**given, normalise=False)
    del given["beta"]
    FUNCTIONS["gla"][form](**given)


# (B, N, H, chunk): several chunks, the last one whole or not; one, of more tokens than there are; of two; of one.
SIZES = [(1, 12, 2, 4), (2, 13, 1, 5), (1, 33, 1, 64), (2, 2, 1, 2), (1, 4, 1, 2), (1, 3, 2, 1), (2, 1, 1, 64)]


@pytest.mark.parametrize(("name", "causal"), CALLS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("qk_grad", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_declared_equals_counted(name, causal, form, qk_grad, dtype):
    """With axes of length 1, too."""
    for (B, N, H, chunk), (K, V) in product(SIZES, [(3, 2), (1, 3), (4, 1)]):
        leaves = {x: torch.zeros(B, H, N, w, dtype=dtype) for x, w in zip("qkv", (K, K, V), strict=True)}
        leaves["log_decay"] = torch.zeros(B, H, N, K, dtype=dtype)
        if name == "kda":
            leaves["beta"] = torch.zeros(B, H, N, dtype=dtype)
        wanted = [x.requires_grad_() for key, x in leaves.items() if qk_grad or key not in ("q", "k")]
        kwargs = {"chunk": chunk} if form == "fast" else {}
        with OperationCounter() as ahead, saved_bytes() as kept:
            o = FUNCTIONS[name][form](**leaves, is_causal=causal, **kwargs)
        with OperationCounter() as back:
            torch.autograd.grad(o, wanted, torch.ones_like(o))
        kwargs |= {"form": form, "causal": causal, "qk_grad": qk_grad, "itemsize": dtype.itemsize}
        declared = COSTS[name](B, N, H, K, V, **kwargs)
        assert ahead.flops.total() == declared.forward
        assert back.flops.total() == declared.backward
        assert ahead.elementwise.total() == declared.elementwise_forward
        assert back.elementwise.total() == declared.elementwise_backward
        assert kept() == declared.saved_bytes
        assert all(type(part) is int for part in vars(declared).values())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("form", FORMS)
def test_decode(name, form):
    B, N, H, K, V = 2, 7, 3, 4, 5
    declared = COSTS[name](B, N, H, K, V, form=form)
    q, k, v = torch.zeros(B, H, 1, K), torch.zeros(B, H, 1, K), torch.zeros(B, H, 1, V)
    gates = {"log_decay": k} | ({"beta": k[..., 0]} if name == "kda" else {})
    _, state = FUNCTIONS[name][form](q, k, v, **gates, is_causal=True, return_state=True)
    assert (
        count_forward(FUNCTIONS[name][form], q, k, v, **gates, initial_state=state, is_causal=True)[0]
        == declared.decode
    )
    assert declared.state_bytes == sum(x.nbytes for x in state)


@pytest.mark.parametrize(("name", "causal"), CALLS)
def test_growth(name, causal):
    """Formulas with the sizes put in are the closed forms called with them; the fast form's are linear in N, and so are
    the reference's; a decode step's do not depend on N."""
    K, V = sp.symbols("K V", positive=True)
    sizes = {sym.B: 2, sym.N: 3 * CHUNK, sym.H: 3, K: 5, V: 4}
    for form in FORMS:
        formula = COSTS[name](sym.B, sym.N, sym.H, K, V, form=form, causal=causal)
        numbers = COSTS[name](2, 3 * CHUNK, 3, 5, 4, form=form, causal=causal)
        for part in ("forward", "backward", "elementwise_forward", "elementwise_backward", "saved_bytes"):
            assert sp.sympify(getattr(formula, part)).subs(sizes) == getattr(numbers, part), (form, part)
            assert sym.order(getattr(formula, part), sym.N) == {sym.N}
        assert sym.order(formula.decode, sym.N) == sym.order(formula.state_bytes, sym.N) == {sp.Integer(1)}


def test_products_by_hand():
    """A token: K (C + 1) for what a reader finds in its chunk, 2 V C to answer by it; (K + V) C to solve a chunk's
    system; 2 K V each to write to the memory, to read it and to find in it what is erased."""
    K, V, C = 8, 7, CHUNK
    assert COSTS["gla"](1, 2 * C, 1, K, V, causal=True).forward == 2 * C * (K * (C + 1) + 2 * V * C + 4 * K * V)
    assert COSTS["kda"](1, 2 * C, 1, K, V, causal=True).forward == 2 * C * (
        2 * K * (C + 1) + 2 * V * C + (K + V) * C + 6 * K * V
    )
    assert COSTS["gla"](1, 2 * C, 1, K, V).forward == 2 * C * 4 * K * V
