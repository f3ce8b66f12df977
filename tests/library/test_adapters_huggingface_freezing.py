"""Frozen heads in tiny models of transformers."""

import copy

import pytest
import torch
from transformers_models import CONFIGS, MAIN, TOLERANCES, D, H, K, inputs, make, run, same_state, state_of

from ortho import to_standard
from ortho.adapters import FrozenRows, attention_layers, freeze_qk, set_heads, unfreeze_qk


def weights(name, model, part):
    """W_Q or W_K of the first layer as the model is documented to store it, (heads, K, D)."""
    layer = attention_layers(model)[0].module
    if name == "gpt2":
        return layer.c_attn.weight.T.unflatten(0, (3, H, K))["qk".index(part)]
    if name == "neox":
        return layer.query_key_value.weight.unflatten(0, (H, 3, K))[:, "qk".index(part)]
    names = {"bert": ("query", "key"), "distilbert": ("q_lin", "k_lin"), "t5": ("q", "k")}
    attribute = names.get(name, ("q_proj", "k_proj"))["qk".index(part)]
    return getattr(layer, attribute).weight.unflatten(0, (-1, K))


@pytest.mark.parametrize("name", CONFIGS)
def test_frozen_and_back(name):
    """The right rows of the right matrices: orthogonal, or as they were; and back to the model's own layers."""
    model = make(name)
    state, data = state_of(model), inputs(name)
    types = [type(module) for module in model.modules()]
    want = run(model, **data)
    freeze_qk(model, heads=[2, 3], draw=None, stop_gradient=True)
    torch.testing.assert_close(run(model, **data), want, **TOLERANCES[name])
    unfreeze_qk(model)
    assert same_state(model, state)
    assert [type(module) for module in model.modules()] == types
    assert torch.equal(run(model, **data), want)
    assert all(parameter.requires_grad for parameter in model.parameters())
    freeze_qk(model, layers=[0], heads=[2, 3])
    frozen = run(model, **data)
    torch.testing.assert_close(run(to_standard(model), **data), frozen, **TOLERANCES[name])
    plain = to_standard(model)
    for part in "qk":
        new, old = weights(name, plain, part), weights(name, make(name), part)
        half = len(new) // 2
        assert torch.equal(new[:half], old[:half])
        own = new[half:].flatten(0, 1)
        torch.testing.assert_close(own @ own.T, torch.eye(len(own), dtype=own.dtype), atol=1e-13, rtol=0)
    own = {key for key, value in plain.state_dict().items() if not torch.equal(value, state[key])}
    assert len(own) <= 4  # weights and biases of queries and keys, of one layer


@pytest.mark.parametrize("name", MAIN)
def test_training_step(name):
    """AdamW with weight decay moves no frozen row, and all others."""
    model, data = freeze_qk(make(name), heads=[0, 1]), inputs(name)
    matrices = [module for module in model.modules() if isinstance(module, FrozenRows)]
    before = [matrix.weight.detach().clone() for matrix in matrices]
    assert matrices
    assert not any("frozen_" in key for key, _ in model.named_parameters())
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    run(model, **data).square().sum().backward()
    optimiser.step()
    for matrix, old in zip(matrices, before, strict=True):
        assert torch.equal((matrix.weight == old).all(1), matrix.frozen)


def detach_queries_and_keys(name, model):
    """Constants for the queries and keys of a plain model, by hooks."""
    for layer in attention_layers(model):
        if name == "gpt2":
            layer.module.c_attn.register_forward_hook(
                lambda *c: torch.cat([c[-1][..., : 2 * D].detach(), c[-1][..., 2 * D :]], -1)
            )
        else:
            for child in ("query", "key") if name == "bert" else ("q_proj", "k_proj"):
                getattr(layer.module, child).register_forward_hook(lambda *call: call[-1].detach())


@pytest.mark.parametrize("by_kind", [False, True])
@pytest.mark.parametrize("name", MAIN)
def test_stopped_gradient(name, by_kind):
    """That of constant queries and keys, by autograd: of frozen heads, and of heads of that kind."""
    plain, data = make(name), inputs(name)
    model = copy.deepcopy(plain)
    detach_queries_and_keys(name, plain)
    if by_kind:
        set_heads(model, ["stopped"] * H)
    else:
        freeze_qk(model, draw=None, stop_gradient=True)
    for one in (plain, model):
        run(one, **data).square().sum().backward()
    wanted = dict(plain.named_parameters())
    compared = 0
    for key, parameter in model.named_parameters():
        if key in wanted and "c_attn" not in key and wanted[key].grad is not None:
            size = wanted[key].grad.abs().max().item()
            kind = {"atol": TOLERANCES[name]["atol"] * max(size, 1), "rtol": 0}
            torch.testing.assert_close(parameter.grad, wanted[key].grad, **kind)
            compared += size > 0
    assert compared > 10


def test_training_with_frozen_and_positional_heads():
    """All together: a step changes what is trained, and no head that is frozen."""
    model = make("llama")
    freeze_qk(model, heads=[2, 3], stop_gradient=True)
    set_heads(model, ["learned", "previous", "stopped", "stopped"])
    matrices = [module for module in model.modules() if isinstance(module, FrozenRows)]
    before = [matrix.weight[matrix.frozen].clone() for matrix in matrices]
    data = inputs("llama")
    loss = model(**data, labels=data["input_ids"]).loss
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())
    torch.optim.AdamW(model.parameters(), lr=1e-3).step()
    assert model(**data, labels=data["input_ids"]).loss < loss
    assert all(torch.equal(m.weight[m.frozen], old) for m, old in zip(matrices, before, strict=True))


def test_grouped_heads_are_frozen_together():
    model = make("llama")
    state = state_of(model)
    with pytest.raises(
        ValueError, match="heads: expected all 2 heads that share a head of keys in model.layers.1.self_attn"
    ):
        freeze_qk(model, heads={0: [0, 1], 1: [1, 2, 3]})
    assert same_state(model, state)
