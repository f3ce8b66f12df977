"""The exchanged pass at its limits: extreme scales and scores, half precision, and the terms of the log-sum-exp."""

from math import log

import pytest
import torch
from exchanged_operands import draw, operands, results

from ortho.attention.softmax import value_gradient
from ortho.attention.softmax.value_gradient import value_gradient_attention, value_gradient_attention_reference

CAUSAL = pytest.mark.parametrize("causal", [False, True])


@CAUSAL
@pytest.mark.parametrize("scale", [0.0, -0.7, 1.0, 3.0, 1e-300, 1e-30, 1e-9, -1e-9])
def test_scales(scale, causal):
    """In half precision too, where a log-sum-exp over a small scale is not within the range of float16."""
    found, expected = (
        results(form, *operands(17), is_causal=causal, scale=scale)
        for form in (value_gradient_attention, value_gradient_attention_reference)
    )
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-12)  # scores up to 100
    for dtype in (torch.float16, torch.bfloat16):
        rounded = operands(17, dtype=dtype)
        found = results(value_gradient_attention, *rounded, is_causal=causal, scale=scale)
        q, k, v, do = (x.detach().double() for x in rounded)
        expected = results(
            value_gradient_attention_reference, q, k, v.requires_grad_(), do, is_causal=causal, scale=scale
        )
        for a, b in zip(found, expected, strict=True):
            assert (a - b).norm() <= 4 * torch.finfo(dtype).eps * b.norm()  # about as many roundings of each number


def positive(N, dtype, gain):
    """Values and upstream gradients between 0 and 1, so that no sum of them cancels, and scores of spread `gain`."""
    q, k, v, do = operands(N, (1, 2), torch.float64, 64)
    v, do = ((x.detach().abs() / (1 + x.detach().abs())).to(dtype) for x in (v, do))
    return (q * gain**0.5).to(dtype), (k * gain**0.5).to(dtype), v.requires_grad_(), do


def worst(dtype, N, gain, causal):
    """The largest relative error of an entry of the gradient of v, over the dtype's rounding."""
    given = positive(N, dtype, gain)
    (found,) = results(value_gradient_attention, *given, is_causal=causal)[1:]
    q, k, v, do = (x.detach().double() for x in given)
    (exact,) = results(value_gradient_attention_reference, q, k, v.requires_grad_(), do, is_causal=causal)[1:]
    seen = exact > 1e-3  # a key that hardly anybody reads has a gradient that half precision rounds coarsely or to 0
    assert seen.sum() > seen.numel() / 4
    return float(((found - exact).abs() / exact)[seen].max() / (torch.finfo(dtype).eps / 2))


@CAUSAL
@pytest.mark.parametrize("gain", [1, 5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype, gain, causal):
    """Three roundings: of the kernel's weights, of what it sums up with them, of the gradient; what float32 adds, some
    1e-5 for scores up to 40, is no tenth of one."""
    assert worst(dtype, 200, gain, causal) <= 3.1


@CAUSAL
def test_one_term_would_not_do(causal, monkeypatch):
    """A log-sum-exp of 20 that is rounded to 8 bits is off by up to 2^-4: more than 30 roundings of a weight."""
    monkeypatch.setattr(value_gradient, "channels", lambda itemsize: 1)
    assert worst(torch.bfloat16, 200, 5, causal) > 10
    for terms, most in ((2, 3.5), (3, 3.1)):
        monkeypatch.setattr(value_gradient, "channels", lambda itemsize, terms=terms: terms)
        assert worst(torch.bfloat16, 200, 5, causal) <= most


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sign", [1, -1])
@CAUSAL
def test_huge_scores(causal, sign, dtype):
    """Whole numbers, whose scores about 1000 are exact; the log-sum-exp then is rounded to 2^-14, three times over."""
    N, whole = 40, torch.randint(-2, 3, (2, 1, 1, 40, 4), generator=torch.Generator().manual_seed(0)).double()
    q, k = (torch.cat([x, torch.full((1, 1, N, 4), 16.0)], -1).to(dtype) for x in whole)
    q[..., 4:] *= sign
    v, do = (draw(1, 1, N, 8, seed=s).to(dtype) for s in (2, 3))
    found = results(value_gradient_attention, q, k, v.requires_grad_(), do, is_causal=causal, scale=1.0)
    q, k, v, do = (x.detach().double() for x in (q, k, v, do))
    assert (q @ k.mT * sign).min() > 900
    exact = results(value_gradient_attention_reference, q, k, v.requires_grad_(), do, is_causal=causal, scale=1.0)
    for a, b in zip(found, exact, strict=True):
        assert (a - b).norm() <= (3 * 2**-14 + 4 * torch.finfo(dtype).eps) * b.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_of_a_million(dtype):
    """Nothing overflows: no weight is above 1, and so no gradient above the sum of the upstream ones."""
    q, k, v, do = operands(30, dtype=dtype)
    for sign in (1, -1):
        o, dv = results(value_gradient_attention, sign * 1000 * q, 1000 * k, v, do)
        assert o.isfinite().all() and dv.isfinite().all()
        assert dv.abs().max() <= 2 * do.abs().sum(-2).max()


@CAUSAL
def test_weights_are_at_most_1(causal):
    """So that the second log-sum-exp, of which the exponential is taken, is at most ln N; all of one key reaches it."""
    met, kernel = [], value_gradient._kernel

    def watched(*args):
        met.append(kernel(*args)[1])
        return kernel(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(value_gradient, "_kernel", watched)
        for gain in (0, 1, 30):
            q, k, v, do = operands(33, (1, 2))
            results(value_gradient_attention, gain * q, gain * k, v, do, is_causal=causal)
            assert met[-1].max() <= log(33) + 1e-12
        one = torch.zeros_like(k)
        one[..., 0, :] = 1000
        results(value_gradient_attention, torch.ones_like(q), one, v, do, is_causal=causal)
    assert abs(float(met[-1].max()) - log(33)) < 1e-10
