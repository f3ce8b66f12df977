"""Extreme numbers: outputs are finite or refused, and keys and values that leave the range of the dtype change only the
rows that may attend to them."""

from itertools import product

import pytest
import torch
from extent import some
from piecewise import ways
from refusals import refuses
from seeded import draw

from ortho import MECHANISMS
from ortho.attention import FORMS

CUT, LENGTH = 5, 9
MEMORIES = {name: m.gates for name, m in MECHANISMS.items() if m.family == "recurrent"}
ERASING = {name for name, gates in MEMORIES.items() if "beta" in gates}
SUMMING = ERASING | {name for name in MEMORIES if name.startswith("ttt")}
SUMMING |= {"rotary", "linear", "linear-relu", "cosformer", "taylor", "powers", "rff", "favor", "routing"}


def drawn():
    return [draw(1, 2, LENGTH, 4, seed=seed, dtype=torch.float32) for seed in range(3)]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", [name for name, m in MECHANISMS.items() if m.causal])
def test_the_future_overflows_alone(name, form):
    """Products with keys of 3e38 are infinite, or NaN where signs differ. Earlier rows are the same to the bit; a
    mechanism that takes lengths or sums of all keys raises an error that names the keys."""
    q, k, v = drawn()
    huge = k.clone()
    huge[..., CUT:, :] = 3e38
    f = MECHANISMS[name].form(form)
    kept = f(q, k, v, is_causal=True)[..., :CUT, :]
    if name in SUMMING:
        refuses("(q, )?k: expected .* (within|numbers)", f, q, huge, v, is_causal=True)
        return
    assert torch.equal(f(q, huge, v, is_causal=True)[..., :CUT, :], kept)


HIDING = [(n, f) for n, m in MECHANISMS.items() for f in FORMS if m.family in ("softmax", "sparse")]


@pytest.mark.parametrize(("name", "form"), [pair for pair in HIDING if pair != ("softmax", "fast")])
def test_hidden_keys_overflow_alone(name, form):
    """Hidden keys change nothing in calls that are not causal. (PyTorch's kernel adds masks to scores: NaN.)"""
    q, k, v = drawn()
    huge = k.clone()
    huge[..., CUT:, :] = -3e38
    mask = (torch.arange(LENGTH) < CUT)[None]
    f = MECHANISMS[name].form(form)
    assert torch.equal(f(q, huge, v, attn_mask=mask), f(q, k, v, attn_mask=mask))


FLOODED = ERASING | {"ttt-contrastive"}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", [name for name, m in MECHANISMS.items() if m.causal])
def test_future_values_overflow_alone(name, form):
    """Sums of values of 3e38 are infinite, and written differences of them are NaN. Earlier rows are the same to the
    bit; a mechanism that reads what it wrote by products over a chunk raises an error that names the values."""
    q, k, v = drawn()
    f = MECHANISMS[name].form(form)
    kept = f(q, k, v, is_causal=True)[..., :CUT, :]
    values = torch.where(torch.arange(LENGTH)[:, None] < CUT, v, 3e38 * v.sign())
    if name in FLOODED:
        refuses("^v: expected ", f, q, k, values, is_causal=True)
        return
    assert torch.equal(f(q, k, values, is_causal=True)[..., :CUT, :], kept)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", MECHANISMS)
def test_hidden_values_overflow_alone(name, form):
    q, k, v = drawn()
    values = torch.where(torch.arange(LENGTH)[:, None] < CUT, v, 3e38 * v.sign())
    mask = (torch.arange(LENGTH) < CUT)[None]
    f = MECHANISMS[name].form(form)
    for is_causal in {MECHANISMS[name].causal, not MECHANISMS[name].bidirectional}:
        hidden = f(q, k, values, attn_mask=mask, is_causal=is_causal)
        assert torch.equal(hidden, f(q, k, v, attn_mask=mask, is_causal=is_causal))


TOKENS = 20
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


def called(mechanism):
    """(is_causal, attn_mask): each way that is served, and one of them with a mask, which leaves fewer keys."""
    served = ways(mechanism)
    return [*((way, None) for way in served), (served[-1], torch.arange(TOKENS) % 3 == 1)]


@pytest.mark.parametrize("name", MECHANISMS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", some([torch.float32, torch.float64], 2))
def test_extremes(name, form, dtype):
    """A finite output with finite gradients, or an error that names what is out of range; never NaN.

    An output is checked as far as possible without computing it again: if no weight is negative, it is an average of
    the values, or 0 if a row may be without weight.
    """
    m, drawn = MECHANISMS[name], [draw(2, TOKENS, 16, seed=i, dtype=dtype) for i in range(3)]
    for (kind, change), (causal, mask) in product(EXTREMES.items(), called(m)):
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
        empty = torch.tensor(mask is not None or name == "cosformer" or m.family in ("sparse", "selected"))
        allowed = torch.ones(TOKENS, TOKENS, dtype=torch.bool) if mask is None else mask.expand(TOKENS, TOKENS)
        allowed = (allowed.tril() if causal else allowed)[..., None]  # (N, M, 1)
        low = v[:, None].masked_fill(~allowed, torch.inf).amin(-2)
        high = v[:, None].masked_fill(~allowed, -torch.inf).amax(-2)
        slack = 100 * torch.finfo(dtype).eps * v.abs().max()  # sums of 20 products, and their quotient
        assert ((o >= low - slack) & (o <= high + slack) | empty & (o == 0)).all(), kind


@pytest.mark.parametrize("name", MECHANISMS)
@pytest.mark.parametrize("form", FORMS)
def test_float32_keeps_its_digits(name, form):
    """Where tokens are alike, gradients are differences; in float32 they still equal float64's to about 1e4 eps."""
    for kind in ("no queries", "no keys", "ones", "minus ones"):
        results = []
        for dtype in (torch.float32, torch.float64):
            drawn = (draw(2, TOKENS, 16, seed=i).to(dtype) for i in range(3))
            leaves = [x.clone().requires_grad_() for x in EXTREMES[kind](*drawn)]
            o = MECHANISMS[name].form(form)(*leaves, is_causal=ways(MECHANISMS[name])[0])
            results.append([o, *torch.autograd.grad(o.square().sum(), leaves)])
        for single, double in zip(*results, strict=True):
            torch.testing.assert_close(single.double(), double, atol=1e-3, rtol=1e-3, msg=lambda m, k=kind: f"{k}: {m}")


@pytest.mark.parametrize("name", MECHANISMS)
@pytest.mark.parametrize("form", FORMS)
def test_nothing_to_attend_to(name, form):
    """Outputs are zeros without gradients, beside sequences that are not hidden, and whatever the hidden ones hold."""
    m, (q, k, v) = MECHANISMS[name], [draw(2, TOKENS, 16, seed=s) for s in range(3)]
    mask = torch.tensor([False, True])[:, None, None]
    for causal, factor in product(ways(m), (0.0, 1.0, 1e3)):
        leaves = [torch.cat([factor * x[:1], x[1:]]).requires_grad_() for x in (q, k, v)]
        o = m.form(form)(*leaves, is_causal=causal, attn_mask=mask)
        assert not o[0].any()
        assert not any(gradient[0].any() for gradient in torch.autograd.grad(o.sum(), leaves))
        alone = m.form(form)(q[1:], k[1:], v[1:], is_causal=causal)
        torch.testing.assert_close(o[1:], alone)
