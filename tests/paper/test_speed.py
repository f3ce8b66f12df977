"""Every benchmark: checked before it is timed, arms in turn, its records read back; and the engine that they share."""

import dataclasses
from functools import partial

import pytest
import torch
from experiment_fakes import small_library
from tiny_arms import MODELS, SETS, shrink_models

from paper.experiments import EXPERIMENTS, measure
from paper.experiments.speed import (
    analysis,
    attention,
    attention_variants,
    benchmark,
    decoding,
    generation,
    heads,
    inference,
    ladder_models,
    language_models,
    projections,
    recomputation,
    training_step,
    value_gradient,
    whole_models,
)
from paper.experiments.speed.benchmark import PASSES, PHASES, Arm, Budget
from paper.tasks import text

LAYER = {"N": 24, "d": 32, "H": 2}
HEADS = {"N": 24, "d": 64, "H": 4}
BYTES = {"B": 2, "N": 16, "d": 16, "H": 4, "L": 1}
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
    "decode-speed": [partial(decoding.case, family, **DECODED) for family in decoding.FAMILIES],
    "projection-speed": [partial(projections.case, 128, N=8)],
    "recomputation-speed": [lambda **kind: recomputation.case(N=8, L=2, **kind) | {"d": 16, "H": 2}],
    "whole-models": [partial(whole_models.case, model) for model in MODELS],
    "generation": [partial(generation.case, 2, N=20)],
    "bytes-speed": [partial(language_models.case, **BYTES)],
    "ladder-speed": [partial(ladder_models.case, "python", B=2, N=16, d=16, L=1)],
}
CASES = [(name, make) for name, cases in TINY.items() for make in cases]
IDS = [f"{name}-{index}" for name, cases in TINY.items() for index in range(len(cases))]


@pytest.fixture(scope="module", autouse=True)
def tiny(tmp_path_factory):
    """Models and texts small enough to train in a test, and timings that take a moment."""
    parts = small_library(tmp_path_factory.mktemp("text"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text, "python_parts", lambda: parts)
        arms = language_models.arms
        patch.setattr(language_models, "arms", lambda *sizes: {name: arms(*sizes)[name] for name in BYTES_ARMS})
        shrink_models(patch)
        patch.setitem(whole_models.EDGE, "cpu", 32)
        patch.setattr(projections, "CALL_SECONDS", 1e-6)
        for module in (attention, decoding, generation, inference):
            patch.setitem(module.CALL_SECONDS, "cpu", 1e-3)
        for module in (
            attention,
            decoding,
            generation,
            language_models,
            projections,
            recomputation,
            training_step,
            whole_models,
        ):
            patch.setitem(module.BUDGETS, "cpu", dataclasses.replace(module.BUDGETS["cpu"], least=1, warm_up=0))
        yield


PHASES_OF = {
    "inference": ("forward",),
    **dict.fromkeys(("decode-speed", "generation", "bytes-speed", "ladder-speed"), ("step",)),
    **{name: PASSES for name in TINY if name.endswith(("attention-speed", "memory-speed", "pattern-speed"))},
    **dict.fromkeys(("flash-speed", "recomputation-speed", "exchanged-speed"), PASSES),
    "projection-speed": projections.PHASES,
}


def test_every_benchmark_is_here():
    assert TINY.keys() == {name for name, experiment in EXPERIMENTS.items() if experiment.is_timing}


@pytest.mark.parametrize(("name", "make"), CASES, ids=IDS)
def test_every_arm_runs_once_a_repetition(name, make):
    """What readers are shown includes every arm."""
    experiment, case = EXPERIMENTS[name], make()
    record = measure(experiment, case, "cpu", seconds=0.0)
    times, orders = record["repetitions"], record["facts"]["order"]
    beside = {whole_models.MATMUL} if name == "whole-models" else set()
    assert all(sorted(order) == sorted(times.keys() | beside) for order in orders)
    expected = {f"{phase}{clock}_s" for phase in PHASES_OF.get(name, PHASES) for clock in ("", "_cpu")}
    for arm, quantities in times.items():
        assert set(quantities) == expected
        assert {len(values) for values in quantities.values()} == {len(orders)}
        assert record["facts"].get(arm, {}).get("calls", 1)
    assert bool(record["failures"]) == (case.get("arms") == "kernels")
    assert isinstance(experiment.line(record), str)
    shown = experiment.show([record])
    if name not in ("exchanged-speed", "inference"):  # these show a line for each case
        assert all(arm.split()[0] in shown for arm in times if arm not in ("learned", "sdpa", "dense"))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize(("name", "make"), CASES, ids=IDS)
def test_every_case_runs_on_cuda(name, make):
    kind = {"device": "cuda", "dtype": "bfloat16"} if name != "bytes-speed" else {"device": "cuda"}
    case = make(**kind)
    case |= {"compiled": True} if name in ("training-step", "heads-speed", "induction-speed", "attention-speed") else {}
    record = measure(EXPERIMENTS[name], case, "cuda", seconds=0.05)
    assert not record["failures"]
    assert all(value > 0 for times in record["repetitions"].values() for values in times.values() for value in values)
    assert EXPERIMENTS[name].line(record)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("case", "wrong", "message"),
    [
        (training_step.case, {"scope": "model"}, "scope: expected one of"),
        (training_step.case, {"N": 0}, "N: expected an integer of at least 1, got 0"),
        (attention.case, {"N": 8, "arms": "all"}, "arms: expected one of"),
        (attention.case, {"N": 8, "dtype": "int8"}, "dtype: expected one of"),
        (decoding.case, {"family": "conv"}, "family: expected one of"),
        (decoding.case, {"family": "softmax", "B": 0}, "B: expected an integer of at least 1"),
        (projections.case, {"d": 100}, "d: expected a multiple of 64, the width of a head, got 100"),
        (projections.case, {"device": "tpu"}, "device: expected"),
        (whole_models.case, {"model": "BERT-large"}, "model: expected one of 'BERT-base'"),
        (generation.case, {"N": 49}, "N: expected at most 48 tokens, got 49"),
        (language_models.case, {"d": 1.5}, "d: expected"),
        (language_models.case, {"steps": 3}, "sizes: expected some of B, N, d, H, L, got steps"),
    ],
)
def test_an_impossible_case_is_refused(case, wrong, message):
    with pytest.raises((TypeError, ValueError), match=message):
        case(**wrong)


# ------------------------------------------------------------------------------- what is wrong is not timed


def scaled(right, by=1.001):
    return lambda *args, **kwargs: right(*args, **kwargs) * by


def test_a_wrong_layer_is_not_timed(monkeypatch):
    place = "ortho.attention.softmax.softmax_attention.scaled_dot_product_attention"
    monkeypatch.setattr(place, scaled(torch.nn.functional.scaled_dot_product_attention))
    with pytest.raises(AssertionError, match="learned, output: expected a relative error"):
        training_step.run(training_step.case(**LAYER), seconds=0.0)


@pytest.mark.parametrize(("arm", "place"), [("stopped", "frozen_qk"), ("one", "positional")])
def test_a_wrong_kind_of_head_is_not_timed(monkeypatch, arm, place):
    right, case = torch.nn.functional.linear, training_step.case(**HEADS)
    module = heads.build(case, arm)
    wrong = lambda x, w, *b: right(x, w, *b) * (1 + 1e-3 * (x.dtype == torch.float32))  # noqa: E731
    monkeypatch.setattr(f"ortho.layers.{place}.linear", wrong)
    with pytest.raises(AssertionError, match=f"{arm}, .*expected a relative error of at most"):
        training_step.check(case, arm, module, heads.declared)


def test_a_frozen_weight_that_is_trained_is_not_timed():
    case = training_step.case(**LAYER)
    with pytest.raises(AssertionError, match=rf"expected {2 * 32**2} trained weights, got {4 * 32**2}"):
        training_step.check(case, "frozen", training_step.build(case, "learned"))


def test_a_wrong_exchanged_pass_is_not_timed(monkeypatch):
    monkeypatch.setattr(value_gradient, "frozen_qk_attention", scaled(value_gradient.frozen_qk_attention))
    with pytest.raises(AssertionError, match="exchanged, output: expected a relative error of at most"):
        value_gradient.run(value_gradient.case(24, 128), seconds=0.0)


@pytest.mark.parametrize("part", ["forward", "backward"])
def test_a_wrong_projection_is_not_timed(monkeypatch, part):
    right = projections.build

    def off(case):
        arms = right(case)
        if part == "forward":
            hook = lambda _, args, out: (out[0], out[1] * 1.001)  # noqa: E731
        else:  # the values stay, but a little of the gradient is lost
            hook = lambda _, args, out: (0.999 * out[0] + 0.001 * out[0].detach(), out[1])  # noqa: E731
        arms["structured"].register_forward_hook(hook)
        return arms

    monkeypatch.setattr(projections, "build", off)
    what = "k" if part == "forward" else "gradient of x"
    with pytest.raises(AssertionError, match=f"structured, {what}: expected a relative error of at most"):
        projections.run(projections.case(128, N=8), seconds=0.0)


def test_wrong_recomputation_is_not_timed(monkeypatch):
    right = recomputation.build

    def off(case):
        modules = right(case)
        with torch.no_grad():
            modules[recomputation.SELECTIVE][0].attention.weight_v.mul_(1.01)
        return modules

    monkeypatch.setattr(recomputation, "build", off)
    with pytest.raises(AssertionError, match="attention again: expected a relative error of at most"):
        recomputation.run(TINY["recomputation-speed"][0](), seconds=0.0)


def test_arms_of_inference_that_differ_are_not_timed(monkeypatch):
    right = inference.to_standard

    def wrong(module):
        standard = right(module)
        with torch.no_grad():
            standard.weight_o[0, 0] += 1
        return standard

    monkeypatch.setattr(inference, "to_standard", wrong)
    with pytest.raises(AssertionError, match="learned: expected the frozen layer's output, bit for bit"):
        inference.run(TINY["inference"][0](), seconds=0.0)


def test_a_wrong_language_model_is_not_timed(monkeypatch):
    fitting = language_models.fitting
    right = fitting.assert_close
    monkeypatch.setattr(fitting, "assert_close", lambda what, a, b, bound: right(what, a * (1 + 1e-6), b, bound))
    with pytest.raises(AssertionError, match="fast form"):
        language_models.run(language_models.case(**BYTES), seconds=0.0)


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


def test_the_work_of_a_budget():
    budget = Budget(10.0, 3, 8, warm_up=1)
    assert [budget.work(one) for one in (0.1, 2.0, 100.0)] == [pytest.approx(0.9), 12.0, 400.0]
    assert budget.work(2.0, more=2) == 16.0


def test_the_tolerance_is_what_rounding_may_make():
    """It is that of the longest sum: over the inner width of a block's feed-forward layer, or over the tokens."""
    bound = benchmark.rounding_error(28, 128, torch.float32)
    assert bound == 28 * (1 + 128**0.5) * 2**-24
    assert training_step.tolerance(training_step.case("block", **LAYER)) == bound
    layer = training_step.case(**LAYER | {"N": 40}, dtype="bfloat16")
    assert training_step.tolerance(layer) == benchmark.rounding_error(12, 40, torch.bfloat16)


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


def attention_call(name="linear", ran=None):
    operands, upstream = attention_variants.draw(SETS["main"])
    call = attention_variants.function(name, 8)
    return lambda *x: (ran if ran is not None else []).append(1) or call(*x), operands, upstream


def test_a_timing_is_the_mean_of_its_calls(ticks):
    ran = []
    times = benchmark.timed(*attention_call(ran=ran), 4)
    assert len(ran) == 4
    assert times == {"forward_s": 1.0, "forward_cpu_s": 0.0, "backward_s": 1.0, "backward_cpu_s": 0.0}
    cache, tokens = decoding._read(decoding.case("recurrent", **DECODED), "softmax", 20, 8)
    assert decoding.timed(cache, tokens, 4) == {"step_s": 0.25, "step_cpu_s": 0.0}
    assert cache.length == 20, "what is timed reads a copy"


def layer(variant="learned"):
    module = training_step.build(training_step.case(**LAYER), variant)
    x, upstream = (torch.randn(1, LAYER["N"], LAYER["d"]) for _ in range(2))
    return module, x.requires_grad_(), upstream


def test_a_timed_step_takes_the_gradients_of_one_step():
    module, x, upstream = layer()
    arm = Arm("learned", module, module, torch.optim.SGD(module.parameters(), lr=0.0))
    leaves = [x, *module.parameters()]
    expected = torch.autograd.grad(module(x), leaves, upstream)
    for _ in range(2):
        benchmark.timed_step(arm, x, upstream)
    torch.testing.assert_close([leaf.grad for leaf in leaves], list(expected))


class OnCuda(torch.Tensor):
    """A tensor that claims to be on CUDA."""

    is_cuda = True


@pytest.fixture
def cuda(monkeypatch):
    """A made-up CUDA device whose events are a millisecond apart; the list of what is called, in order."""
    called, ticks, held = [], iter(range(10**6)), iter([100, 100, 150, 130, 120])

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = next(ticks)
            called.append("event")

        def elapsed_time(self, other):
            return float(other.at - self.at)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: next(held, 100))
    for name, value in {"max_memory_allocated": 180, "reset_peak_memory_stats": None, "synchronize": None}.items():
        monkeypatch.setattr(torch.cuda, name, lambda name=name, value=value: called.append(name) or value)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: called.append("empty_cache"))
    return called


@pytest.mark.unchecked
def test_on_cuda_time_comes_from_events_behind_an_untimed_call(cuda):
    ran = []
    call, operands, upstream = attention_call("linear causal", ran)
    times = benchmark.timed(call, operands, upstream.as_subclass(OnCuda), 2)
    assert times == {"forward_s": 0.001, "backward_s": 0.001}
    assert len(ran) == 3
    assert cuda == 6 * ["event"] + ["synchronize"]  # no synchronisation between the calls


@pytest.mark.unchecked
def test_a_step_on_cuda_and_its_memory_by_the_allocator(cuda):
    module, x, upstream = layer("frozen")
    x, arm = x.detach().as_subclass(OnCuda).requires_grad_(), benchmark.trained("frozen", module)
    assert benchmark.timed_step(arm, x, upstream) == {f"{phase}_s": 0.001 for phase in PHASES}
    assert cuda == 4 * ["event"] + ["synchronize"]
    steps = [int(slots["step"]) for slots in arm.optimiser.state.values()]
    assert steps == [2, 2]  # the timed step follows an untimed one
    assert benchmark.step_bytes(arm, x, upstream) == {"peak_bytes": 80, "activation_bytes": 50}


def test_a_compiled_module_is_what_is_called():
    """Some releases' compiled modules refuse `len`, and so to be asked whether they are true."""

    class Compiled(torch.nn.Linear):
        def __len__(self):
            raise TypeError("does not support len()")

    call, module = Compiled(2, 2), torch.nn.Linear(2, 2)
    assert benchmark.trained("compiled", module, call).call is call
    assert benchmark.trained("plain", module).call is module


@pytest.mark.unchecked
def test_a_case_of_attention_on_cuda(cuda, monkeypatch):
    def draw(case, *arm):
        operands, upstream = drawn({**case, "device": "cpu"}, *arm)
        return tuple(x.detach().as_subclass(OnCuda).requires_grad_() for x in operands), upstream.as_subclass(OnCuda)

    drawn = attention_variants.draw
    monkeypatch.setattr(attention_variants, "draw", draw)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 100)
    outcome = attention.run(SETS["main"] | {"device": "cuda", "dtype": "bfloat16"}, seconds=0.01)
    for arm in attention_variants.SETS["main"]:
        assert set(outcome["repetitions"][arm]) == {"forward_s", "backward_s"}
        # Each call takes two of the ten milliseconds that a timing should take.
        assert outcome["facts"][arm] == {"peak_bytes": 80, "calls": 5}
    assert not outcome["failures"]
    assert cuda.count("empty_cache") == len(attention_variants.SETS["main"])


def compiler(compiled):
    """A compiler that fails at the first call it is given, spoils the second, and keeps the others."""

    def compiling(call, **_):
        compiled.append(call)
        if len(compiled) == 1:
            raise RuntimeError("no kernel in /usr/lib/x/kernel.so\nand more")
        by = 2 if len(compiled) == 2 else 1
        return lambda *x, **kwargs: call(*x, **kwargs) * by

    return compiling


@pytest.mark.parametrize("name", ["training-step", "attention-speed"])
def test_a_compiler_that_fails_or_is_off_is_recorded_as_such(monkeypatch, name):
    monkeypatch.setattr(torch, "compile", compiler([]))
    experiment = EXPERIMENTS[name]
    record = measure(experiment, TINY[name][0](compiled=True), "cpu", seconds=0.0)
    if name == "training-step":
        first, second, others = "learned-compiled", "frozen-compiled", {"stopped-compiled"}
        arms, off = training_step.VARIANTS, "frozen compiled"
    else:
        first, second, others = "linear compiled", "linear causal compiled", {"favor compiled", "favor causal compiled"}
        arms, off = attention_variants.SETS["main"], second
    assert set(record["repetitions"]) == {*arms, *others}
    assert record["failures"][first] == "RuntimeError: no kernel in kernel.so"
    assert f"{off}, output: expected a relative error" in record["failures"][second]
    assert f"{first} failed: RuntimeError: no kernel in kernel.so" in experiment.line(record)
    assert f"{first}" in experiment.show([record]) and "failed" in experiment.show([record])


def test_ratios_are_quartiles_within_repetitions():
    assert analysis.quartiles([3.0]) == (3.0, 3.0, 3.0)
    assert analysis.ratio([3.0, 8.0, 5.0], [2.0, 4.0, 5.0]) == (1.25, 1.5, 1.75)
    assert analysis.spread((1.25, 1.5, 1.75), 1) == "1.5 [1.2, 1.8]"
    assert analysis.spread(None) == "-"
    assert analysis.spelt((-0.001, 1.5, 1.75)) == "1.50 (0.00 to 1.75)"
    assert PASSES == ("forward", "backward")
