"""Extreme numbers: outputs are finite, or NaN where no digits are left; hidden values that leave the range of the dtype
change nothing."""

from itertools import product

import pytest
import torch
from extent import some
from piecewise import ways
from seeded import draw

from ortho import MECHANISMS
from ortho.attention import FORMS

CUT, LENGTH = 5, 9


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", MECHANISMS)
def test_hidden_values_overflow_alone(name, form):
    """Sums of values of 3e38 are infinite; of hidden keys they change nothing."""
    q, k, v = (draw(1, 2, LENGTH, 4, seed=seed, dtype=torch.float32) for seed in range(3))
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
HARMLESS = ["tiny", "no queries", "no keys", "nothing", "ones", "minus ones"]  # no row may be NaN for these


def called(mechanism):
    """(is_causal, attn_mask): each way that is served, and one of them with a mask, which leaves fewer keys."""
    served = ways(mechanism)
    return [*((way, None) for way in served), (served[-1], torch.arange(TOKENS) % 3 == 1)]


@pytest.mark.parametrize("name", MECHANISMS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", some([torch.float32, torch.float64], 2))
def test_extremes(name, form, dtype):
    """Finite outputs with finite gradients; NaN only in whole rows of linear attention whose totals of weights leave
    the range of the dtype.

    An output is checked as far as possible without computing it again: if no weight is negative, it is an average of
    the values, or 0 if a row may be without weight.
    """
    m, drawn = MECHANISMS[name], [draw(2, TOKENS, 16, seed=i, dtype=dtype) for i in range(3)]
    for (kind, change), (causal, mask) in product(EXTREMES.items(), called(m)):
        operands = change(*drawn)
        leaves = [x.clone().requires_grad_() for x in operands]
        o = m.form(form)(*leaves, is_causal=causal, attn_mask=mask)
        lost = o.isnan()
        if lost.any():
            assert m.family == "linear" and kind not in HARMLESS, kind
            assert torch.equal(lost, lost.all(-1, keepdim=True).expand_as(lost)), kind
            continue
        assert all(x.isfinite().all() for x in (o, *torch.autograd.grad(o.sum(), leaves))), kind
        if m.signed:
            continue
        v = operands[2]
        empty = torch.tensor(mask is not None or name == "cosformer" or m.family in ("sparse", "dynamic_sparse"))
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
