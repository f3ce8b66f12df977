"""Attention by patterns at its edges: leading axes, masks, other keys, large scores outside, half precision, errors.

What holds for each pattern is in `test_pattern_counts.py`, `test_pattern_tilings.py` and `test_pattern_attention.py`.
"""

from itertools import product

import pytest
import torch
from drawn_tilings import Parity, draw

from ortho.attention.mechanism import Mechanism
from ortho.attention.softmax.softmax_attention import softmax_attention_reference
from ortho.attention.sparse.pattern import pattern_attention, pattern_attention_reference, pattern_mechanism
from ortho.attention.sparse.tiling import Section
from ortho.attention.sparse.window import Window

FORMS = {"reference": pattern_attention_reference, "fast": pattern_attention}
# Sums of at most 300 float64 products of size 10, in another order and behind the exponentials of scores up to 10.
TOLERANCE = {"atol": 1e-12, "rtol": 1e-12}
K, V = 4, 5


def qkv(*lead, length, keys=None, dtype=torch.float64):
    keys = length if keys is None else keys
    shapes = (length, K), (keys, K), (keys, V)
    return [draw(*lead, *shape, seed=s).to(dtype).requires_grad_() for s, shape in enumerate(shapes)]


def compare(leaves, **kwargs):
    """Both forms: outputs, states, and the gradients of all operands and of the state."""
    state = kwargs.get("initial_state", ())
    results = []
    for function in FORMS.values():
        o, carried = function(*leaves, return_state=True, **kwargs)
        gradients = torch.autograd.grad(o, [*leaves, *state], draw(*o.shape, seed=9).to(o.dtype))
        results.append([o, *carried, *gradients])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, **TOLERANCE)
    return results[0][0]


@pytest.mark.parametrize("width", [1, 64, 65, 129])
def test_a_window_reads_no_block_in_vain(width):
    """Every block of the table holds a pair of its tile, for whole sequences and for a lone query."""
    for (first, stop), causal in product(((0, 256), (255, 256), (192, 193), (100, 230)), (False, True)):
        (part,) = Window(width).tilings(Section(first, stop, stop, causal))
        for t, row in enumerate(part.table):
            for block in row[row >= 0]:
                i, j = part.queries.positions[t][:, None], part.keys.positions[block]
                assert (part.allowed(i, j) & (j >= 0)).any()


@pytest.mark.parametrize("lead", [(), (1,), (3,), (2, 3), (2, 1, 2)])
@pytest.mark.parametrize("pattern", [Window(20), Parity()])
def test_leading_axes(lead, pattern):
    """Any number, each sequence by itself."""
    leaves = qkv(*lead, length=70)
    o = compare(leaves, pattern=pattern, is_causal=True, scale=-0.3)
    flat = [x.reshape(-1, *x.shape[-2:]) for x in leaves]
    for number, one in enumerate(zip(*flat, strict=True)):
        alone = pattern_attention(*one, pattern=pattern, is_causal=True, scale=-0.3)
        torch.testing.assert_close(alone, o.reshape(-1, 70, V)[number], **TOLERANCE)


@pytest.mark.parametrize("pattern", [Window(7), Window(70), Parity()])
def test_keys_of_another_sequence(pattern):
    """Queries and keys both count from 0, whichever are more; queries too far from any key get zeros."""
    for length, keys in ((5, 150), (150, 5), (64, 65)):
        o = compare(qkv(2, length=length, keys=keys), pattern=pattern)
        empty = ~pattern.mask(length, keys).any(1)
        assert not o[:, empty].any()
        assert empty.any() or (length, keys) != (150, 5)


@pytest.mark.parametrize("pattern", [Window(9), Parity()])
@pytest.mark.parametrize("causal", [False, True])
def test_masks(pattern, causal):
    """Of every shape that broadcasts, with a state and without; rows may be left with nothing."""
    g = torch.Generator().manual_seed(3)
    shapes = [(), (70,), (70, 1), (1, 70), (70, 70), (3, 1, 70), (2, 1, 70, 70), (2, 3, 70, 1), (1, 1, 70, 70)]
    for shape in shapes:
        mask = torch.rand(shape, generator=g) < 0.5
        compare(qkv(2, 3, length=70), pattern=pattern, is_causal=causal, attn_mask=mask)
    past = [x.requires_grad_() for x in (draw(2, 3, 30, K, seed=5), draw(2, 3, 30, V, seed=6))]
    for shape in ((130 - 30,), (70, 100), (2, 1, 1, 100)):
        mask = torch.rand(shape, generator=g) < 0.5
        compare(qkv(2, 3, length=70), pattern=pattern, is_causal=causal, attn_mask=mask, initial_state=tuple(past))
    o = compare(qkv(2, 3, length=70), pattern=pattern, attn_mask=torch.zeros(70, dtype=torch.bool))
    assert not o.any()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("causal", [False, True])
def test_a_window_of_all_is_softmax_attention(form, causal):
    leaves = qkv(2, length=100)
    o = FORMS[form](*leaves, pattern=Window(100), is_causal=causal)
    torch.testing.assert_close(o, softmax_attention_reference(*leaves, is_causal=causal), **TOLERANCE)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("pattern", [Window(9), Window(70), Parity()])
def test_what_lies_outside_changes_nothing(form, pattern):
    """Bit for bit, however large it is."""
    length = 150
    leaves = [x.detach() for x in qkv(1, length=length)]
    for causal in (False, True):
        o = FORMS[form](*leaves, pattern=pattern, is_causal=causal)
        kept = pattern.mask(length, is_causal=causal)
        for row in (0, 64, 100, 149):
            changed = [x.clone() for x in leaves]
            for x in changed[1:]:
                x[:, ~kept[row]] *= 1e3
            again = FORMS[form](*changed, pattern=pattern, is_causal=causal)
            assert torch.equal(again[:, row], o[:, row])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("pattern", [Window(9), Parity()])
def test_half_precision(dtype, pattern):
    """Computed in float32: the result for the same numbers there, rounded once, and so its gradients."""
    leaves = qkv(2, 3, length=100, dtype=dtype)
    single = [x.detach().float().requires_grad_() for x in leaves]
    d_o = draw(2, 3, 100, V, seed=9).to(dtype)
    o, exact = (pattern_attention(*x, pattern=pattern, is_causal=True) for x in (leaves, single))
    assert torch.equal(o, exact.to(dtype))
    found = torch.autograd.grad(o, leaves, d_o)
    for ours, theirs in zip(found, torch.autograd.grad(exact, single, d_o.float()), strict=True):
        assert ours.dtype == dtype and torch.equal(ours, theirs.to(dtype))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(pattern_attention(*single, pattern=pattern, is_causal=True), exact)


def test_mechanism():
    """An entry whose forms and cost are those of the pattern."""
    window = Window(5)
    entry = pattern_mechanism("window", window, "a source")
    assert isinstance(entry, Mechanism)
    assert (entry.name, entry.family, entry.source) == ("window", "pattern", "a source")
    assert entry.causal and entry.bidirectional and entry.positional and not entry.exact and not entry.gates
    leaves = qkv(length=20)
    for form, function in FORMS.items():
        assert torch.equal(entry.form(form)(*leaves), function(*leaves, pattern=window))
    assert entry.cost(1, 20, 1, K, V, form="fast").decode == 2 * 5 * (K + V)


@pytest.mark.bad_input
@pytest.mark.parametrize("form", FORMS)
def test_errors(form):
    function = FORMS[form]
    q, k, v = (x.detach() for x in qkv(2, length=6))
    for pattern in ("window", None, Window, torch.ones(6, 6, dtype=torch.bool)):
        with pytest.raises(TypeError, match="pattern: expected a Pattern, got "):
            function(q, k, v, pattern=pattern)
    call = {"pattern": Window(3)}
    with pytest.raises(ValueError, match="k: expected width 4 like q"):
        function(q, k[..., :3], v, **call)
    with pytest.raises(ValueError, match="v: expected length 6 like k"):
        function(q, k, v[:, :5], **call)
    with pytest.raises(ValueError, match="v: expected finite numbers"):
        function(q, k, v / 0, **call)
    with pytest.raises(TypeError, match="scale: expected a number"):
        function(q, k, v, scale="1", **call)
    with pytest.raises(ValueError, match="is_causal: expected as many queries as keys, got 6 and 5"):
        function(q, k[:, :5], v[:, :5], is_causal=True, **call)
    with pytest.raises(TypeError, match="attn_mask: expected a boolean tensor"):
        function(q, k, v, attn_mask=torch.ones(6), **call)
    with pytest.raises(ValueError, match=r"attn_mask: expected a shape that broadcasts to \(2, 6, 6\), got \(6, 5\)"):
        function(q, k, v, attn_mask=torch.ones(6, 5, dtype=torch.bool), **call)
    with pytest.raises(TypeError, match="initial_state: expected a tuple of tensors"):
        function(q, k, v, initial_state=k, **call)
    with pytest.raises(ValueError, match="initial_state: expected keys torch.float64"):
        function(q, k, v, initial_state=(k[..., :2], v), **call)
    with pytest.raises(ValueError, match="initial_state: expected values of length 6 like the keys"):
        function(q, k, v, initial_state=(k, v[:, :4]), **call)


@pytest.mark.bad_input
def test_patterns_refuse():
    with pytest.raises(ValueError, match="width: expected an integer of at least 1, got 0"):
        Window(0)
    for width in (1.5, "3", None, True):
        with pytest.raises(TypeError, match="width: expected an integer of at least 1, got "):
            Window(width)
    with pytest.raises(TypeError, match="pattern: expected a Pattern, got int 5"):
        pattern_mechanism("window", 5, "")
