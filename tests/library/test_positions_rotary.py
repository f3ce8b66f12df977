"""Rotary positions: the turned softmax against the formula in complex numbers, and what makes scores relative."""

import cmath
import math

import pytest
import torch

from ortho.attention.positions.rotary import angles, rotary_attention, rotary_attention_reference, turn

FORMS = [rotary_attention_reference, rotary_attention]
# Sums of some 10 products rounded in float64, behind exponentials of scores below 10.
TOLERANCE = {"atol": 1e-13, "rtol": 1e-13}


def draw(*shape, seed=0, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=g, dtype=dtype)


def by_loops(q, k, v, causal, base=10000.0):
    """Plane c of a vector is a complex number; a score is the real part of q conj(k) e^{i (i - j) theta}."""
    K = q.shape[1]
    planes = K // 2
    out = torch.zeros(len(q), v.shape[1], dtype=q.dtype)
    for i in range(len(q)):
        weights = []
        for j in range(len(k)):
            score = float(q[i, -1] * k[j, -1]) if K % 2 else 0.0
            for c in range(planes):
                of_q, of_k = complex(q[i, c], q[i, c + planes]), complex(k[j, c], k[j, c + planes])
                score += (of_q * of_k.conjugate() * cmath.exp(1j * (i - j) * base ** (-2 * c / (2 * planes)))).real
            weights.append(math.exp(score / math.sqrt(K)) if j <= i or not causal else 0.0)
        for j, weight in enumerate(weights):
            out[i] += weight / sum(weights) * v[j]
    return out


@pytest.mark.parametrize("attention", FORMS)
@pytest.mark.parametrize("width", [1, 2, 3, 6])
@pytest.mark.parametrize("causal", [False, True])
def test_formula(attention, width, causal):
    q, k, v = (draw(7, width, seed=s) for s in range(3))
    torch.testing.assert_close(attention(q, k, v, is_causal=causal), by_loops(q, k, v, causal), **TOLERANCE)


@pytest.mark.parametrize("attention", FORMS)
def test_base(attention):
    q, k, v = (draw(7, 4, seed=s) for s in range(3))
    torch.testing.assert_close(attention(q, k, v, base=10.0), by_loops(q, k, v, False, base=10.0), **TOLERANCE)


def test_scores_depend_on_the_distance_alone():
    """The same two vectors everywhere: along each diagonal of the scores stands one number."""
    q, k = draw(8), draw(8, seed=1)
    table = angles(1000, 1020, 8)
    turned = [turn(x.expand(20, 8), table.cos(), table.sin()) for x in (q, k)]
    scores = turned[0] @ turned[1].T
    assert len({round(float(x), 10) for x in scores.flatten()}) == 39
    for distance in range(-19, 20):
        diagonal = scores.diagonal(distance)
        assert (diagonal - diagonal[0]).abs().max() < 1e-11  # angles near 7000 are rounded to 1e-12


def test_turning_keeps_lengths():
    x, table = draw(3, 9, 7), angles(5, 14, 7)
    turned = turn(x, table.cos(), table.sin())
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1), **TOLERANCE)
    assert torch.equal(turned[..., -1], x[..., -1])  # the odd channel


@pytest.mark.parametrize("attention", FORMS)
def test_far_positions_in_float32(attention):
    """Behind 100,000 keys angles in float32 would be 0.004 off; the state of one key stands for all of them here."""
    q, k, v = (draw(3, 8, seed=s, dtype=torch.float32) for s in range(3))
    past = tuple(torch.zeros(100_000, 8) for _ in range(2))
    mask = torch.cat([torch.zeros(3, 100_000, dtype=torch.bool), torch.ones(3, 3, dtype=torch.bool)], -1)
    far = attention(q, k, v, initial_state=past, attn_mask=mask)
    torch.testing.assert_close(far, attention(q, k, v), atol=1e-5, rtol=0)  # some 100 eps


@pytest.mark.parametrize("attention", FORMS)
def test_half_precision_is_turned_in_float32(attention):
    q, k, v = (draw(2, 16, 8, seed=s) for s in range(3))
    o = attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), is_causal=True)
    exact = rotary_attention_reference(q, k, v, is_causal=True)
    assert o.dtype == torch.bfloat16
    assert (o - exact).abs().max() < 4 * v.abs().max() * torch.finfo(torch.bfloat16).eps * 2  # scores of up to 4


@pytest.mark.bad_input
@pytest.mark.parametrize("attention", FORMS)
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"q": 3}, TypeError, "q: expected a floating-point tensor, got int 3"),
        ({"k": draw(2, 5, 3)}, ValueError, "k: expected width 4 like q"),
        ({"k": draw(2, 5, 4) / 0}, ValueError, "k: expected finite numbers"),
        ({"base": 0.0}, ValueError, "base: expected a positive finite number, got float 0.0"),
        ({"base": None}, TypeError, "base: expected a number, got NoneType None"),
        ({"initial_state": 5}, TypeError, r"initial_state: expected a tuple of tensors \(keys, values\)"),
        ({"scale": "1"}, TypeError, "scale: expected a number"),
    ],
)
def test_errors(attention, change, error, message):
    operands = {name: draw(2, 5, 4, seed=s) for s, name in enumerate("qkv")} | change
    with pytest.raises(error, match=message):
        attention(**operands)
