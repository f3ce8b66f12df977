"""Efficient attention: the definition against its formula by loops, the fast form against the definition."""

import math

import pytest
import torch

from ortho.attention import MECHANISMS
from ortho.attention.linear.efficient import efficient_attention, efficient_attention_reference
from ortho.cost.counting import OperationCounter, saved_bytes

FORMS = [efficient_attention_reference, efficient_attention]
# Sums of at most 130 rounded products of averages: some 100 eps of float64.
TOLERANCE = {"atol": 2e-14, "rtol": 1e-12}


def draw(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def qkv(*lead, length, keys=None, width=6, values=5, dtype=torch.float64):
    shapes = ((length, width), (keys or length, width), (keys or length, values))
    return [draw(*lead, *shape, seed=i, dtype=dtype) for i, shape in enumerate(shapes)]


def softmax(row):
    powers = [math.exp(x - max(row)) for x in row]
    return [x / sum(powers) for x in powers]


def by_loops(q, k, v, kept, root):
    """The formula, one scalar at a time: a query's softmax over features, times each feature's softmax over keys."""
    keys = [j for j in range(len(k)) if kept[j]]
    columns = [softmax([float(root * k[j, c]) for j in keys]) for c in range(k.shape[1])]
    out = torch.zeros(len(q), v.shape[1], dtype=q.dtype)
    for i in range(len(q)):
        features = softmax([float(root * x) for x in q[i]])
        for n, j in enumerate(keys):
            out[i] += sum(feature * column[n] for feature, column in zip(features, columns, strict=True)) * v[j]
    return out


@pytest.mark.parametrize("attention", FORMS)
@pytest.mark.parametrize("case", ["plain", "mask", "nothing", "scale", "no scale", "cross"])
def test_formula(attention, case):
    q, k, v = qkv(length=4, keys=7 if case == "cross" else 4, width=3, values=2)
    kept, kwargs = [True] * len(k), {}
    if case == "mask":
        kept = [True, False, True, False]
    if case == "nothing":
        kept = [False] * 4
    if case in ("mask", "nothing"):
        kwargs = {"attn_mask": torch.tensor(kept)}
    if "scale" in case:
        kwargs = {"scale": 0.3 if case == "scale" else 0.0}
    expected = by_loops(q, k, v, kept, math.sqrt(kwargs.get("scale", 1)))
    torch.testing.assert_close(attention(q, k, v, **kwargs), expected, **TOLERANCE)


def with_gradients(function, operands, **kwargs):
    leaves = [x.clone().requires_grad_() for x in operands]
    o = function(*leaves, **kwargs)
    return [o, *torch.autograd.grad(o, leaves, draw(*o.shape, seed=99))]


@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (2, 1, 3)])
@pytest.mark.parametrize(("length", "keys"), [(1, 1), (1, 9), (63, 63), (130, 7)])
def test_fast_equals_reference(lead, length, keys):
    operands = qkv(*lead, length=length, keys=keys)
    masks = [None, torch.arange(keys) % 3 != 1, draw(*lead, 1, keys, seed=3) > 0, torch.zeros(keys, dtype=torch.bool)]
    for mask in masks:
        reference, fast = (with_gradients(function, operands, attn_mask=mask) for function in FORMS)
        for one, other in zip(reference, fast, strict=True):
            torch.testing.assert_close(one, other, **TOLERANCE)


@pytest.mark.parametrize("attention", FORMS)
def test_rows_are_averages(attention):
    """Rows sum to 1 without a division: ones come back, and others between the least and the largest value."""
    q, k, v = qkv(2, 3, length=20, keys=29)
    torch.testing.assert_close(attention(q, k, torch.ones_like(v)), torch.ones_like(attention(q, k, v)), **TOLERANCE)
    o = attention(5 * q, 5 * k, v)
    assert ((o >= v.amin(-2, True) - 1e-14) & (o <= v.amax(-2, True) + 1e-14)).all()
    weights = attention(q, k, torch.eye(29, dtype=q.dtype).expand(2, 3, 29, 29))
    assert (weights > 0).all()


@pytest.mark.parametrize("attention", FORMS)
def test_masked_keys_are_absent(attention):
    """Whatever they hold; and a sequence of nothing else gives zeros, without gradients."""
    q, k, v = qkv(2, 3, length=9)
    mask = torch.arange(9) < 6
    noisy = [torch.cat([x[..., :6, :], 1e3 * x[..., 6:, :]], -2) for x in (k, v)]
    o = with_gradients(attention, (q, *noisy), attn_mask=mask)
    short = with_gradients(attention, (q, k[..., :6, :], v[..., :6, :]))
    torch.testing.assert_close(o[0], short[0], **TOLERANCE)
    torch.testing.assert_close(o[1], short[1], **TOLERANCE)
    assert not any(gradient[..., 6:, :].any() for gradient in o[2:])
    assert not any(x.any() for x in with_gradients(attention, (q, k, v), attn_mask=torch.zeros(9, dtype=torch.bool)))


@pytest.mark.parametrize("attention", FORMS)
def test_symmetries(attention):
    """Items of a batch do not see each other, permuted keys change nothing, permuted queries the rows' order."""
    q, k, v = qkv(3, 2, length=9)
    o = attention(q, 5 * k, v)
    for i in range(3):
        torch.testing.assert_close(attention(q[i], 5 * k[i], v[i]), o[i], **TOLERANCE)
    order = torch.randperm(9, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(attention(q[..., order, :], 5 * k, v), o[..., order, :], **TOLERANCE)
    torch.testing.assert_close(attention(q, 5 * k[..., order, :], v[..., order, :]), o, **TOLERANCE)


def test_is_not_its_causal_counterpart():
    """`linear-exp` divides a row's weights by their sum, this each feature's over positions: equal where keys are."""
    q, k, v = qkv(length=9)
    linear = MECHANISMS["linear-exp"].fast
    assert (efficient_attention(q, k, v) - linear(q, k, v)).abs().max() > 0.01
    same = k[:1].expand_as(k)
    torch.testing.assert_close(efficient_attention(q, same, v), linear(q, same, v), **TOLERANCE)
    # and where one token's keys are another's turned round, since then each feature's sum over positions is the same
    turned = torch.stack([k[0].roll(i) for i in range(6)])
    torch.testing.assert_close(efficient_attention(q, turned, v[:6]), linear(q, turned, v[:6]), **TOLERANCE)


@pytest.mark.parametrize("attention", FORMS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("autocast", [False, True])
def test_half_precision(attention, dtype, autocast):
    """Only the operands and the output are rounded to `dtype`, the latter by eps / 2; between, averages in float32."""
    operands = [x.to(dtype) for x in qkv(2, length=100)]
    exact = efficient_attention_reference(*(x.double() for x in operands))
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        o = attention(*operands)
    assert o.dtype == dtype
    assert ((o - exact).abs() <= torch.finfo(dtype).eps / 2 * exact.abs() + 1e-6).all()


@pytest.mark.parametrize("attention", FORMS)
@pytest.mark.parametrize("factor", [0.0, 1e3, 1e30])
def test_any_norm_is_finite(attention, factor):
    """Softmax takes any: then each feature attends to its largest key, and each query to its largest feature."""
    q, k, v = qkv(2, length=20, dtype=torch.float32)
    leaves = [(factor * q).requires_grad_(), (factor * k).requires_grad_(), v.requires_grad_()]
    o = attention(*leaves)
    assert all(x.isfinite().all() for x in (o, *torch.autograd.grad(o.sum(), leaves)))
    if factor == 1e30:
        best = k.argmax(-2).gather(-1, q.argmax(-1))
        assert torch.equal(o, torch.stack([v[i, best[i]] for i in range(2)]))


@pytest.mark.parametrize("attention", FORMS)
def test_second_derivatives(attention):
    operands = [x.requires_grad_() for x in qkv(length=3, width=3, values=2)]
    assert torch.autograd.gradgradcheck(attention, operands)


@pytest.mark.parametrize("form", ["reference", "fast"])
@pytest.mark.parametrize("qk_grad", [False, True])
def test_declared_costs(form, qk_grad):
    """Of the function alone, with values of another width than the keys."""
    mechanism = MECHANISMS["efficient"]
    for B, N, H, K, V in ((1, 12, 2, 3, 5), (2, 13, 1, 2, 1), (1, 1, 1, 1, 1)):
        leaves = [torch.zeros(B, H, N, w) for w in (K, K, V)]
        wanted = [x.requires_grad_() for x in (leaves if qk_grad else leaves[2:])]
        with OperationCounter() as ahead, saved_bytes() as kept:
            o = mechanism.form(form)(*leaves)
        with OperationCounter() as back:
            torch.autograd.grad(o, wanted, torch.ones_like(o))
        declared = mechanism.cost(B, N, H, K, V, form=form, qk_grad=qk_grad)
        assert (ahead.flops.total(), back.flops.total()) == (declared.forward, declared.backward)
        assert ahead.elementwise.total() == declared.elementwise_forward
        assert back.elementwise.total() == declared.elementwise_backward
        assert kept() == declared.saved_bytes + declared.output_bytes


MASK = torch.ones(5, 5, dtype=torch.bool)


@pytest.mark.bad_input
@pytest.mark.parametrize("attention", FORMS)
@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"is_causal": True}, ValueError, "is_causal: expected False, since keys are normalised over the whole"),
        ({"return_state": True}, ValueError, "return_state: expected False, since .* got bool True"),
        ({"initial_state": ()}, ValueError, "initial_state: expected None, since .* got tuple of 0"),
        ({"initial_state": (torch.ones(2),)}, ValueError, "initial_state: expected None, since .* got tuple of 1: a "),
        ({"attn_mask": MASK}, ValueError, r"attn_mask: expected a mask of keys, of shape \(..., 1, 5\), got \(5, 5\)"),
        ({"attn_mask": MASK[:, :4]}, ValueError, "attn_mask: expected a shape that broadcasts to"),
        ({"attn_mask": MASK.double()}, TypeError, "attn_mask: expected a boolean tensor"),
        ({"scale": -1.0}, ValueError, "scale: expected a finite number of at least 0, got -1.0"),
        ({"scale": "1"}, TypeError, "scale: expected a number, got str '1'"),
        ({"is_causal": 1}, TypeError, "is_causal: expected True or False, got int 1"),
    ],
)
def test_errors(attention, kwargs, error, message):
    with pytest.raises(error, match=f"^{message}"):
        attention(*qkv(2, length=5), **kwargs)


@pytest.mark.bad_input
@pytest.mark.parametrize("attention", FORMS)
def test_operands_that_do_not_fit(attention):
    q, k, v = qkv(2, length=5)
    for operands, error, message in (
        ((q, k / 0, v), ValueError, "k: expected finite numbers"),
        ((q, k[..., :4], v), ValueError, "k: expected width 6 like q"),
        ((q, k, v[:, :4]), ValueError, "v: expected length 5 like k"),
        ((q, k.float(), v), TypeError, "k: expected torch.float64 on cpu like q"),
    ):
        with pytest.raises(error, match=f"^{message}"):
            attention(*operands)
