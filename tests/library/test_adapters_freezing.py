"""Frozen heads in models of torch, of this package and of others: law, outputs, training, the way back."""

import copy
import json
import pickle
import subprocess
import sys
from functools import partial

import pytest
import torch
from adapted_models import MODELS, TOLERANCE, D, H, assert_same, described, encoder, make, operands, rows
from torch import nn

from ortho import MultiheadAttention, TextEncoder, to_standard
from ortho.adapters import (
    AdaptedAttention,
    FrozenRows,
    attention_layers,
    freeze_qk,
    heads_record,
    restore,
    unfreeze_qk,
)
from ortho.layers.stop_gradient import StoppedAttention
from ortho.projections import FrozenProjection, LearnedProjection

PAIRS = [[0, 1], [2, 3], [0, 1, 2, 3]]  # what may be chosen of heads of which two share their keys


@pytest.mark.parametrize("heads", PAIRS)
@pytest.mark.parametrize("name", MODELS)
def test_draw(name, heads):
    """Of the chosen heads orthonormal rows and no bias, of the others what they had."""
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
    """Also all heads at once, whose matrices are written as a projection of their own."""
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
    """Pretrained weights: the same outputs, frozen and back, and the way back leads to the model as it was."""
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
    """AdamW with weight decay moves all that is trained, and no frozen row by a bit."""
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
    """It adds to the first; what it chooses again is drawn anew, or stays as it is."""
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
    with pytest.raises(ValueError, match="stop_gradient: expected False"):
        freeze_qk(model, heads=[1, 2], stop_gradient=True)
    assert_same(described(model), before)
    freeze_qk(model, heads=[0, 2], draw=None, stop_gradient=True)
    assert model.layer.in_proj.stop_gradient


def test_layers_that_are_frozen_as_they_are_made():
    """Structured projections stay what they are where nothing changes; a layer that computes no gradient of queries and
    keys becomes one that does when they are trained."""
    x = operands(None)[0]
    for layer in (StoppedAttention(D, H), StoppedAttention(D, H, projection="stopped")):
        layer.double()
        kind, want = type(layer.projection), layer(x)
        freeze_qk(layer, draw=None, stop_gradient=True)
        assert (type(layer), type(layer.projection)) == (StoppedAttention, kind)
        freeze_qk(layer, stop_gradient=True)
        assert (type(layer), type(layer.projection)) == (StoppedAttention, FrozenProjection)
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
    """Indices in the order of the modules, for all layers the same heads or for each its own."""
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
    """It says which rows are frozen, and loads where the same are; elsewhere it says what differs."""
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
        with pytest.raises(RuntimeError, match="frozen"):
            freeze_qk(make(name)).load_state_dict(make(name).state_dict())


def test_to_standard():
    """Frozen heads of any layer, in a copy."""
    torch.manual_seed(0)
    model = nn.ModuleList([TextEncoder(17, D, 2, H, max_length=8).double(), encoder().double()])
    freeze_qk(model, heads=[1])
    tokens, x = torch.randint(17, (2, 7)), operands(model)[0]
    standard = to_standard(model)
    assert not any(isinstance(module, FrozenRows) for module in standard.modules())
    assert any(isinstance(module, FrozenRows) for module in model.modules())
    torch.testing.assert_close(standard[0](tokens), model[0](tokens), **TOLERANCE)
    torch.testing.assert_close(standard[1](x), model[1](x), **TOLERANCE)
    with pytest.raises(TypeError, match="PartlyFrozenProjection"):
        freeze_qk(MultiheadAttention(D, H), heads=[1]).to_torch()


def test_other_libraries_are_not_imported():
    """The package itself needs none of those whose models it knows."""
    code = "import sys, ortho; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_bias_trains_if_it_did():
    """Each of weight and bias as it was, and all that is unfrozen, also without gradients at the time."""
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
