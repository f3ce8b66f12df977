"""Attention by position: the fast form is the definition; the past, the future, masks, words, cuts; what it refuses."""

from functools import partial

import pytest
import torch
from extent import repeats
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refusals, refuses
from seeded import draw

from ortho.attention.positional.patterns import Recent, Shift
from ortho.attention.positional.positional_attention import (
    PATTERNS,
    SEVEN,
    positional_attention,
    positional_attention_reference,
)
from ortho.cost.counting import Allocations

FORMS = {"reference": positional_attention_reference, "fast": positional_attention}
HEADS = (
    *PATTERNS.values(),
    Shift("third last", -3),
    Shift("third next", 3),
    Recent("pair", 2),
    Recent("coming", 3, ahead=True),
    Recent("alone", 1),
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


@pytest.mark.parametrize("words", [False, True], ids=["tokens", "words"])
@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
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
def test_gradients_by_finite_differences(form):
    """First and second order: a call is linear, and its gradient is linear in the upstream gradient."""
    v, words = draw(1, len(HEADS), 5, 2).requires_grad_(), torch.tensor([[0, 0, 1, 2, 2]])
    mask = torch.tensor([True, True, False, True, True])
    for causal in (False, True):
        call = partial(FORMS[form], patterns=HEADS, is_causal=causal, attn_mask=mask, words=words)
        assert torch.autograd.gradcheck(call, (v,), fast_mode=True)
        assert torch.autograd.gradgradcheck(call, (v,), fast_mode=True)


@both_forms
@given(length=lengths, seed=seeds, words=st.booleans(), data=st.data())
@examples
def test_the_future_leaves_the_prefix(form, length, seed, words, data):
    """New values after a cut, however large, change nothing before it: bit for bit."""
    v = draw(2, len(HEADS), length, 3, seed=seed)
    numbers = drawn_words(length, 2, seed) if words else None
    cut = data.draw(st.integers(0, length))
    other = v.clone()
    other[:, :, cut:] = 1e6 * draw(2, len(HEADS), length - cut, 3, seed=seed + 1)
    call = partial(FORMS[form], patterns=HEADS, is_causal=True, words=numbers)
    assert torch.equal(call(v)[:, :, :cut], call(other)[:, :, :cut])


@pytest.mark.parametrize("words", [False, True], ids=["tokens", "words"])
@both_forms
@given(length=lengths, seed=seeds, masked=st.booleans(), data=st.data())
@examples
def test_cut_equals_whole(form, words, length, seed, masked, data):
    """Also within a word, and beside masks of each piece; states are the same, and gradients."""
    v = draw(2, len(HEADS), length, 3, seed=seed)
    numbers = drawn_words(length, 2, seed) if words else None
    cuts = data.draw(st.lists(st.integers(1, length), max_size=3).map(lambda c: sorted({*c, length})))
    mask = drawn_mask("heads", 2, length, seed)
    call = partial(FORMS[form], patterns=HEADS, is_causal=True, return_state=True)
    v.requires_grad_()
    whole, final = call(v, words=numbers, attn_mask=mask if masked else None)
    pieces, state = [], None
    for start, stop in zip([0, *cuts[:-1]], cuts, strict=True):
        piece = slice(start, stop)
        of_mask = mask[..., piece] if masked else None
        of_piece = None if numbers is None else numbers[:, piece]
        o, state = call(v[:, :, piece], words=of_piece, initial_state=state, attn_mask=of_mask)
        pieces.append(o)
    close(torch.cat(pieces, 2), whole)
    upstream = draw(*v.shape, seed=seed + 1)
    close(*(torch.autograd.grad(o, v, upstream)[0] for o in (torch.cat(pieces, 2), whole)))
    for piecewise, once in zip(state, final, strict=True):
        assert piecewise.dtype == once.dtype
        # Sums of cubes, up to 100^4 / 4: the tolerance is relative to them.
        torch.testing.assert_close(piecewise, once.expand_as(piecewise), atol=2e-13, rtol=2e-13)


def test_words_after_tokens():
    """A sequence may have words in one call and none in the next: tokens without a number are words of their own."""
    v = draw(1, len(HEADS), 9, 2)
    numbers = torch.tensor([[3, 3, 4, 4, 5, 6, 7, 8, 8]])  # as below, except for the first of each call
    for call in FORMS.values():
        head, state = call(v[:, :, :4], HEADS, is_causal=True, words=numbers[:, :4], return_state=True)
        middle, state = call(v[:, :, 4:7], HEADS, is_causal=True, initial_state=state, return_state=True)
        tail = call(v[:, :, 7:], HEADS, is_causal=True, words=numbers[:, 7:] - 8, initial_state=state)
        close(torch.cat([head, middle, tail], 2), FORMS["reference"](v, HEADS, is_causal=True, words=numbers))


@pytest.mark.parametrize("causal", [False, True])
@both_forms
@given(length=lengths, seed=seeds, words=st.booleans())
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
    bidirectional = [
        ["1/2 1/2 0 0 0", "1/2 1/2 0 0 0", "0 0 1 0 0", "0 0 0 1/2 1/2", "0 0 0 1/2 1/2"],
        ["0 0 0 0 0", "0 0 0 0 0", "1/2 1/2 0 0 0", "0 0 1 0 0", "0 0 1 0 0"],
        ["0 0 0 0 0", "0 0 0 0 0", "0 0 0 0 0", "1/2 1/2 0 0 0", "1/2 1/2 0 0 0"],
        ["1/72 1/72 8/36 27/72 27/72"] * 5,
    ]
    causal = [
        ["1 0 0 0 0", "1/2 1/2 0 0 0", "0 0 1 0 0", "0 0 0 1 0", "0 0 0 1/2 1/2"],
        *bidirectional[1:3],
        ["1 0 0 0 0", "1/2 1/2 0 0 0", "1/18 1/18 8/9 0 0", "1/72 1/72 8/36 27/36 0", bidirectional[3][0]],
    ]
    for is_causal, rows in ((False, bidirectional), (True, causal)):
        expected = torch.tensor([[[eval(x) for x in row.split()] for row in head] for head in rows]).double()
        torch.testing.assert_close(
            FORMS[form](units, heads, is_causal=is_causal, words=words)[0], expected, atol=1e-7, rtol=0
        )


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
    (
        {"attn_mask": torch.ones(4, 4, dtype=torch.bool)},
        r"attn_mask: expected a mask of keys, of shape \(..., 1, 4\), got \(4, 4\)",
    ),
    ({"attn_mask": torch.ones(5, dtype=torch.bool)}, r"attn_mask: expected a shape that broadcasts"),
    ({"words": torch.zeros(4).long()}, r"words: expected shape \(2, 4\), got \(4,\)"),
    ({"return_state": True}, "return_state: expected none in a call that is not causal"),
    ({"initial_state": STATE}, "initial_state: expected none in a call that is not causal"),
    ({"is_causal": True, "initial_state": V}, "initial_state: expected a tuple of tensors"),
    ({"is_causal": True, "initial_state": STATE[:2]}, "initial_state: expected a tuple of tensors"),
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
    words = torch.tensor([[4, 5, 5, 6]] * 2)
    _, state = call(words=words, is_causal=True, return_state=True)
    refuses("words: expected steps .* got -2 to 0", call, words=words, is_causal=True, initial_state=state)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("form", "part", "value", "message"),
    [
        ("fast", 0, STATE[0].float(), r"values torch.float64 of shape \(2, 2, 3\)"),
        ("fast", 1, STATE[1][..., :0], r"sums torch.float64 of shape \(2, 3, 1\)"),
        ("fast", 2, STATE[2].double(), r"places torch.int64 of shape \(2, 1, 3\)"),
        ("reference", 0, V.double(), r"values torch.float32 of shape \(2, 2, 4, 3\)"),
        ("reference", 1, torch.zeros(2, 1, 4), r"positions torch.int64 of shape \(2, 1, 4\)"),
        ("reference", 2, torch.zeros(2, 3).long(), r"word torch.int64 of shape \(2, 1\)"),
    ],
)
def test_errors_of_states(form, part, value, message):
    _, state = FORMS[form](V, TWO, is_causal=True, return_state=True)
    with pytest.raises(ValueError, match=f"initial_state: expected {message}"):
        FORMS[form](V, TWO, is_causal=True, initial_state=(*state[:part], value, *state[part + 1 :]))
