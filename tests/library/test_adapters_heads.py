"""Heads of several kinds in torch's own layers: outputs by definition, masks, gradients, the way back, refusals."""

import copy
import sys
from types import SimpleNamespace

import pytest
import torch
from adapted_models import by_its_kind
from refusals import refuses
from torch import nn

from ortho import MultiheadAttention, to_standard
from ortho.adapters import (
    AdaptedAttention,
    attention_layers,
    freeze_qk,
    heads_record,
    restore,
    set_heads,
    standard_heads,
    unfreeze_qk,
)
from ortho.attention.softmax.softmax_attention import softmax_attention_reference
from ortho.attention.sparse.window import Window

D, H, N = 12, 6, 7
KINDS = ["learned", "previous", Window(2), "linear", "stopped", "start"]
SOFTMAX = ["learned", "stopped"] * 3
# float64 products summed in another order: fewer than 100 terms of size 1, each with error 1e-16, a few layers deep.
TOLERANCE = {"atol": 1e-12, "rtol": 0}


def make(seed=0, **kwargs):
    torch.manual_seed(seed)
    layer = nn.MultiheadAttention(D, H, **{"batch_first": True} | kwargs).double()
    with torch.no_grad():
        for name, value in layer.named_parameters():
            if "bias" in name:
                value.normal_()  # biases start at 0, which would show nothing
    return layer


def encoder(**kwargs):
    layer = nn.TransformerEncoderLayer(D, H, 2 * D, **{"dropout": 0.0, "batch_first": True} | kwargs)
    return nn.TransformerEncoder(layer, 3).double()


def tokens(seed=1):
    return torch.randn(3, N, D, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def future():
    return torch.ones(N, N, dtype=torch.bool).triu(1)


def by_kinds(layer, x, is_causal, there=None):
    """The layer's outputs, computed head by head from the definitions of the mechanisms."""
    q, k, v = (
        y.unflatten(-1, (H, -1)).transpose(1, 2) for y in (x @ layer.in_proj_weight.T + layer.in_proj_bias).chunk(3, -1)
    )
    heads = [by_its_kind(kind, q[:, h], k[:, h], v[:, h], there, is_causal=is_causal) for h, kind in enumerate(KINDS)]
    return layer.out_proj(torch.cat(heads, -1))


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
def test_each_head_is_its_kind(is_causal, padded):
    layer = make()
    plain = copy.deepcopy(layer)
    assert set_heads(layer, KINDS) is layer
    x, there = tokens(), torch.ones(3, N, dtype=torch.bool)
    if padded:
        there[1, 4:], there[2, :2] = False, False
    for hidden in (future(), torch.zeros(N, N).masked_fill(future(), -torch.inf).double()):  # torch takes both
        masks = {"attn_mask": hidden, "is_causal": True} if is_causal else {}
        if padded:
            padding = ~there
            masks["key_padding_mask"] = padding if hidden.dtype == torch.bool else padding.double() * -1e300 * 1e300
            if hidden.dtype != torch.bool:
                masks["key_padding_mask"] = torch.zeros(3, N).double().masked_fill(padding, -torch.inf)
        got, weights = layer(x, x, x, need_weights=False, **masks)
        assert weights is None
        want = by_kinds(plain, x, is_causal, there if padded else None)
        torch.testing.assert_close(got[there], want[there], **TOLERANCE)


def test_only_what_a_head_needs():
    """Positional heads have no rows of queries and keys, so that nothing is computed for scores they do not have."""
    layer = make()
    set_heads(layer, ["current", "next", "learned", *["previous"] * 3])
    assert layer.in_proj.out_features == 2 + 2 + D
    set_heads(layer, ["previous"] * H)
    assert layer.in_proj.out_features == D
    x = tokens()
    want = layer.out_proj(layer.in_proj(x).roll(1, 1).index_fill(1, torch.tensor([0]), 0))
    torch.testing.assert_close(layer(x, x, x, need_weights=False)[0], want, **TOLERANCE)


def test_layouts():
    """Batch first or not, no batch, and attention to another sequence if the heads' kinds allow it."""
    layer = set_heads(make(), KINDS)
    other = set_heads(make(batch_first=False), KINDS)
    x = tokens()
    want = layer(x, x, x, need_weights=False)[0]
    y = x.transpose(0, 1)
    torch.testing.assert_close(other(y, y, y, need_weights=False)[0].transpose(0, 1), want, **TOLERANCE)
    torch.testing.assert_close(layer(*[x[1]] * 3, need_weights=False)[0], want[1], **TOLERANCE)
    plain = make()
    crossed = set_heads(copy.deepcopy(plain), SOFTMAX)
    context = tokens(seed=2)[:, :4]
    wanted = plain(x, context, context)[0]
    torch.testing.assert_close(crossed(x, context, context, need_weights=False)[0], wanted, **TOLERANCE)
    for keys in (context, tokens(seed=2)):  # as many as queries, or not
        for kinds in ([Window(2)] * H, ["previous"] * H):
            with pytest.raises(ValueError, match="key: expected the same sequence as of the queries"):
                set_heads(make(), kinds)(x, keys, keys, need_weights=False)
    causal = {"need_weights": False, "attn_mask": future(), "is_causal": True}
    with pytest.raises(ValueError, match="queries: expected 1, or as many as keys of the same sequence"):
        set_heads(make(), ["linear"] * H)(x, tokens(seed=2), tokens(seed=2), **causal)


def test_masks_of_each_head():
    """Softmax heads take any mask for each head, (B H, N, N)."""
    plain = make()
    layer = set_heads(copy.deepcopy(plain), SOFTMAX)
    x, mask = tokens(), torch.rand(3 * H, N, N, generator=torch.Generator().manual_seed(4)) < 0.3
    mask[:, :, 0] = False
    want = plain(x, x, x, attn_mask=mask)[0]
    torch.testing.assert_close(layer(x, x, x, attn_mask=mask, need_weights=False)[0], want, **TOLERANCE)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layers", [[0, 1, 2], [1]])
def test_in_an_encoder(layers):
    """The same outputs in training and in inference, where torch's fast path would read the weights and ignore the
    kinds of heads; padding changes nothing."""
    model = encoder()
    set_heads(model, KINDS, layers=layers)
    x, padding = tokens(), torch.zeros(3, N, dtype=torch.bool)
    padding[1, 4:] = True
    for masks in ({"mask": future(), "is_causal": True}, {}):
        want = model.train()(x, src_key_padding_mask=padding, **masks)
        with torch.no_grad():
            got = model.eval()(x, src_key_padding_mask=padding, **masks)
        torch.testing.assert_close(got[~padding], want[~padding], **TOLERANCE)
        short = {"mask": future()[:4, :4], "is_causal": True} if masks else {}
        torch.testing.assert_close(got[1:2, :4], model(x[1:2, :4], **short), **TOLERANCE)


def test_gradients():
    """Stopped heads have none, learned heads have that of softmax attention; AdamW leaves frozen heads as they are."""
    model = make()
    plain = copy.deepcopy(model)
    freeze_qk(model, heads=[1, 3, 5], draw=None, stop_gradient=True)
    set_heads(model, SOFTMAX)
    inputs = [tokens().requires_grad_() for _ in range(2)]
    model(*[inputs[0]] * 3, need_weights=False)[0].square().sum().backward()
    q, k, v = (
        y.unflatten(-1, (H, -1)).transpose(1, 2)
        for y in (inputs[1] @ plain.in_proj_weight.T + plain.in_proj_bias).chunk(3, -1)
    )
    q, k = (torch.stack([y[:, h] if h % 2 == 0 else y[:, h].detach() for h in range(H)], 1) for y in (q, k))
    plain.out_proj(softmax_attention_reference(q, k, v).transpose(1, 2).flatten(2)).square().sum().backward()
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad, **TOLERANCE)
    trained = ~model.in_proj.frozen
    grads = torch.cat([p.grad for name, p in model.in_proj.named_parameters() if "weight" in name])
    torch.testing.assert_close(grads, plain.in_proj_weight.grad[trained], **TOLERANCE)
    before = model.in_proj_weight if model.in_proj_weight is not None else model.in_proj.weight.detach().clone()
    torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1).step()
    assert torch.equal((model.in_proj.weight == before).all(1), model.in_proj.frozen)


def test_the_way_back():
    """The way back leads to the layer as it was, or is refused; frozen heads stay frozen until they are unfrozen."""
    model, x = encoder(), tokens()
    state = copy.deepcopy(model.state_dict())
    want = model(x)
    set_heads(model, SOFTMAX)
    assert not model.use_nested_tensor
    torch.testing.assert_close(model(x), want, **TOLERANCE)
    assert standard_heads(model) is model
    assert model.use_nested_tensor
    assert [type(layer.module) for layer in attention_layers(model)] == [nn.MultiheadAttention] * 3
    assert list(state) == list(model.state_dict())
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    freeze_qk(model, heads=[1], draw=None)
    set_heads(model, SOFTMAX, layers=[1])
    unfreeze_qk(model)
    assert [type(layer.module) for layer in attention_layers(model)].count(AdaptedAttention) == 1
    freeze_qk(model, heads=[1], draw=None)
    standard_heads(model)
    assert all(isinstance(layer.module, AdaptedAttention) for layer in attention_layers(model))
    set_heads(model, SOFTMAX, layers=[1])
    standard = to_standard(model)
    standard.load_state_dict(state)
    torch.testing.assert_close(standard(x), want, **TOLERANCE)
    set_heads(model, KINDS, layers=[2])
    for convert in (standard_heads, to_standard):
        refuses("got Shift.* at head 1 of layers.2.self_attn, which no standard layer has", convert, model)
    assert attention_layers(model)[1].module.kinds is not None  # as it was


def test_again_and_state_dict(tmp_path):
    """Kinds may be changed as long as the heads have the queries and keys for it; only such heads can be frozen."""
    layer = set_heads(make(), KINDS)
    freeze_qk(layer, heads=[4], stop_gradient=True)
    frozen = layer.in_proj.frozen[: 2 * 2 * len(layer.asking())].view(2, -1)
    assert frozen.nonzero().tolist() == [[0, 6], [0, 7], [1, 6], [1, 7]]  # the fourth of the heads that have queries
    torch.save(layer.state_dict(), tmp_path / "weights.pt")
    other = restore(make(seed=3), heads_record(layer))
    assert other.kinds == layer.kinds
    other.load_state_dict(torch.load(tmp_path / "weights.pt", weights_only=True))
    x = tokens()
    assert torch.equal(other(x, x, x, need_weights=False)[0], layer(x, x, x, need_weights=False)[0])
    set_heads(layer, [*KINDS[:3], "next", *KINDS[4:]])
    before = copy.deepcopy(layer.state_dict())
    refuses("kinds: expected positional ones of heads that have lost .*, got 'linear'", set_heads, layer, KINDS)
    refuses("heads: expected a part of .0, 2, 4., got 1", freeze_qk, layer, heads=[1])
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())


CALLS = {
    "weights": ({}, "need_weights: expected False"),
    "bias": (
        {"need_weights": False, "attn_mask": torch.full((N, N), 0.5).double()},
        "attn_mask: expected booleans, or 0",
    ),
    "pairs": ({"need_weights": False, "attn_mask": future().T}, "attention_mask: expected a mask of keys"),
    "rows": (
        {"need_weights": False, "attn_mask": future()[:1]},
        r"attn_mask: expected shape \(7, 7\) or .* got \(1, 7\)",
    ),
    "padding": (
        {"need_weights": False, "key_padding_mask": torch.zeros(N, 3) > 0},
        r"key_padding_mask: expected shape \(3, 7\), got \(7, 3\)",
    ),
    "hint": ({"need_weights": False, "is_causal": True}, "attn_mask: expected the mask"),
}


@pytest.mark.parametrize("case", CALLS)
def test_refused_calls(case):
    kwargs, match = CALLS[case]
    layer, x = set_heads(make(), KINDS), tokens()
    refuses(match, layer, x, x, x, **kwargs)


def test_dropout_is_refused_in_training():
    layer, x = set_heads(make(dropout=0.1), KINDS), tokens()
    refuses("dropout: expected 0 in training with heads of several kinds, got 0.1", layer, x, x, x, need_weights=False)
    layer.eval()(x, x, x, need_weights=False)


ERRORS = {
    "number": (encoder, ["learned"] * 5, {}, "kinds: expected a kind for each of 6 heads, got 5"),
    "late": (encoder, {0: KINDS, 1: ["learned"]}, {}, "kinds: expected a kind for each of 6 heads, got 1"),
    "both": (encoder, {0: KINDS}, {"layers": [0]}, "layers: expected None beside a mapping of kinds"),
    "ortho": (lambda: nn.ModuleList([make(), MultiheadAttention(D, H)]), KINDS, {}, "got ortho's at 1"),
    "zero": (lambda: nn.ModuleList([make(), make(add_zero_attn=True)]), KINDS, {}, "no add_zero_attn, got one at 1"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors_change_nothing(case):
    build, kinds, kwargs, match = ERRORS[case]
    model = build()
    before, types = copy.deepcopy(model.state_dict()), [type(module) for module in model.modules()]
    refuses(match, set_heads, model, kinds, **kwargs)
    assert [type(module) for module in model.modules()] == types
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.bad_input
def test_wrong_types():
    for kinds, match in (
        ("learned", "kinds: expected a sequence of the kinds"),
        ([3] * H, "kinds: expected names of kinds"),
    ):
        refuses(match, set_heads, make(), kinds, error=TypeError)
    refuses("model: expected an nn.Module", standard_heads, "model", error=TypeError)


def test_transformers_is_asked_for(monkeypatch):
    """Only models with the names of its layers ask for it, and they do so before anything is changed."""

    class Named(nn.Module):
        def forward(self, hidden_states):
            attention_interface = ALL_ATTENTION_FUNCTIONS  # noqa: F821 (never called)
            return attention_interface(self, hidden_states)

    named = Named()
    named.config = SimpleNamespace(_attn_implementation_internal="sdpa")
    named.q_proj, named.k_proj, named.head_dim = nn.Linear(D, D), nn.Linear(D, D), D // H
    model = nn.ModuleList([make(), named])
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"transformers: expected version 5, as pip install ortho\[hf\] installs it"):
        set_heads(model, KINDS)
    assert type(model[0]) is nn.MultiheadAttention
