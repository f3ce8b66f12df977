"""Attention from feature maps, whichever they are: the fast form against the definition, across chunks and tiles."""

from functools import partial
from itertools import product

import pytest
import torch
from extent import WHOLE
from kernel_mechanisms import (
    ALL,
    CASES,
    CAUSAL,
    FACTORED,
    FITTED,
    FORMS,
    HELD,
    TOLERANCE,
    WIDTH,
    draw,
    feature_map,
    qkv,
    tolerance,
)

from ortho.attention import MECHANISMS, chunking
from ortho.attention.chunking import CHUNK, TILE, chunks
from ortho.attention.linear.feature_maps import FeatureMap, Features
from ortho.attention.linear.linear_attention import kernel_weights, linear_attention, linear_attention_reference


def with_gradients(function, operands, **kwargs):
    """The output and the gradients of q, k, v for one and the same gradient of the output."""
    leaves = [x.clone().requires_grad_() for x in operands]
    o = function(*leaves, **kwargs)
    return [o, *torch.autograd.grad(o, leaves, draw(*o.shape, seed=99))]


def assert_same(ours, theirs, name):
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, **tolerance(name))


def test_what_is_tested():
    assert {"linear", "cosformer", "trigonometric", "favor"} < set(FACTORED) < set(MECHANISMS) - {"efficient", "delta"}
    assert set(FITTED) == {"favor++", "saderf", "aderf", "sderf"} == set(FACTORED) - set(CAUSAL)


def test_chunks():
    """The fewest that cover the sequence, none wider than asked for, nor than it takes."""
    for length, chunk in product(range(1, 40), range(1, 12)):
        width, behind = chunks(length, chunk)
        number = -(-length // chunk)
        assert width * number == length + behind and (width - 1) * number < length <= width * number
        assert width <= chunk


@pytest.mark.parametrize(("name", "causal"), CASES)
@pytest.mark.parametrize(("length", "chunk"), [(1, 4), (2, 1), (7, 3), (12, 4), (13, 4), (63, 64), (130, CHUNK)])
def test_fast_equals_reference(name, causal, length, chunk, monkeypatch):
    """Six sequences of one to three chunks: all in one tile, several sequences a tile, one, or a part of one.

    Where not causal, of which a part makes no tile: all, several, or one.
    """
    m, operands = ALL[name], qkv(2, 3, length=length)
    expected = with_gradients(m.reference, operands, is_causal=causal)
    for tile in (TILE, 7, 5, 2):
        monkeypatch.setattr(chunking, "TILE", tile)
        assert_same(with_gradients(m.fast, operands, is_causal=causal, chunk=chunk), expected, name)


@pytest.mark.parametrize(("name", "causal"), CASES)
@pytest.mark.parametrize("kept", ["right", "left", "scattered", "none"])
def test_hidden_keys(name, causal, kept, monkeypatch):
    """Padding on either side and between: as in the reference, and rows with nothing to attend to give zeros."""
    monkeypatch.setattr(chunking, "TILE", 2)
    m, operands = ALL[name], qkv(2, 3, length=11)
    index = torch.arange(11)
    mask = {"right": index < 7, "left": index > 4, "scattered": index % 3 == 1, "none": index < 0}[kept]
    mask = torch.stack([mask, mask.roll(1)])[:, None, None]  # (B, 1, 1, N)
    fast = with_gradients(m.fast, operands, is_causal=causal, attn_mask=mask, chunk=4)
    assert_same(fast, with_gradients(m.reference, operands, is_causal=causal, attn_mask=mask), name)
    allowed = mask.expand(2, 1, 11, 11)
    empty = ~(allowed.tril() if causal else allowed).any(-1, keepdim=True)
    assert torch.equal(fast[0].masked_select(empty), torch.zeros(int(empty.sum()) * 15, dtype=torch.float64))
    # Where a row is empty its query has no gradient; a hidden key and its value have none.
    assert not fast[1].masked_select(empty).any()
    assert not any(gradient.masked_select(~mask.mT).any() for gradient in fast[2:])
    # Whatever it holds: one whose scale is far from all others' as well.
    q, k, v = operands
    for factor in (0.0, 1e3):
        louder = (q, *(x.where(mask.mT, factor * x) for x in (k, v)))
        for form in FORMS:
            assert_same([m.form(form)(*louder, is_causal=causal, attn_mask=mask)], fast[:1], name)


@pytest.mark.parametrize("name", CAUSAL)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("causal", [False, True])
def test_cut_equals_whole(name, form, causal, monkeypatch):
    """At every cut, with keys whose scale grows from part to part; and all gradients through the state."""
    monkeypatch.setattr(chunking, "TILE", 3)
    function = ALL[name].form(form)
    kwargs = {"chunk": 3} if form == "fast" else {}
    q, k, v = qkv(2, length=11)
    k = k * torch.linspace(0.2, 4, 11, dtype=k.dtype)[:, None]

    def in_two(q, k, v, cut):
        _, state = function(q[:, :cut], k[:, :cut], v[:, :cut], is_causal=causal, return_state=True, **kwargs)
        rest = (q[:, cut:], k[:, cut:], v[:, cut:])
        return function(*rest, is_causal=causal, initial_state=state, return_state=True, **kwargs)

    whole, state = function(q, k, v, is_causal=causal, return_state=True, **kwargs)
    for cut in range(1, 11):
        tail, final = in_two(q, k, v, cut)
        assert_same([tail, *final], [whole[:, cut:], *state], name)
        ours = with_gradients(lambda *x, cut=cut: in_two(*x, cut)[0], (q, k, v))
        theirs = with_gradients(lambda *x, cut=cut: function(*x, is_causal=causal)[:, cut:], (q, k, v))
        assert_same(ours, theirs, name)


@pytest.mark.parametrize("name", CAUSAL)
def test_token_by_token(name):
    m = ALL[name]
    q, k, v = qkv(2, length=9)
    state, rows = None, []
    for i in range(9):
        token = [x[:, i : i + 1] for x in (q, k, v)]
        row, state = m.fast(*token, is_causal=True, initial_state=state, return_state=True)
        rows.append(row)
    torch.testing.assert_close(torch.cat(rows, 1), m.reference(q, k, v, is_causal=True), **tolerance(name))


@pytest.mark.parametrize("name", CAUSAL)
@pytest.mark.parametrize(("form", "tile"), [("reference", TILE), ("fast", TILE), ("fast", 2)])
def test_the_future_leaves_the_prefix(name, form, tile, monkeypatch):
    """Bit for bit, at cuts inside and between chunks, whether the tokens that come are large or vanish."""
    monkeypatch.setattr(chunking, "TILE", tile)
    function = ALL[name].form(form)
    q, k, v = qkv(2, length=150)  # three chunks of 50
    before = function(q, k, v, is_causal=True)
    for cut, size in product((1, 49, 50, 51, 149), (0.0, 10.0)):
        other = [torch.cat([x[:, :cut], size * x[:, cut:]], 1) for x in (q, k, v)]
        assert torch.equal(function(*other, is_causal=True)[:, :cut], before[:, :cut])


@pytest.mark.parametrize(("name", "causal"), CASES)
@pytest.mark.parametrize("form", FORMS)
def test_items_do_not_see_each_other(name, form, causal, monkeypatch):
    """Nor does it matter how they come to the tiles. And the same call gives the same bits."""
    monkeypatch.setattr(chunking, "TILE", 5)
    function = ALL[name].form(form)
    q, k, v = qkv(3, 2, length=70)
    k[0] *= 5  # a scale, or a fit, over the batch would change the others
    whole = with_gradients(function, (q, k, v), is_causal=causal)
    assert all(map(torch.equal, whole, with_gradients(function, (q, k, v), is_causal=causal)))
    for i in range(3):
        torch.testing.assert_close(function(q[i], k[i], v[i], is_causal=causal), whole[0][i], **tolerance(name))


@pytest.mark.parametrize(("name", "causal"), CASES)
@pytest.mark.parametrize("form", FORMS)
def test_outputs_are_averages(name, form, causal):
    """Equal values come back as they are, or 0 from rows without weight; others, where no weight is negative, between
    the least and the largest that the row sees. With more keys than queries, where not causal."""
    function, keys = ALL[name].form(form), 20 if causal else 29
    q, k, v = draw(2, 20, WIDTH), draw(2, keys, WIDTH, seed=1), draw(2, keys, 5, seed=2)
    weights = kernel_weights(feature_map(name), q, k, is_causal=causal)
    filled = (weights != 0).any(-1, keepdim=True).double()
    assert filled.all() or feature_map(name).weights == "non-negative"
    ones = function(q, k, torch.ones_like(v), is_causal=causal)
    torch.testing.assert_close(ones, filled.expand(2, 20, 5), **tolerance(name))
    o = function(q, k, v, is_causal=causal)
    torch.testing.assert_close(o, ALL[name].reference(q, k, v, is_causal=causal), **tolerance(name))
    if ALL[name].signed:
        assert (weights < 0).any()
        return
    assert (weights >= 0).all()
    low, high = (v.cummin(-2)[0], v.cummax(-2)[0]) if causal else (v.amin(-2, True), v.amax(-2, True))
    assert ((o >= low * filled - 1e-12) & (o <= high * filled + 1e-12)).all()  # sums of 30 products, rounded


class Given(FeatureMap):
    """The operands themselves, the keys scaled by e^s."""

    def __init__(self, s=None):
        self.s, self.scales_keys = s, s is not None

    def __call__(self, q, k, **_):
        return Features(q, k, self.s(k) if callable(self.s) else self.s)

    def width(self, K):
        return K

    def cost(self, G, N, M, K, m):
        raise NotImplementedError


@pytest.mark.parametrize("causal", [False, True])
def test_scales_of_keys_are_exact(causal):
    """e^s beside phi(k) is e^s phi(k): over a range of scales that float64 just holds without them."""
    q, k, v = (x.abs() for x in qkv(2, length=40))
    s = 300 * torch.sin(torch.arange(40.0, dtype=torch.float64)).expand(2, 40)
    plain = linear_attention_reference(q, k * s.exp()[..., None], v, feature_map=Given(), is_causal=causal)
    for function, kwargs in ((linear_attention_reference, {}), (linear_attention, {"chunk": 8})):
        scaled = function(q, k, v, feature_map=Given(s), is_causal=causal, **kwargs)
        torch.testing.assert_close(scaled, plain, **TOLERANCE)
        below = function(q, k, v, feature_map=Given(s - 1e4), is_causal=causal, **kwargs)
        torch.testing.assert_close(below, plain, **TOLERANCE)  # s has lost 1e4 eps
        beyond = function(q, k, v, feature_map=Given(1e4 * s), is_causal=causal, **kwargs)
        # So far apart, each row is the value at the largest scale that it sees.
        seen = s[:1].expand(40, 40) + (torch.ones(40, 40).triu(1) * -1e9 if causal else 0)
        torch.testing.assert_close(beyond, v[:, seen.argmax(-1)], **TOLERANCE)


@pytest.mark.parametrize("causal", [False, True])
def test_padding_of_the_last_chunk_is_not_seen(causal):
    """The state's scale is the largest of the keys there are, although all are far below 0, the scale of no key."""
    q, k, v = (x.abs() for x in qkv(2, length=13))
    given = Given(lambda k: -1e4 - k.sum(-1))
    _, (memory, total, peak) = linear_attention(
        q, k, v, feature_map=given, is_causal=causal, return_state=True, chunk=4
    )
    assert torch.equal(peak, given.s(k).amax(-1))
    scaled = k * (given.s(k) - peak[:, None]).exp()[..., None]
    torch.testing.assert_close(memory, scaled.mT @ v, **TOLERANCE)
    torch.testing.assert_close(total, scaled.sum(-2), **TOLERANCE)


@pytest.mark.parametrize("name", HELD)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("causal", [False, True])
def test_gradients_by_finite_differences(name, form, causal):
    """What `test_properties` leaves out, since the gradient of a fitted map is not its derivative: held, it is."""
    operands = [x.requires_grad_() for x in qkv(length=4, values=2)]
    assert torch.autograd.gradcheck(
        lambda *x: ALL[name].form(form)(*x, is_causal=causal), operands, fast_mode=not WHOLE
    )


@pytest.mark.parametrize(("name", "causal"), [case for case in CASES if case[0] not in FITTED])
def test_second_derivatives(name, causal):
    """The reference has them, by finite differences; the fast form refuses, for whichever operand."""
    operands = [x.requires_grad_() for x in qkv(length=3, values=2)]
    reference, fast = (partial(ALL[name].form(form), is_causal=causal) for form in FORMS)
    assert torch.autograd.gradgradcheck(reference, operands, fast_mode=not WHOLE)

    def twice(x):
        (gradient,) = torch.autograd.grad(fast(*operands).square().sum(), x, create_graph=True)
        torch.autograd.grad(gradient.square().sum(), operands, allow_unused=True)

    for x in operands:
        with pytest.raises(RuntimeError, match="twice"):
            twice(x)
