"""Layers of heads with fixed patterns, also beside learned ones: by their formula, cuts, masks, what is trained;
sinusoidal positions."""

import math
from functools import partial

import pytest
import torch
from torch.nn.functional import linear

from ortho import PROJECTIONS, MultiheadAttention
from ortho.attention.untrained.patterns import Gaussian, Recent
from ortho.attention.untrained.positional_attention import SEVEN
from ortho.layers.hybrid import HybridAttention
from ortho.layers.positional import PositionalHeads, sinusoidal_positions

# Sums of at most 1e2 rounded products of size 1 in float64, in different orders.
close = partial(torch.testing.assert_close, atol=1e-12, rtol=0)
SPLITS = [
    ("left",),
    ("previous", "next", "start"),
    ("previous", "current", Gaussian("", 0.5, 2.0, True), "end"),
    ("recent", "recent", "left", "left", Recent("ahead", 3, ahead=True), "left"),
]
MECHANISMS = ("softmax", "linear", "favor", "rotary")  # in which all heads are alike


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def layer(patterns=SPLITS[1], **kwargs):
    """Heads of width 3 on x of width 12, however many."""
    g, kwargs = torch.Generator().manual_seed(1), {"head_dim": 3, **kwargs}
    return PositionalHeads(12, len(patterns), patterns=patterns, generator=g, dtype=torch.float64, **kwargs)


def beside_learned(patterns, learned, *, width=12, **kwargs):
    """The same beside `learned` other heads, which come last."""
    heads = [(partial(PositionalHeads, patterns=patterns), len(patterns))] if patterns else []
    heads += [(partial(MultiheadAttention, **kwargs), learned)] if learned else []
    g = torch.Generator().manual_seed(1)
    return HybridAttention(width, len(patterns) + learned, heads=heads, generator=g, dtype=torch.float64)


@pytest.mark.parametrize("patterns", SPLITS, ids=len)
def test_by_its_formula(patterns):
    """Each head's matrix times its own values, side by side, times W_O."""
    module, x = layer(patterns), draw(2, 6, 12)
    for causal in (False, True):
        weights = torch.stack([p.weights(6, is_causal=causal) for p in module.patterns])
        v = linear(x, module.weight_v).unflatten(-1, (-1, 3)).transpose(1, 2)
        close(module(x, is_causal=causal), (weights @ v).transpose(1, 2).flatten(2) @ module.weight_o.T)


def test_beside_a_learned_head_by_the_formula():
    """Seven matrices and a softmax, each times its own values, side by side, times W_O."""
    module, x = beside_learned(SEVEN, 1, width=16), draw(2, 6, 16)
    fixed, learned = module.groups
    assert fixed.patterns == SEVEN
    v = torch.cat([linear(x, group.weight_v) for group in module.groups], -1)
    of = learned.projection
    scores = linear(x, of.weight_q) @ linear(x, of.weight_k).mT / math.sqrt(2)
    matrices = [*(p.weights(6).expand(2, 6, 6) for p in SEVEN), scores.softmax(-1)]
    heads = [matrix @ v[..., 2 * h : 2 * h + 2] for h, matrix in enumerate(matrices)]
    close(module(x), torch.cat(heads, -1) @ torch.cat([fixed.weight_o, learned.weight_o], 1).T)


def test_by_default_three_patterns_are_shared_out():
    """The first as often as any, equal ones one after the other."""
    shares = {1: (1,), 2: (1, 1), 3: (1, 1, 1), 4: (2, 1, 1), 5: (2, 2, 1), 11: (4, 4, 3), 12: (4, 4, 4)}
    for number, counts in shares.items():
        names = [p.name for p in PositionalHeads(number, number).patterns]
        expected = zip(("previous", "recent", "left"), counts, strict=False)
        assert names == [name for name, count in expected for _ in range(count)]


@pytest.mark.parametrize("projection", PROJECTIONS)
@pytest.mark.parametrize("fixed", [0, 1, 3, 4])
def test_what_is_trained(fixed, projection):
    """Queries and keys of the learned heads alone; of a frozen projection the rows are orthonormal."""
    module, rows = beside_learned(("previous", "next", "start", "end")[:fixed], 4 - fixed, projection=projection), 3
    parameters = {name: tuple(p.shape) for name, p in module.named_parameters()}
    expected = {}
    for group, count in enumerate(c for c in (fixed, 4 - fixed) if c):
        width = rows * count
        expected |= {f"groups.{group}.weight_v": (width, 12), f"groups.{group}.weight_o": (12, width)}
    if fixed == 4 or projection != "learned":
        assert parameters == expected
    else:
        of_heads = {f"groups.{int(fixed > 0)}.projection.weight_{x}": (rows * (4 - fixed), 12) for x in "qk"}
        assert parameters == expected | of_heads
    if fixed < 4 and projection != "learned":
        weight = module.groups[-1].projection.weight_q
        close(weight @ weight.T, torch.eye(rows * (4 - fixed), dtype=torch.float64))


@pytest.mark.parametrize("projection", PROJECTIONS)
@pytest.mark.parametrize("attention", MECHANISMS)
def test_learned_heads_are_the_layer_s(attention, projection):
    """Without fixed heads it is `MultiheadAttention`; with some, the others are those of that layer."""
    kwargs = {"projection": projection, "attention": attention}
    x = draw(2, 7, 12)
    none, some = beside_learned((), 4, **kwargs), beside_learned(("previous", "left"), 2, **kwargs)
    alone = MultiheadAttention(12, 4, head_dim=3, dtype=torch.float64, **kwargs)
    alone.load_state_dict(none.groups[0].state_dict())
    close(none(x, is_causal=True), alone(x, is_causal=True))
    fixed, learned = some.groups
    alone = MultiheadAttention(12, 2, head_dim=3, dtype=torch.float64, **kwargs)
    alone.load_state_dict(learned.state_dict())
    with torch.no_grad():
        fixed.weight_o.zero_()
    close(some(x, is_causal=True), alone(x, is_causal=True))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("patterns", SPLITS, ids=len)
def test_both_forms(patterns, causal):
    """Outputs and all gradients, with masks of keys and words."""
    x, upstream = draw(2, 9, 12), draw(2, 9, 12, seed=1)
    words = torch.tensor([0, 0, 1, 2, 2, 2, 3, 4, 4]).expand(2, 9)
    kwargs = {"attn_mask": draw(2, 1, 1, 9, seed=2) > -1, "is_causal": causal, "words": words}
    results = []
    for form in ("reference", "fast"):
        module, leaf = layer(patterns, form=form, empty="self"), x.clone().requires_grad_()
        y = module(leaf, **kwargs)
        results.append((y, *torch.autograd.grad(y, [leaf, *module.parameters()], upstream)))
    for reference, fast in zip(*results, strict=True):
        close(fast, reference)


@pytest.mark.parametrize("form", ["reference", "fast"])
@pytest.mark.parametrize("patterns", SPLITS, ids=len)
def test_cut_equals_whole_and_the_future_leaves_the_prefix(patterns, form):
    """Also behind a piece in which heads have masks of their own, which equal ones are told apart by."""
    module, x = layer(patterns, form=form), draw(2, 9, 12)
    mask = draw(2, len(patterns), 1, 9, seed=2) > -0.5
    for cut in range(1, 9):
        for there in (None, mask.index_fill(-1, torch.arange(cut, 9), True)):
            whole = module(x, is_causal=True, attn_mask=there)
            first = None if there is None else there[..., :cut]
            head, state = module(x[:, :cut], is_causal=True, attn_mask=first, return_state=True)
            tail, _ = module(x[:, cut:], is_causal=True, initial_state=state, return_state=True)
            close(torch.cat([head, tail], 1), whole)
            other = torch.cat([x[:, :cut], 30 * x[:, cut:]], 1)
            assert torch.equal(module(other, is_causal=True, attn_mask=there)[:, :cut], whole[:, :cut])


@pytest.mark.parametrize("form", ["reference", "fast"])
@pytest.mark.parametrize("patterns", SPLITS, ids=len)
def test_decoding(patterns, form):
    """Token by token, and in pieces: what the whole gives. A copy reads on by itself."""
    module, x = layer(patterns, form=form), draw(2, 9, 12)
    whole = module(x, is_causal=True).detach()
    cache, other = module.new_cache(9), None
    for t in range(9):
        if t == 4:
            other = cache.copy()
        close(module(x[:, t : t + 1], is_causal=True, cache=cache), whole[:, t : t + 1])
        assert cache.length == t + 1
    assert other.length == 4
    close(module(x[:, 4:], is_causal=True, cache=other), whole[:, 4:])
    if form == "fast":
        assert cache.nbytes == 8 * 2 * (3 * sum(1 + p.vectors for p in module.patterns) + 3)


def test_masks():
    """Of keys, for all heads or for each: what is masked is not there, for a pattern and for a learned head."""
    module, x = beside_learned(("previous", "end", "start"), 1), draw(2, 8, 12)
    there = torch.tensor([True, False, True, True, False, True, True, False])
    close(module(x, attn_mask=there)[:, there], module(x[:, there]))
    close(module(x, attn_mask=there.expand(2, 4, 1, 8))[:, there], module(x[:, there]))
    of_heads = torch.ones(2, 4, 1, 8, dtype=torch.bool)
    of_heads[:, 3] = there  # of the learned head alone
    difference = module(x, attn_mask=of_heads) - module(x)
    with torch.no_grad():
        module.groups[1].weight_o.zero_()
    assert difference.abs().max() > 1e-3
    close(module(x, attn_mask=of_heads), module(x))


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


def test_the_empty_rows_policy():
    module, x = layer(SEVEN[:4]), draw(1, 1, 12)  # one token: current is itself, and three have nothing
    module_self = layer(SEVEN[:4], empty="self")
    v = linear(x, module.weight_v)
    close(module_self(x), linear(v, module.weight_o))
    v[..., 3:] = 0
    close(module(x), linear(v, module.weight_o))
    assert "patterns=(current, previous, next, left)" in repr(module) and "empty='self'" in repr(module_self)


def test_initial_variance():
    """1/d however many heads of a width there are, and with d/H by default. The variance of 256 * 1024 normal-like
    entries has a relative spread below 0.3 %; the bound is ten of them, and the width of 3 heads is less than d / 3."""
    for heads, width in ((8, None), (3, 32)):
        g = torch.Generator().manual_seed(0)
        module = PositionalHeads(256, heads, head_dim=width, generator=g)
        for weight in (module.weight_v, module.weight_o):
            assert abs(weight.var().item() * 256 - 1) < 0.03


def decoded(m, x, **kwargs):
    return m(x, is_causal=True, cache=m.new_cache(4), **kwargs)


BAD = [
    (lambda m, x: PositionalHeads(12, 5), ValueError, "num_heads: expected a divisor of d_model = 12, got 5"),
    (
        lambda m, x: PositionalHeads(12, 4, patterns=SEVEN),
        ValueError,
        "patterns: expected one for each of 4 heads, got 7",
    ),
    (
        lambda m, x: PositionalHeads(12, 4, patterns="left"),
        TypeError,
        "patterns: expected a sequence.*, got str",
    ),
    (lambda m, x: layer(("last",)), ValueError, "patterns: expected one of 'current'.*, got 'last'"),
    (lambda m, x: layer(form="slow"), ValueError, "form: expected one of 'reference', 'fast', got 'slow'"),
    (lambda m, x: layer(empty="one"), ValueError, "empty: expected one of 'zero', 'self', got 'one'"),
    (lambda m, x: m(x[..., :4]), ValueError, r"x: expected shape \(B, N, 12\) with B, N >= 1, got \(2, 6, 4\)"),
    (lambda m, x: m(x.float()), TypeError, "x: expected torch.float64 like the weights, got torch.float32"),
    (lambda m, x: m(x, words=torch.zeros(6).long()), ValueError, r"words: expected shape \(2, 6\), got \(6,\)"),
    (lambda m, x: m(x, attn_mask=x > 0), ValueError, "attn_mask: expected a shape that broadcasts to"),
    (lambda m, x: m(x, attn_mask=torch.ones(6, 6).bool()), ValueError, "attn_mask: expected a mask of keys"),
    (lambda m, x: m(x, is_causal=True, initial_state=x), TypeError, r"initial_state: .* \(values, sums, places\), got"),
    (lambda m, x: m(x, is_causal=True, initial_state=(x, x)), ValueError, "initial_state: expected a tuple of tensors"),
    (lambda m, x: m(x, return_state=True), ValueError, "return_state: expected none in a call that is not causal"),
    (
        lambda m, x: m(x, is_causal=True, cache=layer().new_cache()),
        ValueError,
        "cache: expected one of this layer, got",
    ),
    (lambda m, x: m(x, cache=m.new_cache()), ValueError, "cache: expected in a causal call without mask, words or"),
    (lambda m, x: decoded(m, x[:, :2], return_state=True), ValueError, "cache: expected in a causal call without mask"),
    (lambda m, x: decoded(m, x[:, :2], attn_mask=x[0, 0, :2] > 0), ValueError, "cache: expected in a causal call with"),
    (lambda m, x: decoded(m, x), ValueError, "expected at most 4 tokens more in a cache of capacity 4, got 6"),
    (lambda m, x: sinusoidal_positions(0, 4), ValueError, "n: expected an integer of at least 1, got 0"),
    (lambda m, x: sinusoidal_positions(4, 2.0), TypeError, "d: expected an integer of at least 1, got float 2.0"),
    (lambda m, x: sinusoidal_positions(4, 2, start=-1), ValueError, "start: expected an integer of at least 0, got -1"),
    (lambda m, x: sinusoidal_positions(4, 2, start=0.5), TypeError, "start: expected an integer.*, got fl"),
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
