"""Layers of heads with fixed patterns, also beside learned ones: by their formula, cuts, masks, what is trained;
sinusoidal positions."""

import math
from functools import partial

import pytest
import torch
from refusals import refusals
from seeded import draw
from torch.nn.functional import linear

from ortho.attention.positional.patterns import Recent
from ortho.attention.positional.positional_attention import SEVEN
from ortho.layers.positional import PositionalHeads, sinusoidal_positions

# Sums of at most 1e2 rounded products of size 1 in float64, in different orders.
close = partial(torch.testing.assert_close, atol=1e-12, rtol=0)
SPLITS = [
    ("left",),
    ("previous", "next", "start"),
    ("previous", "current", "right", "end"),
    ("recent", "recent", "left", "left", Recent("ahead", 3, ahead=True), "left"),
]


def layer(patterns=SPLITS[1], **kwargs):
    """A layer with any number of heads of width 3, on x of width 12."""
    g, kwargs = torch.Generator().manual_seed(1), {"head_dim": 3, **kwargs}
    return PositionalHeads(12, len(patterns), patterns=patterns, generator=g, dtype=torch.float64, **kwargs)


@pytest.mark.parametrize("patterns", SPLITS, ids=len)
def test_by_its_formula(patterns):
    """Each head's matrix times its own values, side by side, times W_O."""
    module, x = layer(patterns), draw(2, 6, 12)
    for causal in (False, True):
        weights = torch.stack([p.weights(6, is_causal=causal) for p in module.patterns])
        v = linear(x, module.weight_v).unflatten(-1, (-1, 3)).transpose(1, 2)
        close(module(x, is_causal=causal), (weights @ v).transpose(1, 2).flatten(2) @ module.weight_o.T)


def test_by_default_three_patterns_are_shared_out():
    """No pattern has more heads than the one before it; equal heads follow each other."""
    shares = {1: (1,), 2: (1, 1), 3: (1, 1, 1), 4: (2, 1, 1), 5: (2, 2, 1), 11: (4, 4, 3), 12: (4, 4, 4)}
    for number, counts in shares.items():
        names = [p.name for p in PositionalHeads(number, number).patterns]
        expected = zip(("previous", "recent", "left"), counts, strict=False)
        assert names == [name for name, count in expected for _ in range(count)]


def test_equal_heads_with_masks_of_their_own():
    """They are then not one wide head: each is what it would be alone."""
    names, x = ("left", "left", "recent", "recent"), draw(2, 8, 12)
    module, mask = layer(names), draw(2, 4, 1, 8, seed=3) > -0.5
    parts = []
    for h, name in enumerate(names):
        alone, rows = layer((name,)), slice(3 * h, 3 * h + 3)
        with torch.no_grad():
            alone.weight_v.copy_(module.weight_v[rows])
            alone.weight_o.copy_(module.weight_o[:, rows])
        parts.append(alone(x, attn_mask=mask[:, h : h + 1], is_causal=True))
    close(module(x, attn_mask=mask, is_causal=True), sum(parts))


def test_empty_rows():
    module, x = layer(SEVEN[:4]), draw(1, 1, 12)  # one token: current is itself, and three have nothing
    v = linear(x, module.weight_v)
    v[..., 3:] = 0
    close(module(x), linear(v, module.weight_o))
    assert "patterns=(current, previous, next, left)" in repr(module)


def decoded(m, x, **kwargs):
    return m(x, is_causal=True, cache=m.new_cache(4), **kwargs)


BAD = [
    (lambda m, x: PositionalHeads(12, 4, patterns=SEVEN), "patterns: expected one for each of 4 heads, got 7"),
    (lambda m, x: m(x, words=torch.zeros(6).long()), r"words: expected shape \(2, 6\), got \(6,\)"),
    (lambda m, x: m(x, cache=m.new_cache()), "is_causal: expected True beside a cache, got False"),
    (lambda m, x: decoded(m, x[:, :2], attn_mask=x[0, 0, :2] > 0), "attn_mask: expected none beside a cache"),
    (lambda m, x: decoded(m, x), "expected at most 4 tokens more in a cache of capacity 4, got 6"),
]


@refusals(BAD)
def test_errors(refused):
    refused(layer(), draw(2, 6, 12))


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
