"""Linear attention: the definition against its formula by loops, the map, and growth linear in N."""

import math

import pytest
import sympy as sp
import torch

from ortho.attention.factored import CHUNK
from ortho.attention.linear import elu_plus_one, linear_attention, linear_attention_reference, linear_cost
from ortho.cost.big_o import B, H, N, order

FORMS = [linear_attention_reference, linear_attention]
TOLERANCE = {"atol": 1e-13, "rtol": 1e-13}  # sums of at most 8 rounded products, some 100 eps of float64


def draw(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def phi(x):
    return x + 1 if x > 0 else math.exp(x)


def by_loops(q, k, v, allowed, root):
    """The formula, one scalar at a time."""
    out = torch.zeros(len(q), v.shape[1], dtype=q.dtype)
    for i, row in enumerate(q):
        weights = [
            sum(phi(root * a) * phi(root * b) for a, b in zip(row, key, strict=True)) if allowed[i, j] else 0.0
            for j, key in enumerate(k)
        ]
        for weight, value in zip(weights, v, strict=True):
            if sum(weights) > 0:
                out[i] += weight / sum(weights) * value
    return out


@pytest.mark.parametrize("attention", FORMS)
@pytest.mark.parametrize("case", ["plain", "causal", "mask", "scale"])
def test_formula(attention, case):
    q, k, v = draw(4, 3), draw(4, 3, seed=1), draw(4, 2, seed=2)
    allowed = torch.ones(4, 4, dtype=torch.bool)
    kwargs = {}
    if case == "causal":
        allowed, kwargs = allowed.tril(), {"is_causal": True}
    if case == "mask":
        allowed = torch.tensor([True, False, True, False]).expand(4, 4)
        kwargs = {"attn_mask": allowed[:1]}
    if case == "scale":
        kwargs = {"scale": 0.3}
    expected = by_loops(q, k, v, allowed, math.sqrt(kwargs.get("scale", 1)))
    torch.testing.assert_close(attention(q, k, v, **kwargs), expected, **TOLERANCE)


def test_any_mask_in_the_reference():
    q, k, v = draw(4, 3), draw(4, 3, seed=1), draw(4, 2, seed=2)
    mask = torch.tensor([[1, 0, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 1]], dtype=torch.bool)
    o = linear_attention_reference(q, k, v, attn_mask=mask)
    torch.testing.assert_close(o, by_loops(q, k, v, mask, 1), **TOLERANCE)


def test_map():
    """elu(x) + 1, with all digits of small values, and a derivative that is continuous at 0, where padding lies."""
    x = torch.linspace(-5, 5, 101, dtype=torch.float64)
    torch.testing.assert_close(elu_plus_one(x), torch.nn.functional.elu(x) + 1, **TOLERANCE)
    small = torch.tensor([-30.0, -80.0])
    assert torch.equal(elu_plus_one(small), small.exp())
    assert torch.autograd.gradcheck(elu_plus_one, draw(9).requires_grad_())
    zero = torch.zeros(1, requires_grad=True)
    assert torch.autograd.grad(elu_plus_one(zero), zero)[0] == 1


def test_state():
    """S and z are the sums they are said to be."""
    q, k, v = draw(2, 70, 3), draw(2, 70, 3, seed=1), draw(2, 70, 4, seed=2)
    for causal in (False, True):
        _, (memory, total) = linear_attention(q, k, v, is_causal=causal, return_state=True)
        features = elu_plus_one(k)
        torch.testing.assert_close(memory, features.mT @ v, atol=1e-12, rtol=1e-12)
        torch.testing.assert_close(total, features.sum(-2), atol=1e-12, rtol=1e-12)


def test_linear_in_length():
    """Every part of the fast form's cost is linear in N, of the reference's quadratic; the state does not grow."""
    K, V = sp.symbols("K V", positive=True)
    for causal in (False, True):
        fast = linear_cost(B, N, H, K, V, causal=causal)
        reference = linear_cost(B, N, H, K, V, form="reference", causal=causal)
        for name in ("forward", "backward", "elementwise_forward", "elementwise_backward", "saved_bytes"):
            assert order(getattr(fast, name), N) == {N}
            assert order(getattr(reference, name), N) == {N**2}
        assert not {N} & (fast.decode.free_symbols | fast.state_bytes.free_symbols)


def test_products_by_hand():
    """2 (K + V + 1) C within the chunk, 4 K (V + 1) for the memory, a token; without the memory's, a single chunk."""
    assert linear_cost(1, 128, 1, 8, 7, causal=True).forward == 128 * (2 * (8 + 8) * CHUNK + 4 * 8 * 8)
    assert linear_cost(1, 128, 1, 8, 7).forward == 128 * 4 * 8 * 8
    assert linear_cost(1, 128, 1, 8, 7, form="reference").forward == 2 * 128**2 * (8 + 7)


@pytest.mark.parametrize("attention", FORMS)
def test_weights_out_of_range(attention):
    """Finite, or an error where a row's weights have left the range of the dtype, on either side; never NaN."""
    q, k, v = (draw(2, 20, 16, seed=s, dtype=torch.float32) for s in range(3))
    leaves = [(1e3 * x).requires_grad_() for x in (q, k, v)]
    o = attention(*leaves, is_causal=True)
    assert all(x.isfinite().all() for x in (o, *torch.autograd.grad(o.sum(), leaves)))
    with pytest.raises(ValueError, match=r"q, k: expected row sums of the torch.float32 weights within .* got 0 to"):
        attention(-1e3 * q.abs(), k, v)
    with pytest.raises(ValueError, match="q, k: expected row sums of the torch.float32 weights within .* to inf"):
        attention(1e20 * q, 1e20 * k, v)
