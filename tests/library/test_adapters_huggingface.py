"""Heads of several kinds in tiny models of transformers."""

import copy
from itertools import pairwise

import pytest
import torch
from torch import nn
from transformers_models import (
    CAUSAL,
    KINDS,
    MAIN,
    TOLERANCES,
    H,
    K,
    N,
    inputs,
    make,
    run,
    same_state,
    state_of,
    transformers,
)

from ortho import MECHANISMS, to_standard
from ortho.adapters import attention_layers, set_heads, standard_heads
from ortho.adapters.huggingface import ortho_attention
from ortho.attention.softmax.softmax_attention import softmax_attention_reference
from ortho.attention.sparse.pattern import pattern_attention_reference
from ortho.attention.sparse.window import Window
from ortho.attention.untrained.positional_attention import PATTERNS, positional_attention_reference

CHILD = "ortho_heads.kinds"  # where a state dict has a layer's kinds


def recorded(model, **data):
    """(module, query, key, value, mask, kwargs) of the layers' calls."""
    calls = []

    def spy(module, query, key, value, attention_mask, **kwargs):
        calls.append((module, query, key, value, attention_mask, kwargs))
        return transformers.AttentionInterface()["sdpa"](module, query, key, value, attention_mask, **kwargs)

    transformers.AttentionInterface.register("spy", spy)
    transformers.AttentionMaskInterface.register("spy", transformers.AttentionMaskInterface()["sdpa"])
    model.set_attn_implementation("spy")
    run(model, **data)
    return calls


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", MAIN)
def test_each_head_is_its_kind(name, padded):
    """By the definitions of the mechanisms, from a layer's own operands; keys that are shared are each group's own."""
    data, there = inputs(name), torch.ones(3, N, dtype=torch.long)
    if padded and name != "vit":
        there[1, 5:] = 0
        data["attention_mask"] = there
    model = make(name)
    calls = recorded(model, **data)
    set_heads(model, {0: KINDS[0], 1: KINDS[1]})
    for (module, q, k, v, mask, kwargs), kinds in zip(calls, KINDS, strict=True):
        got = ortho_attention(module, q, k, v, mask, **kwargs)[0].transpose(1, 2)
        is_causal = name in CAUSAL
        keys = there[:, None].bool() if padded and name != "vit" else None  # (B, 1, N)
        for h, kind in enumerate(kinds):
            group = h * k.shape[1] // H
            own = q[:, h], k[:, group], v[:, group]
            given = {"is_causal": is_causal, "attn_mask": keys}
            if kind in PATTERNS:
                given["attn_mask"] = None if keys is None else keys[:, None]
                want = positional_attention_reference(own[2][:, None], [kind], **given)[:, 0]
            elif kind == "linear":
                want = MECHANISMS["linear"].reference(*own, **given)
            elif isinstance(kind, Window):
                want = pattern_attention_reference(*own, pattern=kind, scale=kwargs["scaling"], **given)
            else:
                want = softmax_attention_reference(*own, scale=kwargs["scaling"], **given)
            present = there.bool() if keys is not None else torch.ones(want.shape[:2], dtype=torch.bool)
            torch.testing.assert_close(got[:, h][present], want[present], **TOLERANCES[name])


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_padding(name, side):
    """A batch of sequences of several lengths gives what each gives alone. Without the function that makes masks for
    this attention the models would make none."""
    model = set_heads(make(name), {0: KINDS[0], 1: KINDS[1]})
    lengths = [N, 4, 2]
    ids = inputs(name)["input_ids"]
    there = torch.arange(N) < torch.tensor(lengths)[:, None]
    there = there.flip(1) if side == "left" else there
    places = (there.cumsum(1) - 1).clamp(min=0)
    got = run(model, input_ids=ids * there, attention_mask=there.long(), position_ids=places)
    for i, n in enumerate(lengths):
        want = run(model, input_ids=ids[i : i + 1][there[i : i + 1]][None])[0]
        assert len(want) == n
        torch.testing.assert_close(got[i][there[i]], want, **TOLERANCES[name])
    if side == "right" and name in CAUSAL:  # where nothing sees the padding
        return
    loose = run(model, input_ids=ids * there, position_ids=places)
    assert not torch.allclose(loose[1][there[1]], got[1][there[1]], atol=1e-3)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("side", ["none", "left"])
@pytest.mark.parametrize("name", CAUSAL)
def test_decoding(name, side, cache):
    """A prompt, and then a token at a time, all kinds of heads; and several at a time, but for linear heads."""
    model = set_heads(make(name), {0: KINDS[0], 1: KINDS[1]}).eval()
    ids, there = inputs(name)["input_ids"], torch.ones(3, N, dtype=torch.long)
    if side == "left":
        there[1, :2] = 0
    places = (there.cumsum(1) - 1).clamp(min=0)
    want = run(model, input_ids=ids, attention_mask=there, position_ids=places)

    def decode(steps):
        past = (
            transformers.DynamicCache()
            if cache == "dynamic"
            else transformers.StaticCache(model.config, max_cache_len=12)
        )
        found = []
        for first, stop in pairwise(steps):
            cut = slice(first, stop)
            given = {"attention_mask": there[:, :stop], "position_ids": places[:, cut]}
            found.append(run(model, input_ids=ids[:, cut], past_key_values=past, use_cache=True, **given))
        return torch.cat(found, 1)

    with torch.no_grad():
        got = decode([0, 3, 4, 5, 6, 7])
        torch.testing.assert_close(got[there.bool()], want[there.bool()], **TOLERANCES[name])
        with pytest.raises(
            ValueError, match="queries: expected 1, or as many as keys of the same sequence, .* got 2 and"
        ):
            decode([0, 3, 5])
        set_heads(model, ["learned", "stopped", Window(3), "previous"])
        want = run(model, input_ids=ids, attention_mask=there, position_ids=places)
        got = decode([0, 3, 5, 7])
        torch.testing.assert_close(got[there.bool()], want[there.bool()], **TOLERANCES[name])


def test_generation():
    model = set_heads(make("gpt2"), {0: KINDS[0]}).eval()
    given = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
    ids = inputs("gpt2")["input_ids"]
    with_cache, without = (model.generate(ids, use_cache=use, **given) for use in (True, False))
    assert with_cache.shape == (3, N + 5)
    assert torch.equal(with_cache, without)


@pytest.mark.parametrize("before", ["eager", "sdpa"])
@pytest.mark.parametrize("name", MAIN)
def test_the_way_back(name, before):
    """Learned and stopped heads give the model's own outputs, and are given back; others are not."""
    model, data = make(name), inputs(name)
    model.set_attn_implementation(before)
    state, want = state_of(model), run(model, **data)
    set_heads(model, ["learned", "stopped"] * 2, layers=[1])
    set_heads(model, ["learned"] * 4, layers=[0])
    assert model.config._attn_implementation == before  # of the layers alone it is another
    kind = TOLERANCES["llama" if before == "eager" else name]  # the models' own softmax is in float32
    torch.testing.assert_close(run(model, **data), want, **kind)
    assert standard_heads(model) is model
    assert model.config._attn_implementation == before
    assert same_state(model, state)
    assert torch.equal(run(model, **data), want)
    set_heads(model, KINDS[0], layers=[1])
    assert {key for key in model.state_dict() if key not in state} == {f"{attention_layers(model)[1].name}.{CHILD}"}
    other = run(model, **data)
    assert not torch.allclose(other, want, atol=1e-3)
    for convert in (standard_heads, to_standard):
        with pytest.raises(ValueError, match="got Shift.* at head 1 of .*1.*, which no standard layer has"):
            convert(model)
    assert torch.equal(run(model, **data), other)
    assert torch.equal(run(copy.deepcopy(model), **data), other)


def test_refused_calls():
    """What heads of several kinds do not know is said, and not left out."""
    data = inputs("llama")
    model = make("llama")
    set_heads(model, KINDS[0])
    with pytest.raises(ValueError, match="output_attentions: expected none with heads of several kinds"):
        model(**data, output_attentions=True)
    with pytest.raises(ValueError, match="eager"):
        model.config.output_attentions = True
    mask = torch.full((3, 1, N, N), 0.5).double()
    with pytest.raises(
        ValueError, match="attention_mask: expected booleans, or 0 and -inf, with heads of several kinds"
    ):
        model(**data, attention_mask=mask)
    with pytest.raises(ValueError, match=r"attention_mask: expected shape \(batch, 1 or 4, 7, 7\) .* got \(3, 7\)"):
        ortho_attention(attention_layers(model)[0].module, *torch.randn(3, 3, H, N, K), torch.ones(3, N) > 0)
    with pytest.raises(ValueError, match="attention_mask: expected a mask of keys, causal or not"):
        model(**data, attention_mask=torch.rand(3, 1, N, N) < 0.5)
    with pytest.raises(ValueError, match="attention_mask: expected a mask of keys, causal or not"):  # two in one row
        model(**data, position_ids=torch.tensor([0, 1, 2, 0, 1, 2, 3]).expand(3, -1), use_cache=False)
    for layer in attention_layers(model):
        layer.module.attention_dropout = 0.1
    with pytest.raises(ValueError, match="dropout: expected 0 in training with heads of several kinds, got 0.1"):
        model(**data)
    model.eval()(**data)
    for name in ("position_bias", "softcap", "s_aux"):
        with pytest.raises(ValueError, match=f"{name}: expected none"):
            ortho_attention(attention_layers(model)[0].module, *torch.randn(3, 1, H, N, K), None, **{name: 1.0})


ERRORS = {
    "attention": ("t5", KINDS[0], "encoder.block.0.layer.0.SelfAttention .* which hands position_bias to it"),
    "late": ("bert", KINDS[0], "1 that it chooses its attention by name .* got SelfAttention"),
    "kind": ("bert", ["learned", "last", "linear", "linear"], "kinds: expected one of 'learned'"),
    "number": ("gpt2", ["learned"], "kinds: expected a kind for each of 4 heads, got 1"),
}


class SelfAttention(nn.Module):
    """One that looks up no attention."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.num_heads = nn.Linear(4, 4), nn.Linear(4, 4), 4


@pytest.mark.parametrize("case", ERRORS)
def test_errors_change_nothing(case):
    name, kinds, match = ERRORS[case]
    model = make(name)
    if case == "late":  # after one that would do
        model = nn.ModuleList([model, SelfAttention()])
    before = [module.config._attn_implementation for module in model.modules() if hasattr(module, "config")]
    with pytest.raises(ValueError, match=match):
        set_heads(model, kinds)
    assert [module.config._attn_implementation for module in model.modules() if hasattr(module, "config")] == before
    assert not any(hasattr(module, "ortho_heads") for module in model.modules())
