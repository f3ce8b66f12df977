"""Layers and the language model: heads by the definition, what is trained; projections; weights and their dropout;
recomputation."""

from functools import partial

import pytest
import torch
from gradients import trained
from seeded import draw, generator
from torch import nn

from ortho import MECHANISMS, FrozenQKAttention, LanguageModel, MultiheadAttention, TransformerBlock, cost, to_standard
from ortho.cost.models import recomputed
from ortho.layers.checkpointed import Checkpointed, CheckpointedAttention
from ortho.projections import PROJECTIONS, FrozenProjection, LearnedProjection

FROZEN = ["frozen", "stopped"]


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


# ---------------------------------------------------------------------------------------------------------- projections

# Sums of at most 1e2 rounded products of size 1 in float64, in different orders.
close = partial(torch.testing.assert_close, atol=1e-12, rtol=1e-12)


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
    apart.load_state_dict(model.state_dict())
    tokens = torch.randint(13, (2, 9), generator=generator(3))
    assert torch.equal(model(tokens), apart(tokens))
    close(to_standard(model)(tokens), model(tokens))


# ---------------------------------------------------------------------------------------------------- attention weights

# Two float64 computations of the same sums in different orders, magnified by exponentials of scores up to 20.
weight_close = partial(torch.testing.assert_close, atol=1e-10, rtol=1e-10)
B, N, D, H = 2, 40, 12, 3  # N: more than the mini-batch of test-time training
WITH = [name for name, m in MECHANISMS.items() if m.has_weights]


def layer_of(attention="softmax", cls=MultiheadAttention, **kwargs):
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
    one = layer_of(name, form=form)
    padding = torch.arange(N).expand(B, -1) >= torch.tensor([[N], [6]])
    for masks in ({}, {"key_padding_mask": padding}):
        call = {"is_causal": m.causal, **masks}
        leaf = x.clone().requires_grad_()
        leaves = [leaf, *trained(one).values()]
        plain = one(leaf, **call)
        y, weights = one(leaf, need_weights=True, **call)
        assert weights.shape == (B, H, N, N)
        weight_close(y, plain)
        weight_close(merged(one, x, weights), y)
        if masks and not m.data_dependent:
            assert not weights[1, :, :, 6:].any()
        if m.causal:
            assert not weights.triu(1).any()
        if not m.data_dependent:  # a fit's constants see another part of what passes a gradient
            weight_close(*(torch.autograd.grad(out, leaves, d_y) for out in (y, plain)))


@pytest.mark.parametrize("masked", [False, True])
def test_weights_are_those_of_torch(masked):
    one, x, context = layer_of(dropout=0.1).eval(), draw(B, N, D), draw(B, 5, D, seed=2)
    padding = torch.tensor([[False] * 5, [False, True, True, False, False]]) if masked else None
    y, weights = one(x, context, key_padding_mask=padding, need_weights=True)
    other = one.to_torch()
    assert (other.dropout, other.training) == (0.1, False)
    theirs = other(x, context, context, key_padding_mask=padding, average_attn_weights=False)
    weight_close(y, theirs[0])
    weight_close(weights, theirs[1])


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
    weight_close(one(x), y)
    weight_close(merged(one, x, weights), y)
    kept = weights != 0
    weight_close(weights[kept], whole[kept] / 0.75)
    # 12,800 weights are left out independently of each other; the bound is five standard errors.
    assert abs(float((~kept).double().mean()) - 0.25) < 5 * (0.25 * 0.75 / kept.numel()) ** 0.5
    leaf = x.clone().requires_grad_()
    one(leaf).square().sum().backward()
    assert leaf.grad.abs().sum() > 0


# -------------------------------------------------------------------------------------------------------- recomputation


def blocks(count, **kwargs):
    generator = torch.Generator().manual_seed(0)
    return [TransformerBlock(D, H, generator=generator, dtype=torch.float64, **kwargs) for _ in range(count)]


@pytest.mark.parametrize(("count", "segments"), [(1, 1), (5, None), (5, 1), (5, 3), (5, 5)])
@pytest.mark.parametrize("causal", [False, True])
def test_the_same_numbers(count, segments, causal):
    """Bit for bit: the same operations run in the same order, the gradients' too."""
    rows, x = blocks(count), draw(2, N, D).requires_grad_()
    plain = nn.Sequential(*rows)
    y = x
    for block in rows:
        y = block(y, is_causal=causal)
    z = Checkpointed(rows, segments)(x, is_causal=causal)
    upstream = draw(2, N, D, seed=2)
    leaves = [x, *trained(plain).values()]
    assert torch.equal(y, z)
    for one, other in zip(
        torch.autograd.grad(y, leaves, upstream), torch.autograd.grad(z, leaves, upstream), strict=True
    ):
        assert torch.equal(one, other)


@pytest.mark.parametrize("causal", [False, True])
def test_attention_alone(causal):
    """The weights, N^2 numbers a head, are not kept; all else is."""
    x = draw(1, 40, D).requires_grad_()
    layers = []
    for attention in ("softmax", CheckpointedAttention()):
        options = {"form": "reference"} if attention == "softmax" else {}
        layers.append(
            MultiheadAttention(
                D, H, attention=attention, generator=torch.Generator().manual_seed(0), dtype=torch.float64, **options
            )
        )
    plain, recomputed = (cost.of(layer, x, is_causal=causal) for layer in layers)
    assert torch.equal(*(layer(x, is_causal=causal) for layer in layers))
    assert plain.saved_bytes - recomputed.saved_bytes == 8 * H * 40 * 40 + (40 * 40 if causal else 0)
    assert 0 < recomputed.backward - plain.backward <= 4 * 40 * 40 * D


@pytest.mark.parametrize(("count", "segments"), [(6, 1), (6, 2), (7, 3), (6, 6)])
def test_declared_is_counted(count, segments):
    x = draw(1, N, D).requires_grad_()
    counts = cost.of(Checkpointed(blocks(count), segments), x)
    declared = recomputed(1, N, D, H, count, segments, itemsize=8)
    assert (counts.forward, counts.backward) == (declared.forward, declared.backward)
    assert counts.saved_bytes == segments * 8 * N * D  # the segments' inputs


def test_a_recomputed_model_decodes():
    """With a cache for each block, as the model without recomputation."""
    model = LanguageModel(9, 8, 2, 3, max_length=12, generator=torch.Generator().manual_seed(0))
    tokens = torch.tensor([[1, 2, 3]])
    expected = model.generate(tokens, 5, temperature=0)
    model.blocks = nn.ModuleList([Checkpointed(model.blocks, segments=2)])
    assert torch.equal(model.generate(tokens, 5, temperature=0), expected)
