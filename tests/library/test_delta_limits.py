"""The delta rule at the edges: very strong decays, half precision, layouts, memory, what does not fit, compiling."""

from itertools import pairwise, product

import pytest
import torch
from memory_operands import FORMS, FUNCTIONS, arguments, call, close, draw, with_gradients

from ortho import MultiheadAttention
from ortho.attention.chunking import CHUNK
from ortho.attention.recurrent.delta import delta_rule, delta_rule_reference
from ortho.attention.recurrent.memory import unit
from ortho.cost.counting import Allocations, saved_bytes

NAN, INF = float("nan"), float("inf")


def to(given, dtype):
    return {name: x.to(dtype) for name, x in given.items()}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("strong", [-1e4, -1e30, "least"])
def test_strong_decays(form, dtype, strong):
    """Such a decay empties the memory: what comes after is what a sequence that begins there gives, to rounding; so are
    all gradients. A difference of sums that hold -1e4 would leave float32 an error of 1e-3."""
    strong = torch.finfo(dtype).min if strong == "least" else strong
    given = to(arguments(2, length=150, gated=True), dtype)  # three chunks of 50
    cuts = [0, 1, 20, 21, 49, 50, 51, 97, 100, 150]
    given["log_decay"][:, cuts[:-1]] = strong
    state = given.pop("initial_state")

    def whole(**leaves):
        return FUNCTIONS[form](**leaves, is_causal=True)

    def in_parts(return_state, initial_state, log_decay, **leaves):
        outputs, S = [], None
        for start, stop in pairwise(cuts):
            mild = torch.cat([0 * log_decay[:, start : start + 1], log_decay[:, start + 1 : stop]], 1).to(torch.float64)
            part = {name: x[:, start:stop].double() for name, x in leaves.items()}
            o, S = delta_rule_reference(**part, log_decay=mild, is_causal=True, return_state=True)
            outputs.append(o)
        return torch.cat(outputs, 1) + 0 * initial_state[0].sum(), S

    given["initial_state"] = state
    found, exact = with_gradients(whole, given), with_gradients(in_parts, to(given, torch.float64))
    # 50 rounded products, through systems whose inverses have entries of at most 2.
    bound = 1e3 * torch.finfo(dtype).eps
    for one, other in zip(found, exact, strict=True):
        assert one.isfinite().all()
        torch.testing.assert_close(one.double(), other, atol=bound, rtol=bound)


@pytest.mark.parametrize("form", FORMS)
def test_decays_beyond_float32(form):
    """A gate in float64 beside operands in float32: what overflows there is a decay to nothing, and not NaN."""
    given = to(arguments(2, length=70, gated=True, state=False), torch.float32)
    given["log_decay"] = given["log_decay"].double()
    results = []
    for strong in (-1e300, -1e4):
        given["log_decay"][:, 30] = strong
        results.append(with_gradients(FUNCTIONS[form], given, is_causal=True))
    assert all(x.isfinite().all() for x in results[0])
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
def test_half_precision(form, dtype, causal):
    """Only the operands and the output are rounded to `dtype`, the latter by eps / 2. In between are sums in float32 of
    100 terms of some 10. Gates and state have a dtype of their own: float32."""
    given = to(arguments(2, length=100, gated=True), torch.float32) | to(
        {name: x for name, x in arguments(2, length=100, gated=True).items() if name in "qkv"}, dtype
    )
    exact, memory = call(delta_rule_reference, to(given, torch.float64), is_causal=causal)
    for autocast in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            o, S = call(FUNCTIONS[form], given, is_causal=causal)
        assert o.dtype == dtype and S.dtype == torch.float32
        assert ((o - exact).abs() <= torch.finfo(dtype).eps / 2 * exact.abs() + 1e-5).all()
        torch.testing.assert_close(S.double(), memory, atol=1e-5, rtol=1e-5)
    # Cut, the output of the parts is that of the whole, but for its last rounding.
    head = {name: x[:, :37] if name != "initial_state" else x for name, x in given.items()}
    tail = {name: x[:, 37:] for name, x in given.items() if name != "initial_state"}
    _, S = call(FUNCTIONS[form], head, is_causal=causal)
    o, _ = call(FUNCTIONS[form], tail | {"initial_state": S}, is_causal=causal)
    assert (o - exact[:, 37:]).abs().max() <= torch.finfo(dtype).eps * exact.abs().max()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("form", FORMS)
def test_rounded_unit_keys_are_unit_keys(dtype, form):
    """Where a caller divides by lengths, in his own precision, strengths of 2 are served."""
    k = torch.nn.functional.normalize(draw(500, 64, dtype=torch.float32).to(dtype), dim=-1)
    beta = torch.full((500,), 2, dtype=dtype)
    assert FUNCTIONS[form](k, k, k, beta=beta, normalise=False).isfinite().all()
    with pytest.raises(ValueError, match=r"^k: expected beta \|k\|\^2 within 0 and 2.*, got 2"):
        FUNCTIONS[form](k, 1.2 * k, k, beta=beta, normalise=False)


@pytest.mark.parametrize("gated", [False, True])
def test_backward_under_autocast(gated):
    """A causal backward pass inside autocast, too, is computed in float32."""
    given = to(arguments(2, length=9, gated=gated), torch.float32)
    expected = with_gradients(delta_rule, given, is_causal=True, chunk=4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = with_gradients(delta_rule, given, is_causal=True, chunk=4)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("attention", ["delta", "gated-delta"])
def test_a_layer_under_autocast(form, attention):
    """Products are rounded to bfloat16, relative 2^-8 each; six of them lie between an input and its gradient."""
    layer = MultiheadAttention(16, 2, attention=attention, form=form, generator=torch.Generator().manual_seed(0))
    x = draw(2, 20, 16, dtype=torch.float32).requires_grad_()
    results = []
    for autocast in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            y = layer(x, is_causal=True)
        assert y.dtype == (torch.bfloat16 if autocast else torch.float32)
        results.append([y.float(), *torch.autograd.grad(y.float().square().sum(), [x, *layer.parameters()])])
    for exact, rounded in zip(*results, strict=True):
        assert (rounded - exact).norm() <= 2**-4 * exact.norm()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("causal", [False, True])
def test_layouts(form, causal):
    """With no leading axes, one or three; of tensors that are views with gaps, turned, or one number many times. What a
    caller hands in is not written to, in a backward pass neither."""
    given = arguments(2, 1, 3, length=70, gated=True)
    whole = with_gradients(FUNCTIONS[form], given, is_causal=causal)
    for b, h in product(range(2), range(3)):
        o, S = call(FUNCTIONS[form], {name: x[b, 0, h] for name, x in given.items()}, is_causal=causal)
        close([o, S], [x[b, 0, h] for x in whole[:2]])
    flat = call(FUNCTIONS[form], {name: x.flatten(0, 2) for name, x in given.items()}, is_causal=causal)
    close(flat, [x.flatten(0, 2) for x in whole[:2]])

    def strided(x):
        """Its last two axes turned in memory, every other number of it."""
        wide = torch.zeros(*x.shape[:-2], x.shape[-1], 2 * x.shape[-2], dtype=x.dtype)
        wide[..., ::2] = x.mT
        return wide[..., ::2].mT

    leaves = {name: strided(x).requires_grad_() for name, x in given.items()}
    assert not any(x.is_contiguous() for x in leaves.values())
    versions = [x._version for x in leaves.values()]
    o, S = call(FUNCTIONS[form], leaves, is_causal=causal)
    gradients = torch.autograd.grad([o, S], leaves.values(), [draw(*o.shape, seed=98), draw(*S.shape, seed=99)])
    close([o, S, *gradients], whole)
    assert [x._version for x in leaves.values()] == versions
    assert all(map(torch.equal, leaves.values(), given.values()))

    equal = {name: x[:1, :, :1].expand_as(x) for name, x in given.items()}
    o, S = call(FUNCTIONS[form], equal, is_causal=causal)
    close([o, S], [x[:1, :, :1].expand_as(x) for x in whole[:2]])


def test_memory_is_linear():
    """A step's peak grows by the same from 4 chunks to 8 as from 8 to 12; of what autograd keeps, one memory a chunk is
    all that is as large as K V."""

    def step(length, gated):
        given = arguments(2, length=length, gated=gated, state=False)
        leaves = [x.requires_grad_() for x in given.values()]
        with Allocations() as memory:
            o = delta_rule(**dict(zip(given, leaves, strict=True)), is_causal=True)
            torch.autograd.grad(o.sum(), leaves)
        return memory.peak

    for gated in (False, True):
        peaks = [step(number * CHUNK, gated) for number in (4, 8, 12)]
        assert 0 < peaks[2] - peaks[1] == peaks[1] - peaks[0]

    def kept(form, width, **kwargs):
        q, k, v = (torch.ones(1, 48, width, requires_grad=True) for _ in range(3))
        with saved_bytes() as count:
            FUNCTIONS[form](q, k, v, beta=torch.ones(1, 48), is_causal=True, **kwargs)
        return count()

    for form, kwargs, memories in (("fast", {"chunk": 16}, 3), ("fast", {"chunk": 4}, 12), ("reference", {}, 49)):
        small, middle, large = (kept(form, width, **kwargs) for width in (10, 20, 30))
        assert large - 2 * middle + small == 4 * 2 * 10**2 * memories  # the second difference of 4 K^2 a memory


BAD = [
    ({"beta": torch.ones(2, 4)}, ValueError, r"beta: expected shape \(2, 5\) like the keys, got \(2, 4\)"),
    ({"beta": torch.ones(5)}, ValueError, r"beta: expected shape \(2, 5\) like the keys, got \(5,\)"),
    ({"beta": torch.ones(2, 5, 1)}, ValueError, r"beta: expected shape \(2, 5\) like the keys, got \(2, 5, 1\)"),
    ({"beta": torch.ones(2, 5) * -0.1}, ValueError, "beta: expected write strengths within 0 and 2, got -0.1 to -0.1"),
    ({"beta": torch.ones(2, 5) * 2.1}, ValueError, "beta: expected write strengths within 0 and 2, got 2.1 to 2.1"),
    ({"beta": torch.full((2, 5), NAN)}, ValueError, "beta: expected write strengths within 0 and 2, got nan to nan"),
    ({"beta": 0.5}, TypeError, "beta: expected a floating-point tensor, got float 0.5"),
    ({"beta": torch.ones(2, 5, dtype=torch.int64)}, TypeError, "beta: expected a floating-point tensor, got a int64"),
    (
        {"beta": torch.ones(2, 5, device="meta")},
        TypeError,
        "beta: expected a tensor on cpu like the keys, got one on meta",
    ),
    ({"log_decay": torch.zeros(2, 6)}, ValueError, r"log_decay: expected shape \(2, 5\) like the keys, got \(2, 6\)"),
    ({"log_decay": torch.zeros(2, 5, 4)}, ValueError, r"log_decay: expected shape \(2, 5\) like the keys, got \(2, 5"),
    ({"log_decay": torch.ones(2, 5)}, ValueError, "log_decay: expected logarithms of decays within .* 0, got 1 to 1"),
    ({"log_decay": torch.full((2, 5), NAN)}, ValueError, "log_decay: expected logarithms of decays .* got nan to nan"),
    ({"log_decay": torch.full((2, 5), -INF)}, ValueError, "log_decay: expected logarithms of .* got -inf to -inf"),
    ({"log_decay": [0.0]}, TypeError, "log_decay: expected a floating-point tensor, got list of 1: float 0.0"),
    ({"normalise": False}, ValueError, r"k: expected beta \|k\|\^2 within 0 and 2, got 0.\d+ to \d"),
    ({"normalise": False, "beta": torch.ones(2, 5)}, ValueError, r"k: expected beta \|k\|\^2 within 0 and 2, got"),
    (
        {"k": torch.ones(2, 5, 4).double() * 1e200},
        ValueError,
        "k: expected squared lengths within 0 and 1.8e.308, got inf",
    ),
    ({"attn_mask": torch.ones(5, 5, dtype=torch.bool)}, ValueError, r"attn_mask: expected a mask of keys, of shape"),
    ({"attn_mask": torch.ones(4, dtype=torch.bool)}, ValueError, "attn_mask: expected a shape that broadcasts to"),
    ({"attn_mask": torch.ones(5)}, TypeError, "attn_mask: expected a boolean tensor"),
    ({"scale": "1"}, TypeError, "scale: expected a number, got str '1'"),
    ({"scale": INF}, ValueError, "scale: expected a finite number, got inf"),
    ({"is_causal": 1}, TypeError, "is_causal: expected True or False, got int 1"),
    ({"q": torch.zeros(2, 0, 4)}, ValueError, r"q: expected shape \(..., N, width\) without empty axes, got \(2, 0, 4"),
    ({"q": torch.zeros(2, 6, 4), "is_causal": True}, ValueError, "is_causal: expected as many queries as keys, got 6"),
    ({"v": torch.zeros(2, 6, 3)}, ValueError, r"v: expected length 5 like k, got shape \(2, 6, 3\)"),
    ({"v": torch.full((2, 5, 3), NAN)}, ValueError, "v: expected finite numbers, got 30 NaN or infinite of 30"),
    ({"initial_state": 5}, TypeError, r"initial_state: expected a tuple of tensors \(S\), got int 5"),
    ({"initial_state": torch.zeros(2, 4, 3)}, TypeError, r"initial_state: expected a tuple of tensors \(S\), got a"),
    ({"initial_state": ()}, ValueError, r"initial_state: expected a tuple of tensors \(S\), got tuple of 0"),
    ({"initial_state": (torch.zeros(2, 4, 3),) * 2}, ValueError, r"initial_state: .* \(S\), got tuple of 2"),
    *(
        (
            {"initial_state": (x,)},
            ValueError,
            r"initial_state: expected S float64 \(2, 4, 3\), got a float\d+ tensor of",
        )
        for x in (torch.zeros(2, 3, 4).double(), torch.zeros(4, 3).double(), torch.zeros(2, 4, 3))
    ),
    (
        {"initial_state": (torch.zeros(2, 4, 3).double(),), "attn_mask": torch.ones(5, dtype=torch.bool)},
        ValueError,
        "attn_mask: expected None beside an initial_state",
    ),
]


@pytest.mark.bad_input
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("kwargs", "error", "message"), BAD)
def test_errors(form, kwargs, error, message):
    given = arguments(2, length=5, gated=False, state=False)
    del given["beta"]
    doubled = {name: x.double() if name in given and isinstance(x, torch.Tensor) else x for name, x in kwargs.items()}
    with pytest.raises(error, match=f"^{message}"):
        FUNCTIONS[form](**given | doubled)


@pytest.mark.bad_input
@pytest.mark.parametrize(("chunk", "error"), [(0, ValueError), (-1, ValueError), (2.5, TypeError), (True, TypeError)])
def test_bad_chunks(chunk, error):
    with pytest.raises(error, match="^chunk: expected an integer of at least 1, got "):
        delta_rule(**arguments(2, length=5, gated=True, state=False), chunk=chunk)


@pytest.mark.parametrize("form", FORMS)
def test_masks_that_hide_keys(form):
    """Every shape that broadcasts over the queries."""
    given = arguments(2, 3, length=5, gated=True, state=False)
    for shape in ((), (5,), (1, 5), (3, 1, 5), (2, 1, 1, 5), (2, 3, 1, 1)):
        mask = draw(*shape, seed=4) > -0.3
        hidden = ~mask.expand(2, 3, 1, 5)[..., 0, :]
        gates = {name: given[name].masked_fill(hidden, 0) for name in ("beta", "log_decay")}
        o, S = call(FUNCTIONS[form], given | gates, is_causal=True)
        close(call(FUNCTIONS[form], given, is_causal=True, attn_mask=mask), [o, S])
        close(call(FUNCTIONS[form], given, attn_mask=mask), [unit(given["q"]) @ S, S])


@pytest.mark.unchecked
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # of a class that dynamo makes
def test_compiles(gated, causal):
    """In one graph, forward and backward, bit for bit."""
    torch.compiler.reset()
    given = arguments(2, length=70, gated=gated)
    compiled = torch.compile(delta_rule, backend="eager", fullgraph=True)
    results = [with_gradients(function, given, is_causal=causal) for function in (delta_rule, compiled)]
    assert all(map(torch.equal, *results))
