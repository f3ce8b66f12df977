"""Removed heads: outputs and gradients are those of the layer without these heads' outputs; costs are as declared."""

import copy
from contextlib import ExitStack
from functools import partial

import pytest
import torch
from counted import assert_declared, assert_decodes
from refusals import refuses
from torch import nn

from ortho import (
    MECHANISMS,
    ConvolvedAttention,
    HybridAttention,
    MultiheadAttention,
    RandomFeatureAttention,
    StoppedAttention,
    TextEncoder,
    freeze_qk,
)
from ortho.adapters import attention_layers, head_importance, prune_heads, without_head
from ortho.adapters.pruning import BY_NUMBER
from ortho.cost import layer as layer_cost
from ortho.projections import FrozenProjection, Projection

D, H, K = 24, 6, 4
REMOVED = [1, 2, 5]
# Sums of about a hundred products of numbers near 1, in another order: each is rounded to eps.
TOLERANCE = 1e3 * torch.finfo(torch.float64).eps
PROJECTIONS = ("learned", "frozen", "stopped", "structured", "structured-stopped")


def make(**kwargs):
    options = {"dtype": torch.float64, "generator": torch.Generator().manual_seed(0), **kwargs}
    layer = MultiheadAttention(D, H, **options)
    for bias in (layer.bias_v, layer.bias_o):
        if bias is not None:
            nn.init.normal_(bias, generator=options["generator"])
    return layer


def inputs(length=11):
    return torch.randn(2, length, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def assert_close(got, wanted):
    torch.testing.assert_close(got, wanted, rtol=TOLERANCE, atol=TOLERANCE)


def assert_prunes(full, removed, **call):
    """The smaller layer's outputs, state and gradients are those of the full one without these heads."""
    small = prune_heads(copy.deepcopy(full), removed)
    x, y = inputs().requires_grad_(), inputs().requires_grad_()
    with ExitStack() as zeroed:
        for head in removed:
            zeroed.enter_context(without_head(attention_layers(full)[0], head))
        wanted = full(x, **call)
        wanted.square().sum().backward()
    got = small(y, **call)
    got.square().sum().backward()
    assert_close(got, wanted)
    assert_close(y.grad, x.grad)
    return small


LAYERS = {
    **{projection: partial(make, projection=projection) for projection in PROJECTIONS},
    "biases": partial(make, bias=True),
    "frozen, biases": partial(make, bias=True, projection="frozen"),
    "wide": partial(make, head_dim=7),
    "some frozen": lambda: freeze_qk(make(), heads=[0, 1]),
    "all that stay frozen": lambda: freeze_qk(make(), heads=[0, 3, 4]),
    "StoppedAttention": lambda: StoppedAttention(D, H, dtype=torch.float64),
    "random features": lambda: make(attention=RandomFeatureAttention(K, 16, dtype=torch.float64)),
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("is_causal", [False, True])
def test_outputs_and_gradients(name, is_causal):
    full = LAYERS[name]()
    small = assert_prunes(full, REMOVED, is_causal=is_causal)
    rows = [h * full.head_dim + i for h in (0, 3, 4) for i in range(full.head_dim)]
    for part, axis in (("weight_v", 0), ("weight_o", 1)):
        assert_close(getattr(small, part).grad, getattr(full, part).grad.index_select(axis, torch.tensor(rows)))
    trained = name in ("learned", "biases", "wide", "some frozen", "random features")
    assert any(p.grad is not None for p in small.projection.parameters()) == trained
    if name == "learned":
        assert_close(small.projection.weight_q.grad, full.projection.weight_q.grad[rows])
        assert_close(small.projection.weight_k.grad, full.projection.weight_k.grad[rows])
    if name == "all that stay frozen":
        assert isinstance(small.projection, FrozenProjection)
    assert (small.num_heads, small.head_dim, type(small)) == (3, full.head_dim, type(full))


@pytest.mark.parametrize("mechanism", [m for m in MECHANISMS.values() if not m.gates], ids=lambda m: m.name)
def test_every_mechanism_treats_heads_alike_or_is_refused(mechanism):
    """Refused mechanisms do not compute the same with fewer heads; all others do."""
    full, call = make(attention=mechanism.name), {"is_causal": not mechanism.bidirectional}
    if mechanism.name not in BY_NUMBER:
        assert_prunes(full, REMOVED, **call)
        return
    refuses(f"treats all heads alike, got {mechanism.name}", prune_heads, full, REMOVED)
    q, k, v = (torch.randn(1, H, 5, K, dtype=torch.float64) for _ in range(3))
    stay = [0, 3, 4]
    alone = mechanism.fast(q[:, stay], k[:, stay], v[:, stay], **call)
    assert not torch.allclose(alone, mechanism.fast(q, k, v, **call)[:, stay])


@pytest.mark.parametrize(
    ("groups", "removed", "left"), [(3, [2, 3], 2), (3, [0, 3, 5], 3), (1, [0, 1, 2, 5], 1), (2, [0, 1, 2, 4], 1)]
)
def test_heads_that_share_keys(groups, removed, left):
    """Whole groups are removed, or each group loses the same number of heads."""
    small = assert_prunes(make(num_kv_heads=groups, bias=True), removed, is_causal=True)
    assert small.num_kv_heads == left and small.weight_v.shape == (K * left, D)


@pytest.mark.parametrize("groups", [None, 3])
@pytest.mark.parametrize("projection", ["learned", "frozen", "stopped"])
@pytest.mark.parametrize("bias", [False, True])
def test_cost_is_declared(groups, projection, bias):
    """A step and a decoded token cost what they cost in a layer made with this number of heads of this width."""
    small = prune_heads(make(num_kv_heads=groups, projection=projection, bias=bias, dtype=torch.float32), [2, 3])
    sizes = {"head_dim": K, "num_kv_heads": groups and groups - 1, "bias": bias, "projection": projection}
    declared = partial(layer_cost, d=D, H=H - 2, causal=True, **sizes)
    assert_declared(declared(2, 11), small, inputs().float().requires_grad_(), is_causal=True)
    assert_decodes(declared, small, D)


def test_a_model_and_pruning_twice():
    """A mapping has the heads of each layer; a second call counts the heads that are there."""
    model = TextEncoder(16, D, H, 2, max_length=8, dtype=torch.float64).eval()
    tokens = torch.arange(8)[None]
    layers = attention_layers(model)
    with without_head(layers[0], 2), without_head(layers[0], 3), without_head(layers[1], 0):
        wanted = model.encode(tokens)
    small = prune_heads(prune_heads(copy.deepcopy(model), {0: [2], 1: [0]}), [2], layers=[0])
    assert [layer.num_heads for layer in attention_layers(small)] == [4, 5]
    assert_close(small.encode(tokens), wanted)
    again = prune_heads(copy.deepcopy(model), {0: [2, 3], 1: [0]})
    again.load_state_dict(small.state_dict())
    assert_close(again.encode(tokens), wanted)


@pytest.mark.parametrize("convolved", [False, True])
def test_layers_that_hold_layers(convolved):
    """Masks with an axis of heads have it for the heads that are left."""
    kind = {"heads": {"learned": 3, "positional": 2, "rotary": 1}, "dtype": torch.float64}
    full = ConvolvedAttention(D, H, of=HybridAttention, **kind) if convolved else HybridAttention(D, H, **kind)
    mask = torch.rand(2, H, 1, 11, generator=torch.Generator().manual_seed(2)) < 0.7
    stay = [0, 2, 3, 4, 5]
    with without_head(attention_layers(full)[0], 1):
        wanted = full(inputs(), attn_mask=mask)
    small = prune_heads(full, {0: [1]})
    assert small.num_heads == 5
    assert_close(small(inputs(), attn_mask=mask[:, stay]), wanted)


def test_importance():
    """Importance is the rise of the loss without each head; the model stays as it was, also if the loss fails."""
    for model in (make(), nn.MultiheadAttention(D, H, batch_first=True, dtype=torch.float64)):
        x, before = inputs(), copy.deepcopy(model.state_dict())

        @torch.no_grad()
        def loss(layer, x=x):
            y = layer(x) if isinstance(layer, MultiheadAttention) else layer(x, x, x)[0]
            return y.square().mean()

        rises = head_importance(model, loss)
        assert list(rises) == [0] and len(rises[0]) == H
        for head, rise in enumerate(rises[0]):
            other = copy.deepcopy(model)
            weight = other.weight_o if isinstance(other, MultiheadAttention) else other.out_proj.weight
            weight.data[:, head * K : (head + 1) * K] = 0
            assert rise == float(loss(other)) - float(loss(model))
        calls = iter([1.0, 0.0])
        with pytest.raises(StopIteration):
            head_importance(model, lambda _, calls=calls: next(calls))
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class Own(Projection):
    """A user's own projection, with the weights of a learned one."""

    def __init__(self, of):
        super().__init__(D, H)
        self.weight_q, self.weight_k, self.bias_q, self.bias_k = of.weight_q, of.weight_k, None, None


def shared():
    layers = nn.ModuleList([make(), make()])
    layers[1].weight_o = layers[0].weight_o
    return layers


class Attend(nn.Module):
    def forward(self, q, k, v, **kwargs):
        return MECHANISMS["softmax"].fast(q, k, v, **kwargs)


ERRORS = {
    "all": (make, list(range(H)), ValueError, "heads: expected at least one that stays in each layer, got all 6"),
    "none": (make, [], ValueError, "heads: expected at least one index"),
    "twice": (make, [1, 1], ValueError, "heads: expected at least one index, and none twice"),
    "head": (make, [6], ValueError, "heads: expected a part of .0, 1, 2, 3, 4, 5., got 6"),
    "layer": (make, {1: [0]}, ValueError, "heads: expected a part of .0., got 1"),
    "group": (partial(make, num_kv_heads=3), [0], ValueError, "heads: expected as many heads of each 2 that share"),
    "gates": (partial(make, attention="delta"), [0], ValueError, "without gates, .* got delta"),
    "module": (lambda: make(attention=Attend()), [0], ValueError, "treats all heads alike, got Attend"),
    "torch": (lambda: nn.MultiheadAttention(D, H), [0], ValueError, "expected layers of ortho .*MultiheadAttention at"),
    "own": (lambda: make(projection=Own(make().projection)), [0], TypeError, "expected one of this package, got Own"),
    "shared": (shared, {0: [1]}, ValueError, "model: expected weights of its own in 0, got shared ones"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_refusals_change_nothing(case):
    build, heads, error, match = ERRORS[case]
    model = build()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    refuses(match, prune_heads, model, heads, error=error)
    after = model.state_dict()
    assert list(after) == list(before) and all(torch.equal(value, before[name]) for name, value in after.items())


def test_no_head_to_go_without():
    with pytest.raises(ValueError, match="head: expected a part of"), without_head(attention_layers(make())[0], H):
        pass
