"""The random Synthesizer: its formula by loops, masks, cut and resume, what is trained, and its declared costs."""

import math
from dataclasses import fields
from itertools import product

import pytest
import sympy as sp
import torch
from torch.nn.functional import linear

from ortho import cost
from ortho.cost.big_o import N, d, order, symbolic
from ortho.cost.counting import Counts, count_forward, count_step
from ortho.synthesizer import SynthesizerAttention

# Sums of at most 1e2 rounded products of size 1 in float64, in different orders.
TOLERANCE = {"atol": 1e-13, "rtol": 1e-13}


def draw(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def layer(max_length=9, trained=True, **kwargs):
    g = torch.Generator().manual_seed(1)
    return SynthesizerAttention(12, 3, max_length, trained=trained, generator=g, dtype=torch.float64, **kwargs)


def by_loops(module, x, allowed):
    """A row of weights at a time: exp of its logits over the sum of those that it may attend to."""
    v = linear(x, module.weight_v)
    heads = torch.zeros_like(v)
    for b, h, i in product(range(x.shape[0]), range(3), range(x.shape[1])):
        weights = [math.exp(module.logits[h, i, j].item()) if allowed[b, h, i, j] else 0.0 for j in range(x.shape[1])]
        for j, weight in enumerate(weights):
            if sum(weights) > 0:
                heads[b, i, 4 * h : 4 * h + 4] += weight / sum(weights) * v[b, j, 4 * h : 4 * h + 4]
    return linear(heads, module.weight_o)


@pytest.mark.parametrize("case", ["plain", "causal", "heads", "items", "causal items"])
@pytest.mark.parametrize("length", [1, 6, 9])
def test_formula(case, length):
    module, x = layer(), draw(2, length, 12)
    allowed = torch.ones(2, 3, length, length, dtype=torch.bool)
    kwargs = {}
    if case == "heads":  # one mask a head, the same for the batch
        kwargs["attn_mask"] = draw(3, length, length, seed=2) > 0
    if "items" in case:
        kwargs["attn_mask"] = draw(2, 1, length, length, seed=3) > 0
    if "attn_mask" in kwargs:
        allowed = allowed & kwargs["attn_mask"]
    if "causal" in case:
        kwargs["is_causal"] = True
        allowed = allowed.tril()
    torch.testing.assert_close(module(x, **kwargs), by_loops(module, x, allowed), **TOLERANCE)


def test_gradients():
    module, x = layer(5), draw(2, 4, 12).requires_grad_()

    def function(x, logits, weight_v):
        parameters = {"logits": logits, "weight_v": weight_v, "weight_o": module.weight_o}
        return torch.func.functional_call(module, parameters, (x,), {"is_causal": True})

    assert torch.autograd.gradcheck(function, (x, module.logits, module.weight_v))


def test_what_is_trained():
    for trained in (True, False):
        module = layer(trained=trained)
        assert {name for name, _ in module.named_parameters()} == {"weight_v", "weight_o"} | (
            {"logits"} if trained else set()
        )
        assert set(module.state_dict()) == {"weight_v", "weight_o", "logits"}
        assert f"trained={trained}" in repr(module)
        torch.testing.assert_close(module(draw(1, 4, 12)), layer()(draw(1, 4, 12)), **TOLERANCE)  # the same draw


@pytest.mark.parametrize("causal", [False, True])
def test_the_future_and_the_batch(causal):
    """A causal prefix does not see what follows, bit for bit; items of a batch never see each other."""
    module, x = layer(), draw(3, 9, 12)
    y = module(x, is_causal=causal)
    for i in range(3):
        torch.testing.assert_close(module(x[i : i + 1], is_causal=causal)[0], y[i], **TOLERANCE)
    other = x.clone()
    other[:, 5:] *= 1e3
    assert torch.equal(module(other, is_causal=causal)[:, :5], y[:, :5]) is causal


def test_cut_equals_whole():
    module, x = layer(), draw(2, 9, 12)
    whole = module(x, is_causal=True)
    for cut in range(1, 9):
        head, state = module(x[:, :cut], is_causal=True, return_state=True)
        tail, (values,) = module(x[:, cut:], is_causal=True, initial_state=state, return_state=True)
        torch.testing.assert_close(torch.cat([head, tail], 1), whole, **TOLERANCE)
        assert values.shape == (2, 3, 9, 4)


def test_nothing_to_attend_to():
    """Zeros for such a row, and gradients without NaN, for logits of any size."""
    module, x = layer(), draw(2, 6, 12).requires_grad_()
    with torch.no_grad():
        module.logits.mul_(1e300)
    mask = torch.arange(6) > 3  # with is_causal, the first four rows have nothing
    y = module(x, attn_mask=mask, is_causal=True)
    assert torch.equal(y[:, :4], torch.zeros(2, 4, 12, dtype=torch.float64))
    assert y[:, 4:].any(-1).all()
    gradients = torch.autograd.grad(y.sum(), [x, *module.parameters()])
    assert all(g.isfinite().all() for g in gradients)


SIZES = [
    (1, 5, 8, 2, 5),
    (2, 7, 12, 3, 9),
    (3, 16, 16, 1, 16),
    (1, 1, 4, 4, 1),
    (2, 1, 4, 4, 6),
]  # B, N, d, H, L
COUNTED = [f.name for f in fields(Counts) if f.compare]


@pytest.mark.parametrize(("trained", "causal", "input_grad"), list(product([True, False], repeat=3)))
def test_declared_costs(trained, causal, input_grad):
    for (batch, length, width, heads, longest), dtype in product(SIZES, [torch.float32, torch.float64]):
        module = SynthesizerAttention(width, heads, longest, trained=trained, dtype=dtype)
        x = torch.zeros(batch, length, width, dtype=dtype, requires_grad=input_grad)
        counts = count_step(module, x, is_causal=causal)
        variant = {"max_length": longest, "trained": trained, "causal": causal, "input_grad": input_grad}
        declared = cost.synthesizer(batch, length, width, heads, itemsize=x.element_size(), **variant)
        assert {n: getattr(counts, n) for n in COUNTED} == {n: getattr(declared, n) for n in COUNTED}


def test_decode():
    module, state = SynthesizerAttention(12, 3, 5), None
    for length in range(1, 6):
        x = torch.zeros(2, 1, 12)
        declared = cost.synthesizer(2, length, 12, 3)
        assert count_forward(module, x, is_causal=True, initial_state=state)[0] == declared.decode
        _, state = module(x, is_causal=True, initial_state=state, return_state=True)
        assert state[0].numel() * 4 == declared.state_bytes


def test_orders():
    """Quadratic in N like the standard layer, with H N^2 parameters in place of 2 d^2."""
    form = symbolic(cost.synthesizer)
    assert order(form.forward) == order(form.backward) == {N * d**2, N**2 * d}
    assert sp.expand(form.trained - 2 * d**2) == sp.Symbol("H", positive=True) * N**2
    assert sp.expand(form.forward - 4 * N * d**2 - 2 * N**2 * d) == 0


BAD = [
    (lambda m, x: SynthesizerAttention(12, 5, 9), ValueError, "num_heads: expected a divisor of d_model = 12, got 5"),
    (lambda m, x: SynthesizerAttention(12, 3, 0), ValueError, "max_length: expected an integer of at least 1, got 0"),
    (lambda m, x: m(x[..., :4]), ValueError, r"x: expected shape \(B, N, 12\) with B, N >= 1, got \(2, 6, 4\)"),
    (lambda m, x: m(x.float()), TypeError, "x: expected torch.float64 like the weights, got torch.float32"),
    (lambda m, x: m(torch.cat([x, x], 1)), ValueError, "x: expected at most 9 tokens, got 12"),
    (lambda m, x: m(x, attn_mask=torch.ones(6, 6)), TypeError, "attn_mask: expected a boolean tensor"),
    (
        lambda m, x: m(x, attn_mask=torch.ones(5, 6, dtype=torch.bool)),
        ValueError,
        r"attn_mask: expected a shape that broadcasts to \(2, 3, 6, 6\), got \(5, 6\)",
    ),
    (
        lambda m, x: m(x, initial_state=(x,)),
        ValueError,
        r"initial_state: expected torch.float64 values of shape \(2, 3, P, 4\), got.*\(2, 6, 12\)",
    ),
]


@pytest.mark.bad_input
@pytest.mark.parametrize(("call", "error", "message"), BAD)
def test_errors(call, error, message):
    with pytest.raises(error, match=message):
        call(layer(), draw(2, 6, 12))
