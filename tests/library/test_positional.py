"""Attention by position: the patterns' matrices by hand and at great length; both forms, words, masks, cuts; layers."""

import math
from fractions import Fraction
from functools import partial
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refusals, refuses
from sample import repeats
from seeded import draw
from torch.nn.functional import linear

from ortho.attention.positional.patterns import RECENT, Near
from ortho.attention.positional.positional_attention import (
    PATTERNS,
    SEVEN,
    positional_attention,
    positional_attention_reference,
)
from ortho.cost.counting import Allocations
from ortho.layers.positional import PositionalHeads, sinusoidal_positions

FORMS = {"reference": positional_attention_reference, "fast": positional_attention}
HEADS = (
    *PATTERNS.values(),
    Near("third last", -3, -3),
    Near("third next", 3, 3),
    Near("pair", -1, 0),
    Near("coming", 0, 2),
    Near("around", -3, 1),
    Near("further", -4, -2),
    # Equal neighbours, which the fast form computes as one wide head.
    *[PATTERNS[name] for name in ("recent", "left", "end", "previous", "current") for _ in range(2)],
)
# Rows are means of at most 100 float64 values of about 1, up to 5: about 1e2 roundings of 1.1e-16 each. The bound
# leaves a factor 20; a wrong weight would show at 1e-6.
close = partial(torch.testing.assert_close, atol=2e-13, rtol=0)

lengths = st.one_of(st.integers(1, 12), st.integers(60, 100))
seeds = st.integers(0, 2**32 - 1)
examples = settings(max_examples=repeats(6, 25), deadline=None, derandomize=True)
both_forms = pytest.mark.parametrize("form", FORMS)
WAYS = [(False, False), (False, True), (True, False)]  # causal, by words


def drawn_mask(kind, batch, length, seed):
    """True where a token is there. "tokens": the same mask for all heads; "heads": one for each head; "none": no token
    is there; "all": None, no mask."""
    g = torch.Generator().manual_seed(seed)
    there = torch.rand(batch, len(HEADS) if kind == "heads" else 1, 1, length, generator=g) > 0.4
    return {"none": torch.zeros_like(there), "all": None}.get(kind, there)


def drawn_words(length, batch, seed):
    """The words' numbers, for words of one token and more; some numbers are left out."""
    g = torch.Generator().manual_seed(seed)
    return (torch.randint(0, 4, (batch, length), generator=g).clamp(max=2) * 2).cumsum(-1) // 2


masks = st.sampled_from(["all", "tokens", "heads", "none"])


@pytest.mark.parametrize(("causal", "words"), WAYS)
@given(length=lengths, seed=seeds, mask=masks)
@examples
def test_fast_equals_reference(causal, words, length, seed, mask):
    """Outputs and gradients."""
    v = draw(2, len(HEADS), length, 3, seed=seed).requires_grad_()
    kwargs = {
        "is_causal": causal,
        "attn_mask": drawn_mask(mask, 2, length, seed),
        "words": drawn_words(length, 2, seed) if words else None,
    }
    upstream = draw(2, len(HEADS), length, 3, seed=seed + 1)
    results = []
    for attention in FORMS.values():
        o = attention(v, HEADS, **kwargs)
        results.append((o, *torch.autograd.grad(o, v, upstream)))
    for reference, fast in zip(*results, strict=True):
        close(fast, reference)


@pytest.mark.parametrize("causal", [False, True])
@both_forms
def test_the_matrix(form, causal):
    """If values are unit vectors, rows are the weights themselves, whatever the axes before the heads."""
    for lead in ((), (2,), (2, 3)):
        units = torch.eye(70, dtype=torch.float64).expand(*lead, len(HEADS), 70, 70)
        o = FORMS[form](units, HEADS, is_causal=causal)
        weights = torch.stack([p.weights(70, is_causal=causal) for p in HEADS])
        close(o, weights.expand_as(o))


@both_forms
@given(length=lengths, seed=seeds, masked=st.booleans(), data=st.data())
@examples
def test_cut_equals_whole(form, length, seed, masked, data):
    """Also beside masks of each piece; states are the same, and gradients."""
    v = draw(2, len(HEADS), length, 3, seed=seed)
    cuts = data.draw(st.lists(st.integers(1, length), max_size=3).map(lambda c: sorted({*c, length})))
    mask = drawn_mask("heads", 2, length, seed)
    call = partial(FORMS[form], patterns=HEADS, is_causal=True, return_state=True)
    v.requires_grad_()
    whole, final = call(v, attn_mask=mask if masked else None)
    pieces, state = [], None
    for start, stop in zip([0, *cuts[:-1]], cuts, strict=True):
        piece = slice(start, stop)
        of_mask = mask[..., piece] if masked else None
        o, state = call(v[:, :, piece], initial_state=state, attn_mask=of_mask)
        pieces.append(o)
    close(torch.cat(pieces, 2), whole)
    upstream = draw(*v.shape, seed=seed + 1)
    close(*(torch.autograd.grad(o, v, upstream)[0] for o in (torch.cat(pieces, 2), whole)))
    for piecewise, once in zip(state, final, strict=True):
        assert piecewise.dtype == once.dtype
        # Sums of cubes, up to 100^4 / 4: the tolerance is relative to them.
        torch.testing.assert_close(piecewise, once.expand_as(piecewise), atol=2e-13, rtol=2e-13)


@pytest.mark.parametrize(("causal", "words"), WAYS)
@both_forms
@given(length=lengths, seed=seeds)
@examples
def test_padding_anywhere_equals_cutting_out(form, causal, length, seed, words):
    """Masked tokens, whatever they hold, leave other rows as if they were not there, and have zeros themselves."""
    v = draw(1, len(HEADS), length, 3, seed=seed)
    there = drawn_mask("tokens", 1, length, seed)[0, 0, 0]
    v[:, :, ~there] *= 1e6
    numbers = drawn_words(length, 1, seed) if words else None
    call = partial(FORMS[form], patterns=HEADS, is_causal=causal)
    o = call(v, attn_mask=there, words=numbers)
    assert not o[:, :, ~there].any()
    if there.any():
        close(o[:, :, there], call(v[:, :, there], words=None if numbers is None else numbers[:, there]))


@both_forms
def test_words_by_hand(form):
    """Words of two, one and two tokens: each row is one of the words' matrix, and a word's tokens share its entry."""
    words = torch.tensor([[5, 5, 6, 9, 9]])
    units = torch.eye(5, dtype=torch.float64).expand(1, 4, 5, 5)
    heads = ("current", "previous", "left", "end")
    by_hand = [
        ["1/2 1/2 0 0 0", "1/2 1/2 0 0 0", "0 0 1 0 0", "0 0 0 1/2 1/2", "0 0 0 1/2 1/2"],
        ["0 0 0 0 0", "0 0 0 0 0", "1/2 1/2 0 0 0", "0 0 1 0 0", "0 0 1 0 0"],
        ["0 0 0 0 0", "0 0 0 0 0", "0 0 0 0 0", "1/2 1/2 0 0 0", "1/2 1/2 0 0 0"],
        ["1/72 1/72 8/36 27/72 27/72"] * 5,
    ]
    expected = torch.tensor([[[eval(x) for x in row.split()] for row in head] for head in by_hand]).double()
    torch.testing.assert_close(FORMS[form](units, heads, words=words)[0], expected, atol=1e-7, rtol=0)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("pattern", dict.fromkeys(HEADS), ids=lambda p: p.name)
def test_no_matrix(pattern, causal):
    """The largest tensor of a forward and backward step has at most 3 N V numbers in float64. At N = 4096 and V = 2
    that is less than a tenth of the bytes of an N x N matrix of bits."""
    n, width = 4096, 2
    v = draw(1, 1, n, width).requires_grad_()
    with Allocations() as memory:
        o = positional_attention(v, [pattern], is_causal=causal)
        torch.autograd.grad(o, v, torch.ones_like(o))
    assert memory.largest <= 8 * n * width * 3 < n * n / 8
    assert memory.peak <= 8 * n * width * 12


def test_lower_precision():
    """Results are those of the rounded values, rounded: sums are taken in float32 at least."""
    v = draw(2, len(HEADS), 90, 3)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for causal in (False, True):
            rounded = v.to(dtype)
            for call in FORMS.values():
                o = call(rounded, HEADS, is_causal=causal)
                with torch.autocast("cpu", torch.bfloat16):
                    assert torch.equal(call(rounded, HEADS, is_causal=causal), o)
                assert o.dtype == dtype
                exact = positional_attention(rounded.double(), HEADS, is_causal=causal)
                eps = torch.finfo(dtype).eps  # and for float32 about 1e2 roundings of values up to 5
                torch.testing.assert_close(o.double(), exact, atol=eps * 1e-3 + 3e-6, rtol=eps)


# -------------------------------------------------------------------------------------------- what is refused


V = torch.zeros(2, 2, 4, 3)
TWO = ("previous", "next")
STATE = positional_attention(V, TWO, is_causal=True, return_state=True)[1]
BAD = [
    ({"v": V[0, 0]}, r"v: expected shape \(..., H, N, V\) without empty axes, got \(4, 3\)"),
    ({"patterns": ("previous", "nxt")}, "patterns: expected one of 'current'.*, got 'nxt'"),
    ({"patterns": SEVEN}, "patterns: expected one for each of 2 heads, got 7"),
    ({"attn_mask": torch.ones(4, 4, dtype=torch.bool)}, r"attn_mask: expected a mask of keys, of shape \(..., 1, 4\)"),
    ({"attn_mask": torch.ones(5, dtype=torch.bool)}, r"attn_mask: expected a shape that broadcasts"),
    ({"words": torch.zeros(4).long()}, r"words: expected shape \(2, 4\), got \(4,\)"),
    ({"return_state": True}, "return_state: expected none in a call that is not causal"),
    ({"initial_state": STATE}, "initial_state: expected none in a call that is not causal"),
    ({"is_causal": True, "initial_state": V}, "initial_state: expected a tuple of tensors"),
    ({"is_causal": True, "initial_state": STATE[:1]}, "initial_state: expected a tuple of tensors"),
]


@refusals(BAD)
@both_forms
def test_errors(form, refused):
    refused(FORMS[form], v=V, patterns=TWO)


@pytest.mark.bad_input
@both_forms
def test_errors_of_words(form):
    call = partial(FORMS[form], V, TWO)
    for numbers, message in (([0, 1, 0, 1], "steps .* got -1 to 1"), ([-1, 0, 1, 2], "numbers .* got -1 to 2")):
        refuses(f"words: expected {message}", call, words=torch.tensor([numbers] * 2))
    there = torch.tensor([True, True, False, True])  # what is masked may have any number
    call(words=torch.tensor([[0, 1, -7, 1]] * 2), attn_mask=there)
    refuses("words: expected None in a causal call", call, words=torch.tensor([[4, 5, 5, 6]] * 2), is_causal=True)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("form", "part", "value", "message"),
    [
        ("fast", 0, STATE[0].float(), r"values torch.float64 of shape \(2, 2, 3\)"),
        ("fast", 1, STATE[1][..., :0], r"sums torch.float64 of shape \(2, 3, 1\)"),
        ("fast", 2, STATE[2].double(), r"position torch.int64 of shape \(2, 1\)"),
        ("reference", 0, V.double(), r"values torch.float32 of shape \(2, 2, 4, 3\)"),
        ("reference", 1, torch.zeros(2, 1, 4), r"positions torch.int64 of shape \(2, 1, 4\)"),
    ],
)
def test_errors_of_states(form, part, value, message):
    _, state = FORMS[form](V, TWO, is_causal=True, return_state=True)
    with pytest.raises(ValueError, match=f"initial_state: expected {message}"):
        FORMS[form](V, TWO, is_causal=True, initial_state=(*state[:part], value, *state[part + 1 :]))


# ----------------------------------------------------------------------------------------- the matrices of the patterns

ULP = 2.0**-53  # the largest relative change of a float64 by rounding to nearest

# Five tokens. Cubes are 1, 8, 27, 64, 125; their sums 1, 9, 36, 100, 225.
BY_HAND = {
    "current": ["1 0 0 0 0", "0 1 0 0 0", "0 0 1 0 0", "0 0 0 1 0", "0 0 0 0 1"],
    "previous": ["0 0 0 0 0", "1 0 0 0 0", "0 1 0 0 0", "0 0 1 0 0", "0 0 0 1 0"],
    "next": ["0 1 0 0 0", "0 0 1 0 0", "0 0 0 1 0", "0 0 0 0 1", "0 0 0 0 0"],
    "left": ["0 0 0 0 0", "0 0 0 0 0", "1 0 0 0 0", "1/9 8/9 0 0 0", "1/36 8/36 27/36 0 0"],
    "right": ["0 0 27/36 8/36 1/36", "0 0 0 8/9 1/9", "0 0 0 0 1", "0 0 0 0 0", "0 0 0 0 0"],
    "end": 5 * ["1/225 8/225 27/225 64/225 125/225"],
    "start": 5 * ["125/225 64/225 27/225 8/225 1/225"],
}
CAUSAL = {
    **{name: BY_HAND[name] for name in ("current", "previous", "left")},
    **dict.fromkeys(("next", "right"), 5 * ["0 0 0 0 0"]),
    "end": ["1 0 0 0 0", "1/9 8/9 0 0 0", "1/36 8/36 27/36 0 0", "1/100 8/100 27/100 64/100 0", BY_HAND["end"][0]],
    "start": ["1 0 0 0 0", "8/9 1/9 0 0 0", "27/36 8/36 1/36 0 0", "64/100 27/100 8/100 1/100 0", BY_HAND["start"][0]],
}


def matrix(rows):
    return torch.tensor([[float(Fraction(entry)) for entry in row.split()] for row in rows], dtype=torch.float64)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("pattern", SEVEN, ids=lambda p: p.name)
def test_by_hand(pattern, causal):
    """To the last bit: sums of cubes are integers, and each weight is one quotient of two."""
    expected = matrix((CAUSAL if causal else BY_HAND)[pattern.name])
    assert torch.equal(pattern.weights(5, is_causal=causal), expected)


RECENT_BY_HAND = [
    ["1 0 0 0 0", "1/2 1/2 0 0 0", "1/3 1/3 1/3 0 0", "0 1/3 1/3 1/3 0", "0 0 1/3 1/3 1/3"],
    ["1/3 1/3 1/3 0 0", "0 1/3 1/3 1/3 0", "0 0 1/3 1/3 1/3", "0 0 0 1/2 1/2", "0 0 0 0 1"],
]


@pytest.mark.parametrize("causal", [False, True])
def test_the_last_tokens_by_hand(causal):
    """Each row is the mean of the tokens that there are; in a causal call no token is ahead."""
    one = "1 0 0 0 0", "0 1 0 0 0", "0 0 1 0 0", "0 0 0 1 0", "0 0 0 0 1"
    back, ahead = RECENT_BY_HAND
    expected = {Near("", -2, 0): back, Near("", 0, 2): one if causal else ahead, Near("", 0, 0): one}
    for pattern, rows in expected.items():
        assert torch.equal(pattern.weights(5, is_causal=causal), matrix(rows))
    assert (RECENT.width, RECENT.vectors, RECENT.mirrored().vectors) == (8, 7, 0)


def exact(pattern, i, n, values, causal):
    """Row i times the values, in integers, which can be of any size."""
    seen = i + 1 if causal else n
    weights = [pattern.weight(i, j, seen) for j in range(seen)]
    return Fraction(sum(w * v for w, v in zip(weights, values, strict=False)), sum(weights))


@pytest.mark.parametrize(("name", "causal"), [*product(["left", "end", "start"], [False, True]), ("right", False)])
def test_cubes_at_great_length(name, causal):
    """65 536 tokens, whose cubes sum to 4.6e18, compared with exact fractions.

    A running sum to term i of weights t^3 is rounded at each term t, by one ULP of about t^4 / 4: in all by i / 5 ULP
    of the last sum. Each of the four nested sums of `start` adds the same error. So the error stays below N ULP of the
    largest value, which is at most 1. With float32 values the result is rounded once more, by 2^-24.
    """
    n = 65_536
    g = torch.Generator().manual_seed(0)
    values = torch.randint(-(2**20), 2**20 + 1, (n,), generator=g)
    v = (values.double() / 2**20)[None, None, :, None]
    rows = {"left": [2, 3, 1000, n - 1], "right": [0, n - 1000, n - 3]}.get(name, [0, 1, 1000, n - 1])
    o = positional_attention(v, [name], is_causal=causal)
    single = positional_attention(v.float(), [name], is_causal=causal)
    for i in rows:
        expected = float(exact(PATTERNS[name], i, n, values.tolist(), causal) / 2**20)
        assert abs(float(o[0, 0, i, 0]) - expected) <= n * ULP
        assert abs(float(single[0, 0, i, 0]) - expected) <= 2**-24 + n * ULP


@pytest.mark.parametrize("name", ["left", "end", "start"])
def test_state_at_great_length(name):
    """Zeros follow 10^6 values of 1, so that a row is the share of weight on the ones. The sums of weights, up to
    2.5e23, are beyond the integers of float64 and of int64."""
    length = 10**6
    _, state = positional_attention(torch.ones(1, 1, length, 1), [name], is_causal=True, return_state=True)
    o = positional_attention(torch.zeros(1, 1, 3, 1).double(), [name], is_causal=True, initial_state=state)
    for t, got in enumerate(o.flatten().tolist()):
        i = length + t
        cube = lambda m: (m * (m + 1) // 2) ** 2  # noqa: E731
        total = cube(i - 1) if name == "left" else cube(i + 1)
        ones = {"left": min(cube(length), total), "end": cube(length), "start": total - cube(t + 1)}[name]
        assert got == pytest.approx(float(Fraction(ones, total)), abs=length * ULP)


# --------------------------------------------------------------------------------------------------------------- layers

# Sums of at most 1e2 rounded products of size 1 in float64, in different orders.
layer_close = partial(torch.testing.assert_close, atol=1e-12, rtol=0)
SPLITS = [
    ("left",),
    ("previous", "next", "start"),
    ("previous", "current", "right", "end"),
    ("recent", "recent", "left", "left", Near("ahead", 0, 2), "left"),
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
        layer_close(module(x, is_causal=causal), (weights @ v).transpose(1, 2).flatten(2) @ module.weight_o.T)


def test_by_default_three_patterns_are_shared_out():
    """No pattern has more heads than the one before it; equal heads follow each other."""
    shares = {1: (1,), 2: (1, 1), 3: (1, 1, 1), 4: (2, 1, 1), 5: (2, 2, 1), 11: (4, 4, 3), 12: (4, 4, 4)}
    for number, counts in shares.items():
        names = [p.name for p in PositionalHeads(number, number).patterns]
        expected = zip(("previous", "recent", "left"), counts, strict=False)
        assert names == [name for name, count in expected for _ in range(count)]


def decoded(m, x, **kwargs):
    return m(x, is_causal=True, cache=m.new_cache(4), **kwargs)


LAYER_BAD = [
    (lambda m, x: PATTERNS["left"].weights(0), "n: expected an integer of at least 1, got 0"),
    (lambda m, x: Near("", 1, 0), "last: expected at least first = 1, got 0"),
    (lambda m, x: PositionalHeads(12, 4, patterns=SEVEN), "patterns: expected one for each of 4 heads, got 7"),
    (lambda m, x: m(x, words=torch.zeros(6).long()), r"words: expected shape \(2, 6\), got \(6,\)"),
    (lambda m, x: m(x, cache=m.new_cache()), "is_causal: expected True beside a cache, got False"),
    (lambda m, x: decoded(m, x[:, :2], attn_mask=x[0, 0, :2] > 0), "attn_mask: expected none beside a cache"),
    (lambda m, x: decoded(m, x), "expected at most 4 tokens more in a cache of capacity 4, got 6"),
]


@refusals(LAYER_BAD)
def test_layer_errors(refused):
    refused(layer(), draw(2, 6, 12))


@pytest.mark.parametrize("d", [1, 2, 7, 8])
def test_sinusoids_by_their_formula(d):
    positions = sinusoidal_positions(5, d, dtype=torch.float64)
    for p in range(5):
        for channel in range(d):
            wave = math.sin if channel % 2 == 0 else math.cos
            expected = wave(p / 10000 ** (2 * (channel // 2) / d))
            assert positions[p, channel].item() == pytest.approx(expected, abs=1e-14)
