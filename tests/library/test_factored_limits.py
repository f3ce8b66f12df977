"""Attention from feature maps at the edges: half precision, extreme numbers, what does not fit together, compiling."""

from itertools import product

import pytest
import torch
from extent import some
from kernel_mechanisms import ALL, CASES, CAUSAL, FACTORED, FITTED, FORMS, draw, feature_map, qkv, tolerance

from ortho import _checks
from ortho.attention import MECHANISMS
from ortho.attention.linear.feature_maps import FeatureMap, Features
from ortho.attention.linear.linear_attention import linear_attention


@pytest.mark.parametrize(("name", "causal"), CASES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(name, causal, dtype):
    """Only the operands and the output are rounded to `dtype`, the latter by eps / 2. In between are sums in float32 of
    100 terms behind exponents of some 10, and, of signed weights, totals of some 1e-2 of what they sum."""
    m = ALL[name]
    operands = [x.to(dtype) for x in qkv(2, length=100)]
    exact = m.reference(*(x.double() for x in operands), is_causal=causal)
    for form, autocast in product(FORMS, (False, True)):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            o = m.form(form)(*operands, is_causal=causal)
        assert o.dtype == dtype
        between = 1e-3 if m.signed else 1e-5
        assert ((o - exact).abs() <= torch.finfo(dtype).eps / 2 * exact.abs() + between).all()
    if m.causal:
        _, (memory, total, *rest) = m.fast(*operands, is_causal=causal, return_state=True)
        seen = rest[-1:] if m.positional else []
        assert {x.dtype for x in (memory, total, *rest[: len(rest) - len(seen)])} == {torch.float32}
        assert [x.dtype for x in seen] == [torch.int64] * m.positional


@pytest.mark.parametrize("name", CAUSAL)
def test_a_state_in_half_precision(name):
    """Carried in float32, it gives in parts what the whole gives, but for the last rounding of the output."""
    m = ALL[name]
    q, k, v = (x.to(torch.float16) for x in qkv(2, length=60))
    whole = m.fast(q, k, v, is_causal=True)
    head, state = m.fast(q[:, :23], k[:, :23], v[:, :23], is_causal=True, return_state=True)
    tail = m.fast(q[:, 23:], k[:, 23:], v[:, 23:], is_causal=True, initial_state=state)
    error = (torch.cat([head, tail], 1) - whole).abs().max()
    assert error <= torch.finfo(torch.float16).eps * whole.abs().max()


def test_sums_do_not_overflow_float16():
    ones = torch.ones(1, 70_000, 1, dtype=torch.float16)  # 2 x 70 000 is more than float16 holds
    assert torch.equal(MECHANISMS["linear"].fast(ones, ones, ones), ones)


LENGTH = 20
EXTREMES = {
    "huge queries and keys": lambda q, k, v: (1e3 * q, 1e3 * k, v),
    "huge queries": lambda q, k, v: (1e3 * q, k, v),
    "huge keys": lambda q, k, v: (q, 1e3 * k, v),
    "huge": lambda q, k, v: (1e3 * q, 1e3 * k, 1e3 * v),
    "large": lambda q, k, v: (30 * q, 30 * k, v),
    "huge and negative": lambda q, k, v: (-1e3 * q.abs(), -1e3 * k.abs(), v),
    "equal tokens": lambda q, k, v: (30 * q[:, :1].expand_as(q), 30 * q[:, :1].expand_as(q), v),
    "opposite tokens": lambda q, k, v: (30 * q[:, :1].expand_as(q), -30 * q[:, :1].expand_as(q), v),
    "tiny": lambda q, k, v: (1e-20 * q, 1e-20 * k, v),
    "no queries": lambda q, k, v: (0 * q, k, v),
    "no keys": lambda q, k, v: (q, 0 * k, v),
    "nothing": lambda q, k, v: (0 * q, 0 * k, 0 * v),
    "ones": lambda q, k, v: (torch.ones_like(q), torch.ones_like(k), v),
    "minus ones": lambda q, k, v: (-torch.ones_like(q), -torch.ones_like(k), v),
}
HARMLESS = ["tiny", "no queries", "no keys", "nothing", "ones", "minus ones"]  # no mechanism may refuse these
MASKS = {"none": None, "all": torch.arange(LENGTH) >= 0, "some": torch.arange(LENGTH) % 3 == 1}


def ways(mechanism):
    """Of is_causal, those that are served."""
    return [way for way, served in ((False, mechanism.bidirectional), (True, mechanism.causal)) if served]


@pytest.mark.parametrize("name", MECHANISMS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", some([torch.float32, torch.float64], 2))
def test_extremes(name, form, dtype):
    """A finite output with finite gradients, or an error that names what is out of range; never NaN.

    An output is right as far as can be said without computing it again: where no weight is negative it is an average
    of the values, or 0 where no weight is left and may be.
    """
    m, drawn = MECHANISMS[name], [draw(2, LENGTH, 16, seed=i, dtype=dtype) for i in range(3)]
    for (kind, change), causal, mask in product(EXTREMES.items(), ways(m), MASKS.values()):
        operands = change(*drawn)
        leaves = [x.clone().requires_grad_() for x in operands]
        refused = None
        try:
            o = m.form(form)(*leaves, is_causal=causal, attn_mask=mask)
        except ValueError as error:
            refused = str(error)
        if refused is not None:
            assert refused.startswith(f"q, k: expected row sums of the {dtype} weights within")
            assert kind not in HARMLESS
            continue
        assert all(x.isfinite().all() for x in (o, *torch.autograd.grad(o.sum(), leaves))), kind
        if m.signed:
            continue
        v = operands[2]
        empty = torch.tensor(mask is not None or name == "cosformer" or m.family in ("pattern", "dynamic"))
        allowed = torch.ones(LENGTH, LENGTH, dtype=torch.bool) if mask is None else mask.expand(LENGTH, LENGTH)
        allowed = (allowed.tril() if causal else allowed)[..., None]  # (N, M, 1)
        low = v[:, None].masked_fill(~allowed, torch.inf).amin(-2)
        high = v[:, None].masked_fill(~allowed, -torch.inf).amax(-2)
        slack = 100 * torch.finfo(dtype).eps * v.abs().max()  # sums of 20 products, and their quotient
        assert ((o >= low - slack) & (o <= high + slack) | empty & (o == 0)).all(), kind


@pytest.mark.parametrize("name", MECHANISMS)
@pytest.mark.parametrize("form", FORMS)
def test_float32_keeps_its_digits(name, form):
    """Where tokens are alike, gradients are differences: float32's are float64's to some 1e4 eps all the same."""
    for kind in ("no queries", "no keys", "ones", "minus ones"):
        results = []
        for dtype in (torch.float32, torch.float64):
            drawn = (draw(2, LENGTH, 16, seed=i).to(dtype) for i in range(3))
            leaves = [x.clone().requires_grad_() for x in EXTREMES[kind](*drawn)]
            o = MECHANISMS[name].form(form)(*leaves, is_causal=ways(MECHANISMS[name])[0])
            results.append([o, *torch.autograd.grad(o.square().sum(), leaves)])
        for single, double in zip(*results, strict=True):
            torch.testing.assert_close(single.double(), double, atol=1e-3, rtol=1e-3, msg=lambda m, k=kind: f"{k}: {m}")


@pytest.mark.parametrize("name", MECHANISMS)
@pytest.mark.parametrize("form", FORMS)
def test_nothing_to_attend_to(name, form):
    """Zeros, without gradients; next to sequences that are not hidden, and whatever the hidden ones hold."""
    m, (q, k, v) = MECHANISMS[name], [draw(2, LENGTH, 16, seed=s) for s in range(3)]
    mask = torch.tensor([False, True])[:, None, None]
    for causal, factor in product(ways(m), (0.0, 1.0, 1e3)):
        leaves = [torch.cat([factor * x[:1], x[1:]]).requires_grad_() for x in (q, k, v)]
        o = m.form(form)(*leaves, is_causal=causal, attn_mask=mask)
        assert not o[0].any()
        assert not any(gradient[0].any() for gradient in torch.autograd.grad(o.sum(), leaves))
        alone = m.form(form)(q[1:], k[1:], v[1:], is_causal=causal)
        torch.testing.assert_close(o[1:], alone, **(tolerance(name) if name in ALL else {}))


@pytest.mark.bad_input
@pytest.mark.parametrize("form", FORMS)
def test_weights_out_of_range(form):
    """On either side; of signed weights, which may add to anything, above."""
    q, k, v = (draw(2, 20, 16, seed=s, dtype=torch.float32) for s in range(3))
    linear, favor, taylor, signed = (MECHANISMS[n].form(form) for n in ("linear", "favor", "taylor", "trigonometric"))
    for call, said in (
        (lambda: linear(-1e3 * q.abs(), k, v), r"within .* got 0 to"),
        (lambda: linear(1e20 * q, 1e20 * k, v), r"within .* to inf"),
        (lambda: favor(1e3 * q, 1e3 * k, v), r"within .* got 0 to"),
        (lambda: favor(1e20 * q, 1e20 * k, v, is_causal=True), r"within .* got (nan|-inf to inf)"),
        (lambda: taylor(1e10 * q, 1e10 * k, v), r"within .* got (nan|-inf to inf)"),
        (lambda: signed(1e20 * q, 1e20 * k, v), r"within -3.4e\+38 and 3.4e\+38, got nan"),
    ):
        with pytest.raises(ValueError, match=rf"^q, k: expected row sums of the torch.float32 weights {said}"):
            call()


@pytest.mark.bad_input
@pytest.mark.parametrize("name", FACTORED)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_not_finite(name, form, bad):
    operands = qkv(2, length=5)
    for i, x in enumerate("qkv"):
        broken = [each.clone() for each in operands]
        broken[i][1, 2, 3] = bad
        with pytest.raises(ValueError, match=f"^{x}: expected finite numbers, got 1 NaN or infinite of"):
            MECHANISMS[name].form(form)(*broken)


BAD = [
    ({"attn_mask": torch.ones(5, 5, dtype=torch.bool)}, ValueError, "attn_mask: expected a mask of keys"),
    ({"attn_mask": torch.ones(2, 5, 1, dtype=torch.bool)}, ValueError, "attn_mask: expected a mask of keys"),
    ({"attn_mask": torch.ones(4, dtype=torch.bool)}, ValueError, r"attn_mask: expected a shape that broadcasts to"),
    ({"attn_mask": torch.ones(5)}, TypeError, "attn_mask: expected a boolean tensor"),
    ({"chunk": 0}, ValueError, "chunk: expected an integer of at least 1, got 0"),
    ({"chunk": 2.0}, TypeError, "chunk: expected an integer of at least 1, got float 2.0"),
    ({"scale": -1.0}, ValueError, "scale: expected a finite number of at least 0, got -1.0"),
    ({"scale": float("inf")}, ValueError, "scale: expected a finite number, got inf"),
    ({"scale": "1"}, TypeError, "scale: expected a number, got str '1'"),
    ({"is_causal": 1}, TypeError, "is_causal: expected True or False, got int 1"),
]


@pytest.mark.bad_input
@pytest.mark.parametrize("name", FACTORED)
@pytest.mark.parametrize(("kwargs", "error", "message"), BAD)
def test_errors(name, kwargs, error, message):
    with pytest.raises(error, match=f"^{message}"):
        MECHANISMS[name].fast(*qkv(2, length=5), **kwargs)


@pytest.mark.bad_input
@pytest.mark.parametrize("name", CAUSAL)
def test_bad_states(name):
    """Too few or other tensors, of another dtype, width or batch; and masks, which cannot reach into one."""
    fast, operands = ALL[name].fast, qkv(2, length=5)
    _, state = fast(*operands, is_causal=True, return_state=True)
    assert len(state) == 2 + feature_map(name).scales_keys + ALL[name].positional
    for broken in (state[:-1], (*state, state[0]), ()):
        with pytest.raises(ValueError, match=r"^initial_state: expected a tuple of tensors \(S, z"):
            fast(*operands, initial_state=broken)
    for i, x in enumerate(state):
        for other in (x.to(torch.float32), x[None], x.expand(3, *x.shape)):
            with pytest.raises(ValueError, match="^initial_state: expected float64 "):
                fast(*operands, initial_state=(*state[:i], other, *state[i + 1 :]))
    with pytest.raises(TypeError, match="^initial_state: expected a tuple of tensors"):
        fast(*operands, initial_state=5)
    with pytest.raises(ValueError, match="^attn_mask: expected None beside an initial_state"):
        fast(*operands, initial_state=state, attn_mask=torch.ones(5, dtype=torch.bool))


@pytest.mark.bad_input
@pytest.mark.parametrize("name", FITTED)
@pytest.mark.parametrize("form", FORMS)
def test_what_is_fitted_takes_no_parts(name, form):
    operands = qkv(2, length=5)
    wanted = {"is_causal": True, "return_state": True, "initial_state": ()}
    for argument, value in wanted.items():
        with pytest.raises(ValueError, match=f"^{argument}: expected a feature map that looks at one token at a time"):
            MECHANISMS[name].form(form)(*operands, **{argument: value})


@pytest.mark.parametrize("name", ALL)
def test_masks_that_hide_keys_only(name):
    """Every shape that broadcasts over the queries is served; the reference serves all others too."""
    m = ALL[name]
    q, k, v = qkv(2, 3, length=5)
    for shape in ((), (5,), (1, 5), (3, 1, 5), (2, 1, 1, 5), (2, 3, 1, 1)):
        mask = draw(*shape, seed=4) > -0.3
        expected = m.reference(q, k, v, attn_mask=mask)
        torch.testing.assert_close(m.fast(q, k, v, attn_mask=mask), expected, **tolerance(name))
    lone = m.reference(q, k, v, attn_mask=torch.eye(5, dtype=torch.bool))
    weightless = (lone == 0).all(-1, keepdim=True)
    assert not weightless.any() or feature_map(name).weights == "non-negative"
    torch.testing.assert_close(lone, v.masked_fill(weightless, 0), **tolerance(name))


@pytest.mark.unchecked
@pytest.mark.parametrize("name", some(FACTORED, 6))
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # of a class that dynamo makes
def test_compiles(name):
    """In one graph, forward and backward, bit for bit; default rows must have been drawn before."""
    m = MECHANISMS[name]
    torch.compiler.reset()  # or the mechanisms, one function with different maps, would count as recompilations
    leaves = [x.requires_grad_() for x in qkv(2, length=70)]
    results = []
    for function in (m.fast, torch.compile(m.fast, backend="eager", fullgraph=True)):
        o = function(*leaves, is_causal=m.causal)
        results.append([o, *torch.autograd.grad(o.sum(), leaves)])
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("causal", [False, True])
def test_backward_under_autocast(causal):
    """A backward pass inside autocast, too, is computed in float32 but for the map's own products with its rows, which
    autocast rounds to bfloat16, relative 2^-8 a factor."""
    operands = [torch.randn(2, 9, 4, generator=torch.Generator().manual_seed(i)).requires_grad_() for i in range(3)]
    fast = MECHANISMS["favor"].fast
    expected = torch.autograd.grad(fast(*operands, is_causal=causal).sum(), operands)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = torch.autograd.grad(fast(*operands, is_causal=causal).sum(), operands)
    assert torch.equal(found[2], expected[2])
    for one, other in zip(found, expected, strict=True):
        assert (one - other).norm() < 2**-6 * other.norm()


@pytest.mark.parametrize("form", ["reference", "fast"])
def test_overflow_beside_a_mask(form):
    """A mask leaves rows without weight, and no others out of range."""
    q = torch.full((1, 3, 4), 1e25)
    with pytest.raises(ValueError, match="q, k: expected row sums of the torch.float32 weights within 9.9e-32 and"):
        MECHANISMS["linear"].form(form)(q, q, q, attn_mask=torch.tensor([True, True, False]))


def test_maps_keep_to_what_they_declare():
    class Undeclared(FeatureMap):
        def __call__(self, q, k, **_):
            return Features(q.exp(), k.exp(), k[..., 0])

        def width(self, K):
            return K

        def cost(self, *_):
            raise NotImplementedError

    q = torch.ones(1, 3, 4)
    with pytest.raises(TypeError, match="feature_map: expected a log_k if and only if it scales keys"):
        linear_attention(q, q, q, feature_map=Undeclared())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["favor", "hyperbolic", "favor++", "sderf"])
@pytest.mark.parametrize("masked", [False, True])
def test_rows_out_of_range_are_never_zero(form, name, masked, monkeypatch):
    """Where values are read, an error, also beside a mask; where they are not, as on a GPU, NaN. Rows without a key are
    0 all the same."""
    m = MECHANISMS[name]
    q, k, v = (torch.randn(1, 6, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(3))
    mask = torch.tensor([False, False, True, True, False, True]) if masked else None
    call = {"is_causal": m.causal, "attn_mask": mask}
    with pytest.raises(ValueError, match="^q, k: expected row sums"):
        m.form(form)(60 * q, 60 * k, v, **call)
    fine = m.form(form)(q, k, v, **call)
    monkeypatch.setattr(_checks, "shows_values", lambda _: True)
    assert torch.equal(m.form(form)(q, k, v, **call), fine)
    o = m.form(form)(60 * q, 60 * k, v, **call)[0]
    lost = o.isnan().all(-1)
    assert lost.any() and o[~lost].isfinite().all()
    empty = torch.arange(6) < (2 if masked and m.causal else 0)
    assert not o[empty].any() and o[~empty].any(-1).all()
