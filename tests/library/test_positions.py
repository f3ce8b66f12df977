"""Rotary positions, ALiBi and forgetting attention: their formulas by loops, what makes scores relative, limits."""

import cmath
import math
from functools import partial

import pytest
import torch
from by_loops import averaged
from seeded import draw

from ortho.attention.position_bias.alibi import alibi_attention, alibi_attention_reference, slopes
from ortho.attention.position_bias.forgetting_transformer import forgetting_attention, forgetting_attention_reference
from ortho.attention.position_bias.rotary import rotary_attention, rotary_attention_reference

ROTARY = [rotary_attention_reference, rotary_attention]
ALIBI = [alibi_attention_reference, alibi_attention, partial(alibi_attention, tile=3)]
FOX = [forgetting_attention_reference, forgetting_attention, partial(forgetting_attention, tile=3)]
# Sums of about 10 products rounded in float64, after exponentials of scores below 10.
TOLERANCE = {"atol": 1e-13, "rtol": 1e-13}
close = partial(torch.testing.assert_close, **TOLERANCE)


def gates(*shape, seed=9, dtype=torch.float64, size=1.0):
    return -size * torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def biased(q, k, v, bias, allowed):
    """Softmax attention of one head with bias(i, j)."""
    score = lambda i, j: float(q[i] @ k[j]) / math.sqrt(q.shape[1]) + bias(i, j)  # noqa: E731
    return averaged(lambda i, j: math.exp(score(i, j)), v, allowed)


def test_slopes():
    """The published slopes: 1/2, ..., 1/256 for 8 heads; for 12 heads these and every second one of 16 heads."""
    assert slopes(8) == [2.0**-h for h in range(1, 9)]
    assert slopes(1) == [2.0**-8]
    assert slopes(12) == [*slopes(8), 2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5]
    assert slopes(3) == [2.0**-4, 2.0**-8, 2.0**-2]


@pytest.mark.parametrize("attention", ALIBI)
@pytest.mark.parametrize("causal", [False, True])
def test_alibi_formula(attention, causal):
    q, k, v = (draw(2, 3, 7, 4, seed=s) for s in range(3))
    o = attention(q, k, v, is_causal=causal)
    allowed = torch.ones(7, 7).tril() if causal else torch.ones(7, 7)
    for item in range(2):
        for head, slope in enumerate(slopes(3)):
            here = (item, head)
            expected = biased(q[here], k[here], v[here], lambda i, j, m=slope: -m * abs(i - j), allowed)
            close(o[here], expected)


@pytest.mark.parametrize("attention", ALIBI)
def test_alibi_with_keys_of_another_sequence(attention):
    """Queries and keys count from 0, whichever are more; after a state both go on from its end."""
    for N, M in ((5, 7), (7, 5)):
        q, k, v = draw(N, 4), draw(M, 4, seed=1), draw(M, 4, seed=2)
        close(attention(q, k, v), biased(q, k, v, lambda i, j: -(2**-8) * abs(i - j), torch.ones(N, M)))
        past = draw(3, 4, seed=3), draw(3, 4, seed=4)
        keys, values = (torch.cat(pair) for pair in zip(past, (k, v), strict=True))
        expected = biased(q, keys, values, lambda i, j: -(2**-8) * abs(i + 3 - j), torch.ones(N, M + 3))
        close(attention(q, k, v, initial_state=past), expected)


@pytest.mark.parametrize("attention", FOX)
@pytest.mark.parametrize("causal", [False, True])
def test_forgetting_formula(attention, causal):
    """The bias is the sum of the gates' logarithms after the earlier of the two tokens, up to the later one."""
    q, k, v, log_f = *(draw(7, 4, seed=s) for s in range(3)), gates(7)
    allowed = torch.ones(7, 7).tril() if causal else torch.ones(7, 7)
    expected = biased(q, k, v, lambda i, j: float(log_f[min(i, j) + 1 : max(i, j) + 1].sum()), allowed)
    close(attention(q, k, v, log_forget=log_f, is_causal=causal), expected)


@pytest.mark.parametrize("attention", FOX[:2])
@pytest.mark.parametrize("causal", [False, True])
def test_large_decays_in_float32(attention, causal):
    """Depths of 4e6 beside distances of 0 give float64's outputs. (Subtracted in float32 they would be wrong by 0.2
    here.) A score is rounded by about 10 eps, and an output with it by about 1e-5, for values below 5."""
    q, k, v = (draw(300, 8, seed=s) for s in range(3))
    log_f = torch.cat([torch.full((150,), -3e4), gates(150, dtype=torch.float32, size=0.1)])
    exact = forgetting_attention_reference(q, k, v, log_forget=log_f.double(), is_causal=causal)
    o = attention(q.float(), k.float(), v.float(), log_forget=log_f, is_causal=causal)
    torch.testing.assert_close(o.double(), exact, atol=2e-5, rtol=0)


@pytest.mark.parametrize("attention", ALIBI[:2])
def test_a_long_sequence_in_float32(attention):
    """With the slope 1/16 over 2048 tokens, at depths of up to 128."""
    q, k, v = (draw(2, 2048, 8, seed=s) for s in range(3))
    exact = attention(q, k, v, is_causal=True)
    o = attention(q.float(), k.float(), v.float(), is_causal=True)
    torch.testing.assert_close(o.double(), exact, atol=2e-5, rtol=0)


@pytest.mark.parametrize("attention", FOX)
def test_gates_at_their_limit_stay_finite(attention):
    """Everything is forgotten at every token, over several calls: each query is left with its own key."""
    q, k, v = (draw(6, 4, seed=s, dtype=torch.float32) for s in range(3))
    log_f = torch.full((6,), torch.finfo(torch.float32).min / 6).requires_grad_()
    state, parts = None, []
    for _ in range(3):
        o, state = attention(q, k, v, log_forget=log_f, is_causal=True, initial_state=state, return_state=True)
        parts.append(o)
    assert all(torch.equal(part, v) for part in parts)
    assert all(x.isfinite().all() for x in state)
    (gradient,) = torch.autograd.grad(sum(parts).sum(), log_f)
    assert gradient.isfinite().all()


@pytest.mark.bad_input
@pytest.mark.parametrize("attention", FOX[:2])
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"log_forget": gates(2, 4)}, r"log_forget: expected shape \(2, 5\) like the keys, got \(2, 4\)"),
        ({"log_forget": -gates(2, 5)}, "log_forget: expected logarithms of forget gates within"),
        ({"log_forget": torch.full((2, 5), -1e308, dtype=torch.float64)}, "log_forget: expected logarithms"),
        ({"is_causal": True, "attn_mask": torch.ones(5, 5) > 0}, "attn_mask: expected a mask of keys"),
        ({"q": draw(2, 3, 4)}, "q: expected as many queries as keys, 5, got 3"),
        (
            {"initial_state": (draw(2, 3, 4), draw(2, 3, 4), gates(2, 2))},
            r"initial_state: expected faded torch.float64 of shape \(2, 3\)",
        ),
    ],
)
def test_fox_errors(attention, wrong, message):
    given = {name: draw(2, 5, 4, seed=s) for s, name in enumerate("qkv")}
    with pytest.raises(ValueError, match=message):
        attention(**given | wrong)


def turned(q, k, v, causal, base=10000.0):
    """Plane c of a vector is a complex number; a score is the real part of q conj(k) e^{i (i - j) theta}."""
    planes = q.shape[1] // 2

    def weight(i, j):
        score = float(q[i, -1] * k[j, -1]) if q.shape[1] % 2 else 0.0
        for c in range(planes):
            of_q, of_k = complex(q[i, c], q[i, c + planes]), complex(k[j, c], k[j, c + planes])
            score += (of_q * of_k.conjugate() * cmath.exp(1j * (i - j) * base ** (-2 * c / (2 * planes)))).real
        return math.exp(score / math.sqrt(q.shape[1]))

    pairs = torch.ones(len(q), len(k))
    return averaged(weight, v, pairs.tril() if causal else pairs)


@pytest.mark.parametrize("attention", ROTARY)
@pytest.mark.parametrize("width", [1, 2, 3, 6])
@pytest.mark.parametrize(("causal", "base"), [(False, 10000.0), (True, 10000.0), (False, 10.0)])
def test_rotary_formula(attention, width, causal, base):
    q, k, v = (draw(7, width, seed=s) for s in range(3))
    close(attention(q, k, v, is_causal=causal, base=base), turned(q, k, v, causal, base))


@pytest.mark.parametrize("attention", ROTARY)
def test_far_positions_in_float32(attention):
    """After 100,000 keys, angles in float32 would be off by 0.004. The state's keys are zeros here, and masked."""
    q, k, v = (draw(3, 8, seed=s, dtype=torch.float32) for s in range(3))
    past = tuple(torch.zeros(100_000, 8) for _ in range(2))
    mask = torch.cat([torch.zeros(3, 100_000, dtype=torch.bool), torch.ones(3, 3, dtype=torch.bool)], -1)
    far = attention(q, k, v, initial_state=past, attn_mask=mask)
    torch.testing.assert_close(far, attention(q, k, v), atol=1e-5, rtol=0)  # about 100 eps
