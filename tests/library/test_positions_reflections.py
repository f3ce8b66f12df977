"""PaTH and position DeltaNet: products of matrices by loops, blocks of any size, states, masks, what they reduce to."""

import math
from functools import partial
from itertools import product

import pytest
import torch
from seeded import draw

from ortho.attention import softmax_attention_reference
from ortho.attention.position_bias.path_attention import (
    path_attention,
    path_attention_reference,
)
from ortho.attention.position_bias.position_delta import position_delta_attention, position_delta_attention_reference

PATH = [path_attention_reference, path_attention, partial(path_attention, block=3)]
BIAS = [position_delta_attention_reference, position_delta_attention, partial(position_delta_attention, block=3)]
# Sums of about 100 rounded products, the largest about 10, through systems whose inverses have entries of at most 4: an
# error of about 1e-13. A wrong term would show at 1e-2.
close = partial(torch.testing.assert_close, atol=1e-12, rtol=1e-12)


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
        close(o[head], (products_by_loops(q, k, w, b) / math.sqrt(4)).softmax(-1) @ v)


@pytest.mark.parametrize("attention", BIAS)
@pytest.mark.parametrize("length", [1, 2, 8])
def test_position_delta_formula(attention, length):
    given = operands(2, length=length, bias=2)
    o = attention(**given, is_causal=True, scale=0.3)
    for head in range(2):
        mine = {name: x[head] for name, x in given.items()}
        bias = products_by_loops(mine["bias_queries"], mine["bias_keys"], mine["directions"], mine["beta"])
        close(o[head], (0.3 * mine["q"] @ mine["k"].T + bias / math.sqrt(2)).softmax(-1) @ mine["v"])


@pytest.mark.parametrize(("forms", "bias"), [(PATH, None), (BIAS, 2)])
def test_masks_of_pairs_are_refused(forms, bias):
    """Masks of pairs are refused since later rows of them would change what earlier rows see."""
    given = operands(2, 3, length=10, bias=bias)
    mask = draw(2, 1, 10, 10, seed=40) > -0.3
    for f, attn_mask in product(forms, (mask, mask[0, 0])):
        with pytest.raises(ValueError, match=r"^attn_mask: expected a mask of keys, of shape \(..., 1, 10\), got"):
            f(**given, is_causal=True, attn_mask=attn_mask)
        with pytest.raises(ValueError, match="^attn_mask: expected a mask of keys"):
            f(given["q"], given["k"], given["v"], is_causal=True, attn_mask=attn_mask)


@pytest.mark.parametrize("attention", [*PATH, *BIAS])
def test_defaults(attention):
    """Without directions, and without bias vectors, it is softmax attention; strengths are 1."""
    given = operands(2, length=9, bias=2 if attention in BIAS else None)
    ones = given | {"beta": torch.ones(2, 9, dtype=torch.float64)}
    del given["beta"]
    assert torch.equal(attention(**given, is_causal=True), attention(**ones, is_causal=True))
    q, k, v = (given[name] for name in "qkv")
    close(attention(q, k, v, is_causal=True), softmax_attention_reference(q, k, v, is_causal=True))


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
        (
            {"initial_state": (draw(2, 3, 4), draw(2, 3, 3), draw(2, 3, 3))},
            r"initial_state: expected bias keys torch.float64 of shape \(2, 3, 2\)",
        ),
    ],
)
def test_bias_errors(attention, wrong, message):
    with pytest.raises(ValueError, match=message):
        attention(**operands(2, length=5, bias=2) | {"is_causal": True} | wrong)
