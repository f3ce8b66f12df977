"""What could make a model wrong without an error: shared configurations, other sequences, sliding windows, padding,
files, hooks, writes past the parameters."""

import copy
import json
import subprocess
import sys

import pytest
import torch
from adapter_cases import MIXED, saved, state_of
from adapter_models import H, OwnAttention, build, close, data, padded, run, tf
from refusals import refuses
from torch import nn
from torch.func import functional_call

from ortho.adapters import (
    FrozenRows,
    Layout,
    Source,
    attention_layers,
    freeze_qk,
    from_pretrained,
    heads_record,
    restore,
    set_heads,
    standard_heads,
    unfreeze_qk,
)
from ortho.attention.sparse.fixed import Fixed
from ortho.attention.sparse.global_local import GlobalLocal
from ortho.attention.sparse.strided import LocalStrided
from ortho.attention.sparse.window import Window

needs_transformers = pytest.mark.skipif(tf is None, reason="transformers is not installed")
TOLERANCE = {"atol": 1e-12, "rtol": 0}  # float64 products summed in another order


@needs_transformers
def test_models_that_share_a_configuration():
    """The other model stays what it was, in its outputs and in its files."""
    model = build("gpt2")
    other = type(model)(model.config).double().eval()
    before, want = state_of(other), run(other, data("gpt2"))
    set_heads(freeze_qk(model, heads=[3]), MIXED)
    assert torch.equal(run(other, data("gpt2")), want)
    assert not hasattr(other.config, "ortho_heads")
    assert state_of(other)[1:] == before[1:]
    assert model.config.ortho_heads["layers"].keys() == heads_record(model).keys()
    assert all(module.config is model.config for module in model.modules() if hasattr(module, "save_pretrained"))


@needs_transformers
def test_another_sequence_is_told_by_the_call():
    """A layer that attends to its own sequence in one call, and to another of the same length in the next."""
    model = build("bart").eval()
    (layer,) = (one.module for one in attention_layers(model) if one.name == "model.decoder.layers.0.self_attn")
    x, other = torch.randn(2, 3, 5, 24, dtype=torch.float64)
    want = layer(x, key_value_states=other)[0]
    index = [one.name for one in attention_layers(model)].index("model.decoder.layers.0.self_attn")
    set_heads(model, {index: ["learned", "stopped"] * 2})
    torch.testing.assert_close(layer(x, key_value_states=other)[0], want, **TOLERANCE)
    set_heads(model, {index: ["learned"] * 3 + ["linear"]})
    layer(x)
    refuses("as many as keys of the same sequence, in a causal call of a linear head", layer, x, key_value_states=other)
    set_heads(model, {index: ["learned"] * 3 + ["previous"]})
    layer(x)
    for call in (lambda: layer(x, key_value_states=other), lambda: layer(x, other)):
        refuses("key: expected the same sequence as of the queries .*cross-attention", call)
    standard_heads(set_heads(model, {index: ["learned"] * H}))
    torch.testing.assert_close(layer(x, key_value_states=other)[0], want, **TOLERANCE)
    assert not layer._forward_pre_hooks


@needs_transformers
def test_sliding_windows():
    """If a layer forgets keys, heads that need positions are refused, also if the layer begins to slide later."""
    for kinds in (["previous"] * H, ["linear"] * H, [Window(2)] * H):
        refuses(r"model.layers.0.self_attn that all earlier keys are kept", set_heads, build("mistral"), kinds)
    model = set_heads(build("mistral-full"), MIXED)
    for layer in attention_layers(model):
        layer.module.config.sliding_window = 4
    refuses("sliding_window: expected None with such heads, got 4", run, model, data("mistral-full"))


@needs_transformers
@pytest.mark.parametrize("pattern", [Window(2), Fixed(3, 1), LocalStrided(3), GlobalLocal(2, 1)])
def test_patterns_count_from_the_first_token(pattern):
    """Patterns do not count from the padding before it, with a cache or without one."""
    model = set_heads(build("llama"), [pattern] * H).eval()
    for side in ("left", "right"):
        given, there = padded("llama", side)
        got = run(model, given)
        for i in range(len(there)):
            want = run(model, {"input_ids": given["input_ids"][i : i + 1, there[i]]})[0]
            assert close(got[i][there[i]], want)
        past, outputs = tf.DynamicCache(), []
        for stop in range(1, there.shape[1] + 1):
            step = {
                "input_ids": given["input_ids"][:, stop - 1 : stop],
                "attention_mask": given["attention_mask"][:, :stop],
            }
            outputs.append(run(model, {**step, "past_key_values": past, "use_cache": True}))
        assert close(torch.cat(outputs, 1)[there], got[there])


@needs_transformers
def test_set_attn_implementation_keeps_the_kinds():
    model, given = set_heads(build("llama"), MIXED).eval(), data("llama")
    want = run(model, given)
    for name in ("eager", "sdpa"):
        model.set_attn_implementation(name)
        assert close(run(model, given), want)


@needs_transformers
def test_files_that_are_loaded_without_a_word(tmp_path):
    """A file of frozen heads gives the plain class the same function. A file of other kinds never loads silently."""
    model = freeze_qk(build("gpt2"), heads=[0, 1]).eval()
    model.save_pretrained(tmp_path / "frozen")
    plain = tf.GPT2LMHeadModel.from_pretrained(tmp_path / "frozen", dtype=torch.float64).eval()
    assert close(run(plain, data("gpt2")), run(model, data("gpt2")))
    assert heads_record(restore(plain)) == heads_record(model)
    set_heads(model, MIXED).save_pretrained(tmp_path / "mixed")
    code = (
        "import sys, transformers\n"
        "try: transformers.GPT2LMHeadModel.from_pretrained(sys.argv[1])\n"
        "except ValueError as error: sys.exit('ortho' not in str(error))\n"
        "sys.exit(1)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path / "mixed")], check=False).returncode == 0
    plain = tf.GPT2LMHeadModel.from_pretrained(tmp_path / "mixed", dtype=torch.float64).eval()
    refuses(r"needs ortho.adapters.restore\(model\) after it was loaded", run, plain, data("gpt2"))
    assert close(run(restore(plain), data("gpt2")), run(model, data("gpt2")))
    # A part of the model from the file of the whole model; and the same part from its own file.
    part = from_pretrained(tf.GPT2Model, tmp_path / "mixed", dtype=torch.float64).eval()
    want = run(model.transformer, data("gpt2"))
    assert close(run(part, data("gpt2")), want)
    assert close(run(saved("gpt2", part, from_pretrained), data("gpt2")), want)


@needs_transformers
def test_state_dicts_name_what_differs():
    """Loaded into a plain model, into one with other kinds of heads, and into one with the same kinds."""
    state = set_heads(build("gpt2"), MIXED).state_dict()
    refuses("Unexpected key.*ortho_heads.kinds", build("gpt2").load_state_dict, state, error=RuntimeError)
    with pytest.raises(RuntimeError, match=r"expected heads of the kinds .*end.*, got .*previous.*Window"):
        set_heads(build("gpt2"), ["end"] * H).load_state_dict(state)
    with pytest.raises(RuntimeError, match="Missing key.*ortho_heads.kinds"):
        set_heads(build("gpt2"), MIXED).load_state_dict(build("gpt2").state_dict())
    set_heads(build("gpt2", seed=3), MIXED).load_state_dict(state)


def test_a_layout_of_ones_own():
    """The layout is found again afterwards; frozen rows are those of the layer's own queries and keys."""
    layout = Layout(Source("ask", "q"), Source("answer", "k"), num_heads=H)
    model = nn.ModuleList([build("torch"), build("own names")])
    freeze_qk(model, heads=[1, 2], layout=layout)
    assert model[1].ask.frozen.nonzero()[:, 0].tolist() == list(range(6, 18))
    refuses("expected of 1 that it chooses its attention by name", set_heads, model, ["stopped"] * H, layout=layout)
    record = json.loads(json.dumps(heads_record(model)))
    other = restore(nn.ModuleList([build("torch", 2), build("own names", 2)]), record, layout=layout)
    other.load_state_dict(model.state_dict())
    assert heads_record(other) == record == heads_record(copy.deepcopy(model))
    unfreeze_qk(model)
    assert type(model[1].ask) is nn.Linear
    freeze_qk(model, strict=False)  # it keeps the layout
    assert heads_record(model).keys() == {"0.layer", "1"}


def test_what_is_not_known_is_left_where_the_caller_says_so():
    model = build("known beside unknown")
    freeze_qk(model, strict=False)
    assert heads_record(model).keys() == {"known"}
    assert isinstance(model.own.ask, nn.Linear)


class Fused(nn.Module):
    """A layer with a fused matrix, which does not show the order of its parts."""

    def __init__(self, name):
        super().__init__()
        self.num_heads = H
        setattr(self, name, nn.Linear(24, 72))


@pytest.mark.parametrize("name", ["qkv", "Wqkv", "c_attn", "qkv_proj", "query_key_value", "in_proj_qkvz", "to_qkv"])
def test_unknown_fused_matrices_are_refused(name):
    cls = type("CausalAttention" if name == "c_attn" else "Mixer", (Fused,), {})
    refuses(rf"expected of 1 a known layout .* got .* of {name}", freeze_qk, nn.ModuleList([build("torch"), cls(name)]))


def test_linear_layers_that_do_more_are_refused():
    """Hooks and parametrisations would be lost."""
    for change in (
        lambda m: m.ask.register_forward_hook(lambda *call: None),
        lambda m: nn.utils.parametrizations.weight_norm(m.ask),
        lambda m: m.answer.register_parameter("more", nn.Parameter(torch.zeros(1))),
        lambda m: setattr(m.answer, "forward", m.answer.forward),
    ):
        model = OwnAttention()
        change(model)
        with pytest.raises(ValueError, match="expected of (ask|answer) (a linear layer without hooks|nn.Linear)"):
            freeze_qk(model, layout=Layout(Source("ask", "q"), Source("answer", "k"), num_heads=H))


def rows(bias=True, stop=False):
    torch.manual_seed(0)
    layer = nn.Linear(5, 8, bias=bias).double()
    return FrozenRows.of(layer).freeze([torch.tensor([1, 2, 6])], None, stop)


def test_nothing_is_joined_without_a_gradient():
    """The matrix is one piece of memory, and what is trained and what is frozen are views of it."""
    layer = rows()
    with torch.no_grad():
        assert layer.weight.data_ptr() == layer.frozen_weight_1.data_ptr() - layer.weight[:1].nbytes
        assert layer.bias.data_ptr() == layer.trained_bias_0.data_ptr()
    own = {
        x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in [*layer.parameters(), *layer.buffers()]
    }
    assert sum(own.values()) == 8 * (8 * 5 + 8)


def by_kind(mean, model):
    """A usual moving average: parameters are averaged, buffers copied."""
    for mine, new in zip(mean.parameters(), model.parameters(), strict=True):
        mine.lerp_(new, 0.25)
    for mine, new in zip(mean.buffers(), model.buffers(), strict=True):
        mine.copy_(new)


def by_state(mean, model):
    new = model.state_dict()
    once = {mine.data_ptr(): (key, mine) for key, mine in mean.state_dict().items()}  # tied weights have one memory
    for key, mine in once.values():
        mine.copy_(mine.lerp(new[key], 0.25) if mine.is_floating_point() else new[key])


@pytest.mark.parametrize("average", [by_kind, by_state])
@pytest.mark.parametrize("name", ["torch", "gpt2"])
def test_averages_of_weights(name, average):
    """What others write into a copy's parameters, buffers or state dict stays written; frozen rows stay as they are."""
    model = freeze_qk(build(name))
    mean = copy.deepcopy(model)
    before = {key: value.clone() for key, value in mean.state_dict().items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 1
        average(mean, model)
    for key, new in model.state_dict().items():
        wanted = before[key].lerp(new, 0.25) if new.is_floating_point() else new
        torch.testing.assert_close(mean.state_dict()[key], wanted)


def doubled(layer):
    return {key: 2 * value if value.is_floating_point() else value for key, value in layer.state_dict().items()}


def other_data(layer):
    for p in layer.parameters():
        p.data = torch.ones_like(p)


CHANGES = {
    "step": lambda layer: torch.optim.SGD(layer.parameters(), 0.1).step(),
    "data": lambda layer: [p.data.mul_(2) for p in layer.parameters()],
    "copied data": lambda layer: [p.data.copy_(torch.ones_like(p)) for p in layer.parameters()],
    "other data": other_data,
    "other type": lambda layer: layer.float().double(),
    "both": lambda layer: other_data(layer.bfloat16().double()),
    "load": lambda layer: layer.load_state_dict(doubled(layer)),
    "assign": lambda layer: layer.load_state_dict(doubled(layer), assign=True),
    "empty": lambda layer: layer.to_empty(device="cpu").load_state_dict(rows(stop=layer.stop_gradient).state_dict()),
    "meta": lambda layer: layer.to("meta").load_state_dict(rows(stop=layer.stop_gradient).state_dict()),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("stop", [False, True])
def test_changes_are_seen(change, stop):
    """However parameters are written to, the outputs without a gradient are those with a gradient."""
    layer, x = rows(stop=stop), torch.randn(4, 5, dtype=torch.float64)
    with torch.no_grad():
        layer(x)
    layer(x).sum().backward()
    CHANGES[change](layer)
    for one in (layer, copy.deepcopy(layer)):
        weight, bias = (
            torch.cat([p for name, p in one.named_parameters() if part in name]) for part in ("weight", "bias")
        )
        with torch.no_grad():
            got = one(x)
        torch.testing.assert_close(got, one(x), **TOLERANCE)
        torch.testing.assert_close(got[:, ~one.frozen], x @ weight.T + bias, **TOLERANCE)


def test_functional_call():
    layer, x = rows(), torch.randn(4, 5, dtype=torch.float64)
    twice = {name: 2 * p.detach() for name, p in layer.named_parameters()}
    with torch.no_grad():
        got = functional_call(layer, twice, (x,))
        grads = torch.func.grad(lambda p: functional_call(layer, p, (x,)).sum())(twice)
    trained = ~layer.frozen
    torch.testing.assert_close(got[:, trained], 2 * layer(x)[:, trained], **TOLERANCE)
    torch.testing.assert_close(got[:, ~trained], layer(x)[:, ~trained], **TOLERANCE)
    assert all(grad.abs().sum() > 0 for grad in grads.values())


def test_a_record_that_does_not_fit_changes_nothing():
    """Kinds for too few heads beside frozen ones, and a head that does not exist in the second of two layers."""
    model = nn.ModuleList([build("torch", 2), build("torch", 2)])
    names = list(heads_record(freeze_qk(copy.deepcopy(model), draw=None)))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    fits = {"frozen": [0], "stop_gradient": False}
    for record in (
        {names[0]: fits | {"kinds": ["learned"]}},
        {names[0]: fits, names[1]: {"frozen": [99], "stop_gradient": True}},
    ):
        with pytest.raises(ValueError, match="expected"):
            restore(model, record)
        after = model.state_dict()
        assert after.keys() == before.keys() and all(torch.equal(after[name], before[name]) for name in before)
        assert all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("own", [
    {}, {"frozen": [0]}, {"frozen": [0], "stop_gradient": "x"}, {"frozen": None, "stop_gradient": False},
    {"frozen": [], "stop_gradient": False, "kinds": ["learned", {"window": 3}]},
    {"frozen": [], "stop_gradient": False, "kinds": ["learned", {"class": "Window", "bad": 3}]},
])  # fmt: skip
def test_what_is_no_record_is_refused(own):
    with pytest.raises((TypeError, ValueError), match="^record: expected"):
        restore(nn.MultiheadAttention(8, 2), {"": own})
