"""Softmax attention: the definition equals its formula by loops; the fused form and the tiles of FlashAttention equal
the definition. (`test_precision` has the limits of numbers.)"""

import math
from functools import partial

import pytest
import torch
from by_loops import averaged
from refusals import refuses
from seeded import draw
from torch.nn.attention import SDPBackend

from ortho.attention import MECHANISMS, softmax_attention, softmax_attention_reference
from ortho.attention.softmax.flash import flash_attention

FORMS = [softmax_attention_reference, softmax_attention]
# Sums of at most 70 products of size 10, in another order, after exponentials of scores up to 10.
close = partial(torch.testing.assert_close, atol=1e-12, rtol=1e-12)


def operands(N, M=None, lead=(2, 3), dtype=torch.float64, K=4, V=5):
    shapes = (N, K), (M or N, K), (M or N, V)
    return [draw(*lead, *shape, seed=s, dtype=dtype).requires_grad_() for s, shape in enumerate(shapes)]


CASES = {
    "plain": {},
    "causal": {"is_causal": True},
    "mask": {"attn_mask": torch.tensor([[1, 0, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 1]]).bool()},
    "causal, mask": {
        "is_causal": True,
        "attn_mask": torch.tensor([[1, 0, 1, 0], [0, 0, 1, 1], [1] * 4, [0, 1, 0, 1]]) > 0,
    },
    "scale": {"scale": 0.3},
    "no scores": {"is_causal": True, "scale": 0.0},
    "negative scale": {"is_causal": True, "scale": -0.4},
}


@pytest.mark.parametrize("attention", FORMS)
@pytest.mark.parametrize("case", CASES)
def test_formula(attention, case):
    q, k, v, kwargs = draw(4, 3), draw(4, 3, seed=1), draw(4, 3, seed=2), CASES[case]
    allowed = kwargs.get("attn_mask", torch.ones(4, 4, dtype=torch.bool))
    allowed = allowed.tril() if "is_causal" in kwargs else allowed
    scale = kwargs.get("scale", 1 / math.sqrt(3))
    close(attention(q, k, v, **kwargs), averaged(lambda i, j: math.exp(scale * float(q[i] @ k[j])), v, allowed))


@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (2, 1, 3)])
@pytest.mark.parametrize("axes", ["scalar", "keys", "queries and keys", "heads", "full"])
def test_every_mask_that_broadcasts(lead, axes):
    """Both forms serve every mask that broadcasts to (..., N, M), with the same output."""
    full = (*lead, 5, 7)
    shape = {"scalar": (), "keys": (7,), "queries and keys": (5, 7), "heads": (*lead[-1:], 1, 7), "full": full}[axes]
    q, k, v = operands(5, 7, lead, V=4)
    mask = draw(*shape, seed=3) > -0.5
    expected = softmax_attention_reference(q, k, v, attn_mask=mask.expand(full))
    assert expected.shape == (*lead, 5, 4)
    for attention in FORMS:
        close(attention(q, k, v, attn_mask=mask), expected)


def test_no_silent_fallback(monkeypatch):
    """Where no fused kernel serves the call, the fast form raises; it does not materialise the weights."""
    not_on_a_cpu = [SDPBackend.CUDNN_ATTENTION]
    monkeypatch.setattr("ortho.attention.softmax.softmax_attention._KERNELS", not_on_a_cpu)
    q = draw(1, 2, 5, 4)
    refuses("No viable backend", softmax_attention, q, q, q, error=RuntimeError)


@pytest.mark.parametrize("name", ["softmax", "alibi", "fox", "path"])
def test_hidden_keys_have_no_weight_beside_scores_that_overflow(name):
    """A score of minus infinity gives NaN, and never the values of the future."""
    q, v = torch.full((3, 2), 1e20), torch.tensor([[1.0], [100.0], [10000.0]]).expand(3, 2)
    o = MECHANISMS[name].reference(q, -q, v, is_causal=True)
    assert not (o[0] > 2).any()


@pytest.mark.parametrize("scale", [1e-50, -1e-50, 1e-38])
def test_a_scale_below_the_range_of_float32_weighs_all_alike(scale):
    q, k, v = (x.float() for x in operands(6, V=4))
    ours, exact = (form(q, k, v, is_causal=True, scale=scale) for form in (softmax_attention, FORMS[0]))
    assert torch.allclose(ours, exact, atol=1e-6)


def test_tiles_of_scores_near_the_least_number():
    q, k = torch.full((1, 1, 1), 1e19), torch.tensor([[[-1e19], [-1e19]]])
    v = torch.tensor([[[1.0], [3.0]]])
    assert float(flash_attention(q, k, v, scale=1.0)) == 2
