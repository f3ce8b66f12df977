"""Layers, blocks and the language model: what is trained, what is kept, conversion, errors."""

import numpy as np
import pytest
import torch
from gradients import trained
from seeded import generator

from ortho import (
    MECHANISMS,
    HybridAttention,
    LanguageModel,
    MultiheadAttention,
    TransformerBlock,
    freeze_qk,
    to_standard,
)
from ortho.gates import ReflectingWriteStrength
from ortho.projections import PROJECTIONS

FROZEN = ["frozen", "stopped"]


def draw(*shape, seed=1, dtype=torch.float32):
    return torch.randn(*shape, generator=generator(seed), dtype=dtype)


def layer(projection, **kwargs):
    return MultiheadAttention(8, 2, projection=projection, generator=generator(), **kwargs)


@pytest.mark.parametrize("projection", FROZEN)
def test_frozen_weights_are_parameters_that_are_not_trained(projection):
    ora = layer(projection)
    assert set(trained(ora)) == {"weight_v", "weight_o"}
    assert {n for n, p in ora.named_parameters() if not p.requires_grad} == {
        "projection.weight_q",
        "projection.weight_k",
    }
    assert not list(ora.buffers())
    assert set(ora.state_dict()) == set(layer("learned").state_dict())
    for weight in (ora.projection.weight_q, ora.projection.weight_k):
        torch.testing.assert_close(weight @ weight.mT, torch.eye(8), atol=1e-6, rtol=0)
    assert not torch.equal(ora.projection.weight_q, ora.projection.weight_k)


@pytest.mark.parametrize("projection", PROJECTIONS)
@pytest.mark.parametrize(
    ("heads", "width", "shared"), [(4, 4, 4), (4, 4, 2), (4, 4, 1), (3, 1, 1), (1, 6, None), (5, 7, None), (6, 8, 2)]
)
def test_heads_by_the_definition(projection, heads, width, shared):
    """Heads of any number and width, with biases: each head of queries uses the head of keys and values of its group.
    Outputs and gradients are those of a layer whose keys and values are repeated beforehand."""
    if projection.startswith("structured") and heads * width > 16:
        return  # a structured draw has no more columns than rows
    generator_ = generator()
    kind = {"projection": projection, "bias": True, "dtype": torch.float64, "generator": generator_}
    one = MultiheadAttention(16, heads, head_dim=width, num_kv_heads=shared, **kind)
    with torch.no_grad():
        for part, bias in one.named_parameters():
            if "bias" in part:
                bias.normal_(generator=generator_)
    x, upstream = draw(2, 7, 16, dtype=torch.float64).requires_grad_(), draw(2, 7, 16, seed=2, dtype=torch.float64)
    inner = x.detach() if projection.endswith("stopped") else x
    of, groups, rows = one.projection, shared or heads, []
    assert (one.weight_v.shape, one.weight_o.shape) == ((groups * width, 16), (16, heads * width))
    assert of.weight_q.shape == (heads * width, 16) and of.weight_k.shape == one.weight_v.shape
    for head in range(heads):
        own, theirs = (slice(i * width, (i + 1) * width) for i in (head, head * groups // heads))
        made = ((inner, of.weight_q, of.bias_q, own), (inner, of.weight_k, of.bias_k, theirs))
        parts = (*made, (x, one.weight_v, one.bias_v, theirs))
        q, k, v = (y @ weight[rows_].T + added[rows_] for y, weight, added, rows_ in parts)
        rows.append(MECHANISMS["softmax"].reference(q, k, v, is_causal=True))
    expected = torch.cat(rows, -1) @ one.weight_o.T + one.bias_o
    leaves = [x, *trained(one).values()]
    got = one(x, is_causal=True)
    torch.testing.assert_close(got, expected, atol=1e-11, rtol=1e-11)  # sums of up to 48 products of size 1
    gradients = [torch.autograd.grad(y, leaves, upstream) for y in (got, expected)]
    torch.testing.assert_close(*gradients, atol=1e-11, rtol=1e-11)
    torch.testing.assert_close(to_standard(one)(x, is_causal=True), got, atol=1e-11, rtol=1e-11)
    if (heads, width, shared) == (4, 4, 4):
        mask = torch.ones(7, 7, dtype=torch.bool).triu(1)
        theirs, _ = one.to_torch()(x, x, x, attn_mask=mask, need_weights=False)
        torch.testing.assert_close(theirs, got, atol=1e-12, rtol=1e-12)


def test_cross_attention_gradients():
    """If stopped, x gets no gradient, as it makes only the queries; the context gets one through v alone."""
    x, context = draw(1, 3, 8).double().requires_grad_(), draw(1, 7, 8, seed=2).double().requires_grad_()
    one = layer("stopped", dtype=torch.float64)
    into_x, into_context = torch.autograd.grad(one(x, context).square().sum(), [x, context], allow_unused=True)
    assert into_x is None
    q, k = (t.detach() for t in one.projection(x, context))
    one.projection.forward = lambda x, context: (q, k)
    (through_v,) = torch.autograd.grad(one(x, context).square().sum(), context)
    torch.testing.assert_close(into_context, through_v, atol=1e-12, rtol=0)


def test_conversion_draws_nothing():
    ora = layer("frozen")
    before = torch.get_rng_state()
    to_standard(ora)
    assert torch.equal(torch.get_rng_state(), before)


def test_sinusoidal_positions_are_fixed_and_as_long_as_the_tokens():
    model = LanguageModel(13, 64, 2, 1, max_length=40, positions="sinusoidal", generator=generator())
    assert "embed_positions" in dict(model.named_buffers()) and "embed_positions" in model.state_dict()
    # In each plane the squares of sine and cosine have one sum, so all rows have the same length, 0.02 sqrt(64).
    torch.testing.assert_close(model.embed_positions.norm(dim=-1), torch.full((40,), 0.02 * 8))
    like = LanguageModel(13, 64, 2, 1, max_length=None, generator=generator())
    tokens = torch.randint(13, (2, 40), generator=generator())
    assert not torch.equal(model(tokens), like(tokens))


@pytest.mark.parametrize("norm_first", [True, False])
def test_dropout_leaves_out_a_share_while_training(norm_first):
    block = TransformerBlock(8, 2, dropout=0.25, norm_first=norm_first, generator=generator())
    x = draw(2, 5, 8)
    plain = TransformerBlock(8, 2, norm_first=norm_first, generator=generator())
    assert torch.equal(block.eval()(x), plain(x))
    torch.manual_seed(0)
    first, second = block.train()(x), block(x)
    assert not torch.equal(first, second)
    torch.manual_seed(0)
    assert torch.equal(block(x), first)
    if norm_first:  # with zero attention only the second half adds to x: nothing, or 4/3 of it
        with torch.no_grad():
            block.attention.weight_o.zero_()
        halves = (block(x) - x) / (block.eval()(x) - x)
        dropped = (halves == 0).double().mean()
        torch.testing.assert_close(halves[halves != 0], torch.full_like(halves[halves != 0], 4 / 3), atol=1e-4, rtol=0)
        assert abs(dropped - 0.25) < 5 * (0.25 * 0.75 / x.numel()) ** 0.5


def test_a_model_hands_gates_to_every_block():
    model = LanguageModel(13, 8, 2, 2, max_length=None, attention="delta", gates={"beta": ReflectingWriteStrength})
    assert all(isinstance(block.attention.gates["beta"], ReflectingWriteStrength) for block in model.blocks)


@pytest.mark.unchecked
def test_numbers_of_numpy():
    """Heads chosen by `np.argsort`, sizes and shares computed by NumPy, are taken as Python's numbers are."""
    n, x = np.int64, torch.randn(1, 9, 16)
    MultiheadAttention(n(16), n(4), num_kv_heads=n(2), head_dim=n(4), dropout=np.float32(0.1))(x)
    for attention, options in {"window": {"width": n(4)}, "favor": {"m": n(8)}, "top-k": {"k": n(4)}}.items():
        MultiheadAttention(16, 4, attention=attention, **options)(x, is_causal=True)
    HybridAttention(16, n(4), heads={"learned": n(1), "positional": n(3)})(x)
    model = LanguageModel(n(11), n(16), n(4), n(2), max_length=n(32), dropout=np.float32(0.1))
    how = {"temperature": np.float32(0.7), "top_k": n(5), "stop": n(3)}
    model.generate(torch.zeros(1, 5, dtype=torch.long), n(4), **how)
    encoder = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(16, 4, batch_first=True), 3)
    freeze_qk(encoder, layers=np.argsort([3, 1, 2])[:2])  # the second and the third
    assert [all(p.requires_grad for p in layer.parameters()) for layer in encoder.layers] == [True, False, False]
    for name, m in MECHANISMS.items():
        q, k, v = torch.randn(3, 1, 2, 9, 4)
        for form in (m.reference, m.fast):
            by_numpy, plain = (form(q, k, v, is_causal=m.causal, scale=s) for s in (np.float32(0.5), 0.5))
            assert torch.equal(by_numpy, plain), name
