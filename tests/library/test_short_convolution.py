"""The short convolution before attention, and the KV shift: formulas, padding, states, costs, errors."""

from functools import partial

import pytest
import torch
from counted import assert_declared, assert_decodes
from refusals import refusals, refuses
from seeded import draw, generator

from ortho import ConvolvedAttention, MultiheadAttention, TransformerBlock, cost
from ortho.attention import MECHANISMS
from ortho.attention.shifted import ShiftedKeysValues
from ortho.cost.layers import convolved_layer, shifted_layer
from ortho.layers.short_convolution import short_convolution, short_convolution_reference

# Sums of at most 1e2 rounded products of size 1 in float64, in different orders.
close = partial(torch.testing.assert_close, atol=1e-12, rtol=1e-12)
FORMS = pytest.mark.parametrize("form", ["reference", "fast"])
B, N, WIDTH, H = 2, 9, 24, 4
FUNCTIONS = {"reference": short_convolution_reference, "fast": short_convolution}
SIZES = [(1, 5, 8, 2), (2, 7, 12, 3), (2, 33, 64, 4), (3, 1, 8, 4), (2, 2, 8, 4)]  # B, N, d, H


def convolved(**kwargs):
    """A layer whose taps are not 0."""
    one = ConvolvedAttention(WIDTH, H, generator=torch.Generator().manual_seed(1), dtype=torch.float64, **kwargs)
    with torch.no_grad():
        one.taps.normal_(generator=torch.Generator().manual_seed(2))
    return one


@pytest.mark.parametrize("width", [1, 2, 4, 7])
@pytest.mark.parametrize("form", FUNCTIONS)
def test_as_the_formula_reads(form, width):
    """Tap by tap, with a tail and without, outputs and all gradients; of sequences shorter than the taps, too."""
    for length in (1, 3, N):
        for tail in (None, draw(B, width - 1, WIDTH, seed=3)):
            leaves = [draw(B, length, WIDTH).requires_grad_(), draw(width, WIDTH, seed=1).requires_grad_()]
            leaves += [] if tail is None or width == 1 else [tail.requires_grad_()]
            x, taps = leaves[:2]
            line = torch.cat([torch.zeros(B, width - 1, WIDTH) if tail is None else tail, x], 1)
            rows = [x[:, t] + sum(taps[i] * line[:, width - 1 + t - i] for i in range(width)) for t in range(length)]
            found, expected = FUNCTIONS[form](x, taps, tail), torch.stack(rows, 1)
            close(found, expected)
            d_y = draw(B, length, WIDTH, seed=9)
            close(*(torch.autograd.grad(y, leaves, d_y) for y in (found, expected)))


@FORMS
def test_it_begins_as_nothing(form):
    """With the same draws the layer is the one that it wraps, bit for bit."""
    kind = {"form": form, "dtype": torch.float64}
    layer = MultiheadAttention(WIDTH, H, generator=torch.Generator().manual_seed(1), **kind)
    one = ConvolvedAttention(WIDTH, H, generator=torch.Generator().manual_seed(1), **kind)
    x = draw(B, N, WIDTH)
    assert torch.equal(one(x, is_causal=True), layer(x, is_causal=True))


@FORMS
@pytest.mark.parametrize("causal", [False, True])
def test_padding(causal, form):
    """On either side it is as good as absent, whatever it holds, by a mask of keys in one of its shapes; in a gap it
    is as good as zeros. A mask of pairs leaves out no token."""
    one, x = convolved(form=form), draw(B, N, WIDTH)
    for there in (torch.arange(N) >= 4, torch.arange(N) < 6):
        padded = torch.where(there[:, None], x, 30 * x)
        expected = one(x[:, there], is_causal=causal)
        masks = [{"key_padding_mask": ~there.expand(B, N)}, {"attn_mask": there}, {"attn_mask": there[None]}]
        masks += [{"attn_mask": there[None, None]}, {"attn_mask": there.expand(B, H, 1, N)}]
        for mask in masks:
            close(one(padded, is_causal=causal, **mask)[:, there], expected)
    gap = torch.arange(N) != 4
    found = one(x, is_causal=causal, key_padding_mask=~gap.expand(B, N))
    close(found[:, gap], one(x * gap[:, None], is_causal=causal, key_padding_mask=~gap.expand(B, N))[:, gap])
    pairs = torch.ones(N, N, dtype=torch.bool).tril()
    close(one(x, attn_mask=pairs), one(x, is_causal=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    """Sums are taken in float32 and rounded once: half a unit in the last place of each result."""
    x, taps, tail = (draw(*shape, seed=i, dtype=dtype) for i, shape in enumerate([(B, N, 8), (4, 8), (B, 3, 8)]))
    exact = short_convolution_reference(x.double(), taps.double(), tail.double())
    found = short_convolution(x, taps, tail)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), exact, rtol=0.51 * torch.finfo(dtype).eps, atol=1e-6)


def test_cost_of_a_block():
    """Declared = counted, exactly, with a convolution as wide as some sequences are long."""
    for width in (1, 2, 4):
        for b, n, d, h in SIZES:
            x = torch.zeros(b, n, d, requires_grad=True)
            declared = cost.block(b, n, d, h, causal=True, layer=convolved_layer, width=width)
            block = TransformerBlock(d, h, layer=ConvolvedAttention, width=width)
            assert_declared(declared, block, x, is_causal=True)
    half = torch.zeros(2, 7, 12, requires_grad=True, dtype=torch.bfloat16)
    layer = ConvolvedAttention(12, 3, dtype=half.dtype)
    assert_declared(convolved_layer(2, 7, 12, 3, causal=True, itemsize=2), layer, half, is_causal=True)
    declared = partial(cost.block, d=12, H=4, causal=True, layer=convolved_layer)
    assert_decodes(declared, TransformerBlock(12, 4, layer=ConvolvedAttention), 12)


# -- the KV shift


def shifted(attention="softmax", form="fast", *, width=WIDTH, heads=H, dtype=torch.float64):
    g = torch.Generator().manual_seed(1)
    shift = ShiftedKeysValues(heads, attention, form=form, generator=g, dtype=dtype)
    return MultiheadAttention(width, heads, attention=shift, generator=g, dtype=dtype)


def test_the_shift_as_the_formula_reads():
    """Head by head and token by token, causal and not; and the weights of a head add up to 1 at first."""
    layer, x = shifted(), draw(B, N, WIDTH)
    shift = layer.attention
    close(shift.keys.sum(1), torch.ones(H, dtype=torch.float64))
    assert shift.keys.min() >= 0 and shift.keys[:, 0].unique().numel() == H
    with torch.no_grad():
        shift.values.normal_(generator=torch.Generator().manual_seed(5))
    q, k = layer.projection(x)
    v = (x @ layer.weight_v.mT).unflatten(-1, (H, -1)).transpose(1, 2)
    mixed = []
    for y, weights in ((k, shift.keys), (v, shift.values)):
        rows = [torch.stack([weights[h, 0] * y[:, h, t] + (weights[h, 1] * y[:, h, t - 1] if t else 0)
                             for t in range(N)], 1) for h in range(H)]  # fmt: skip
        mixed.append(torch.stack(rows, 1))
    for causal in (False, True):
        o = torch.nn.functional.scaled_dot_product_attention(q, *mixed, is_causal=causal)
        close(layer(x, is_causal=causal), o.transpose(1, 2).flatten(2) @ layer.weight_o.mT)


@pytest.mark.parametrize("attention", [name for name, m in MECHANISMS.items() if m.fitted])
def test_padding_is_not_in_the_fit_under_the_shift(attention):
    """Neither its keys nor its queries: what a token reads does not depend on what padding holds."""
    layer, x = shifted(attention), draw(B, N, WIDTH)
    padding = torch.zeros(B, N, dtype=torch.bool)
    padding[:, 5:] = True
    o, other = (layer(x + 9 * c * padding[..., None], key_padding_mask=padding)[:, :5] for c in (0, 1))
    close(o, other)


@pytest.mark.parametrize("attention", ["softmax", "rotary"])
@pytest.mark.parametrize("causal", [False, True])
def test_cost_of_the_shift(attention, causal):
    """Declared = counted, exactly."""
    for b, n, d, h in SIZES:
        x = torch.zeros(b, n, d, requires_grad=True)
        declared = shifted_layer(b, n, d, h, attention=attention, causal=causal)
        layer = shifted(attention, width=d, heads=h, dtype=torch.float32)
        assert_declared(declared, layer, x, is_causal=causal)


BAD = [
    (lambda x: convolved()(x, attn_mask=x > 0), "attn_mask: expected a shape that broadcasts"),
    (lambda x: convolved()(x, initial_state=5), "initial_state: expected the last tokens and the attention", TypeError),
    (lambda x: convolved()(x, initial_state=(x, x, x)), "initial_state: expected tail torch.float64 of sh"),
    (lambda x: convolved()(x, cache=convolved().new_cache(9)), "cache: expected one of this layer, got an"),
    (lambda x: convolved().new_cache(9).attend(x, x, x), "cache: expected to be read by a ConvolvedAttent", TypeError),
    (lambda x: ShiftedKeysValues(4, "delta"), "attention: expected a mechanism without gates, got 'delta'"),
]


@refusals(BAD)
def test_errors(refused):
    refused(draw(B, N, WIDTH))


@FORMS
def test_the_output_has_the_dtype_of_x(form):
    x, taps = draw(2, 5, 8).half(), draw(4, 8).float()
    assert FUNCTIONS[form](x, taps).dtype == torch.float16


def test_shifted_heads_are_as_many_as_the_layer_s():
    layer = MultiheadAttention(8, 4, attention=ShiftedKeysValues(1))
    refuses(r"^q: expected shape \(B, 1, N, K\)", layer, torch.zeros(2, 6, 8))


@pytest.mark.bad_input
@FORMS
def test_a_tail_that_does_not_fit(form):
    x, taps = draw(2, 5, 8), draw(4, 8)
    refuses("tail: expected", FUNCTIONS[form], x, taps, error=TypeError, tail=[1])
    refuses(r"tail: expected torch.float64 of shape \(2, 3, 8\)", FUNCTIONS[form], x, taps, tail=x[:, :2])
    refuses("tail: expected finite numbers", FUNCTIONS[form], x, taps, tail=x[:, :3] * float("nan"))


@pytest.mark.bad_input
def test_padding_of_shifted_heads_that_does_not_fit():
    shifted, q = ShiftedKeysValues(2), draw(2, 2, 5, 4).float()
    there, padding = torch.ones(5, dtype=torch.bool), torch.zeros(2, 5, dtype=torch.bool)
    for wrong in (padding[0], padding[:, :3], torch.zeros(2, 9, dtype=torch.bool)):
        refuses(r"key_padding_mask: expected shape \(2, 5\)", shifted, q, q, q, attn_mask=there, key_padding_mask=wrong)
    refuses("attn_mask: expected a mask that hides", shifted, q, q, q, key_padding_mask=padding)


def test_padding_is_read_token_by_token():
    layer = MultiheadAttention(8, 2, attention=ShiftedKeysValues(2, generator=generator(1)), generator=generator(2))
    x, padding = draw(2, 5, 8).float(), torch.tensor([[True, True, False, False, False], [False] * 5])
    whole, state, parts = layer(x, is_causal=True, key_padding_mask=padding), None, []
    for i in range(5):
        now = {"key_padding_mask": padding[:, : i + 1], "initial_state": state}
        part, state = layer(x[:, i : i + 1], is_causal=True, return_state=True, **now)
        parts.append(part)
    assert torch.allclose(torch.cat(parts, 1)[~padding], whole[~padding], atol=1e-5)
