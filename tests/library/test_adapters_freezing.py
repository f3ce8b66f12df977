"""Frozen heads in models of torch, of this package and of others: distribution, outputs, gradients, unfreezing,
refusals."""

import copy
import json
import pickle
from functools import partial

import pytest
import torch
from adapted_models import (
    MODELS,
    TOLERANCE,
    D,
    H,
    N,
    NamedAttention,
    OfTorch,
    assert_same,
    described,
    encoder,
    make,
    operands,
    rows,
)
from refusals import refuses
from torch import nn

from ortho import MultiheadAttention, TextEncoder, to_standard
from ortho.adapters import AdaptedAttention, FrozenRows, attention_layers, freeze_qk, heads_record, restore, unfreeze_qk
from ortho.layers.frozen_qk import FrozenQKAttention
from ortho.projections import FrozenProjection, LearnedProjection

PAIRS = [[0, 1], [2, 3], [0, 1, 2, 3]]  # the heads that may be chosen if every two heads share their keys


@pytest.mark.parametrize("heads", PAIRS)
@pytest.mark.parametrize("name", MODELS)
def test_draw(name, heads):
    """The chosen heads get orthonormal rows and no bias; the other heads keep what they had."""
    model = make(name)
    before = [layer.read() for layer in attention_layers(copy.deepcopy(model))]
    generator = torch.Generator().manual_seed(3)
    assert freeze_qk(model, heads=heads, stop_gradient=name == "ortho-frozen", generator=generator) is model
    for layer, old in zip(attention_layers(model), before, strict=True):
        matrices, packed = layer.read(), layer.matrix("q") == "in_proj"
        own = {"q": rows(heads), "k": rows(sorted({h * layer.num_kv_heads // H for h in heads}))}
        if packed:  # queries, keys and values, one after the other
            own["k"] = [D + row for row in own["k"]]
        for part, chosen in own.items():
            matrix, was = matrices[layer.matrix(part)], old[layer.matrix(part)]
            w = matrix.weight[chosen]
            small = w @ w.T if w.shape[0] <= w.shape[1] else w.T @ w
            torch.testing.assert_close(small, torch.eye(len(small), dtype=w.dtype), **TOLERANCE)
            frozen = sorted(own["q"] + own["k"]) if packed else chosen
            assert matrix.frozen.nonzero()[:, 0].tolist() == frozen or name == "ortho-frozen"
            others = [row for row in range(matrix.out_features) if row not in frozen]
            assert torch.equal(matrix.weight[others], was.weight[others])
            if matrix.bias is not None:
                assert not matrix.bias[chosen].any()
                assert torch.equal(matrix.bias[others], was.bias[others])
        q, k = (matrices[layer.matrix(part)].weight[chosen] for part, chosen in own.items())
        assert not torch.equal(q[: len(k), : k.shape[1]], k[:, : q.shape[1]])


def test_heads_of_any_width_keep_it():
    """Also if all heads are chosen at once, whose matrices then become a projection of their own."""
    layer = MultiheadAttention(D, H, head_dim=D // H + 1, dtype=torch.float64)
    x = torch.randn(2, 5, D, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    want = layer(x)
    for change in (partial(freeze_qk, draw=None), unfreeze_qk):
        change(layer)
        assert layer.projection.head_dim == D // H + 1
        torch.testing.assert_close(layer(x), want, **TOLERANCE)


@pytest.mark.parametrize("stop", [False, True])
@pytest.mark.parametrize("heads", PAIRS)
@pytest.mark.parametrize("name", MODELS)
def test_as_they_are_and_back(name, heads, stop):
    """Freezing pretrained weights keeps the outputs; unfreezing keeps them too, and gives the model as it was."""
    if name == "ortho-frozen" and not stop:
        pytest.skip("its projection is stopped")
    model = make(name).eval()
    before, args = described(model), operands(model)
    want = model(*args)
    freeze_qk(model, heads=heads, draw=None, stop_gradient=stop)
    torch.testing.assert_close(model(*args), want, **TOLERANCE)
    with torch.no_grad():  # by torch's fast path
        torch.testing.assert_close(model(*args), want, **TOLERANCE)
    unfreeze_qk(model)
    if name == "ortho-frozen":
        assert isinstance(model.projection, LearnedProjection)
    else:
        assert_same(described(model), before)
        make(name, seed=9).load_state_dict(model.state_dict())
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert torch.equal(model(*args), want)
    assert_same(described(unfreeze_qk(model)), described(model))


@pytest.mark.parametrize("stop", [False, True])
@pytest.mark.parametrize("draw", [None, "haar"])
@pytest.mark.parametrize("name", MODELS)
def test_training_step(name, draw, stop):
    """AdamW with weight decay changes everything that is trained, and no bit of a frozen row."""
    model = make(name)
    if name == "ortho-frozen" and not stop:
        pytest.skip("its projection is stopped")
    freeze_qk(model, heads=[0, 1], draw=draw, stop_gradient=stop)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    model(*operands(model)).square().sum().backward()
    optimiser.step()
    matrices = [module for module in model.modules() if isinstance(module, FrozenRows)]
    kept = 0
    for module in matrices:
        (key,) = (name for name, other in model.named_modules() if other is module)
        key = key if f"{key}.weight" in state else key.replace("in_proj", "in_proj_weight")
        old = state.get(f"{key}.weight", state.get(key))
        assert torch.equal(module.weight[module.frozen], old[module.frozen])
        assert (module.weight != old).any(1)[~module.frozen].all()
        kept += int(module.frozen.sum())
    assert kept or isinstance(getattr(model, "projection", None), FrozenProjection)
    assert not any("frozen" in key for key, _ in model.named_parameters())


def test_a_second_call():
    """A second call adds to the first; heads chosen again are drawn anew or, without a draw, stay as they are."""
    model = make("torch")
    freeze_qk(model, heads=[0])
    first = model.layer.in_proj_weight[rows([0])].clone()
    freeze_qk(model, heads=[2])
    assert torch.equal(model.layer.in_proj_weight[rows([0])], first)
    assert model.layer.in_proj.frozen.nonzero()[:, 0].tolist() == rows([0, 2, 4, 6])
    before = described(model)
    assert_same(described(freeze_qk(model, heads=[0, 2], draw=None)), before)
    freeze_qk(model, heads=[0])
    assert not torch.equal(model.layer.in_proj_weight[rows([0])], first)
    before = described(model)
    refuses("stop_gradient: expected False", freeze_qk, model, heads=[1, 2], stop_gradient=True)
    assert_same(described(model), before)
    freeze_qk(model, heads=[0, 2], draw=None, stop_gradient=True)
    assert model.layer.in_proj.stop_gradient


def test_layers_that_are_frozen_as_they_are_made():
    """Structured projections stay what they are if nothing changes. A layer that computes no gradient of queries and
    keys becomes one that does when they are trained."""
    x = operands(None)[0]
    for layer in (FrozenQKAttention(D, H), FrozenQKAttention(D, H, projection="stopped")):
        layer.double()
        kind, want = type(layer.projection), layer(x)
        freeze_qk(layer, draw=None, stop_gradient=True)
        assert (type(layer), type(layer.projection)) == (FrozenQKAttention, kind)
        freeze_qk(layer, stop_gradient=True)
        assert (type(layer), type(layer.projection)) == (FrozenQKAttention, FrozenProjection)
        assert not torch.allclose(layer(x), want)
        want = layer(x)
        standard = to_standard(layer)
        assert type(standard) is MultiheadAttention
        torch.testing.assert_close(standard(x), want, **TOLERANCE)
        standard(x).square().sum().backward()
        assert standard.projection.weight_q.grad.abs().sum() > 0
        freeze_qk(layer)  # with a gradient
        assert type(layer) is MultiheadAttention


def test_layers_and_heads():
    """Layers are counted in the order of the modules; heads are the same in all layers, or given for each layer."""
    model = make("encoder")
    freeze_qk(model, layers=[2], heads=[1])
    freeze_qk(model, heads={0: [0, 3], 2: [2]})
    assert [type(layer.self_attn) for layer in model.layers] == [
        AdaptedAttention,
        nn.MultiheadAttention,
        AdaptedAttention,
    ]
    assert model.layers[0].self_attn.in_proj.frozen.nonzero()[:, 0].tolist() == rows([0, 3, 4, 7])
    assert model.layers[2].self_attn.in_proj.frozen.nonzero()[:, 0].tolist() == rows([1, 2, 5, 6])
    decoder = make("decoder")
    assert [layer.name for layer in attention_layers(decoder)] == ["self_attn", "multihead_attn"]
    assert isinstance(freeze_qk(MultiheadAttention(D, H)).projection, FrozenProjection)


@pytest.mark.parametrize("stop", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_state_dict(name, stop, tmp_path):
    """A state dict says which rows are frozen, and loads where the same are; elsewhere the error says what differs."""
    if name == "ortho-frozen":
        pytest.skip("frozen as it is made")
    model = freeze_qk(make(name), heads=[2, 3], stop_gradient=stop)
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    state = torch.load(tmp_path / "weights.pt", weights_only=True)
    other = restore(make(name, seed=7), json.loads(json.dumps(heads_record(model))))
    other.load_state_dict(state)
    args = operands(model)
    for one in (other, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(one(*args), model(*args))
        assert heads_record(one) == heads_record(model)
    for wrong in ({"heads": [0, 1]}, {"heads": [2, 3], "stop_gradient": not stop}):
        other = freeze_qk(make(name, seed=7), **{"stop_gradient": stop, **wrong})
        with pytest.raises(RuntimeError, match="frozen: expected a checkpoint in which the same rows are frozen"):
            other.load_state_dict(state)
    with pytest.raises(RuntimeError, match="frozen"):  # unexpected, or missing
        make(name).load_state_dict(state)
    if "ortho" not in name:  # whose projections are frozen by their class, with the names of learned ones
        refuses("frozen", freeze_qk(make(name)).load_state_dict, make(name).state_dict(), error=RuntimeError)


def test_to_standard():
    """`to_standard` makes standard layers of frozen heads in any layer, in a copy."""
    torch.manual_seed(0)
    model = nn.ModuleList([TextEncoder(17, D, 2, H, max_length=8).double(), encoder().double()])
    freeze_qk(model, heads=[1])
    tokens, x = torch.randint(17, (2, 7)), operands(model)[0]
    standard = to_standard(model)
    assert not any(isinstance(module, FrozenRows) for module in standard.modules())
    assert any(isinstance(module, FrozenRows) for module in model.modules())
    torch.testing.assert_close(standard[0](tokens), model[0](tokens), **TOLERANCE)
    torch.testing.assert_close(standard[1](x), model[1](x), **TOLERANCE)
    refuses("PartlyFrozenProjection", freeze_qk(MultiheadAttention(D, H), heads=[1]).to_torch, error=TypeError)


def test_the_bias_trains_if_it_did():
    """After freezing, weight and bias are each trained if they were; after unfreezing all are, also under `no_grad`."""
    for weight, bias in ((True, False), (False, True)):
        linear = nn.Linear(D, D)
        linear.weight.requires_grad_(weight)
        linear.bias.requires_grad_(bias)
        rows = FrozenRows.of(linear).freeze([torch.arange(2)], None, False)
        assert {name: p.requires_grad for name, p in rows.named_parameters()} == {
            "trained_weight_2": weight,
            "trained_bias_2": bias,
        }
    model = MultiheadAttention(D, H, bias=True)
    with torch.no_grad():
        unfreeze_qk(freeze_qk(model))
    assert all(parameter.requires_grad for parameter in model.parameters())


def by_hand(layer, x, stopped, mask=None):
    """Attention by `layer`'s parameters, with constants for the queries and keys of stopped heads; and its weights."""
    q, k, v = (
        y.unflatten(-1, (H, -1)).transpose(1, 2) for y in (x @ layer.in_proj_weight.T + layer.in_proj_bias).chunk(3, -1)
    )
    q, k = (torch.stack([y[:, h].detach() if h in stopped else y[:, h] for h in range(H)], 1) for y in (q, k))
    scores = q @ k.mT * (D // H) ** -0.5
    weights = (scores if mask is None else scores.masked_fill(mask, -torch.inf)).softmax(-1)
    return layer.out_proj((weights @ v).transpose(1, 2).flatten(2)), weights


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("heads", [[1], [0, 2], [0, 1, 2, 3]])
def test_stopped_gradient_of_torch(heads, need_weights):
    """The gradient is autograd's for constant queries and keys, also with masks, and in all layouts of the operands."""
    layer = make("torch").layer
    plain = copy.deepcopy(layer)
    freeze_qk(layer, heads=heads, draw=None, stop_gradient=True)
    (x,) = operands(layer)
    padding = torch.zeros(3, N, dtype=torch.bool)
    padding[1, 3:] = True
    future = torch.ones(N, N, dtype=torch.bool).triu(1)
    for masks in ({}, {"key_padding_mask": padding}, {"attn_mask": future, "key_padding_mask": padding}):
        mask = padding[:, None, None] & ("key_padding_mask" in masks) | future & ("attn_mask" in masks)
        inputs = [x.clone().requires_grad_() for _ in range(2)]
        want, weights = by_hand(plain, inputs[0], heads, mask)
        got, found = layer(*[inputs[1]] * 3, need_weights=need_weights, **masks)
        torch.testing.assert_close(got, want, **TOLERANCE)
        if need_weights:
            torch.testing.assert_close(found, weights.mean(1), **TOLERANCE)
            each = layer(*[x] * 3, average_attn_weights=False, **masks)[1]
            torch.testing.assert_close(each, weights, **TOLERANCE)
        for y in (got, want):
            y.square().sum().backward()
        torch.testing.assert_close(inputs[1].grad, inputs[0].grad, **TOLERANCE)
        frozen = rows(heads) + [D + row for row in rows(heads)]
        trained = [row for row in range(3 * D) if row not in frozen]
        grads = torch.cat([p.grad for name, p in layer.in_proj.named_parameters() if "weight" in name])
        torch.testing.assert_close(grads, plain.in_proj_weight.grad[trained], **TOLERANCE)
        plain.zero_grad()
        layer.zero_grad()
    layer.batch_first = False
    want = by_hand(plain, x, heads)[0]
    torch.testing.assert_close(layer(*[x.transpose(0, 1)] * 3)[0].transpose(0, 1), want, **TOLERANCE)
    y, w = layer(*[x[0]] * 3, need_weights=need_weights)
    torch.testing.assert_close(y, want[0], **TOLERANCE)
    assert w is None or w.shape == (N, N)


@pytest.mark.parametrize("name", ["ortho", "ortho-grouped", "named"])
def test_stopped_gradient_of_others(name):
    """With all heads stopped, x has only its gradient through the values."""
    model = make(name)
    plain = copy.deepcopy(model)
    freeze_qk(model, draw=None, stop_gradient=True)
    parts = [plain.projection] if name != "named" else [plain.q_proj, plain.k_proj]
    for part in parts:
        part.register_forward_hook(
            lambda *call: tuple(y.detach() for y in call[-1]) if name != "named" else call[-1].detach()
        )
    grads = []
    for one in (model, plain):
        x = operands(one)[0].requires_grad_()
        one(x).square().sum().backward()
        grads.append(x.grad)
    torch.testing.assert_close(*grads, **TOLERANCE)


@pytest.mark.parametrize("need_weights", [False, True])
def test_dropout_of_stopped_heads(need_weights):
    """torch's layer drops weights in training, whether it returns them or not."""
    layer = freeze_qk(OfTorch(dropout=0.5).double(), draw=None, stop_gradient=True).layer
    (x,) = operands(layer)
    dropped = layer(x, x, x, need_weights=need_weights)[0]
    kept = layer.eval()(x, x, x, need_weights=need_weights)[0]
    assert ((dropped - kept).abs().amax((1, 2)) > 1e-3).all()  # nothing is dropped with probability 2^-100 an item


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("stop", [False, True])
@pytest.mark.parametrize("heads", [[1], None])
def test_fast_path(heads, stop, monkeypatch):
    """torch's fast path, which reads packed weights past all modules, is still taken; it gives training's outputs."""
    model = freeze_qk(make("encoder"), heads=heads, stop_gradient=stop)
    (x,) = operands(model)
    padding = torch.zeros(3, N, dtype=torch.bool)
    padding[0, 3:] = True
    calls = []
    fast = torch._transformer_encoder_layer_fwd
    monkeypatch.setattr(torch, "_transformer_encoder_layer_fwd", lambda *args: calls.append(0) or fast(*args))
    for given in ({}, {"src_key_padding_mask": padding}):
        want = model.train()(x, **given)
        with torch.no_grad():
            got = model.eval()(x, **given)
        there = ~given.get("src_key_padding_mask", torch.zeros_like(padding))
        torch.testing.assert_close(got[there], want[there], **TOLERANCE)
    assert len(calls) == 6


class Subclass(nn.MultiheadAttention):
    pass


class QuantisedLinear(nn.Linear):
    pass


def with_child(name, layer):
    model = NamedAttention()
    setattr(model, name, layer)
    return model


def tied():
    model = nn.ModuleList([NamedAttention(), NamedAttention()])
    model[1].q_proj.weight = model[0].q_proj.weight
    return model


ERRORS = {
    "nothing": (lambda: nn.Linear(3, 3), {}, "got Linear with none"),
    "subclass": (
        lambda: nn.ModuleList([OfTorch(), Subclass(D, H)]),
        {},
        "of 1 nn.MultiheadAttention itself, got .*Subclass",
    ),
    "quantised": (lambda: with_child("k_proj", QuantisedLinear(D, D)), {}, "k_proj .*got .*QuantisedLinear"),
    "width": (lambda: with_child("k_proj", nn.Linear(D, 7)), {}, "fits 12 outputs of q_proj and 7 outputs of k_proj"),
    "number": (lambda: with_child("num_heads", 6), {}, "their number .* fits 12 outputs of q_proj"),
    "tied": (tied, {}, "of its own in 0"),
    "layer": (encoder, {"layers": [1, 3]}, "layers: expected a part of .0, 1, 2., got 3"),
    "head": (encoder, {"heads": [4]}, "heads: expected a part of .0, 1, 2, 3., got 4"),
    "twice": (encoder, {"layers": [1, 1]}, "layers: expected at least one index, and none twice"),
    "layer of a mapping": (encoder, {"heads": {5: [1]}}, "heads: expected a part of .0, 1, 2., got 5"),
    "both": (encoder, {"heads": {0: [1]}, "layers": [0]}, "layers: expected None beside a mapping"),
    "draw": (encoder, {"draw": "uniform"}, "draw: expected one of"),
    "zero": (lambda: OfTorch(add_zero_attn=True), {"stop_gradient": True}, "expected False with add_bias_kv"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors_change_nothing(case):
    build, kwargs, match = ERRORS[case]
    model = build()
    before = described(model)
    refuses(match, freeze_qk, model, **kwargs)
    assert_same(described(model), before)


def test_parts_of_a_group_change_nothing():
    """A refused part of a group also changes nothing in the layers before it, whose heads have keys of their own."""
    model = nn.ModuleList([OfTorch(), NamedAttention()])
    before = described(model)
    with pytest.raises(
        ValueError, match="heads: expected all 2 heads that share a head of keys in 1, or none, got .0, 1, 2."
    ):
        freeze_qk(model, heads=[0, 1, 2])
    assert_same(described(model), before)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"model": "bert"}, "model: expected an nn.Module, got str"),
        ({"layers": 1}, "layers: expected indices, got int 1"),
        ({"layers": "0"}, "layers: expected indices, got str"),
        ({"heads": [1.0]}, "heads: expected integers, got float"),
        ({"heads": [True]}, "heads: expected integers, got bool"),
        ({"stop_gradient": 1}, "stop_gradient: expected True or False, got int 1"),
    ],
)
def test_wrong_types(kwargs, match):
    refuses(match, freeze_qk, error=TypeError, **{"model": encoder()} | kwargs)
    refuses("model: expected an nn.Module", unfreeze_qk, 3, error=TypeError)


def test_own_projections_are_refused():
    class Own(LearnedProjection):
        pass

    model = nn.ModuleList([MultiheadAttention(D, H), MultiheadAttention(D, H, projection=Own(D, H))])
    before = described(model)
    for convert in (freeze_qk, unfreeze_qk):
        refuses("projection: expected one of this package, got Own", convert, model, error=TypeError)
        assert_same(described(model), before)
