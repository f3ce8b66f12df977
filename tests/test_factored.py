"""Attention from feature maps, elu(x) + 1 and FAVOR+'s alike: the fast form against the definition, across chunks."""

from itertools import product

import pytest
import torch

from ortho.attention import MECHANISMS
from ortho.attention.factored import CHUNK, Features, feature_attention, feature_attention_reference
from ortho.cost.counting import OperationCounter, saved_bytes

NAMES = ["linear", "favor"]
# Sums of at most 1e3 rounded products (2e-13) of which the largest are some 10; a wrong term would show at 1e-2.
TOLERANCE = {"atol": 1e-11, "rtol": 1e-11}


def draw(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def qkv(*lead, length, width=6, values=5, seed=0):
    return [draw(*lead, length, w, seed=3 * seed + i) for i, w in enumerate((width, width, values))]


def with_gradients(function, operands, **kwargs):
    """The output and the gradients of q, k, v for one and the same gradient of the output."""
    leaves = [x.clone().requires_grad_() for x in operands]
    o = function(*leaves, **kwargs)
    return [o, *torch.autograd.grad(o, leaves, draw(*o.shape, seed=99))]


def assert_same(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, **TOLERANCE)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("length", "chunk"), [(1, 4), (2, 1), (7, 3), (12, 4), (13, 4), (63, 64), (130, CHUNK)])
def test_fast_equals_reference(name, causal, length, chunk):
    m = MECHANISMS[name]
    operands = qkv(2, 3, length=length)
    fast = with_gradients(m.fast, operands, is_causal=causal, chunk=chunk)
    assert_same(fast, with_gradients(m.reference, operands, is_causal=causal))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kept", ["right", "left", "scattered", "none"])
def test_hidden_keys(name, causal, kept):
    """Padding on either side and between: as in the reference, and rows with nothing to attend to give zeros."""
    m = MECHANISMS[name]
    operands = qkv(2, 3, length=11)
    index = torch.arange(11)
    mask = {"right": index < 7, "left": index > 4, "scattered": index % 3 == 1, "none": index < 0}[kept]
    mask = torch.stack([mask, mask.roll(1)])[:, None, None]  # (B, 1, 1, N)
    fast = with_gradients(m.fast, operands, is_causal=causal, attn_mask=mask, chunk=4)
    assert_same(fast, with_gradients(m.reference, operands, is_causal=causal, attn_mask=mask))
    allowed = mask.expand(2, 1, 11, 11)
    empty = ~(allowed.tril() if causal else allowed).any(-1, keepdim=True)
    assert torch.equal(fast[0].masked_select(empty), torch.zeros(int(empty.sum()) * 15, dtype=torch.float64))
    # Where a row is empty its query has no gradient; a hidden key and its value have none.
    assert not fast[1].masked_select(empty).any()
    assert not any(gradient.masked_select(~mask.mT).any() for gradient in fast[2:])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("form", ["reference", "fast"])
@pytest.mark.parametrize("causal", [False, True])
def test_cut_equals_whole(name, form, causal):
    """At every cut, with keys whose scale grows from part to part; and all gradients through the state."""
    function = MECHANISMS[name].form(form)
    kwargs = {"chunk": 4} if form == "fast" else {}
    q, k, v = qkv(2, length=11)
    k = k * torch.linspace(0.2, 4, 11, dtype=k.dtype)[:, None]

    def in_two(q, k, v, cut):
        _, state = function(q[:, :cut], k[:, :cut], v[:, :cut], is_causal=causal, return_state=True, **kwargs)
        rest = (q[:, cut:], k[:, cut:], v[:, cut:])
        return function(*rest, is_causal=causal, initial_state=state, return_state=True, **kwargs)

    whole, state = function(q, k, v, is_causal=causal, return_state=True, **kwargs)
    for cut in range(1, 11):
        tail, final = in_two(q, k, v, cut)
        assert_same([tail, *final], [whole[:, cut:], *state])
        ours = with_gradients(lambda *x, cut=cut: in_two(*x, cut)[0], (q, k, v))
        assert_same(ours, with_gradients(lambda *x, cut=cut: function(*x, is_causal=causal)[:, cut:], (q, k, v)))


@pytest.mark.parametrize("name", NAMES)
def test_token_by_token(name):
    m = MECHANISMS[name]
    q, k, v = qkv(2, length=9)
    state, rows = None, []
    for i in range(9):
        token = [x[:, i : i + 1] for x in (q, k, v)]
        row, state = m.fast(*token, is_causal=True, initial_state=state, return_state=True)
        rows.append(row)
    torch.testing.assert_close(torch.cat(rows, 1), m.reference(q, k, v, is_causal=True), **TOLERANCE)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("form", ["reference", "fast"])
def test_the_future_leaves_the_prefix(name, form):
    """Bit for bit, at cuts inside and between chunks, whether the keys that come are large or vanishing."""
    function = MECHANISMS[name].form(form)
    q, k, v = qkv(2, length=150)
    before = function(q, k, v, is_causal=True)
    for cut, size in product((1, 63, 64, 65, 149), (0.0, 30.0)):
        other = [torch.cat([x[:, :cut], size * x[:, cut:]], 1) for x in (q, k, v)]
        assert torch.equal(function(*other, is_causal=True)[:, :cut], before[:, :cut])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("form", ["reference", "fast"])
@pytest.mark.parametrize("causal", [False, True])
def test_items_do_not_see_each_other(name, form, causal):
    function = MECHANISMS[name].form(form)
    q, k, v = qkv(3, 2, length=70)
    k[0] *= 10  # a scale taken over the batch would change the others
    whole = function(q, k, v, is_causal=causal)
    for i in range(3):
        torch.testing.assert_close(function(q[i], k[i], v[i], is_causal=causal), whole[i], **TOLERANCE)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("form", ["reference", "fast"])
def test_cross_attention(name, form):
    """More keys than queries; and equal values come back as they are, since the weights of a row sum to 1."""
    function = MECHANISMS[name].form(form)
    q, k, v = draw(2, 3, 6), draw(2, 8, 6, seed=1), draw(2, 8, 5, seed=2)
    assert function(q, k, v).shape == (2, 3, 5)
    torch.testing.assert_close(function(q, k, torch.ones_like(v)), torch.ones(2, 3, 5).double(), **TOLERANCE)


@pytest.mark.parametrize("causal", [False, True])
def test_scales_of_keys_are_exact(causal):
    """e^s beside phi(k) is e^s phi(k): over a range of scales that float64 just holds without them."""
    q, k, v = (x.abs() for x in qkv(2, length=40))
    s = 300 * torch.sin(torch.arange(40.0, dtype=torch.float64)).expand(2, 40)
    plain = feature_attention_reference(lambda q, k: Features(q, k * s.exp()[..., None]), q, k, v, is_causal=causal)
    for function, kwargs in ((feature_attention_reference, {}), (feature_attention, {"chunk": 8})):
        scaled = function(lambda q, k: Features(q, k, s), q, k, v, is_causal=causal, **kwargs)
        torch.testing.assert_close(scaled, plain, **TOLERANCE)
        beyond = function(lambda q, k: Features(q, k, 1e4 * s), q, k, v, is_causal=causal, **kwargs)
        # So far apart, each row is the value at the largest scale that it sees.
        seen = s[:1].expand(40, 40) + (torch.ones(40, 40).triu(1) * -1e9 if causal else 0)
        torch.testing.assert_close(beyond, v[:, seen.argmax(-1)], **TOLERANCE)


@pytest.mark.parametrize("causal", [False, True])
def test_padding_of_the_last_chunk_is_not_seen(causal):
    """The state's scale is the largest of the keys there are, although all are far below that of a padded row of 0."""
    q, k, v = (x.abs() for x in qkv(2, length=13))
    s = -1e4 - k.sum(-1)

    def feature_map(q, k):
        return Features(q, k, -1e4 * (k.sum(-1) > 0) - k.sum(-1))

    _, (memory, total, peak) = feature_attention(feature_map, q, k, v, is_causal=causal, return_state=True, chunk=4)
    assert torch.equal(peak, s.amax(-1))
    scaled = k * (s - peak[:, None]).exp()[..., None]
    assert_same((memory, total), (scaled.mT @ v, scaled.sum(-2)))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(name, causal, dtype):
    """Only the operands and the output are rounded to `dtype`, relative 2 eps; exponents of at most 10 magnify it."""
    m = MECHANISMS[name]
    operands = [x.to(dtype) for x in qkv(2, length=100)]
    exact = m.reference(*(x.double() for x in operands), is_causal=causal)
    for form, autocast in product(("reference", "fast"), (False, True)):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            o = m.form(form)(*operands, is_causal=causal)
        assert o.dtype == dtype
        assert (o - exact).abs().max() < torch.finfo(dtype).eps * exact.abs().max()
    _, state = m.fast(*operands, is_causal=causal, return_state=True)
    assert {x.dtype for x in state} == {torch.float32}


def test_sums_do_not_overflow_float16():
    ones = torch.ones(1, 70_000, 1, dtype=torch.float16)  # 2 x 70 000 is more than float16 holds
    assert torch.equal(MECHANISMS["linear"].fast(ones, ones, ones), ones)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("form", "causal", "qk_grad"), list(product(["reference", "fast"], [False, True], [False, True]))
)
def test_declared_costs(name, form, causal, qk_grad):
    """Of the function alone, with values of another width than the keys, and several chunks, padded and not."""
    m = MECHANISMS[name]
    for (B, N, H, K, V), chunk in product([(1, 12, 2, 3, 5), (2, 13, 1, 2, 1), (1, 1, 1, 1, 1)], (4, 64)):
        leaves = [torch.zeros(B, H, N, w) for w in (K, K, V)]
        wanted = [x.requires_grad_() for x in (leaves if qk_grad else leaves[2:])]
        kwargs = {"chunk": chunk} if form == "fast" else {}
        with OperationCounter() as ahead, saved_bytes() as kept:
            o = m.form(form)(*leaves, is_causal=causal, **kwargs)
        with OperationCounter() as back:
            torch.autograd.grad(o, wanted, torch.ones_like(o))
        declared = m.cost(B, N, H, K, V, form=form, causal=causal, qk_grad=qk_grad, **kwargs)
        counted = (ahead.flops.total(), back.flops.total(), ahead.elementwise.total(), back.elementwise.total(), kept())
        assert counted == (
            declared.forward,
            declared.backward,
            declared.elementwise_forward,
            declared.elementwise_backward,
            declared.saved_bytes,
        )


BAD = [
    ({"attn_mask": torch.ones(5, 5, dtype=torch.bool)}, "attn_mask: expected a mask of keys"),
    ({"attn_mask": torch.ones(2, 5, 1, dtype=torch.bool)}, "attn_mask: expected a mask of keys"),
    ({"initial_state": (torch.zeros(2, 6, 5), torch.zeros(2, 6))}, "initial_state: expected"),
    ({"initial_state": (torch.zeros(2, 6, 5).double(),)}, "initial_state: expected"),
    (
        {"initial_state": (), "attn_mask": torch.ones(5, dtype=torch.bool)},
        "attn_mask: expected None beside an initial_state",
    ),
    ({"chunk": 0}, "chunk: expected an integer of at least 1, got 0"),
    ({"scale": -1.0}, "scale: expected a finite number of at least 0, got -1.0"),
]


@pytest.mark.bad_input
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("kwargs", "message"), BAD)
def test_errors(name, kwargs, message):
    q, k, v = qkv(2, length=5)
    with pytest.raises(ValueError, match=message):
        MECHANISMS[name].fast(q, k, v, **kwargs)


@pytest.mark.parametrize("name", NAMES)
def test_masks_that_hide_keys_only(name):
    """Every shape that broadcasts over the queries is served; the reference serves all others too."""
    m = MECHANISMS[name]
    q, k, v = qkv(2, 3, length=5)
    for shape in ((), (5,), (1, 5), (3, 1, 5), (2, 1, 1, 5), (2, 3, 1, 1)):
        mask = draw(*shape, seed=4) > -0.3
        torch.testing.assert_close(m.fast(q, k, v, attn_mask=mask), m.reference(q, k, v, attn_mask=mask), **TOLERANCE)
    lone = m.reference(q, k, v, attn_mask=torch.eye(5, dtype=torch.bool))
    torch.testing.assert_close(lone, v, **TOLERANCE)


@pytest.mark.parametrize("name", NAMES)
def test_compiles(name):
    """In one graph; FAVOR+'s features must have been drawn before."""
    fast, (q, k, v) = MECHANISMS[name].fast, qkv(2, length=70)
    expected = fast(q, k, v, is_causal=True)
    assert torch.equal(torch.compile(fast, backend="eager", fullgraph=True)(q, k, v, is_causal=True), expected)
