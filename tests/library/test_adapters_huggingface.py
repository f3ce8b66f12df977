"""Frozen heads, and heads of several kinds, in tiny models of transformers: what test_adapters_matrix.py leaves out."""

import copy
from itertools import pairwise

import pytest
import torch
from adapted_models import by_its_kind
from adapter_cases import same, state_of
from adapter_models import D, H, N, build, data, run, tf
from refusals import refuses
from torch import nn

from ortho import to_standard
from ortho.adapters import FrozenRows, attention_layers, freeze_qk, set_heads, standard_heads
from ortho.attention.sparse.window import Window

pytest.importorskip("transformers")
from ortho.adapters.huggingface import ortho_attention

K = D // H
MAIN, CAUSAL = ["gpt2", "llama", "bert", "vit"], ["gpt2", "llama"]
KINDS = [["learned", "previous", Window(3), "linear"], ["stopped", "end", "linear", "learned"]]
CHILD = "ortho_heads.kinds"  # the entry of a state dict that holds a layer's kinds
# Sums of fewer than 100 terms of size 1 in another order, a few layers deep: 1e-16 each; Llama's norms are in float32.
TOLERANCES = {name: {"atol": 1e-5 if name == "llama" else 1e-12, "rtol": 0} for name in MAIN}


def recorded(model, given):
    """(module, query, key, value, mask, kwargs) of each call of a layer."""
    calls = []

    def spy(module, query, key, value, attention_mask, **kwargs):
        calls.append((module, query, key, value, attention_mask, kwargs))
        return tf.AttentionInterface()["sdpa"](module, query, key, value, attention_mask, **kwargs)

    tf.AttentionInterface.register("spy", spy)
    tf.AttentionMaskInterface.register("spy", tf.AttentionMaskInterface()["sdpa"])
    model.set_attn_implementation("spy")
    run(model, given)
    return calls


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", MAIN)
def test_each_head_is_its_kind(name, padded):
    """Outputs are those of the mechanisms' definitions, from a layer's own operands; each group shares its own keys."""
    given, there = data(name), torch.ones(3, N, dtype=torch.long)
    if padded and name != "vit":
        there[1, 5:] = 0
        given["attention_mask"] = there
    model = build(name)
    calls = recorded(model, given)
    set_heads(model, {0: KINDS[0], 1: KINDS[1]})
    for (module, q, k, v, mask, kwargs), kinds in zip(calls, KINDS, strict=True):
        got = ortho_attention(module, q, k, v, mask, **kwargs)[0].transpose(1, 2)
        is_causal = name in CAUSAL
        present = there.bool()
        for h, kind in enumerate(kinds):
            group, keys = h * k.shape[1] // H, present if padded and name != "vit" else None
            own = q[:, h], k[:, group], v[:, group]
            want = by_its_kind(kind, *own, keys, is_causal=is_causal, scale=kwargs["scaling"])
            shown = present if keys is not None else torch.ones(want.shape[:2], dtype=torch.bool)
            torch.testing.assert_close(got[:, h][shown], want[shown], **TOLERANCES[name])


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("side", ["none", "left"])
@pytest.mark.parametrize("name", CAUSAL)
def test_decoding(name, side, cache):
    """A prompt, then one token at a time, with all kinds of heads; several at a time, except with linear heads."""
    model = set_heads(build(name), {0: KINDS[0], 1: KINDS[1]}).eval()
    ids, there = data(name)["input_ids"], torch.ones(3, N, dtype=torch.long)
    if side == "left":
        there[1, :2] = 0
    places = (there.cumsum(1) - 1).clamp(min=0)
    whole = {"input_ids": ids, "attention_mask": there, "position_ids": places}
    want = run(model, whole)

    def decode(steps):
        past = tf.DynamicCache() if cache == "dynamic" else tf.StaticCache(model.config, max_cache_len=12)
        found = []
        for first, stop in pairwise(steps):
            cut = slice(first, stop)
            given = {"attention_mask": there[:, :stop], "position_ids": places[:, cut]}
            found.append(run(model, {"input_ids": ids[:, cut], "past_key_values": past, "use_cache": True, **given}))
        return torch.cat(found, 1)

    with torch.no_grad():
        got = decode([0, 3, 4, 5, 6, 7])
        torch.testing.assert_close(got[there.bool()], want[there.bool()], **TOLERANCES[name])
        refuses("queries: expected 1, or as many as keys of the same sequence, .* got 2 and", decode, [0, 3, 5])
        set_heads(model, ["learned", "stopped", Window(3), "previous"])
        want = run(model, whole)
        got = decode([0, 3, 5, 7])
        torch.testing.assert_close(got[there.bool()], want[there.bool()], **TOLERANCES[name])


@pytest.mark.parametrize("before", ["eager", "sdpa"])
def test_the_way_back(before):
    """Learned and stopped heads give the model's own outputs and can be undone; other heads cannot."""
    model, given = build("gpt2"), data("gpt2")
    model.set_attn_implementation(before)
    state, want = state_of(model), run(model, given)
    set_heads(model, ["learned", "stopped"] * 2, layers=[1])
    set_heads(model, ["learned"] * 4, layers=[0])
    assert model.config._attn_implementation == before  # only the layers' own setting is another
    kind = TOLERANCES["llama" if before == "eager" else "gpt2"]  # the models' own softmax is in float32
    torch.testing.assert_close(run(model, given), want, **kind)
    assert same(state_of(standard_heads(model)), state)
    assert torch.equal(run(model, given), want)
    set_heads(model, KINDS[0], layers=[1])
    assert {key for key in model.state_dict() if key not in state[0]} == {f"{attention_layers(model)[1].name}.{CHILD}"}
    other = run(model, given)
    assert not torch.allclose(other, want, atol=1e-3)
    for convert in (standard_heads, to_standard):
        refuses("got Shift.* at head 1 of .*1.*, which no standard layer has", convert, model)
    assert torch.equal(run(model, given), other)
    assert torch.equal(run(copy.deepcopy(model), given), other)


def detach_queries_and_keys(name, model):
    """Constants for the queries and keys of a plain model, by hooks."""
    for layer in attention_layers(model):
        if name == "gpt2":
            layer.module.c_attn.register_forward_hook(
                lambda *c: torch.cat([c[-1][..., : 2 * D].detach(), c[-1][..., 2 * D :]], -1)
            )
        else:
            for child in ("query", "key"):
                getattr(layer.module, child).register_forward_hook(lambda *call: call[-1].detach())


@pytest.mark.parametrize("by_kind", [False, True])
@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_stopped_gradient(name, by_kind):
    """The gradient is autograd's for constant queries and keys, with frozen heads and with heads of kind "stopped"."""
    plain, given = build(name), data(name)
    model = copy.deepcopy(plain)
    detach_queries_and_keys(name, plain)
    if by_kind:
        set_heads(model, ["stopped"] * H)
    else:
        freeze_qk(model, draw=None, stop_gradient=True)
    for one in (plain, model):
        run(one, given).square().sum().backward()
    wanted = dict(plain.named_parameters())
    compared = 0
    for key, parameter in model.named_parameters():
        if key in wanted and "c_attn" not in key and wanted[key].grad is not None:
            size = wanted[key].grad.abs().max().item()
            kind = {"atol": TOLERANCES[name]["atol"] * max(size, 1), "rtol": 0}
            torch.testing.assert_close(parameter.grad, wanted[key].grad, **kind)
            compared += size > 0
    assert compared > 10


@pytest.mark.parametrize("name", CAUSAL)
def test_training_with_frozen_and_positional_heads(name):
    """AdamW with weight decay changes what is trained, and no frozen head."""
    model = freeze_qk(build(name), heads=[2, 3], stop_gradient=True)
    set_heads(model, ["learned", "previous", "stopped", "stopped"])
    matrices = [module for module in model.modules() if isinstance(module, FrozenRows)]
    before = [matrix.weight.detach().clone() for matrix in matrices]
    given = data(name)
    loss = model(**given, labels=given["input_ids"]).loss
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())
    torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1).step()
    assert model(**given, labels=given["input_ids"]).loss < loss
    for matrix, old in zip(matrices, before, strict=True):
        assert torch.equal((matrix.weight == old).all(1), matrix.frozen)


def test_refused_calls():
    """Arguments that heads of several kinds do not support are refused, not ignored."""
    given = data("llama")
    model = set_heads(build("llama"), KINDS[0])
    refuses("output_attentions: expected none with heads of several kinds", model, output_attentions=True, **given)
    with pytest.raises(ValueError, match="eager"):
        model.config.output_attentions = True
    mask = torch.full((3, 1, N, N), 0.5).double()
    with pytest.raises(
        ValueError, match="attention_mask: expected booleans, or 0 and -inf, with heads of several kinds"
    ):
        model(**given, attention_mask=mask)
    with pytest.raises(ValueError, match=r"attention_mask: expected shape \(batch, 1 or 4, 7, 7\) .* got \(3, 7\)"):
        ortho_attention(attention_layers(model)[0].module, *torch.randn(3, 3, H, N, K), torch.ones(3, N) > 0)
    with pytest.raises(ValueError, match="attention_mask: expected a mask of keys, causal or not"):
        model(**given, attention_mask=torch.rand(3, 1, N, N) < 0.5)
    with pytest.raises(ValueError, match="attention_mask: expected a mask of keys, causal or not"):  # two in one row
        model(**given, position_ids=torch.tensor([0, 1, 2, 0, 1, 2, 3]).expand(3, -1), use_cache=False)
    for layer in attention_layers(model):
        layer.module.attention_dropout = 0.1
    refuses("dropout: expected 0 in training with heads of several kinds, got 0.1", model, **given)
    model.eval()(**given)
    for name in ("position_bias", "softcap", "s_aux"):
        with pytest.raises(ValueError, match=f"{name}: expected none"):
            ortho_attention(attention_layers(model)[0].module, *torch.randn(3, 1, H, N, K), None, **{name: 1.0})


class SelfAttention(nn.Module):
    """A layer that does not look up its attention function by name."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.num_heads = nn.Linear(4, 4), nn.Linear(4, 4), 4


def test_an_error_in_a_later_layer_changes_nothing():
    model = nn.ModuleList([build("bert"), SelfAttention()])
    before = state_of(model)
    refuses("1 that it chooses its attention by name .* got SelfAttention", set_heads, model, KINDS[0])
    assert same(state_of(model), before)
    assert not any(hasattr(module, "ortho_heads") for module in model.modules())
