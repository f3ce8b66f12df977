"""Frozen queries and keys in other people's layers: draws, gradients, what others do to a model, and refusals. Each
conversion of each kind of model is right, or is refused with a sentence that names a layer and changes nothing."""

import copy
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from adapter_cases import CASES, judged, same, state_of
from adapter_models import MODELS, OWN, Attention, D, H, N, NamedAttention, build, data, run, tf
from gradients import trained
from refusals import refuses
from sample import WHOLE
from seeded import draw
from torch import nn
from torch.nn.functional import linear, scaled_dot_product_attention
from torch.nn.utils import parametrizations, parametrize, prune

from ortho import MultiheadAttention, freeze_qk, to_standard, unfreeze_qk
from ortho.adapters import FrozenRows, Layout, Source
from ortho.layers.frozen_qk import FrozenQKAttention
from ortho.projections import FrozenProjection, LearnedProjection

needs_transformers = pytest.mark.skipif(tf is None, reason="transformers is not installed")
close = torch.testing.assert_close
# float64 products summed in another order: fewer than 100 terms of size 1, each with error 1e-16, a few layers deep.
TOLERANCE = {"atol": 1e-12, "rtol": 0}
X = draw(3, N, D)


def fused(model):
    return [module for module in model.modules() if isinstance(module, FrozenRows)]


def test_a_second_call():
    """Draws again, or changes whether gradients stop; with `draw=None` nothing else changes."""
    model = freeze_qk(build("torch"))
    first = model.layer.in_proj_weight.clone()
    before = state_of(freeze_qk(model, draw=None))
    assert torch.equal(model.layer.in_proj_weight, first)
    freeze_qk(model, draw=None, stop_gradient=True)
    assert len(model.layer._forward_pre_hooks) == 1
    assert same(state_of(freeze_qk(model, draw=None))[:1] + before[1:], before)
    assert not torch.equal(freeze_qk(model).layer.in_proj_weight[: 2 * D], first[: 2 * D])
    assert torch.equal(model.layer.in_proj_weight[2 * D :], first[2 * D :])


def test_layers():
    """By their indices, or by names with wildcards."""
    for layers in ([0, 2], ["layers.0.*", 2], ["layers.[02].self_attn"]):
        model = freeze_qk(build("nn.TransformerEncoder"), layers=layers)
        assert [bool(fused(layer)) for layer in model.layers] == [True, False, True]
    for layers, words in (([3], "got 3"), (["other*"], "got 'other"), ([], "at least one")):
        refuses(f"layers: expected .*{words}", freeze_qk, model, layers=layers)
    refuses("layers: expected indices or names, got str", freeze_qk, model, layers="0", error=TypeError)
    mixed = nn.ModuleList([build("named"), LowRank()])
    refuses("expected of 1 scores", freeze_qk, mixed)
    assert [len(trained(one)) for one in freeze_qk(mixed, layers=["0"])] == [4, 10]
    assert [len(trained(one)) for one in freeze_qk(copy.deepcopy(mixed), strict=False)] == [4, 10]


def test_what_was_not_trained_stays_so():
    model = build("torch")
    model.layer.in_proj_weight.requires_grad_(False)
    assert not any("in_proj_weight" in key or "weight.original" in key for key in trained(freeze_qk(model)))
    assert not unfreeze_qk(model).layer.in_proj_weight.requires_grad
    assert model.layer.in_proj_bias.requires_grad
    named = build("named")
    named.q_proj.weight.requires_grad_(False)
    assert set(trained(build("named"))) - set(trained(unfreeze_qk(freeze_qk(named)))) == {"q_proj.weight"}
    ours = build("ortho")
    ours.projection.bias_k.requires_grad_(False)
    assert not unfreeze_qk(freeze_qk(ours)).projection.bias_k.requires_grad
    assert ours.projection.weight_k.requires_grad


def test_an_optimiser_that_was_made_before():
    """Whole matrices stay the parameters that they were, so that it misses nothing."""
    model = build("named")
    held = {id(p) for p in model.parameters()}
    assert {id(p) for p in freeze_qk(model).parameters()} == held


def test_state_dicts():
    """Those of a plain model, and of earlier versions, load into a converted one; its own load strictly."""
    for name in ("torch", "named"):
        plain, model = build(name), freeze_qk(build(name, seed=3))
        model.load_state_dict(plain.state_dict())
        close(model(X), plain(X), **TOLERANCE)
        old = plain.state_dict() | {"layer.in_proj_frozen" if name == "torch" else "q_proj.frozen": torch.zeros(1)}
        model.load_state_dict(old)
        other = freeze_qk(build(name, seed=4))
        other.load_state_dict(model.state_dict())
        close(other(X), plain(X), **TOLERANCE)


def by_hand(layer, x, mask):
    """Attention by `layer`'s parameters, with constants for queries and keys."""
    w, b = layer.in_proj_weight, layer.in_proj_bias
    q, k, v = (y.unflatten(-1, (H, -1)).transpose(1, 2) for y in linear(x, w, b).chunk(3, -1))
    scores = (q.detach() @ k.detach().mT * (D // H) ** -0.5).masked_fill(mask, -torch.inf)
    return layer.out_proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("need_weights", [False, True])
def test_stopped_gradient_of_torch(need_weights):
    """The gradient is autograd's for constant queries and keys, also with masks, and in all layouts of the operands."""
    layer = build("torch").layer
    plain = copy.deepcopy(layer)
    freeze_qk(layer, draw=None, stop_gradient=True)
    padding = torch.zeros(3, N, dtype=torch.bool)
    padding[1, 3:] = True
    future = torch.ones(N, N, dtype=torch.bool).triu(1)
    for masks in ({}, {"key_padding_mask": padding}, {"attn_mask": future, "key_padding_mask": padding}):
        mask = padding[:, None, None] & ("key_padding_mask" in masks) | future & ("attn_mask" in masks)
        inputs = [X.clone().requires_grad_() for _ in range(2)]
        want = by_hand(plain, inputs[0], mask)
        got, _ = layer(*[inputs[1]] * 3, need_weights=need_weights, **masks)
        close(got, want, **TOLERANCE)
        for one, y in ((layer, got), (plain, want)):
            one.zero_grad()
            y.square().sum().backward()
        close(inputs[1].grad, inputs[0].grad, **TOLERANCE)
        own = layer.parametrizations.in_proj_weight.original1.grad
        close(own, plain.in_proj_weight.grad[2 * D :], **TOLERANCE)
    layer.batch_first = False
    want = by_hand(plain, X, torch.tensor(False))
    close(layer(*[X.transpose(0, 1)] * 3)[0].transpose(0, 1), want, **TOLERANCE)
    close(layer(query=X[0], key=X[0], value=X[0])[0], want[0], **TOLERANCE)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("stop", [False, True])
def test_inference_with_padding(stop):
    """PyTorch's fast path, with nested tensors, gives training's outputs; stopped layers go without it."""
    model = freeze_qk(build("nn.TransformerEncoder"), stop_gradient=stop)
    padding = torch.zeros(3, N, dtype=torch.bool)
    padding[0, 3:] = True
    for given in ({}, {"src_key_padding_mask": padding}):
        want = model.train()(X, **given)
        with torch.no_grad():
            got = model.eval()(X, **given)
        there = ~given.get("src_key_padding_mask", torch.zeros_like(padding))
        close(got[there], want[there], **TOLERANCE)


def test_layers_that_are_frozen_as_they_are_made():
    """Structured projections stay what they are if nothing changes. A layer that computes no gradient of queries and
    keys becomes one that does when they are trained."""
    for layer in (FrozenQKAttention(D, H), FrozenQKAttention(D, H, projection="stopped")):
        layer.double()
        kind, want = type(layer.projection), layer(X)
        freeze_qk(layer, draw=None, stop_gradient=True)
        assert (type(layer), type(layer.projection)) == (FrozenQKAttention, kind)
        freeze_qk(layer, stop_gradient=True)
        assert (type(layer), type(layer.projection)) == (FrozenQKAttention, FrozenProjection)
        assert not torch.allclose(layer(X), want)
        want = layer(X)
        standard = to_standard(layer)
        assert type(standard) is MultiheadAttention
        close(standard(X), want, **TOLERANCE)
        standard(X).square().sum().backward()
        assert standard.projection.weight_q.grad.abs().sum() > 0
        freeze_qk(layer)  # with a gradient
        assert type(layer) is MultiheadAttention


class LowRank(NamedAttention):
    """A trained low-rank part, 0 at first, is added to the keys, by parameters of the layer's own."""

    def __init__(self):
        super().__init__()
        self.down, self.up = nn.Parameter(torch.randn(2, D)), nn.Parameter(torch.zeros(D // 2, 2))

    def forward(self, x):
        q, v = (linear(x, one.weight, one.bias).unflatten(-1, (-1, D // H)) for one in (self.q_proj, self.v_proj))
        k = (linear(x, self.k_proj.weight, self.k_proj.bias) + x @ self.down.T @ self.up.T).unflatten(-1, (-1, D // H))
        k, v = (y.repeat_interleave(2, 2) for y in (k, v))
        return scaled_dot_product_attention(*(y.transpose(1, 2) for y in (q, k, v)))


def side_by_side(self, x):
    q, k, v = self.qkv(x).unflatten(-1, (self.num_heads, 3, self.head_dim)).unbind(-2)
    o = scaled_dot_product_attention(*(y.transpose(1, 2) for y in (q, k, v)))
    return self.proj(o.transpose(1, 2).flatten(2))


class WithoutCalls(NamedAttention):
    """A layer that reads the weights of its linear layers itself."""

    def forward(self, x):
        q, k, v = (
            linear(x, one.weight, one.bias).unflatten(-1, (-1, D // H)).transpose(1, 2)
            for one in (self.q_proj, self.k_proj, self.v_proj)
        )
        return scaled_dot_product_attention(q, *(y.repeat_interleave(2, 1) for y in (k, v)))


def of_timm(forward):
    return type("Attention", (Attention,), {"forward": forward})()


FALSE = {"low rank": LowRank, "side by side": lambda: of_timm(side_by_side)}


@pytest.mark.parametrize("case", FALSE)
def test_what_only_looks_known_is_refused(case):
    """Scores are not products of the named queries and keys alone, head by head: a call shows it."""
    model = nn.ModuleList([build("torch"), FALSE[case]()])
    before = state_of(model)
    refuses("expected of 1 scores that are products of the queries and keys of .* alone", freeze_qk, model)
    assert same(state_of(model), before)
    assert len(fused(freeze_qk(model, strict=False))) == 2  # the weight and the bias of torch's layer


def test_a_layout_of_ones_own():
    """A layout that is given is tried out like those of the table."""
    wrong, right = (Layout(Source("qkv", "qkv", by_head=flag), num_heads=4) for flag in (False, True))
    refuses("expected of the model scores", freeze_qk, of_timm(side_by_side), layout=wrong)
    model = of_timm(side_by_side)
    x = torch.randn(2, N, 24)
    want = model(x)
    close(freeze_qk(model, draw=None, layout=right)(x), want)
    (rows,) = {one.runs for one in fused(model)}
    assert rows == ((12, True), (6, False)) * 4
    assert type(unfreeze_qk(model).qkv) is nn.Linear


def test_stopped_gradients_hold_or_are_refused():
    model = WithoutCalls().double()
    refuses("calls of q_proj, k_proj .it reads their weights itself.", freeze_qk, model, stop_gradient=True)
    want = model(X)
    close(freeze_qk(model, draw=None)(X), want, **TOLERANCE)


CHANGED = {
    "pruned": lambda m: prune.random_unstructured(m.q_proj, "weight", 0.5),
    "weight norm": lambda m: parametrizations.weight_norm(m.q_proj),
    "spectral norm": lambda m: parametrizations.spectral_norm(m.k_proj),
    "old weight norm": lambda m: nn.utils.spectral_norm(m.k_proj),
    "own parametrization": lambda m: parametrize.register_parametrization(m.q_proj, "weight", nn.Identity()),
    "hook": lambda m: m.q_proj.register_forward_hook(lambda *call: None),
    "forward": lambda m: setattr(m.k_proj, "forward", m.k_proj.forward),
    "more parameters": lambda m: m.k_proj.register_parameter("more", nn.Parameter(torch.zeros(1))),
    "other class": lambda m: setattr(m, "q_proj", type("QuantisedLinear", (nn.Linear,), {})(D, D)),
}


@pytest.mark.parametrize("change", CHANGED)
def test_linear_layers_that_do_more_are_refused(change):
    model = NamedAttention()
    CHANGED[change](model)
    kind = type(model.q_proj)
    refuses("expected of (q|k)_proj nn.Linear .* without hooks, pruning", freeze_qk, model)
    assert type(model.q_proj) is kind


@pytest.mark.parametrize("change", [
    lambda layer: prune.random_unstructured(layer, "in_proj_weight", 0.5),
    lambda layer: parametrizations.weight_norm(layer, "in_proj_weight"),
    lambda layer: setattr(layer, "__class__", type("Subclass", (nn.MultiheadAttention,), {})),
])  # fmt: skip
def test_layers_of_torch_that_do_more_are_refused(change):
    model = build("torch")
    change(model.layer)
    refuses("expected of layer nn.MultiheadAttention itself, not pruned or parametrized", freeze_qk, model)


def tied():
    model = nn.ModuleList([NamedAttention(), NamedAttention()])
    model[1].q_proj.weight = model[0].q_proj.weight
    return model


ERRORS = {
    "nothing": (lambda: nn.Linear(3, 3), {}, "got Linear with none"),
    "tied": (tied, {}, "of its own in 0"),
    "draw": (lambda: build("nn.TransformerEncoder"), {"draw": "uniform"}, "draw: expected one of"),
    "inputs": (lambda: build("qwen2-vl"), {}, "visual.blocks.0.attn a call that shows what it computes .`inputs=`"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors_change_nothing(case):
    make_model, kwargs, match = ERRORS[case]
    if case == "inputs" and tf is None:
        pytest.skip("transformers is not installed")
    model = make_model()
    before = state_of(model)
    refuses(match, freeze_qk, model, **kwargs)
    assert same(state_of(model), before)


def test_own_projections_are_refused():
    class Own(LearnedProjection):
        pass

    model = nn.ModuleList([MultiheadAttention(D, H), MultiheadAttention(D, H, projection=Own(D, H))])
    before = state_of(model)
    for convert in (freeze_qk, unfreeze_qk):
        refuses("projection: expected one of this package, got Own", convert, model, error=TypeError)
        assert same(state_of(model), before)


@needs_transformers
def test_the_model_is_only_read():
    """Trying out layers leaves the random state, hooks, modes and caches of a model as they were."""
    model = build("llama")
    model.model.layers[0].eval()
    modes, random = [m.training for m in model.modules()], torch.get_rng_state()
    before = state_of(model)
    want = run(model, data("llama"))
    freeze_qk(model, draw=None)
    assert torch.equal(torch.get_rng_state(), random)
    assert [m.training for m in model.modules()] == modes
    assert torch.equal(run(model, data("llama")), want)
    assert same(state_of(unfreeze_qk(model)), before)


# -- each conversion of each kind of model is right, or is refused with a sentence that names a layer and changes nothin

UNKNOWN = "a known layout of queries and keys"
ALONE = "scores that are products of the queries and keys of {} alone, head by head"
REFUSED = {  # model -> words of the refusal, of all cases
    "longformer": "no projections of queries or keys beside",
    "olmo2": ALONE.format("q_proj, k_proj"),  # norms over all heads
    "convbert": ALONE.format("query, key"),  # a convolution reads queries, too
    **dict.fromkeys(("codegen", "gpt-bigcode", "known beside unknown", "own names"), UNKNOWN),
    "peft-wrapped llama": "without hooks, pruning, parametrizations, adapters or quantisation",
}
STOPS = {"wavlm": "it reads their weights itself"}  # of stopped gradients alone


def cases():
    """By default each model has one case, which differs from model to model; every night all."""
    models, names = MODELS if tf else OWN, list(CASES)
    return [(n, c) for i, n in enumerate(models) for c in CASES if WHOLE or c == names[i % len(names)]]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(("name", "case"), cases())
def test_right_or_refused(name, case):
    want = STOPS.get(name) if case == "stopped" and name in STOPS else REFUSED.get(name)
    got = judged(CASES[case], name)
    if want is None:
        assert got == "right"
    else:
        assert got.startswith("refused: ValueError: ") and re.search(want, got)


# ------------------------------------------------------------------------------------------------- distributed training

TESTS = Path(__file__).parents[1]


def test_two_processes(tmp_path):
    given = [] if tf is not None else ["without-transformers"]
    env = os.environ | {"PYTHONPATH": f"{TESTS.parent}{os.pathsep}{TESTS}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(TESTS / "sharded_processes.py")]
    started = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "meeting"), *given],
            env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        said = [process.communicate(timeout=300)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0], "\n".join(said)
    assert said[0].count("holds") == (7 if tf is not None else 4)
