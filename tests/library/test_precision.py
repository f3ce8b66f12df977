"""Definitions, fast forms and selections compute in float32 at least, for any operands, also under autocast."""

from itertools import product

import pytest
import torch
from extent import some

from ortho import MECHANISMS
from ortho.attention import FORMS
from ortho.attention.dynamic_sparse.top_k import top_k_mask
from ortho.attention.softmax.frozen_qk import frozen_qk_attention, frozen_qk_attention_reference

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
    outside = top_k_mask(q, k, num_keys=4, is_causal=is_causal)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(top_k_mask(q, k, num_keys=4, is_causal=is_causal), outside)


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
