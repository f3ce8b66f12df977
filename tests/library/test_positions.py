"""Rotary positions, ALiBi and forgetting attention: their formulas by loops, their limits. PaTH and
position DeltaNet: products of matrices by loops, what they reduce to."""

import cmath
import math
from functools import partial

import pytest
import torch
from by_loops import averaged
from seeded import draw

from ortho.attention import softmax_attention_reference
from ortho.attention.position_bias.alibi import alibi_attention, alibi_attention_reference, slopes
from ortho.attention.position_bias.forgetting_transformer import forgetting_attention, forgetting_attention_reference
from ortho.attention.position_bias.path_attention import path_attention, path_attention_reference
from ortho.attention.position_bias.position_delta import position_delta_attention, position_delta_attention_reference
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
        ({"initial_state": (draw(2, 3, 4), draw(2, 3, 4), gates(2, 2))}, r"initial_state: expected faded torch.float"),
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


# ---------------------------------------------------------------------------------------------- products of reflections

PATH = [path_attention_reference, path_attention, partial(path_attention, block=3)]
BIAS = [position_delta_attention_reference, position_delta_attention, partial(position_delta_attention, block=3)]
# Sums of about 100 rounded products, the largest about 10, through systems whose inverses have entries of at most 4: an
# error of about 1e-13. A wrong term would show at 1e-2.
near = partial(torch.testing.assert_close, atol=1e-12, rtol=1e-12)


def strengths(*shape, seed=5):
    """Write strengths from all of [0, 2], its ends included."""
    return (1 + 0.8 * draw(*shape, seed=seed)).clamp(0, 2)


def operands(*lead, length, width=4, values=3, bias=None, seed=0):
    """All that a call is given, by name; with a `bias` width for position DeltaNet."""
    D = width if bias is None else bias
    widths = {"q": width, "k": width, "v": values, "directions": D}
    widths |= {} if bias is None else {"bias_queries": D, "bias_keys": D}
    given = {name: draw(*lead, length, w, seed=10 * seed + i) for i, (name, w) in enumerate(widths.items())}
    return given | {"beta": strengths(*lead, length, seed=10 * seed + 9)}


def products_by_loops(q, k, directions, beta):
    """Entry (i, j) is k_j^T H_{j+1} ... H_i q_i, with every H_t = I - b w w^T multiplied out."""
    length, width = q.shape
    scores = torch.full((length, length), -math.inf, dtype=q.dtype)
    for i in range(length):
        for j in range(i + 1):
            product = torch.eye(width, dtype=q.dtype)
            for t in range(j + 1, i + 1):
                w = directions[t] / math.sqrt(float(directions[t] @ directions[t]) + 1e-6)
                product = product @ (torch.eye(width, dtype=q.dtype) - beta[t] * torch.outer(w, w))
            scores[i, j] = k[j] @ product @ q[i]
    return scores


@pytest.mark.parametrize("attention", PATH)
@pytest.mark.parametrize("length", [1, 2, 8])
def test_path_formula(attention, length):
    given = operands(2, length=length)
    o = attention(**given, is_causal=True)
    for head in range(2):
        q, k, v, w, b = (given[name][head] for name in ("q", "k", "v", "directions", "beta"))
        near(o[head], (products_by_loops(q, k, w, b) / math.sqrt(4)).softmax(-1) @ v)


@pytest.mark.parametrize("attention", BIAS)
@pytest.mark.parametrize("length", [1, 2, 8])
def test_position_delta_formula(attention, length):
    given = operands(2, length=length, bias=2)
    o = attention(**given, is_causal=True, scale=0.3)
    for head in range(2):
        mine = {name: x[head] for name, x in given.items()}
        bias = products_by_loops(mine["bias_queries"], mine["bias_keys"], mine["directions"], mine["beta"])
        near(o[head], (0.3 * mine["q"] @ mine["k"].T + bias / math.sqrt(2)).softmax(-1) @ mine["v"])


@pytest.mark.parametrize("attention", [*PATH, *BIAS])
def test_defaults(attention):
    """Without directions, and without bias vectors, it is softmax attention; strengths are 1."""
    given = operands(2, length=9, bias=2 if attention in BIAS else None)
    ones = given | {"beta": torch.ones(2, 9, dtype=torch.float64)}
    del given["beta"]
    assert torch.equal(attention(**given, is_causal=True), attention(**ones, is_causal=True))
    q, k, v = (given[name] for name in "qkv")
    near(attention(q, k, v, is_causal=True), softmax_attention_reference(q, k, v, is_causal=True))


@pytest.mark.parametrize("attention", PATH[:2])
@pytest.mark.parametrize("beta", [1.0, 2.0])
def test_one_direction_in_float32(attention, beta):
    """The hardest triangular system has the same direction at all 512 tokens: beta = 2 turns a key round at every
    token. 64 keys of the same direction give a condition number of 6,600; the products themselves keep lengths."""
    q, k, v = (draw(512, 8, seed=s) for s in range(3))
    w, b = draw(1, 8, seed=3).expand(512, 8), torch.full((512,), beta, dtype=torch.float64)
    exact = path_attention_reference(q, k, v, directions=w, beta=b, is_causal=True)
    o = attention(q.float(), k.float(), v.float(), directions=w.float(), beta=b.float(), is_causal=True)
    # A score of up to 20 gathers up to 512 roundings of 6e-8, at random 3e-5; values are below 4.
    torch.testing.assert_close(o.double(), exact, atol=2e-4, rtol=0)


@pytest.mark.bad_input
@pytest.mark.parametrize(("attention", "bias"), [*((f, None) for f in PATH[:2]), *((f, 2) for f in BIAS[:2])])
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"is_causal": False}, "is_causal: expected True, since tokens reflect the keys before them"),
        ({"beta": strengths(2, 5) + 2}, "beta: expected strengths of reflections within 0 and 2"),
        ({"beta": strengths(2, 4)}, r"beta: expected shape \(2, 5\) like the keys, got \(2, 4\)"),
        ({"directions": None}, "beta: expected None without directions"),
        ({"directions": draw(2, 5, 7)}, r"directions: expected shape \(2, 5, [24]\) like the keys"),
    ],
)
def test_errors(attention, bias, wrong, message):
    with pytest.raises(ValueError, match=message):
        attention(**operands(2, length=5, bias=bias) | {"is_causal": True} | wrong)


@pytest.mark.bad_input
@pytest.mark.parametrize("attention", BIAS)
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"bias_keys": None}, "bias_keys: expected a tensor beside the other part of the bias, got None"),
        ({"bias_queries": None}, "bias_queries: expected a tensor beside the other part of the bias, got None"),
        ({"bias_keys": draw(2, 5, 3)}, r"bias_keys: expected shape \(2, 5, 2\) like the keys, got \(2, 5, 3\)"),
        ({"initial_state": (draw(2, 3, 4), draw(2, 3, 3), draw(2, 3, 3))}, r"initial_state: expected bias keys torch"),
    ],
)
def test_bias_errors(attention, wrong, message):
    with pytest.raises(ValueError, match=message):
        attention(**operands(2, length=5, bias=2) | {"is_causal": True} | wrong)
