"""Layers with fixed heads beside learned ones: by their formula, cuts, masks, what is trained; sinusoidal positions."""

import math
from functools import partial

import pytest
import torch
from torch.nn.functional import linear

from ortho import PROJECTIONS, MultiheadAttention
from ortho.attention.positional.attention import SEVEN
from ortho.attention.positional.gaussian import Gaussian
from ortho.positional_layers import PositionalAttention, sinusoidal_positions

# Sums of at most 1e2 rounded products of size 1 in float64, in different orders.
close = partial(torch.testing.assert_close, atol=1e-12, rtol=0)
SPLITS = [(), ("left",), ("previous", "next", "start"), ("previous", "current", Gaussian("", 0.5, 2.0, True), "end")]
MECHANISMS = ("softmax", "linear", "favor", "rotary")  # in which all heads are alike


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def layer(patterns=SPLITS[2], **kwargs):
    g = torch.Generator().manual_seed(1)
    return PositionalAttention(12, 4, patterns, generator=g, dtype=torch.float64, **kwargs)


def test_by_its_formula():
    """Seven matrices and a softmax, each times its own values, side by side, times W_O."""
    module = PositionalAttention(16, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert module.patterns == SEVEN
    x = draw(2, 6, 16)
    v = linear(x, module.weight_v)
    scores = linear(x, module.projection.weight_q) @ linear(x, module.projection.weight_k).mT / math.sqrt(2)
    matrices = [*(p.weights(6).expand(2, 6, 6) for p in SEVEN), scores.softmax(-1)]
    heads = [matrix @ v[..., 2 * h : 2 * h + 2] for h, matrix in enumerate(matrices)]
    close(module(x), torch.cat(heads, -1) @ module.weight_o.T)


@pytest.mark.parametrize("projection", PROJECTIONS)
@pytest.mark.parametrize("patterns", SPLITS, ids=len)
def test_what_is_trained(patterns, projection):
    """Queries and keys of the learned heads alone; of frozen projections the rows are orthonormal."""
    module, rows = layer(patterns, projection=projection), 3 * (4 - len(patterns))
    parameters = {name: tuple(p.shape) for name, p in module.named_parameters()}
    expected = {"weight_v": (12, 12), "weight_o": (12, 12)}
    of_heads = {f"projection.weight_{x}": (rows, 12) for x in "qk"} if rows else {}
    assert parameters == (expected | of_heads if projection == "learned" else expected)
    assert {name: tuple(t.shape) for name, t in module.state_dict().items()} == expected | of_heads
    if rows and projection != "learned":
        weight = module.projection.weight_q
        close(weight @ weight.T, torch.eye(rows, dtype=torch.float64))


@pytest.mark.parametrize("projection", PROJECTIONS)
@pytest.mark.parametrize("attention", MECHANISMS)
def test_learned_heads_are_the_layer_s(attention, projection):
    """Without patterns it is `MultiheadAttention`; with some, the other heads are those of that layer."""
    kwargs = {"projection": projection, "attention": attention, "dtype": torch.float64}
    whole = MultiheadAttention(12, 4, generator=torch.Generator().manual_seed(1), **kwargs)
    x = draw(2, 7, 12)
    none = PositionalAttention(12, 4, (), generator=torch.Generator().manual_seed(1), **kwargs)
    close(none(x, is_causal=True), whole(x, is_causal=True))
    some = PositionalAttention(12, 4, ("previous", "left"), generator=torch.Generator().manual_seed(1), **kwargs)
    with torch.no_grad():
        for module in (some, whole):
            module.weight_o[:, :6] = 0
    close(some(x, is_causal=True), whole(x, is_causal=True))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("patterns", SPLITS, ids=len)
def test_both_forms(patterns, causal):
    """Outputs and all gradients, with masks of keys and words."""
    x, upstream = draw(2, 9, 12), draw(2, 9, 12, seed=1)
    kwargs = {"attn_mask": draw(2, 1, 1, 9, seed=2) > -1, "is_causal": causal}
    if patterns:
        kwargs["words"] = torch.tensor([0, 0, 1, 2, 2, 2, 3, 4, 4]).expand(2, 9)
    results = []
    for form in ("reference", "fast"):
        module, leaf = layer(patterns, form=form, empty="self"), x.clone().requires_grad_()
        y = module(leaf, **kwargs)
        results.append((y, *torch.autograd.grad(y, [leaf, *module.parameters()], upstream)))
    for reference, fast in zip(*results, strict=True):
        close(fast, reference)


@pytest.mark.parametrize("attention", ["softmax", "linear", "alibi"])
@pytest.mark.parametrize("form", ["reference", "fast"])
@pytest.mark.parametrize("patterns", SPLITS, ids=len)
def test_cut_equals_whole_and_the_future_leaves_the_prefix(patterns, form, attention):
    module, x = layer(patterns, form=form, attention=attention), draw(2, 9, 12)
    whole = module(x, is_causal=True)
    for cut in range(1, 9):
        head, state = module(x[:, :cut], is_causal=True, return_state=True)
        tail, _ = module(x[:, cut:], is_causal=True, initial_state=state, return_state=True)
        close(torch.cat([head, tail], 1), whole)
        other = torch.cat([x[:, :cut], 30 * x[:, cut:]], 1)
        assert torch.equal(module(other, is_causal=True)[:, :cut], whole[:, :cut])


def test_masks():
    """Of keys, for all heads or for each: what is masked is not there, for a pattern and for a learned head."""
    module, x = layer(("previous", "end", "start")), draw(2, 8, 12)
    there = torch.tensor([True, False, True, True, False, True, True, False])
    close(module(x, attn_mask=there)[:, there], module(x[:, there]))
    close(module(x, attn_mask=there.expand(2, 4, 1, 8))[:, there], module(x[:, there]))
    of_heads = torch.ones(2, 4, 1, 8, dtype=torch.bool)
    of_heads[:, 3] = there  # of the learned head alone
    difference = module(x, attn_mask=of_heads) - module(x)
    with torch.no_grad():
        module.weight_o[:, 9:] = 0
    assert difference.abs().max() > 1e-3
    close(module(x, attn_mask=of_heads), module(x))


def test_the_empty_rows_policy():
    module, x = layer(SEVEN[:4]), draw(1, 1, 12)  # one token: current is itself, and three have nothing
    module_self = layer(SEVEN[:4], empty="self")
    v = linear(x, module.weight_v)
    close(module_self(x), linear(v, module.weight_o))
    v[..., 3:] = 0
    close(module(x), linear(v, module.weight_o))
    assert "patterns=(current, previous, next, left)" in repr(module) and "empty='self'" in repr(module_self)


BAD = [
    (lambda m, x: PositionalAttention(12, 5), ValueError, "num_heads: expected a divisor of d_model = 12, got 5"),
    (lambda m, x: PositionalAttention(12, 4), ValueError, "patterns: expected at most num_heads = 4, got 7"),
    (lambda m, x: layer("previous"), TypeError, "patterns: expected a sequence of positional patterns, got str"),
    (lambda m, x: layer(("last",)), ValueError, "patterns: expected one of 'current'.*, got 'last'"),
    (lambda m, x: layer(attention="delta"), ValueError, "attention: expected a mechanism without gates, got 'delta'"),
    (lambda m, x: layer(attention="flush"), ValueError, "attention: expected one of 'softmax'.*, got 'flush'"),
    (lambda m, x: layer(projection="haar"), ValueError, "projection: expected one of 'learned'.*, got 'haar'"),
    (lambda m, x: layer(form="slow"), ValueError, "form: expected one of 'reference', 'fast', got 'slow'"),
    (lambda m, x: layer(empty="one"), ValueError, "empty: expected one of 'zero', 'self', got 'one'"),
    (lambda m, x: m(x[..., :4]), ValueError, r"x: expected shape \(B, N, 12\) with B, N >= 1, got \(2, 6, 4\)"),
    (lambda m, x: m(x.float()), TypeError, "x: expected torch.float64 like the weights, got torch.float32"),
    (lambda m, x: m(x, words=torch.zeros(6).long()), ValueError, r"words: expected shape \(2, 6\), got \(6,\)"),
    (lambda m, x: layer(())(x, words=torch.zeros(2, 6).long()), ValueError, "words: expected None in a layer without"),
    (lambda m, x: m(x, attn_mask=x > 0), ValueError, "attn_mask: expected a shape that broadcasts to"),
    (lambda m, x: m(x, attn_mask=torch.ones(6, 6).bool()), ValueError, "attn_mask: expected a mask of keys"),
    (
        lambda m, x: m(x, is_causal=True, initial_state=x),
        TypeError,
        "initial_state: expected a tuple of tensors, got a",
    ),
    (lambda m, x: m(x, is_causal=True, initial_state=(x, x)), ValueError, "initial_state: expected a tuple of tensors"),
    (lambda m, x: m(x, return_state=True), ValueError, "return_state: expected none in a call that is not causal"),
    (lambda m, x: sinusoidal_positions(0, 4), ValueError, "n: expected an integer of at least 1, got 0"),
    (lambda m, x: sinusoidal_positions(4, 2.0), TypeError, "d: expected an integer of at least 1, got float 2.0"),
    (lambda m, x: sinusoidal_positions(4, 2, start=-1), ValueError, "start: expected an integer of at least 0, got -1"),
    (lambda m, x: sinusoidal_positions(4, 2, start=0.5), TypeError, "start: expected an integer of at least 0, got fl"),
    (lambda m, x: sinusoidal_positions(4, 2, dtype=torch.long), TypeError, "dtype: expected a floating-point type"),
]


@pytest.mark.bad_input
@pytest.mark.parametrize(("call", "error", "message"), BAD)
def test_errors(call, error, message):
    with pytest.raises(error, match=message):
        call(layer(), draw(2, 6, 12))


@pytest.mark.parametrize("d", [1, 2, 7, 8])
def test_sinusoids_by_their_formula(d):
    positions = sinusoidal_positions(5, d, dtype=torch.float64)
    for p in range(5):
        for channel in range(d):
            wave = math.sin if channel % 2 == 0 else math.cos
            expected = wave(p / 10000 ** (2 * (channel // 2) / d))
            assert positions[p, channel].item() == pytest.approx(expected, abs=1e-14)


def test_sinusoids_far_out():
    """In float32 an angle of 1e6 would be off by 3e-2; made in float64 and rounded, sines are right to 2^-24."""
    start = 10**6
    far, exact = (sinusoidal_positions(3, 8, start=start, dtype=t) for t in (torch.float32, torch.float64))
    assert far.dtype == torch.float32 and sinusoidal_positions(1, 2).dtype == torch.get_default_dtype()
    assert (far - exact).abs().max() <= 2**-24
    assert exact[2, 0].item() == pytest.approx(math.sin(start + 2), abs=1e-14)
    torch.testing.assert_close(exact, sinusoidal_positions(start + 3, 8, dtype=torch.float64)[start:], atol=0, rtol=0)


def test_a_shift_turns_the_sinusoids():
    """Four positions further on, each pair of channels is turned by an angle, the same at all positions."""
    first, later = (sinusoidal_positions(9, 6, start=start, dtype=torch.float64) for start in (0, 4))
    for pair in (0, 2, 4):
        angle = 4 / 10000 ** (pair / 6)
        sine, cosine = first[:, pair], first[:, pair + 1]
        close(later[:, pair], sine * math.cos(angle) + cosine * math.sin(angle))
        close(later[:, pair + 1], cosine * math.cos(angle) - sine * math.sin(angle))
