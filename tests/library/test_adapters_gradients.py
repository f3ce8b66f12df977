"""Gradients past frozen heads, and torch's fast path."""

import copy

import pytest
import torch
from adapted_models import TOLERANCE, D, H, N, OfTorch, make, operands, rows

from ortho.adapters import freeze_qk


def by_hand(layer, x, stopped, mask=None):
    """Attention of `layer`'s weights, with constants for the queries and keys of stopped heads; and its weights."""
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
    """That of constant queries and keys, by autograd; also with masks, and in all layouts of the operands."""
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
    """All heads stopped: x has the gradient that it has through the values alone."""
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
    """torch's, in training."""
    layer = freeze_qk(OfTorch(dropout=0.5).double(), draw=None, stop_gradient=True).layer
    (x,) = operands(layer)
    dropped = layer(x, x, x, need_weights=need_weights)[0]
    kept = layer.eval()(x, x, x, need_weights=need_weights)[0]
    assert ((dropped - kept).abs().amax((1, 2)) > 1e-3).all()  # that nothing is dropped has odds of 2^-100 an item


def test_gradients_still_pass_without_it():
    model = make("torch")
    x = operands(model)[0].requires_grad_()
    (want,) = torch.autograd.grad(model(x).square().sum(), x)
    (got,) = torch.autograd.grad(freeze_qk(model, draw=None)(x).square().sum(), x)
    torch.testing.assert_close(got, want, **TOLERANCE)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("stop", [False, True])
@pytest.mark.parametrize("heads", [[1], None])
def test_fast_path(heads, stop, monkeypatch):
    """torch's inference reads packed weights past all modules: it is taken still, and gives what training gives."""
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
