"""Layers that experiments alone use: rotary heads by the exchanged pass, odd matrices, the KV shift, n-grams."""

from functools import partial

import pytest
import torch
from gradients import step
from seeded import draw, generator

from ortho import EncoderDecoder, MultiheadAttention
from ortho.attention import MECHANISMS
from ortho.projections import FrozenProjection, LearnedProjection
from paper.experiments.learning import pruning
from paper.experiments.learning.heads import StoppedRotaryAttention, TemperatureProjection, TiedProjection, low_rank
from paper.experiments.learning.ladder_arms import ARMS
from paper.experiments.learning.ngram_heads import matches, matches_reference
from paper.experiments.learning.shifted import ShiftedKeysValues

# Sums of at most 1e2 rounded products of size 1 to 10 in float64, in different orders.
close = partial(torch.testing.assert_close, atol=1e-12, rtol=1e-12)
B, N, D, H, K = 2, 9, 24, 4, 6


def stopped_pair(**kwargs):
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
        one, other = stopped_pair(form=form, **kwargs)
        for mask in masks:
            of_both = (step(layer, x, attn_mask=mask, is_causal=causal) for layer in (one, other))
            close(*of_both)
    plain = MultiheadAttention(D, H, projection="stopped", dtype=torch.float64)
    plain.load_state_dict(stopped_pair()[0].state_dict())
    assert torch.allclose(plain(x), stopped_pair()[0](x)) is (length == 1)  # rotating has an effect


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


# --------------------------------------------------------------------------------------------------------- the KV shift


def shifting(form="fast"):
    shift = ShiftedKeysValues(H, form=form, generator=generator(1), dtype=torch.float64)
    return MultiheadAttention(D, H, attention=shift, generator=generator(2), dtype=torch.float64)


def test_the_shift_as_the_formula_reads():
    """Head by head and token by token; and the weights of a head add up to 1 at first."""
    one, x = shifting(), draw(B, N, D)
    shift = one.attention
    torch.testing.assert_close(shift.keys.sum(1), torch.ones(H, dtype=torch.float64))
    assert shift.keys.min() >= 0 and shift.keys[:, 0].unique().numel() == H
    with torch.no_grad():
        shift.values.normal_(generator=generator(5))
    q, k = one.projection(x)
    v = (x @ one.weight_v.mT).unflatten(-1, (H, -1)).transpose(1, 2)
    mixed = [torch.zeros_like(y) for y in (k, v)]
    for to, y, weights in zip(mixed, (k, v), (shift.keys, shift.values), strict=True):
        for h in range(H):
            for t in range(N):
                to[:, h, t] = weights[h, 0] * y[:, h, t] + (weights[h, 1] * y[:, h, t - 1] if t else 0)
    o = MECHANISMS["rotary"].reference(q, *mixed, is_causal=True)
    # Sums of a few products of size 1, in another order.
    torch.testing.assert_close(
        one(x, is_causal=True), o.transpose(1, 2).flatten(2) @ one.weight_o.mT, rtol=1e-12, atol=1e-12
    )


def test_a_sequence_in_two_calls_is_the_whole():
    x = draw(B, N, D)
    for form in ("reference", "fast"):
        one = shifting(form)
        first, state = one(x[:, :4], is_causal=True, return_state=True)
        rest = one(x[:, 4:], is_causal=True, initial_state=state)
        torch.testing.assert_close(torch.cat([first, rest], 1), one(x, is_causal=True), rtol=1e-12, atol=1e-12)


# --------------------------------------------------------------------------------------------------------- n-gram heads


TOKENS = torch.tensor([[7, 8, 9, 7, 8, 7, 8]])


def attended(found):
    return {t: row.nonzero()[:, 0].tolist() for t, row in enumerate(found[0]) if row.any()}


@pytest.mark.parametrize("form", [matches, matches_reference])
def test_by_hand(form):
    """Matches of one token: 8 follows 7; 9 follows 8, later 7 does. Of two: 9 follows 7 8, later 7 does. There are none
    of four. A sequence as long as the match, or shorter, has no place for one."""
    assert attended(form(TOKENS, 1)) == {3: [1], 4: [2], 5: [1, 4], 6: [2, 5]}
    assert attended(form(TOKENS, 2)) == {4: [2], 6: [2, 5]}
    assert attended(form(TOKENS, 4)) == {}
    assert not form(TOKENS[:, :2], 2).any() and not form(TOKENS[:, :1], 4).any()


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_the_fast_form(n):
    tokens = torch.randint(3, (4, 40), generator=torch.Generator().manual_seed(n))
    found = matches(tokens, n)
    assert torch.equal(found, matches_reference(tokens, n)) and found.any()


def test_a_model_sees_matches_and_nothing_later():
    """The logits of a prefix do not change with later tokens."""
    arm = ARMS["2 n-gram + 2 positional"]
    case = {"convolution": 0, "d": 16, "L": 2, "d_ff": 32}
    model = arm.build(case, torch.Generator().manual_seed(0)).double()
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, (2, 24), generator=draw)
    other = tokens.clone()
    other[:, 16:] = torch.randint(3, (2, 8), generator=draw)
    first, second = model(tokens), model(other)
    torch.testing.assert_close(first[:, :16], second[:, :16], rtol=0, atol=1e-12)  # sums of 24 in another order
    assert not torch.allclose(first[:, 16:], second[:, 16:])


# ------------------------------------------------------------------------------------------------------ heads taken out


def test_only_the_encoder_is_pruned_and_the_model_is_left_as_it_was():
    """A pruned layer gives the sum over its other heads; the loss rises by what the head's absence costs."""
    generator = torch.Generator().manual_seed(0)
    sizes = {"max_length": 8, "positions": "sinusoidal", "dtype": torch.float64, "generator": generator}
    model = EncoderDecoder(11, 12, 3, 2, **sizes).eval()
    tokens = torch.randint(11, (2, 8), generator=generator)
    whole = model(tokens, tokens)
    smaller = pruning.pruned(model, [(0, 1), (1, 0), (0, 2)])
    x = torch.randn(2, 8, 12, dtype=torch.float64, generator=generator)
    for block, other, heads in zip(model.encoder, smaller.encoder, ([0], [1, 2]), strict=True):
        layer = block.attention
        q, k = layer.projection(x)
        v = (x @ layer.weight_v.T).unflatten(-1, (3, 4)).transpose(1, 2)
        of = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        wanted = sum(of[:, head] @ layer.weight_o[:, 4 * head : 4 * head + 4].T for head in heads)
        # Some hundred sums, each rounded to eps, in a different order.
        torch.testing.assert_close(other.attention(x), wanted, rtol=1e-12, atol=1e-12)
    assert torch.equal(model(tokens, tokens), whole)
    assert not torch.equal(smaller(tokens, tokens), whole)

    def loss(one):
        return one(tokens, tokens).square().sum().item()

    rises = pruning.head_importance(model, loss)
    assert {index: len(each) for index, each in rises.items()} == {0: 3, 1: 3}
    assert rises[1][2] == loss(pruning.pruned(model, [(1, 2)])) - loss(model) != 0
