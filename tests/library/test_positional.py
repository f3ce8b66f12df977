"""Attention by position: the fast form is the definition; the past, the future, masks, words, cuts."""

from functools import partial

import pytest
import torch
from extent import repeats
from hypothesis import given, settings
from hypothesis import strategies as st

from ortho.attention.untrained.patterns import Gaussian, Recent, Shift
from ortho.attention.untrained.positional_attention import (
    PATTERNS,
    SEVEN,
    positional_attention,
    positional_attention_reference,
)
from ortho.cost.counting import Allocations

FORMS = {"reference": positional_attention_reference, "fast": positional_attention}
HEADS = (
    *PATTERNS.values(),
    Gaussian("normalised", -1.5, 0.7, normalise=True),
    Gaussian("wide", 3.0, 9.0, normalise=True),  # further than a chunk of 64 reaches
    Shift("third last", -3),
    Shift("third next", 3),
    Recent("pair", 2),
    Recent("coming", 3, ahead=True),
    Recent("alone", 1),
    # Equal neighbours, which the fast form computes as one wide head.
    *[PATTERNS[name] for name in ("recent", "left", "end", "gaussian 0", "previous", "current") for _ in range(2)],
)
# Rows are means of at most 100 values of about 1, up to 5, in float64, and Gaussians' sums of as many: some 1e2
# roundings of 1.1e-16 each. The bound leaves a factor 20; a wrong weight would show at 1e-6.
close = partial(torch.testing.assert_close, atol=2e-13, rtol=0)

lengths = st.one_of(st.integers(1, 12), st.integers(60, 100))
seeds = st.integers(0, 2**32 - 1)
examples = settings(max_examples=repeats(10, 25), deadline=None, derandomize=True)
both_forms = pytest.mark.parametrize("form", FORMS)


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def drawn_mask(kind, batch, length, seed):
    """True where a token is there: for all heads alike, for each by itself, of the last tokens, or of none."""
    g = torch.Generator().manual_seed(seed)
    there = torch.rand(batch, len(HEADS) if kind == "heads" else 1, 1, length, generator=g) > 0.4
    return {"none": torch.zeros_like(there), "all": None}.get(kind, there)


def drawn_words(length, batch, seed):
    """Numbers of words of one token and more, some left out."""
    g = torch.Generator().manual_seed(seed)
    return (torch.randint(0, 4, (batch, length), generator=g).clamp(max=2) * 2).cumsum(-1) // 2


masks = st.sampled_from(["all", "tokens", "heads", "none"])


@pytest.mark.parametrize("words", [False, True], ids=["tokens", "words"])
@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
@given(length=lengths, seed=seeds, mask=masks, empty=st.booleans())
@examples
def test_fast_equals_reference(causal, words, length, seed, mask, empty):
    """Outputs and gradients."""
    v = draw(2, len(HEADS), length, 3, seed=seed).requires_grad_()
    kwargs = {
        "is_causal": causal,
        "attn_mask": drawn_mask(mask, 2, length, seed),
        "words": drawn_words(length, 2, seed) if words else None,
        "empty": "self" if empty else "zero",
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
    """Of values that are unit vectors rows are the weights themselves, whatever the axes before the heads."""
    for lead in ((), (2,), (2, 3)):
        units = torch.eye(70, dtype=torch.float64).expand(*lead, len(HEADS), 70, 70)
        for empty in ("zero", "self"):
            o = FORMS[form](units, HEADS, is_causal=causal, empty=empty)
            weights = torch.stack([p.weights(70, is_causal=causal, empty=empty) for p in HEADS])
            close(o, weights.expand_as(o))


@both_forms
def test_gradients_by_finite_differences(form):
    """Of first order, and of second: a call is linear, and its gradient in what comes from above is so too."""
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
    """Also within a word, and after a first piece in which tokens are masked; the states are the same, too."""
    v = draw(2, len(HEADS), length, 3, seed=seed)
    numbers = drawn_words(length, 2, seed) if words else None
    cuts = data.draw(st.lists(st.integers(1, length), max_size=3).map(lambda c: sorted({*c, length})))
    mask = drawn_mask("heads", 2, length, seed)
    mask[..., cuts[0] :] = True
    call = partial(FORMS[form], patterns=HEADS, is_causal=True, return_state=True, empty="self")
    whole, final = call(v, words=numbers, attn_mask=mask if masked else None)
    pieces, state = [], None
    for start, stop in zip([0, *cuts[:-1]], cuts, strict=True):
        piece = slice(start, stop)
        first = {"attn_mask": mask[..., piece]} if masked and start == 0 else {}
        of_piece = None if numbers is None else numbers[:, piece]
        o, state = call(v[:, :, piece], words=of_piece, initial_state=state, **first)
        pieces.append(o)
    close(torch.cat(pieces, 2), whole)
    for piecewise, once in zip(state, final, strict=True):
        assert piecewise.dtype == once.dtype
        # Sums of cubes, up to 100^4 / 4: the tolerance is in relation to them.
        torch.testing.assert_close(piecewise, once.expand_as(piecewise), atol=2e-13, rtol=2e-13)


def test_words_after_tokens():
    """A sequence may have words in one call and none in the next: tokens without a number are words of their own."""
    v = draw(1, len(HEADS), 9, 2)
    numbers = torch.tensor([[3, 3, 4, 4, 5, 6, 7, 8, 8]])  # as below, but for the first of each call
    for call in FORMS.values():
        head, state = call(v[:, :, :4], HEADS, is_causal=True, words=numbers[:, :4], return_state=True)
        middle, state = call(v[:, :, 4:7], HEADS, is_causal=True, initial_state=state, return_state=True)
        tail = call(v[:, :, 7:], HEADS, is_causal=True, words=numbers[:, 7:] - 8, initial_state=state)
        close(torch.cat([head, middle, tail], 2), FORMS["reference"](v, HEADS, is_causal=True, words=numbers))


def test_gradients_through_a_state():
    v = draw(1, len(HEADS), 8, 2).requires_grad_()
    upstream = draw(1, len(HEADS), 8, 2, seed=1)
    (whole,) = torch.autograd.grad(positional_attention(v, HEADS, is_causal=True), v, upstream)
    head, state = positional_attention(v[:, :, :5], HEADS, is_causal=True, return_state=True)
    tail = positional_attention(v[:, :, 5:], HEADS, is_causal=True, initial_state=state)
    close(torch.autograd.grad(torch.cat([head, tail], 2), v, upstream)[0], whole)


@pytest.mark.parametrize("causal", [False, True])
@both_forms
@given(length=lengths, seed=seeds, words=st.booleans())
@examples
def test_padding_anywhere_equals_cutting_out(form, causal, length, seed, words):
    """What is masked, whatever it holds, leaves others as if it were not there, and has zeros itself."""
    v = draw(1, len(HEADS), length, 3, seed=seed)
    there = drawn_mask("tokens", 1, length, seed)[0, 0, 0]
    v[:, :, ~there] *= 1e6
    numbers = drawn_words(length, 1, seed) if words else None
    call = partial(FORMS[form], patterns=HEADS, is_causal=causal)
    o = call(v, attn_mask=there, words=numbers)
    assert not o[:, :, ~there].any()
    if there.any():
        close(o[:, :, there], call(v[:, :, there], words=None if numbers is None else numbers[:, there]))


def test_nothing_is_there():
    v = draw(2, len(HEADS), 5, 3).requires_grad_()
    mask = torch.tensor([[False] * 5, [True] * 5])[:, None, None]
    for call in FORMS.values():
        for causal in (False, True):
            o = call(v, HEADS, is_causal=causal, attn_mask=mask, empty="self")
            assert not o[0].any() and o[1].any()
            (gradient,) = torch.autograd.grad(o.sum(), v)
            assert gradient.isfinite().all() and not gradient[0].any()


@both_forms
def test_items_do_not_see_each_other(form):
    v, words = draw(3, len(HEADS), 11, 2), drawn_words(11, 3, 0)
    for causal in (False, True):
        o = FORMS[form](v, HEADS, is_causal=causal, words=words)
        for item in range(3):
            close(FORMS[form](v[item], HEADS, is_causal=causal, words=words[item]), o[item])


@both_forms
def test_words_by_hand(form):
    """Words of two, one and two tokens: a row of the words' matrix, of which a word's tokens share the entry."""
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


@both_forms
def test_a_word_of_one_token_is_a_token(form):
    v = draw(2, len(HEADS), 9, 3)
    for causal in (False, True):
        words = torch.arange(9).expand(2, 9)
        close(FORMS[form](v, HEADS, is_causal=causal, words=words), FORMS[form](v, HEADS, is_causal=causal))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("pattern", dict.fromkeys(HEADS), ids=lambda p: p.name)
def test_no_matrix(pattern, causal):
    """The largest tensor of a step forward and back is one of N V numbers in float64, with what a Gaussian's chunks
    read twice: at N = 4096 and V = 2, two hundredths of the bytes of an N x N matrix of bits."""
    n, width = 4096, 2
    v = draw(1, 1, n, width).requires_grad_()
    with Allocations() as memory:
        o = positional_attention(v, [pattern], is_causal=causal)
        torch.autograd.grad(o, v, torch.ones_like(o))
    band = 8 * 3 * max(64, pattern.vectors, pattern.mirrored().vectors) ** 2 if isinstance(pattern, Gaussian) else 0
    assert memory.largest <= max(8 * n * width * 3, band) < n * n / 8
    assert memory.peak <= 8 * n * width * 12 + 3 * band


def test_lower_precision():
    """Results are those of the rounded values, rounded: sums are taken in float32 at least."""
    v = draw(2, len(HEADS), 90, 3)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for causal in (False, True):
            rounded = v.to(dtype)
            for call in FORMS.values():
                o = call(rounded, HEADS, is_causal=causal)
                assert o.dtype == dtype
                exact = positional_attention(rounded.double(), HEADS, is_causal=causal)
                eps = torch.finfo(dtype).eps  # and of float32 some 1e2 roundings of values up to 5
                torch.testing.assert_close(o.double(), exact, atol=eps * 1e-3 + 3e-6, rtol=eps)


def test_autocast_changes_nothing():
    v = draw(1, len(HEADS), 70, 3).float()
    plain = positional_attention(v, HEADS)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(positional_attention(v, HEADS), plain)


@pytest.mark.unchecked
def test_compiles():
    v = draw(1, 7, 6, 2)
    for causal in (False, True):
        compiled = torch.compile(positional_attention, backend="eager", fullgraph=True)
        assert torch.equal(compiled(v, SEVEN, is_causal=causal), positional_attention(v, SEVEN, is_causal=causal))
