"""What heads of several kinds do not know in torch's layers is refused."""

import copy
import sys
from types import SimpleNamespace

import pytest
import torch
from layers_by_kinds import KINDS, D, H, N, encoder, future, make, tokens
from torch import nn

from ortho import MultiheadAttention
from ortho.adapters import set_heads, standard_heads

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
    with pytest.raises(ValueError, match=match):
        layer(x, x, x, **kwargs)


def test_dropout_is_refused_in_training():
    layer, x = set_heads(make(dropout=0.1), KINDS), tokens()
    with pytest.raises(ValueError, match="dropout: expected 0 in training with heads of several kinds, got 0.1"):
        layer(x, x, x, need_weights=False)
    layer.eval()(x, x, x, need_weights=False)


ERRORS = {
    "name": (encoder, ["learnt"] * H, {}, "kinds: expected one of .*, got 'learnt'; did you mean 'learned'"),
    "number": (encoder, ["learned"] * 5, {}, "kinds: expected a kind for each of 6 heads, got 5"),
    "late": (encoder, {0: KINDS, 1: ["learned"]}, {}, "kinds: expected a kind for each of 6 heads, got 1"),
    "layer": (encoder, KINDS, {"layers": [3]}, "layers: expected a part of"),
    "both": (encoder, {0: KINDS}, {"layers": [0]}, "layers: expected None beside a mapping of kinds"),
    "ortho": (lambda: nn.ModuleList([make(), MultiheadAttention(D, H)]), KINDS, {}, "got ortho's at 1"),
    "zero": (lambda: nn.ModuleList([make(), make(add_zero_attn=True)]), KINDS, {}, "no add_zero_attn, got one at 1"),
    "nothing": (lambda: nn.Linear(2, 2), KINDS, {}, "got Linear with none"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors_change_nothing(case):
    build, kinds, kwargs, match = ERRORS[case]
    model = build()
    before, types = copy.deepcopy(model.state_dict()), [type(module) for module in model.modules()]
    with pytest.raises(ValueError, match=match):
        set_heads(model, kinds, **kwargs)
    assert [type(module) for module in model.modules()] == types
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.bad_input
def test_wrong_types():
    for kinds, match in (
        ("learned", "kinds: expected a sequence of the kinds"),
        ([3] * H, "kinds: expected names of kinds"),
    ):
        with pytest.raises(TypeError, match=match):
            set_heads(make(), kinds)
    with pytest.raises(TypeError, match="model: expected an nn.Module"):
        standard_heads("model")


def test_transformers_is_asked_for(monkeypatch):
    """By models with the names of its layers alone, and before anything is changed."""

    class Named(nn.Module):
        def forward(self, hidden_states):
            attention_interface = ALL_ATTENTION_FUNCTIONS
            return attention_interface(self, hidden_states)

    named = Named()
    named.config = SimpleNamespace(_attn_implementation_internal="sdpa")
    named.q_proj, named.k_proj, named.head_dim = nn.Linear(D, D), nn.Linear(D, D), D // H
    model = nn.ModuleList([make(), named])
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"transformers: expected version 5, as pip install ortho\[hf\] installs it"):
        set_heads(model, KINDS)
    assert type(model[0]) is nn.MultiheadAttention
