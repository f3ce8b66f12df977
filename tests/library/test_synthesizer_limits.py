"""Synthesizers: what a row may not see, sequences cut and padded, rows that see nothing, bad input."""

import pytest
import torch
from synthesizer_layers import HEADS, TOLERANCE, D, draw, every_case, layer

from ortho.layers.synthesizer import SOURCES, FactoredDense, FactoredRandom, Random, SynthesizerAttention


@every_case
def test_a_mask_spans_the_past(case):
    module, x = layer(case), draw(2, 9, D)
    mask = draw(9, 9, seed=6) > -1
    whole = module(x, attn_mask=mask, is_causal=True)
    _, state = module(x[:, :4], attn_mask=mask[:4, :4], is_causal=True, return_state=True)
    rest = module(x[:, 4:], attn_mask=mask[4:], is_causal=True, initial_state=state)
    torch.testing.assert_close(rest, whole[:, 4:], **TOLERANCE)


@every_case
def test_nothing_to_attend_to(case):
    """Zeros for such a row, and gradients without NaN, also for huge logits."""
    for size in (1, 1e300):
        module, x = layer(case), draw(2, 6, D).requires_grad_()
        for source in module.sources:
            if isinstance(source, Random):
                with torch.no_grad():
                    source.matrix.mul_(size)
        mask = torch.arange(6) > 3  # with is_causal, the first four rows have nothing
        y = module(x, attn_mask=mask, is_causal=True)
        assert torch.equal(y[:, :4], torch.zeros(2, 4, D, dtype=torch.float64))
        assert y[:, 4:].any(-1).all()
        gradients = torch.autograd.grad(y.sum(), [x, *module.parameters()])
        assert all(g.isfinite().all() for g in gradients)


OTHER = (D, HEADS, 9)


def of(source):
    return SynthesizerAttention(D, HEADS, 8, source=source)


BAD = [
    (lambda m, x: of(["dense", 3]), ValueError, "source: expected a name .*, got list of 2: .*int 3"),
    (lambda m, x: of([]), ValueError, "source: expected at least one, got none"),
    (
        lambda m, x: of([FactoredRandom(12, 3, 8), FactoredRandom(12, 3, 9)]),
        ValueError,
        r"source: expected \(d_model, num_heads, max_length\) = \(12, 3, 8\), got \(12, 3, 9\) \(factored-random\)",
    ),
    (
        lambda m, x: SynthesizerAttention(12, 5, 9, head_dim=3, source=["random", "dense"]),
        ValueError,
        "source: expected sources by position beside head_dim, got 'dense'",
    ),
    (
        lambda m, x: SynthesizerAttention(12, 5, 9, head_dim=3, source=FactoredRandom(12, 3, 9)),
        ValueError,
        r"source: expected \(d_model, num_heads, max_length\) = \(15, 5, 9\), got \(12, 3, 9\) \(factored-random\)",
    ),
    (lambda m, x: SOURCES["dense"](12, 5, 9), ValueError, "num_heads: expected a divisor of d_model = 12, got 5"),
    (lambda m, x: FactoredDense(*OTHER, k1=2), ValueError, "k1: expected a divisor of max_length = 9, got 2"),
    (lambda m, x: m(torch.cat([x, x, x], 1)), ValueError, "x: expected at most 12 tokens, got 18"),
    (
        lambda m, x: m(torch.cat([x, x], 1), initial_state=m(x, return_state=True)[1]),
        ValueError,
        "x: expected at most 12 tokens, got 18",
    ),
    (
        lambda m, x: m(x, attn_mask=torch.ones(5, 6, dtype=torch.bool)),
        ValueError,
        r"attn_mask: expected a shape that broadcasts to \(2, 3, 6, 6\), got \(5, 6\)",
    ),
    (
        lambda m, x: m(x, initial_state=(x,)),
        ValueError,
        r"initial_state: expected torch.float64 values of shape \(2, 3, P, 4\), got.*\(2, 6, 12\)",
    ),
    (
        lambda m, x: layer("three")(x, initial_state=m(x, return_state=True)[1]),
        ValueError,
        r"initial_state: expected a tuple of tensors \(values, keys\), got tuple of 1",
    ),
    (
        lambda m, x: layer("dot-product")(x, initial_state=(torch.zeros(2, 3, 6, 4).double(), draw(2, 3, 5, 4))),
        ValueError,
        r"initial_state: expected torch.float64 keys of shape \(2, 3, 6, 4\), got.*\(2, 3, 5, 4\)",
    ),
]


@pytest.mark.bad_input
@pytest.mark.parametrize(("call", "error", "message"), BAD)
def test_errors(call, error, message):
    with pytest.raises(error, match=message):
        call(layer(), draw(2, 6, D))


@every_case
def test_half_precision_is_computed_in_float32(case):
    """The weights' sums are off by 1e-6, some ten roundings of float32 each; those of bfloat16 are, by 4e-3."""
    module, x = layer(case, dtype=torch.bfloat16), draw(2, 9, D, dtype=torch.bfloat16)
    weights = module.weights(x)
    assert weights.dtype == torch.float32
    assert (weights.sum(-1) - 1).abs().max() < 1e-6
    assert module(x).dtype == torch.bfloat16


def test_scores_beyond_half_precision():
    """Products of some 300 by 300 are 90,000, of which float16 holds none."""
    module, x = layer("dot-product", dtype=torch.float16), 300 * draw(2, 9, D, dtype=torch.float16)
    y = module(x.requires_grad_())
    assert y.isfinite().all()
    assert torch.autograd.grad(y.float().sum(), x)[0].isfinite().all()
