"""Keys and values that leave the range of the dtype: what they do stays with the rows that may attend to them."""

import pytest
import torch

from ortho import MECHANISMS
from ortho.attention import FORMS

CUT, LENGTH = 5, 9
SUMMING = {"rotary", "linear", "linear-relu", "cosformer", "taylor", "trigonometric", "favor", "hyperbolic", "delta"}
SUMMING |= {"gated-delta", "delta-product", "kda", "ttt", "ttt-huber", "ttt-huber-norm", "ttt-contrastive"}


def drawn():
    return [torch.randn(1, 2, LENGTH, 4, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", [name for name, m in MECHANISMS.items() if m.causal])
def test_the_future_overflows_alone(name, form):
    """Products with keys of 3e38 are infinite, or NaN where signs differ. Earlier rows are the same to the bit; where
    lengths or sums of all keys are taken, an error names them."""
    q, k, v = drawn()
    huge = k.clone()
    huge[..., CUT:, :] = 3e38
    f = MECHANISMS[name].form(form)
    kept = f(q, k, v, is_causal=True)[..., :CUT, :]
    if name in SUMMING:
        with pytest.raises(ValueError, match="(q, )?k: expected .* (within|numbers)"):
            f(q, huge, v, is_causal=True)
        return
    assert torch.equal(f(q, huge, v, is_causal=True)[..., :CUT, :], kept)


HIDING = [(n, f) for n, m in MECHANISMS.items() for f in FORMS if m.family in ("softmax", "pattern")]


@pytest.mark.parametrize(("name", "form"), [pair for pair in HIDING if pair != ("softmax", "fast")])
def test_hidden_keys_overflow_alone(name, form):
    """In a call that is not causal, keys that a mask hides. (PyTorch's kernel adds a mask to scores, and gives NaN.)"""
    q, k, v = drawn()
    huge = k.clone()
    huge[..., CUT:, :] = -3e38
    mask = (torch.arange(LENGTH) < CUT)[None]
    f = MECHANISMS[name].form(form)
    assert torch.equal(f(q, huge, v, attn_mask=mask), f(q, k, v, attn_mask=mask))


FLOODED = {"delta", "gated-delta", "delta-product", "kda", "ttt-contrastive", "ttt-huber-norm"}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", [name for name, m in MECHANISMS.items() if m.causal])
def test_future_values_overflow_alone(name, form):
    """Sums of values of 3e38 are infinite, and what is written of such differences is NaN. Earlier rows are the same to
    the bit; where what is written is read by products over a chunk, an error names the values."""
    q, k, v = drawn()
    f = MECHANISMS[name].form(form)
    kept = f(q, k, v, is_causal=True)[..., :CUT, :]
    values = torch.where(torch.arange(LENGTH)[:, None] < CUT, v, 3e38 * v.sign())
    if name in FLOODED:
        with pytest.raises(ValueError, match="^v: expected "):
            f(q, k, values, is_causal=True)
        return
    assert torch.equal(f(q, k, values, is_causal=True)[..., :CUT, :], kept)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", MECHANISMS)
def test_hidden_values_overflow_alone(name, form):
    q, k, v = drawn()
    values = torch.where(torch.arange(LENGTH)[:, None] < CUT, v, 3e38 * v.sign())
    mask = (torch.arange(LENGTH) < CUT)[None]
    f = MECHANISMS[name].form(form)
    for is_causal in {MECHANISMS[name].causal, not MECHANISMS[name].bidirectional}:
        hidden = f(q, k, values, attn_mask=mask, is_causal=is_causal)
        assert torch.equal(hidden, f(q, k, v, attn_mask=mask, is_causal=is_causal))
