"""Attention weights of a layer: what `need_weights` gives, their dropout; weights from PyTorch's layer and back."""

from functools import partial

import pytest
import torch
from gradients import trained
from seeded import draw, generator

from ortho import MECHANISMS, FrozenQKAttention, MultiheadAttention

# Two float64 computations of the same sums in different orders, magnified by exponentials of scores up to 20.
close = partial(torch.testing.assert_close, atol=1e-10, rtol=1e-10)
B, N, D, H = 2, 40, 12, 3  # N: more than the mini-batch of test-time training
WITH = [name for name, m in MECHANISMS.items() if m.has_weights]


def layer(attention="softmax", cls=MultiheadAttention, **kwargs):
    kwargs = {"attention": attention, **kwargs} if cls is MultiheadAttention else kwargs
    return cls(D, H, generator=generator(), dtype=torch.float64, **kwargs)


def merged(one, x, weights):
    """The outputs that the weights make of the layer's values."""
    heads = weights.shape[1]
    v = (x @ one.weight_v.T).unflatten(-1, (one.num_kv_heads, -1)).transpose(1, 2)
    v = v.repeat_interleave(heads // one.num_kv_heads, 1)
    return (weights @ v).transpose(1, 2).flatten(2) @ one.weight_o.T


@pytest.mark.parametrize("form", ["fast", "reference"])
@pytest.mark.parametrize("name", WITH)
def test_outputs_are_the_weights_times_the_values(name, form):
    """Also with padding, which gets no weight from any query; gradients are those of the call without weights."""
    m, x, d_y = MECHANISMS[name], draw(B, N, D), draw(B, N, D, seed=2)
    one = layer(name, form=form)
    padding = torch.arange(N).expand(B, -1) >= torch.tensor([[N], [6]])
    for masks in ({}, {"key_padding_mask": padding}):
        call = {"is_causal": m.causal, **masks}
        leaf = x.clone().requires_grad_()
        leaves = [leaf, *trained(one).values()]
        plain = one(leaf, **call)
        y, weights = one(leaf, need_weights=True, **call)
        assert weights.shape == (B, H, N, N)
        close(y, plain)
        close(merged(one, x, weights), y)
        if masks and not m.data_dependent:
            assert not weights[1, :, :, 6:].any()
        if m.causal:
            assert not weights.triu(1).any()
        if not m.data_dependent:  # a fit's constants see another part of what passes a gradient
            close(*(torch.autograd.grad(out, leaves, d_y) for out in (y, plain)))


@pytest.mark.parametrize("masked", [False, True])
def test_weights_are_those_of_torch(masked):
    one, x, context = layer(dropout=0.1).eval(), draw(B, N, D), draw(B, 5, D, seed=2)
    padding = torch.tensor([[False] * 5, [False, True, True, False, False]]) if masked else None
    y, weights = one(x, context, key_padding_mask=padding, need_weights=True)
    other = one.to_torch()
    assert (other.dropout, other.training) == (0.1, False)
    theirs = other(x, context, context, key_padding_mask=padding, average_attn_weights=False)
    close(y, theirs[0])
    close(weights, theirs[1])


@pytest.mark.parametrize(
    "cls", [partial(MultiheadAttention, num_kv_heads=1), FrozenQKAttention], ids=["grouped", "stopped"]
)
def test_dropout_leaves_out_a_share_of_the_weights(cls):
    """Only in training. The remaining weights are scaled and make the outputs, and x gets a gradient through them."""
    one, plain = (cls(D, 4, dropout=p, generator=generator(), dtype=torch.float64) for p in (0.25, 0.0))
    x = draw(B, 40, D)
    assert torch.equal(one.eval()(x), plain(x))
    _, whole = plain(x, need_weights=True)
    one.train()
    torch.manual_seed(0)
    y, weights = one(x, need_weights=True)
    torch.manual_seed(0)
    close(one(x), y)
    close(merged(one, x, weights), y)
    kept = weights != 0
    close(weights[kept], whole[kept] / 0.75)
    # 12,800 weights are left out independently of each other; the bound is five standard errors.
    assert abs(float((~kept).double().mean()) - 0.25) < 5 * (0.25 * 0.75 / kept.numel()) ** 0.5
    leaf = x.clone().requires_grad_()
    one(leaf).square().sum().backward()
    assert leaf.grad.abs().sum() > 0
