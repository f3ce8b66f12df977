"""Softmax attention: the definition against its formula by loops, the fused form against the definition."""

import math

import pytest
import torch
from torch.nn.attention import SDPBackend
from torch.nn.functional import scaled_dot_product_attention

from ortho.attention import softmax_attention, softmax_attention_reference

FORMS = [softmax_attention_reference, softmax_attention]
# Sums of at most 8 rounded products behind exponentials of scores below 10: some 100 eps of float64.
TOLERANCE = {"atol": 1e-13, "rtol": 1e-13}


def draw(*shape, seed=0, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=g, dtype=dtype)


def by_loops(q, k, v, allowed, scale):
    """The formula, one scalar at a time."""
    out = torch.zeros(q.shape[0], v.shape[1], dtype=q.dtype)
    for i in range(q.shape[0]):
        weights = [
            math.exp(scale * sum(q[i, c] * k[j, c] for c in range(q.shape[1]))) if allowed[i, j] else 0.0
            for j in range(k.shape[0])
        ]
        for j, weight in enumerate(weights):
            if sum(weights) > 0:
                out[i] += weight / sum(weights) * v[j]
    return out


@pytest.mark.parametrize("attention", FORMS)
@pytest.mark.parametrize("case", ["plain", "causal", "mask", "scale", "no scores", "negative scale"])
def test_formula(attention, case):
    q, k, v = draw(4, 3), draw(4, 3, seed=1), draw(4, 3, seed=2)
    allowed = torch.ones(4, 4, dtype=torch.bool)
    kwargs = {}
    if case == "causal":
        allowed, kwargs = allowed.tril(), {"is_causal": True}
    if case == "mask":
        allowed = torch.tensor([[1, 0, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 1]], dtype=torch.bool)
        kwargs = {"attn_mask": allowed}
    if case == "scale":
        kwargs = {"scale": 0.3}
    if case == "no scores":
        allowed, kwargs = allowed.tril(), {"is_causal": True, "scale": 0.0}
    if case == "negative scale":
        allowed, kwargs = allowed.tril(), {"is_causal": True, "scale": -0.4}
    expected = by_loops(q, k, v, allowed, kwargs.get("scale", 1 / math.sqrt(3)))
    torch.testing.assert_close(attention(q, k, v, **kwargs), expected, **TOLERANCE)


def test_equals_pytorch():
    q, k, v = (draw(2, 3, 5, 4, seed=s) for s in range(3))
    expected = scaled_dot_product_attention(q, k, v, is_causal=True)
    for attention in FORMS:
        torch.testing.assert_close(attention(q, k, v, is_causal=True), expected, **TOLERANCE)


@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (2, 1, 3)])
def test_leading_axes(lead):
    q, k, v = (draw(*lead, 5, 4, seed=s) for s in range(3))
    mask = draw(*lead, 5, 5, seed=3) > -0.5
    expected = softmax_attention_reference(q, k, v, attn_mask=mask)
    assert expected.shape == (*lead, 5, 4)
    torch.testing.assert_close(softmax_attention(q, k, v, attn_mask=mask), expected, **TOLERANCE)


def test_cross_attention_and_wide_values():
    q, k, v = draw(2, 3, 4), draw(2, 7, 4, seed=1), draw(2, 7, 6, seed=2)
    assert softmax_attention_reference(q, k, v).shape == (2, 3, 6)
    with pytest.raises(ValueError, match="v: expected width 4 like q, for the fused kernel"):
        softmax_attention(q, k, v)
    torch.testing.assert_close(softmax_attention(q, k, k), softmax_attention_reference(q, k, k), **TOLERANCE)


@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (2, 1, 3)])
@pytest.mark.parametrize("axes", ["scalar", "keys", "queries and keys", "heads", "full"])
def test_every_mask_that_broadcasts(lead, axes):
    """Whatever broadcasts to (..., N, M) is served by both forms, alike."""
    full = (*lead, 5, 7)
    shape = {"scalar": (), "keys": (7,), "queries and keys": (5, 7), "heads": (*lead[-1:], 1, 7), "full": full}[axes]
    q, k, v = draw(*lead, 5, 4), draw(*lead, 7, 4, seed=1), draw(*lead, 7, 4, seed=2)
    mask = draw(*shape, seed=3) > -0.5
    expected = softmax_attention_reference(q, k, v, attn_mask=mask.expand(full))
    for attention in FORMS:
        torch.testing.assert_close(attention(q, k, v, attn_mask=mask), expected, **TOLERANCE)


def test_no_silent_fallback(monkeypatch):
    """Where no fused kernel serves the call, the fast form raises; it does not materialise the weights."""
    monkeypatch.setattr(
        "ortho.attention.softmax.softmax_attention._KERNELS", [SDPBackend.CUDNN_ATTENTION]
    )  # not on a CPU
    q = draw(1, 2, 5, 4)
    with pytest.raises(RuntimeError, match="No viable backend"):
        softmax_attention(q, q, q)


@pytest.mark.parametrize("attention", FORMS)
def test_causal_and_mask_together(attention):
    q, k, v = (draw(2, 6, 4, seed=s) for s in range(3))
    mask = draw(2, 6, 6, seed=3) > 0
    both = attention(q, k, v, attn_mask=mask, is_causal=True)
    expected = softmax_attention_reference(q, k, v, attn_mask=mask & torch.ones(6, 6, dtype=torch.bool).tril())
    torch.testing.assert_close(both, expected, **TOLERANCE)


@pytest.mark.parametrize("attention", FORMS)
@pytest.mark.parametrize("size", [1.0, 1e3, 1e30])
def test_large_scores_stay_finite(attention, size):
    q, k, v = (draw(3, 4, seed=s, dtype=torch.float32) * size**0.5 for s in range(3))
    q.requires_grad_()
    o = attention(q, k, v, is_causal=True)
    o.sum().backward()
    assert o.isfinite().all() and q.grad.isfinite().all()


def test_low_precision():
    """bfloat16 against float64: each weight and each output is rounded to 8 bits, and scores to 8 bits of up to 4."""
    q, k, v = (draw(2, 16, 8, seed=s) for s in range(3))
    exact = softmax_attention_reference(q, k, v, is_causal=True)
    for attention in FORMS:
        o = attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), is_causal=True)
        assert o.dtype == torch.bfloat16
        assert (o - exact).abs().max() < 4 * v.abs().max() * torch.finfo(torch.bfloat16).eps * 2


BAD = [
    (lambda q, k, v, f: f(q.long(), k, v), TypeError, "q: expected a floating-point tensor, got a int64 tensor"),
    (lambda q, k, v, f: f(q, k.float(), v), TypeError, "k: expected torch.float64 on cpu like q, got torch.float32"),
    (lambda q, k, v, f: f(q, k[:, :, :3], v), ValueError, "k: expected width 4 like q"),
    (lambda q, k, v, f: f(q, k, v[:, :4]), ValueError, "v: expected length 5 like k"),
    (lambda q, k, v, f: f(q, k[:1], v), ValueError, r"k: expected leading axes \(2,\) like q, got \(1, 5, 4\)"),
    (lambda q, k, v, f: f(q[:, :0], k, v), ValueError, r"q: expected shape \(..., N, width\) without empty axes"),
    (lambda q, k, v, f: f(q[0, 0], k, v), ValueError, "q: expected shape"),
    (lambda q, k, v, f: f(q[:, :3], k, v, is_causal=True), ValueError, "is_causal: expected as many queries as keys"),
    (lambda q, k, v, f: f(q, k, v, attn_mask=torch.ones(5, 5)), TypeError, "attn_mask: expected a boolean tensor"),
    (
        lambda q, k, v, f: f(q, k, v, attn_mask=torch.ones(4, 5, dtype=torch.bool)),
        ValueError,
        r"attn_mask: expected a shape that broadcasts to \(2, 5, 5\), got \(4, 5\)",
    ),
    (lambda q, k, v, f: f(q, k / 0, v), ValueError, "k: expected finite numbers, got 40 NaN or infinite of 40"),
    (lambda q, k, v, f: f(q, k, v, initial_state=(k,)), ValueError, r"initial_state: expected.*\(keys, values\)"),
    (lambda q, k, v, f: f(q, k, v, initial_state=5), TypeError, "initial_state: expected a tuple of tensors"),
    (
        lambda q, k, v, f: f(q, k, v, initial_state=(k, v[:, :3])),
        ValueError,
        "initial_state: expected values of length",
    ),
    (lambda q, k, v, f: f(q, k, v, scale=float("nan")), ValueError, "scale: expected a finite number, got nan"),
    (lambda q, k, v, f: f(q, k, v, scale="1"), TypeError, "scale: expected a number, got str"),
    (lambda q, k, v, f: f(q, k, v, is_causal=torch.ones(2)), TypeError, "is_causal: expected True or False"),
    (lambda q, k, v, f: f(q, k, v, initial_state=(k[:1], v)), ValueError, "initial_state: expected keys"),
    (
        lambda q, k, v, f: f(q, k, v, initial_state=(k[0, 0], v)),
        ValueError,
        "initial_state: expected a tuple of tensors",
    ),
]


@pytest.mark.bad_input
@pytest.mark.parametrize("attention", FORMS)
@pytest.mark.parametrize(("call", "error", "message"), BAD)
def test_errors(attention, call, error, message):
    q, k, v = (draw(2, 5, 4, seed=s) for s in range(3))
    with pytest.raises(error, match=message):
        call(q, k, v, attention)
