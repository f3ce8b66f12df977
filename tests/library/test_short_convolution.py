"""The short convolution before attention: formulas, padding, states, costs, errors."""

from functools import partial

import pytest
import torch
from refusals import refusals
from seeded import draw

from ortho import ConvolvedAttention, MultiheadAttention
from ortho.layers.short_convolution import short_convolution, short_convolution_reference

# Sums of at most 1e2 rounded products of size 1 in float64, in different orders.
close = partial(torch.testing.assert_close, atol=1e-12, rtol=1e-12)
FORMS = pytest.mark.parametrize("form", ["reference", "fast"])
B, N, WIDTH, H = 2, 9, 24, 4
FUNCTIONS = {"reference": short_convolution_reference, "fast": short_convolution}


def convolved(**kwargs):
    """A layer whose kernel are not 0."""
    one = ConvolvedAttention(WIDTH, H, generator=torch.Generator().manual_seed(1), dtype=torch.float64, **kwargs)
    with torch.no_grad():
        one.kernel.normal_(generator=torch.Generator().manual_seed(2))
    return one


@pytest.mark.parametrize("width", [1, 2, 4, 7])
@pytest.mark.parametrize("form", FUNCTIONS)
def test_as_the_formula_reads(form, width):
    """Number by number, with a state and without, outputs and all gradients; of short sequences, too."""
    for length in (1, 3, N):
        for conv_state in (None, draw(B, width - 1, WIDTH, seed=3)):
            leaves = [draw(B, length, WIDTH).requires_grad_(), draw(width, WIDTH, seed=1).requires_grad_()]
            leaves += [] if conv_state is None or width == 1 else [conv_state.requires_grad_()]
            x, kernel = leaves[:2]
            line = torch.cat([torch.zeros(B, width - 1, WIDTH) if conv_state is None else conv_state, x], 1)
            rows = [x[:, t] + sum(kernel[i] * line[:, width - 1 + t - i] for i in range(width)) for t in range(length)]
            found, expected = FUNCTIONS[form](x, kernel, conv_state), torch.stack(rows, 1)
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
    x, kernel, conv_state = (
        draw(*shape, seed=i, dtype=dtype) for i, shape in enumerate([(B, N, 8), (4, 8), (B, 3, 8)])
    )
    exact = short_convolution_reference(x.double(), kernel.double(), conv_state.double())
    found = short_convolution(x, kernel, conv_state)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), exact, rtol=0.51 * torch.finfo(dtype).eps, atol=1e-6)


BAD = [
    (lambda x: convolved()(x, attn_mask=x > 0), "attn_mask: expected a shape that broadcasts"),
    (lambda x: convolved()(x, return_state=True), "cache: expected one in place of a state, got return_state"),
    (lambda x: convolved().new_cache(9).attend(x, x, x), "cache: expected to be read by a ConvolvedAttent", TypeError),
]


@refusals(BAD)
def test_errors(refused):
    refused(draw(B, N, WIDTH))


@FORMS
def test_the_output_has_the_dtype_of_x(form):
    x, kernel = draw(2, 5, 8).half(), draw(4, 8).float()
    assert FUNCTIONS[form](x, kernel).dtype == torch.float16
