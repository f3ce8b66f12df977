"""Every benchmark: checked before it is timed, arms in turn, its records read back; and the engine that they share."""

import dataclasses
from functools import partial

import pytest
import torch

from ortho.cost.configurations import CONFIGURATIONS
from ortho.models.language_model import LanguageModel
from paper.experiments import EXPERIMENTS, measure
from paper.experiments.learning import fitting
from paper.experiments.speed import (
    attention,
    attention_variants,
    benchmark,
    decoding,
    generation,
    inference,
    language_models,
    layers,
    projections,
    recomputation,
    training_step,
    value_gradient,
    whole_models,
)
from paper.experiments.speed.benchmark import Arm, Budget

SMALL = {"H": 2, "K": 8, "chunk": 8}
# Enough tokens for windows and selections to leave some out.
SETS = {
    name: attention.case(600 if "pattern" in name or name in ("dynamic", "window alone") else 24, name, **SMALL)
    for name in attention_variants.SETS
}
SERVED = {None, "math", "flash"}  # names of the kernels that a CPU has
ALL = list(  # each arm once
    {
        arm: (case, arm)
        for case in SETS.values()
        for arm in attention_variants.arms_of(case)
        if attention_variants.by_name(arm) in SERVED
    }.values()
)

MODELS = {
    "BERT-base": {"N": 24, "sizes": {"vocab_size": 19, "max_length": 24}},
    "GPT-2 medium": {"N": 64, "sizes": {"vocab_size": 23, "max_length": 64, "bias": True}},
    "ViT-Base": {"N": 10, "sizes": {"image_size": 12, "patch_size": 4, "num_classes": 5, "channels": 3}},
}


def shrink_models(patch):
    """Give the published models sizes that a test can train."""
    for name, sizes in MODELS.items():
        made = dataclasses.replace(CONFIGURATIONS[name], d=16, H=4, L=3, parameters=0, **sizes)
        count = sum(x.numel() for x in made.build(device="meta").parameters())
        patch.setitem(CONFIGURATIONS, name, dataclasses.replace(made, parameters=count))


LAYER = {"N": 24, "d": 32, "H": 2}
HEADS = {"N": 24, "d": 64, "H": 4}
BYTES = {"B": 2, "N": 16, "d": 16, "H": 4, "L": 1}
assert_close, function = fitting.assert_close, attention_variants.function
BYTES_ARMS = ("learned", "linear", "1 learned + 3 positional")  # test_learning.py trains one of every kind
DECODED = {"H": 2, "K": 8, "N": 1024}


def of_set(name, **kind):
    return SETS[name] | kind


# Name of an experiment -> functions that make its tiny cases, for another device or precision if one is given.
TINY = {
    "training-step": [partial(training_step.case, "block", **LAYER)],
    "heads-speed": [partial(training_step.case, scope, causal=True, **HEADS) for scope in ("layer", "block")],
    "induction-speed": [partial(training_step.case, scope, causal=True, **HEADS) for scope in ("layer", "block")],
    "inference": [partial(training_step.case, "layer", 8, 32, H=2, input_grad=False)],
    "exchanged-speed": [partial(value_gradient.case, 24, 128, causal=True)],
    "attention-speed": [partial(of_set, name) for name in ("main", "recurrent", "family")],
    "memory-speed": [partial(of_set, name) for name in ("delta", "memories")],
    "pattern-speed": [partial(of_set, name) for name in ("patterns", "dynamic")],
    "flash-speed": [partial(of_set, name) for name in ("exact", "kernels")],
    "layer-speed": [partial(layers.case, causal=causal, **LAYER) for causal in (False, True)],
    "decode-speed": [partial(decoding.case, family, **DECODED) for family in decoding.FAMILIES],
    "projection-speed": [partial(projections.case, 128, N=8)],
    "recomputation-speed": [lambda **kind: recomputation.case(N=8, L=2, **kind) | {"d": 16, "H": 2}],
    "whole-models": [partial(whole_models.case, model) for model in MODELS],
    "generation": [partial(generation.case, 2, N=20)],
    "bytes-speed": [partial(language_models.case, **BYTES)],
    "ladder-speed": [partial(language_models.case, "python", B=2, N=16, d=16, L=1)],
}
CASES = [  # FlexAttention, among the kernels, inspects the function that it is given
    pytest.param(name, make, marks=[pytest.mark.unchecked] if name == "flash-speed" else [])
    for name, cases in TINY.items()
    for make in cases
]
IDS = [f"{name}-{index}" for name, cases in TINY.items() for index in range(len(cases))]


@pytest.fixture(scope="module", autouse=True)
def tiny(library):
    """Models small enough to train in a test, and timings that take a moment."""
    with pytest.MonkeyPatch.context() as patch:
        arms = language_models.arms
        patch.setattr(language_models, "arms", lambda *sizes: {name: arms(*sizes)[name] for name in BYTES_ARMS})
        shrink_models(patch)
        patch.setitem(whole_models.EDGE, "cpu", 32)
        patch.setattr(projections, "CALL_SECONDS", 1e-6)
        for module in (attention, decoding, generation, inference):
            patch.setitem(module.CALL_SECONDS, "cpu", 1e-3)
        timings = (attention, decoding, generation, language_models, layers, projections, recomputation)
        for module in (*timings, training_step, whole_models):
            patch.setitem(module.BUDGETS, "cpu", dataclasses.replace(module.BUDGETS["cpu"], least=1, warm_up=0))
        yield


def test_every_benchmark_is_here():
    assert TINY.keys() == {name for name, experiment in EXPERIMENTS.items() if experiment.is_timing}


@pytest.mark.parametrize(("name", "make"), CASES, ids=IDS)
def test_every_arm_runs_once_a_repetition(name, make):
    experiment, case = EXPERIMENTS[name], make()
    record = measure(experiment, case, "cpu", seconds=0.0)
    times, orders = record["repetitions"], record["facts"]["order"]
    beside = {whole_models.MATMUL} if name == "whole-models" else set()
    assert all(sorted(order) == sorted(times.keys() | beside) for order in orders)
    for arm, quantities in times.items():
        assert {len(values) for values in quantities.values()} == {len(orders)}
        assert record["facts"].get(arm, {}).get("calls", 1)
    assert bool(record["failures"]) == (case.get("arms") == "kernels")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize(("name", "make"), CASES, ids=IDS)
def test_every_case_runs_on_cuda(name, make):
    kind = {"device": "cuda", "dtype": "bfloat16"} if name != "bytes-speed" else {"device": "cuda"}
    case = make(**kind)
    record = measure(EXPERIMENTS[name], case, "cuda", seconds=0.05)
    assert not record["failures"]
    assert all(value > 0 for times in record["repetitions"].values() for values in times.values() for value in values)


# ------------------------------------------------------------------------------- what is wrong is not timed


def a_thousandth_more(right):
    return lambda *x, **kwargs: 1.001 * right(*x, **kwargs)


def with_weights(right, change):
    """The modules that a function makes, changed."""

    def off(*arguments):
        made = right(*arguments)
        with torch.no_grad():
            change(made)
        return made

    return off


def lose_gradient(arms):
    arms["structured"].register_forward_hook(lambda _, args, out: (0.999 * out[0] + 0.001 * out[0].detach(), out[1]))


def forgetful(name, capacity):
    """A cache that forgets one token of 320: off by some 1/320 of a softmax's output, 1e4 times the bound."""
    cache = new_cache(name, capacity)
    attend = cache.attend

    def late(**tokens):
        if cache.length == 0:
            attend(**{key: 0 * x[:, :, :1] for key, x in tokens.items()})
        return attend(**tokens)

    cache.attend, cache.capacity = late, cache.capacity + 1
    return cache


def at_the_first_place(model, tokens, past, *padding):
    return embed(model, tokens, 0 if next(model.parameters()).dtype == torch.float32 else past, *padding)


def a_tenth_more(right):
    """One gradient of the variant's results, which come after those of the definition, is a tenth too large."""
    calls = []

    def off(*arguments):
        found = right(*arguments)
        calls.append(found)
        found["gradient of blocks.0.attention.weight_v"] *= 1.1 if len(calls) == 2 else 1
        return found

    return off


embed, new_cache = LanguageModel._embed, decoding.new_cache
SPEED = "paper.experiments.speed."
WRONG = [  # what is measured; what is changed, by what; what is said
    (
        "training-step",
        "ortho.attention.softmax.softmax_attention.scaled_dot_product_attention",
        a_thousandth_more(torch.nn.functional.scaled_dot_product_attention),
        "learned, output",
    ),
    (
        "exchanged-speed",
        SPEED + "value_gradient.frozen_qk_attention",
        a_thousandth_more(value_gradient.frozen_qk_attention),
        "exchanged, output",
    ),
    (
        "projection-speed",
        SPEED + "projections.build",
        with_weights(projections.build, lose_gradient),
        "structured, gradient of x",
    ),
    (
        "recomputation-speed",
        SPEED + "recomputation.build",
        with_weights(recomputation.build, lambda made: made[recomputation.SELECTIVE][0].attention.weight_v.mul_(1.01)),
        "attention again",
    ),
    (
        "inference",
        SPEED + "inference.to_standard",
        with_weights(inference.to_standard, lambda made: made.weight_o[0, 0].add_(1)),
        "learned: expected the frozen layer's output, bit for bit",
    ),
    (
        "bytes-speed",
        "paper.experiments.learning.fitting.assert_close",
        lambda what, a, b, bound: assert_close(what, a * (1 + 1e-6), b, bound),
        "fast form",
    ),
    (
        "attention-speed",
        SPEED + "attention_variants.function",
        lambda arm, chunk: a_thousandth_more(function(arm, chunk)),
        "sdpa, output",
    ),
    ("decode-speed", SPEED + "decoding.new_cache", forgetful, "softmax: expected a relative"),
    ("generation", "ortho.models.language_model.LanguageModel._embed", at_the_first_place, "learned"),
    (
        "whole-models",
        SPEED + "whole_models._results",
        a_tenth_more(whole_models._results),
        "learned, gradient of blocks.0.attention.weight_v",
    ),
]


@pytest.mark.unchecked
@pytest.mark.parametrize(("name", "place", "instead", "said"), WRONG)
def test_what_is_wrong_is_not_timed(name, place, instead, said, monkeypatch):
    monkeypatch.setattr(place, instead)
    with pytest.raises(AssertionError, match=said):
        measure(EXPERIMENTS[name], TINY[name][0](), "cpu", seconds=0.0)


def test_a_frozen_weight_that_is_trained_is_not_timed():
    case = training_step.case(**LAYER)
    with pytest.raises(AssertionError, match=rf"expected {2 * 32**2} trained weights, got {4 * 32**2}"):
        training_step.check(case, "frozen", training_step.build(case, "learned"))


@pytest.mark.parametrize("place", ["output", "gradient of q", "gradient of k", "gradient of v"])
def test_each_gradient_is_checked(place):
    """The output, or the gradient of one operand alone, is off by a thousandth."""
    right, where = function("linear causal", 8), place[-1]

    def wrong(q, k, v):
        o, x = right(q, k, v), {"q": q, "k": k, "v": v}.get(where)
        return o * 1.001 if x is None else o + 1e-3 * (x - x.detach())

    with pytest.raises(AssertionError, match=f"linear causal, {place}: expected a relative error of at most .*, got"):
        attention_variants.check(SETS["main"], "linear causal", wrong)


@pytest.mark.parametrize(("case", "arm"), ALL, ids=[f"{case['arms']}-{arm}" for case, arm in ALL])
def test_every_arm_passes_its_check_in_half_precision(case, arm):
    attention_variants.check({**case, "dtype": "bfloat16"}, arm, attention_variants.function(arm, case["chunk"]))


# ------------------------------------------------------------------------------------------------- the engine


def test_orders_are_drawn_and_repetitions_are_those_of_the_budget():
    ran = []
    timings = {name: lambda name=name: ran.append(name) or {"x_s": 1.0} for name in "abcd"}
    outcome = benchmark.compare(timings, Budget(1e9, 2, 9, warm_up=1), {"order": 3})
    orders = outcome["facts"]["order"]
    assert len(orders) == 9 and len({tuple(order) for order in orders}) > 1
    assert ran == [*"abcd", *(name for order in orders for name in order)]
    assert outcome["repetitions"] == {name: {"x_s": [1.0] * 9} for name in "abcd"}
    assert outcome["facts"]["order"] == benchmark.compare(timings, Budget(1e9, 2, 9), {"order": 3})["facts"]["order"]
    assert len(benchmark.compare(timings, Budget(1e9, 2, 9), {"order": 3}, seconds=0.0)["facts"]["order"]) == 2


def test_what_is_nan_is_not_close():
    one = torch.ones(2)
    with pytest.raises(AssertionError, match="a, y: expected a relative error of at most 1, got nan"):
        benchmark.assert_all_close("a", {"x": one, "y": one * torch.nan}, {"x": one, "y": one}, {"x": 0.0, "y": 1.0})


@pytest.fixture
def ticks(monkeypatch):
    """A clock that advances by a second whenever it is read."""
    clock = iter(range(1000))
    monkeypatch.setattr(benchmark.time, "perf_counter", lambda: float(next(clock)))
    monkeypatch.setattr(benchmark.time, "process_time", lambda: 0.0)


def test_a_timing_is_the_mean_of_its_calls(ticks):
    ran, (operands, upstream) = [], attention_variants.draw(SETS["main"])
    call = attention_variants.function("linear", 8)
    times = benchmark.timed(lambda *x: ran.append(1) or call(*x), operands, upstream, 4)
    assert len(ran) == 4
    assert times == {"forward_s": 1.0, "forward_cpu_s": 0.0, "backward_s": 1.0, "backward_cpu_s": 0.0}
    cache, tokens = decoding._read(decoding.case("recurrent", **DECODED), "softmax", 20, 8)
    assert decoding.timed(cache, tokens, 4) == {"step_s": 0.25, "step_cpu_s": 0.0}
    assert cache.length == 20, "what is timed reads a copy"


def test_a_timed_step_takes_the_gradients_of_one_step():
    module = training_step.build(training_step.case(**LAYER), "learned")
    x, upstream = (torch.randn(1, LAYER["N"], LAYER["d"], requires_grad=True) for _ in range(2))
    arm = Arm("learned", module, torch.optim.SGD(module.parameters(), lr=0.0))
    leaves = [x, *module.parameters()]
    expected = torch.autograd.grad(module(x), leaves, upstream)
    for _ in range(2):
        benchmark.timed_step(arm, x, upstream)
    torch.testing.assert_close([leaf.grad for leaf in leaves], list(expected))
