"""Definitions, fast forms and selections compute in float32 at least, for any operands, also under autocast. At
extreme numbers outputs are finite, or NaN where no digits are left; hidden values that overflow change nothing."""

from functools import partial
from itertools import product

import pytest
import torch
from piecewise import ways
from sample import some
from seeded import draw

from ortho import MECHANISMS
from ortho.attention import FORMS
from ortho.attention.dynamic_sparse.top_k import top_k_attention_reference
from ortho.attention.softmax.frozen_qk import frozen_qk_attention, frozen_qk_attention_reference
from ortho.attention.weights import weights_of

FUNCTIONS = {(name, form): m.form(form) for name, m in MECHANISMS.items() for form in FORMS}
FUNCTIONS |= {
    ("value gradient", "reference"): frozen_qk_attention_reference,
    ("value gradient", "fast"): frozen_qk_attention,
}


def drawn(dtype, *, length=40, factor=1.0):
    """q, k and v, with q and k multiplied by a factor."""
    operands = (torch.randn(1, 2, length, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(3))
    return [(x * f).to(dtype) for x, f in zip(operands, (factor, factor, 1.0), strict=True)]


def gradients(operands, o):
    return torch.autograd.grad(o.square().sum(), [x for x in operands if x.requires_grad])


def causal(name):
    return name not in MECHANISMS or MECHANISMS[name].causal


@pytest.mark.parametrize(("name", "form"), FUNCTIONS)
def test_outputs_have_the_dtype_of_the_operands(name, form):
    """Near float64, and under autocast the same to the bit. Gradients have the dtype, too, and are near float64 unless
    weights are signed.

    Rotary attention rounds turned queries and keys to the dtype. Scores of about 5 change by a relative 2^-9, and the
    output is rounded once: 8 steps of the dtype leave a factor of 4. Float32 sums of about 100 products are off by
    1e-5, with a factor of 10.
    """
    f = FUNCTIONS[name, form]
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        operands = drawn(dtype)
        for x in operands[2 * (name == "value gradient") :]:
            x.requires_grad_()
        wide = [x.detach().double().requires_grad_(x.requires_grad) for x in operands]
        exact, o = (f(*x, is_causal=causal(name)) for x in (wide, operands))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            inside = f(*operands, is_causal=causal(name))
        assert o.dtype == inside.dtype == dtype
        torch.testing.assert_close(inside, o, atol=0, rtol=0)
        steps = 1e-4 if dtype == torch.float32 else 8 * torch.finfo(dtype).eps
        torch.testing.assert_close(o.double(), exact, atol=steps, rtol=steps)
        for narrow, other in zip(*map(gradients, (operands, wide), (o, exact)), strict=True):
            assert narrow.dtype == dtype
            signed = name in MECHANISMS and MECHANISMS[name].signed  # their sums cancel
            assert signed or (narrow - other).norm() <= 10 * steps * (other.norm() + steps)


@pytest.mark.parametrize(
    ("name", "form"), [key for key in FUNCTIONS if key[0] in ("softmax", "rotary", "fox", "top-k")]
)
def test_scores_beyond_half_precision(name, form):
    """Products of 300 by 300 are 90,000, which float16 cannot hold."""
    operands = [x.requires_grad_() for x in drawn(torch.float16, factor=300.0)]
    o = FUNCTIONS[name, form](*operands, is_causal=True)
    assert o.isfinite().all()
    assert all(x.isfinite().all() for x in torch.autograd.grad(o.sum(), operands))


@pytest.mark.parametrize("is_causal", [True, False])
def test_choices_are_made_in_float32(is_causal):
    """Scores that bfloat16 cannot tell apart: keys that differ by 2^-10."""
    q = torch.ones(1, 1, 300, 4)
    k = 1 + 2.0**-10 * torch.rand(1, 1, 300, 4, generator=torch.Generator().manual_seed(0))
    weights = partial(weights_of, top_k_attention_reference, q, k, num_keys=4, is_causal=is_causal)
    outside = weights()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(weights(), outside)


LAYOUTS = {
    "transposed": lambda x: x.mT.contiguous().mT,
    "every second": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "one number": lambda x: x[..., :1].expand(x.shape),
    "one row": lambda x: x[..., :1, :].expand(x.shape),
    "one head": lambda x: x[:, :1].expand(x.shape),
}


@pytest.mark.parametrize(("name", "layout"), some(product(MECHANISMS, LAYOUTS), 2))
def test_operands_in_any_layout(name, layout):
    """Outputs and gradients are those of contiguous operands: sums in another order, 1e-5 with a factor of 10."""
    f = MECHANISMS[name].fast
    for which in ((True, False, False), (False, True, False), (False, False, True), (True, True, True)):
        operands = [LAYOUTS[layout](x) if moved else x for x, moved in zip(drawn(torch.float32), which, strict=True)]
        results = []
        for x in (operands, [x.contiguous() for x in operands]):
            leaves = [each.detach().requires_grad_() for each in x]
            o = f(*leaves, is_causal=causal(name))
            results.append([o, *torch.autograd.grad(o.square().sum(), leaves)])
        torch.testing.assert_close(*results, atol=1e-4, rtol=1e-3)


# ------------------------------------------------------------------------------------------------------ extreme numbers

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
