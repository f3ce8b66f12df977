"""Heads of the learning experiments alone: rotary heads by the exchanged pass, odd matrices, windows, own features."""

from functools import partial

import pytest
import torch
from gradients import step
from refusals import refusals
from seeded import SIGMAS, draw, generator

from ortho import MultiheadAttention
from ortho.attention.linear.random_feature_attention import RandomFeatureAttention
from ortho.projections import PROJECTIONS, FrozenProjection, LearnedProjection
from paper.experiments.learning.heads import (
    StoppedRotaryAttention,
    TemperatureProjection,
    TiedProjection,
    WindowAttention,
    low_rank,
    random_feature_heads,
    scaled,
    synthesizer_heads,
    window_heads,
)
from paper.experiments.learning.kinds import kinds

# Sums of at most 1e2 rounded products of size 1 to 10 in float64, in different orders.
close = partial(torch.testing.assert_close, atol=1e-12, rtol=1e-12)
B, N, D, H, K = 2, 9, 24, 4, 6


def pair(**kwargs):
    """A stopped rotary layer, and one that leaves its gradient to autograd, with the same weights."""
    kwargs = {"projection": "stopped", "dtype": torch.float64, **kwargs}
    one = StoppedRotaryAttention(D, H, generator=generator(1), **kwargs)
    other = MultiheadAttention(D, H, attention="rotary", **kwargs)
    other.load_state_dict(one.state_dict())
    return one, other


@pytest.mark.parametrize("form", ["reference", "fast"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [1, N, 70])
def test_stopped_rotary_is_rotary(length, causal, form):
    """Outputs and all gradients are those of autograd through the rotary mechanism, with the same weights."""
    x = draw(B, length, D)
    masks = [None, torch.arange(length) < max(1, length - 2), draw(B, H, length, length, seed=3) > -0.5]
    for kwargs in ({}, {"head_dim": 4}, {"head_dim": 5}, {"num_kv_heads": 2, "bias": True}):
        one, other = pair(form=form, **kwargs)
        for mask in masks:
            of_both = (step(layer, x, attn_mask=mask, is_causal=causal) for layer in (one, other))
            close(*of_both)
    plain = MultiheadAttention(D, H, projection="stopped", dtype=torch.float64)
    plain.load_state_dict(pair()[0].state_dict())
    assert torch.allclose(plain(x), pair()[0](x)) is (length == 1)  # rotating has an effect


def test_stopped_rotary_goes_on_where_it_was():
    """With a state or a cache, positions count from the very first token."""
    one, other = pair()
    x = draw(B, N, D)
    y = other(x, is_causal=True)
    head, state = one(x[:, :4], is_causal=True, return_state=True)
    close(torch.cat([head, one(x[:, 4:], is_causal=True, initial_state=state)], 1), y)
    cache = one.new_cache(N)
    close(torch.cat([one(x[:, a:b], is_causal=True, cache=cache) for a, b in ((0, 3), (3, 4), (4, N))], 1), y)
    close(one(x, x[:, :5]), other(x, x[:, :5]))


@pytest.mark.parametrize("autocast", [True, False])
def test_stopped_rotary_in_half_precision(autocast):
    """Queries and keys are rotated in float32 and rounded to bfloat16, as in the mechanism. The error against float64
    is below 1.2 times that of autograd's layer: both round to 8 bits, but some numbers at other places."""
    exact, _ = pair()
    dtype, x = torch.float32 if autocast else torch.bfloat16, draw(B, 40, D)
    expected, errors = step(exact, x, is_causal=True), []
    for layer in pair(dtype=dtype):
        layer.load_state_dict({name: value.to(dtype) for name, value in exact.state_dict().items()})
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            found = step(layer, x.to(dtype), is_causal=True)
        errors.append([float((a.double() - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True)])
    for ours, theirs in zip(*errors, strict=True):
        assert 0 < ours < 1.2 * theirs < 0.1


def test_temperature():
    """At first it is the frozen projection; then each head's logits are multiplied by its own trained factor."""
    kwargs = {"dtype": torch.float64, "num_kv_heads": 2}
    made, frozen = (make(D, H, generator=generator(1), **kwargs) for make in (TemperatureProjection, FrozenProjection))
    x, other = draw(B, N, D), draw(B, 5, D, seed=1)
    close(made(x, other), frozen(x, other), atol=0, rtol=0)
    assert {name for name, p in made.named_parameters() if p.requires_grad} == {"log_scale"}
    factors = torch.tensor([1.0, 0.5, 2.0, 4.0], dtype=torch.float64)
    with torch.no_grad():
        made.log_scale.copy_(factors.log())
    (q, k), (plain_q, plain_k) = made(x), frozen(x)
    close(q, plain_q * factors[:, None, None])
    close(k, plain_k)
    stopped = TemperatureProjection(D, H, stop_gradient=True, dtype=torch.float64)
    layer = MultiheadAttention(D, H, projection=stopped, dtype=torch.float64)
    leaf = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(stopped(leaf)[0].sum(), leaf, allow_unused=True)
    assert gradient is None
    layer(x).square().sum().backward()
    assert stopped.log_scale.grad.abs().min() > 0  # the gradient of its own factor, not of x


def test_tied():
    """W_K = W_Q: output and gradients are those of a frozen layer with that matrix; a context has keys of its own."""
    tied = MultiheadAttention(D, H, projection=TiedProjection, generator=generator(1), dtype=torch.float64)
    plain = MultiheadAttention(D, H, projection="frozen", dtype=torch.float64)
    plain.load_state_dict(tied.state_dict())
    assert torch.equal(plain.projection.weight_q, plain.projection.weight_k)
    x, context = draw(B, N, D), draw(B, 5, D, seed=1)
    close(*(step(layer, x, is_causal=True) for layer in (tied, plain)))
    close(tied(x, context), plain(x, context))
    q, k = tied.projection(x)
    assert q is k


@pytest.mark.parametrize("of", ["learned", "frozen", "stopped"])
def test_low_rank(of):
    """Each head's part has the given rank and the mean square of a full one; all parts of queries and keys differ."""
    made = low_rank(D, H, of=of, rank=2, generator=generator(1), dtype=torch.float64)
    assert isinstance(made, LearnedProjection if of == "learned" else FrozenProjection)
    assert getattr(made, "stop_gradient", False) is (of == "stopped")
    parts = [*made.weight_q.detach().split(K), *made.weight_k.detach().split(K)]
    assert all(int(torch.linalg.matrix_rank(part)) == 2 for part in parts)
    assert all(a is b or not torch.allclose(a, b) for a in parts for b in parts)
    close(torch.stack([part.square().sum() for part in parts]), torch.full((2 * H,), float(K), dtype=torch.float64))
    again = low_rank(D, H, of=of, rank=2, generator=generator(1), dtype=torch.float64)
    assert torch.equal(made.weight_k, again.weight_k)


def test_low_rank_logits_are_as_large_as_full_ones():
    """Over 400 draws of matrices and of normal tokens, logits have a mean square of 1."""
    squares = []
    for seed in range(400):
        g = generator(seed)
        projection = low_rank(D, H, of="frozen", rank=2, generator=g, dtype=torch.float64)
        q, k = projection(torch.randn(1, 2, D, generator=g, dtype=torch.float64))
        squares.append((q[0, :, 0] * k[0, :, 1]).sum(-1).square().mean() / K)
    mean, error = torch.stack(squares).mean(), torch.stack(squares).std() / 20
    assert abs(mean - 1) < SIGMAS * error < 0.5


@pytest.mark.parametrize("of", ["learned", "frozen", "stopped"])
def test_scaled(of):
    made, plain = (make(D, H, generator=generator(1)) for make in (partial(scaled, of=of, factor=4.0), PROJECTIONS[of]))
    for name in ("weight_q", "weight_k"):
        assert torch.equal(getattr(made, name), 4 * getattr(plain, name))
    assert getattr(made, "stop_gradient", False) is (of == "stopped")


def test_window():
    """Heads with a width of their own are the mechanism 'window' at the same width, and see less at a smaller one."""
    x = draw(1, 300, D)
    named = MultiheadAttention(D, H, attention="window", generator=generator(1), dtype=torch.float64)
    wide, narrow = (window_heads(D, H, width=w, generator=generator(1), dtype=torch.float64) for w in (256, 3))
    close(wide(x, is_causal=True), named(x, is_causal=True))
    close(narrow(x, is_causal=True)[:, 3:4], narrow(x[:, 1:4], is_causal=True)[:, 2:])
    assert not torch.allclose(narrow(x, is_causal=True), wide(x, is_causal=True))
    assert "width=3" in repr(narrow)


def test_random_features():
    """Rows are drawn with the layer's generator, anew for each layer, and are stored in the state dict."""
    one, again, other = (random_feature_heads(D, H, m=8, generator=generator(seed)) for seed in (1, 1, 2))
    assert isinstance(one.attention, RandomFeatureAttention)
    assert one.attention.features.shape == (8, K) and "attention.features" in one.state_dict()
    assert torch.equal(one.attention.features, again.attention.features)
    assert not torch.equal(one.attention.features, other.attention.features)


BAD = [
    (lambda: TiedProjection(D, H, num_kv_heads=2), "num_kv_heads: expected num_heads = 4 of keys, got 2"),
    (lambda: low_rank(D, H, of="frozen", rank=7), "rank: expected at most the heads' width, 6, got 7"),
    (lambda: low_rank(D, H, of="frozen", rank=0), "rank: expected an integer of at least 1, got 0"),
    (lambda: low_rank(D, H, of="haar", rank=2), "of: expected one of 'learned', .*, got 'haar'"),
    (lambda: scaled(D, H, of="haar", factor=2.0), "of: expected one of 'learned', .*, got 'haar'"),
    (lambda: WindowAttention(0), "width: expected an integer of at least 1, got 0"),
    (lambda: random_feature_heads(D, 5, m=8), "num_heads: expected a divisor of d_model = 24, got 5"),
    (lambda: random_feature_heads(D, H, m=0), "m: expected an integer of at least 1, got 0"),
    (lambda: synthesizer_heads(D, H, max_length=N, form="slow"), "form: expected one of 'reference', 'fast'"),
    (lambda: StoppedRotaryAttention(D, H, projection="frozen"), "projection: expected one that stops"),
    (lambda: StoppedRotaryAttention(D, H, attention="alibi"), "attention: expected none", TypeError),
    (lambda: kinds(0), "N: expected an integer of at least 1, got 0"),
]


@refusals(BAD)
def test_errors(refused):
    refused()
