"""Layers, blocks and the language model: what is trained, what is kept, conversion, errors."""

import io
from functools import partial

import pytest
import torch
from gradients import trained
from seeded import generator

from ortho import MECHANISMS, LanguageModel, MultiheadAttention, TransformerBlock, to_standard
from ortho.projections import PROJECTIONS, FrozenProjection, LearnedProjection

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


def test_sinusoidal_positions_are_fixed_and_as_long_as_the_tokens():
    model = LanguageModel(13, 64, 2, 1, max_length=40, positions="sinusoidal", generator=generator())
    assert "embed_positions" in dict(model.named_buffers()) and "embed_positions" in model.state_dict()
    # In each plane the squares of sine and cosine have one sum, so all rows have the same length, 0.02 sqrt(64).
    torch.testing.assert_close(model.embed_positions.norm(dim=-1), torch.full((40,), 0.02 * 8))
    like = LanguageModel(13, 64, 2, 1, max_length=None, generator=generator())
    tokens = torch.randint(13, (2, 40), generator=generator())
    assert not torch.equal(model(tokens), like(tokens))


def test_dropout_leaves_out_a_share_of_what_is_added():
    """With zero attention the second half alone adds to x: in training nothing, or 4/3 of it."""
    block, x = TransformerBlock(8, 2, dropout=0.25, generator=generator()), draw(2, 5, 8)
    with torch.no_grad():
        block.attention.weight_o.zero_()
        torch.manual_seed(0)
        shares = (block(x) - x) / (block.eval()(x) - x)
    kept = shares[shares != 0]
    torch.testing.assert_close(kept, torch.full_like(kept, 4 / 3), atol=1e-4, rtol=0)
    assert abs(len(kept) / x.numel() - 0.75) < 5 * (0.25 * 0.75 / x.numel()) ** 0.5


# ---------------------------------------------------------------------------------------------------------- projections

# Sums of at most 1e2 rounded products of size 1 in float64, in different orders.
close = partial(torch.testing.assert_close, atol=1e-12, rtol=1e-12)


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=True)


@pytest.mark.parametrize("projection", [LearnedProjection, FrozenProjection])
def test_each_block_has_a_projection_of_its_own(projection):
    """A module that is given to a model is copied for each block: the numbers are the same, the parameters are not."""
    given = projection(24, 4, generator=generator(1), dtype=torch.float64)
    kwargs = {"max_length": 16, "dtype": torch.float64}
    model = LanguageModel(13, 24, 4, 3, projection=given, generator=generator(2), **kwargs)
    apart = LanguageModel(13, 24, 4, 3, projection=projection, generator=generator(2), **kwargs)
    assert [p.shape for p in model.parameters()] == [p.shape for p in apart.parameters()]
    weights = [block.attention.projection.weight_q for block in model.blocks]
    assert len({id(weight) for weight in (given.weight_q, *weights)}) == 4
    assert all(torch.equal(weight, given.weight_q) for weight in weights)
    apart.load_state_dict(through_a_file(model.state_dict()))
    tokens = torch.randint(13, (2, 9), generator=generator(3))
    assert torch.equal(model(tokens), apart(tokens))
    close(to_standard(model)(tokens), model(tokens))
