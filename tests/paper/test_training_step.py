"""The experiment training-step: interleaved, checked before it is timed, and read back beside the FLOP bound."""

import copy

import pytest
import torch
from experiment_fakes import SLUG, within

from ortho import cost
from paper import experiments
from paper.experiments import measure
from paper.experiments.engine import cli, records
from paper.experiments.engine.benchmark import Arm, cuda_memory, timed_step
from paper.experiments.speed import analysis as summary
from paper.experiments.speed import training_step as step

TINY = {"N": 24, "d": 32, "H": 2}


def test_every_experiment_has_cases_that_differ():
    for experiment in experiments.EXPERIMENTS.values():
        for device in cli.DEVICES:
            cases = experiment.cases(device)
            assert len({records.key(case) for case in cases}) == len(cases)
            assert cases or device == "cuda"
            assert all(experiment.work(case) > 0 and case["device"] == device for case in cases)


@pytest.fixture(scope="module")
def measured():
    case = step.case("block", **TINY)
    return measure(experiments.EXPERIMENTS["training-step"], case, "cpu", seconds=0.05)


def test_every_variant_runs_once_a_repetition_in_a_drawn_order(measured):
    orders = measured["facts"]["order"]
    assert all(sorted(order) == sorted(step.VARIANTS) for order in orders)
    assert len({tuple(order) for order in orders}) > 1
    assert step.REPETITIONS["cpu"][0] <= len(orders) <= step.REPETITIONS["cpu"][1]
    for variant in step.VARIANTS:
        quantities = measured["repetitions"][variant]
        assert set(quantities) == {f"{p}{c}_s" for p in ("forward", "backward", "optimiser") for c in ("", "_cpu")}
        assert {len(values) for values in quantities.values()} == {len(orders)}


def test_saved_bytes_are_those_of_the_closed_forms(measured):
    rows = experiments.memory([measured])
    assert [row["variant"] for row in rows] == list(step.VARIANTS)
    for row in rows:
        assert row["saved_bytes"] == row["declared_saved_bytes"] > 0
        assert row["device"] == SLUG


def test_speedups_are_medians_of_ratios_within_repetitions(measured):
    record = copy.deepcopy(measured)
    record["provenance"]["threads"] = 1
    for arm, forward in (("learned", [3.0, 8.0, 5.0]), ("frozen", [2.0, 4.0, 5.0]), ("stopped", [1.0, 1.0, 1.0])):
        phases = {"forward": forward, "backward": [0.0] * 3, "optimiser": [1.0] * 3}
        record["repetitions"][arm] = {f"{phase}_cpu_s": values for phase, values in phases.items()}
        record["repetitions"][arm] |= {f"{phase}_s": [9.0] * 3 for phase in phases}
    frozen, stopped = experiments.speedups([record])
    assert frozen["speedup"] == (1.25, 1.5, 1.75)
    assert frozen["speedup_with_optimiser"][1] == pytest.approx(4 / 3)
    assert stopped["speedup"] == (4.0, 5.0, 6.5)
    record["provenance"]["threads"] = 2  # the process's time then adds up threads
    assert experiments.speedups([record])[0]["speedup"] == (1.0, 1.0, 1.0)


@pytest.mark.parametrize("scope", ["layer", "block"])
def test_the_bound_is_the_ratio_of_the_flops(scope):
    case = step.case(scope, 1024, 768)
    r, own = 1024 / 768, 48 if scope == "block" else 0
    bounds = [summary.declared(case, "learned").step / summary.declared(case, v).step for v in ("frozen", "stopped")]
    standard = 24 + own + 14 * r  # units of N d^2; the fused kernel computes the scores again
    assert bounds == pytest.approx([standard / (20 + own + 14 * r), standard / (16 + own + 14 * r)])


def test_the_view_prints_the_measured_speedup_beside_the_bound(measured, tmp_path, capsys):
    records.write(records.path(tmp_path, "training-step", SLUG), [measured])
    assert experiments.main(["--show", "training-step", "--results", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    for row in experiments.speedups(experiments.load("training-step", tmp_path)):
        low, middle, high = row["speedup"]
        assert f"{middle:.3f} [{low:.3f}, {high:.3f}]" in text
        assert f"{row['bound']:.3f}" in text


class OnCuda(torch.Tensor):
    """Says of itself that it lies on CUDA."""

    is_cuda = True


@pytest.mark.unchecked
def test_on_cuda_time_comes_from_events_and_memory_from_the_allocator(monkeypatch):
    ticks, held = iter(range(100)), iter([100, 100, 150, 130, 120])

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = next(ticks)

        def elapsed_time(self, other):
            return float(other.at - self.at)  # milliseconds

    waited = []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waited.append(1))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: next(held))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 180)
    case = step.case(**TINY)
    module = step.build(case, "frozen")
    arm = step._arm("frozen", module, module)
    x, upstream = (torch.randn(1, TINY["N"], TINY["d"]) for _ in range(2))
    x = x.as_subclass(OnCuda).requires_grad_()
    assert timed_step(arm, x, upstream) == {"forward_s": 0.001, "backward_s": 0.001, "optimiser_s": 0.001}
    assert waited == [1]
    steps = [int(slots["step"]) for slots in arm.optimiser.state.values()]
    assert steps == [2, 2]  # the timed step follows an untimed one
    assert cuda_memory(arm, x, upstream) == {"peak_bytes": 80, "activation_bytes": 50}


def test_a_timed_step_takes_the_gradients_of_one_step():
    module = step.build(step.case(**TINY), "learned")
    arm = Arm("learned", module, module, torch.optim.SGD(module.parameters(), lr=0.0))
    x, upstream = (torch.randn(1, TINY["N"], TINY["d"]) for _ in range(2))
    leaves = [x.requires_grad_(), *module.parameters()]
    expected = torch.autograd.grad(module(x), leaves, upstream)
    for _ in range(2):
        timed_step(arm, x, upstream)
    torch.testing.assert_close([leaf.grad for leaf in leaves], list(expected))


def test_the_sources_are_all_that_a_timed_step_runs():
    module = step.build(step.case("block", **TINY), "stopped")
    arm = step._arm("stopped", module, module)
    x, upstream = (torch.randn(1, TINY["N"], TINY["d"]) for _ in range(2))
    with within(step.TRAINING_STEP):
        timed_step(arm, x, upstream)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("name", ["training-step", "inference"])
def test_a_case_runs_on_cuda(name):
    case = step.case(**TINY, device="cuda", input_grad=name == "training-step")
    experiment = experiments.EXPERIMENTS[name]
    record = measure(experiment, case, "cuda", seconds=0.05)
    for arm in experiment.needs.arms:
        assert set(record["repetitions"][arm]) == set(experiment.needs.quantities)
        assert all(value > 0 for values in record["repetitions"][arm].values() for value in values)
    if name == "training-step":
        assert all(record["facts"][arm]["peak_bytes"] > 0 for arm in step.VARIANTS)
    assert experiment.line(record)


@pytest.mark.parametrize("variant", step.VARIANTS)
@pytest.mark.parametrize("settings", [{}, {"causal": True}, {"dtype": "bfloat16"}, {"scope": "block"}], ids=str)
def test_correct_variants_pass_the_check(variant, settings):
    case = step.case(**{**TINY, **settings})
    step.check(case, variant, step.build(case, variant))


def test_the_check_finds_wrong_results(monkeypatch):
    case = step.case(**TINY)
    module = step.build(case, "frozen")
    fused = torch.nn.functional.scaled_dot_product_attention

    def wrong(q, k, v, **kwargs):
        return fused(q, k, v, **kwargs) * (1 + 1e-3)

    monkeypatch.setattr("ortho.attention.softmax.softmax_attention.scaled_dot_product_attention", wrong)
    with pytest.raises(AssertionError, match="frozen, output: expected a relative error"):
        step.check(case, "frozen", module)


def test_the_check_finds_a_frozen_weight_that_is_trained():
    case = step.case(**TINY)
    with pytest.raises(AssertionError, match=rf"expected {2 * 32**2} trained weights, got {4 * 32**2}"):
        step.check(case, "frozen", step.build(case, "learned"))


def test_a_compiler_that_fails_or_is_off_is_recorded_as_such(monkeypatch):
    def compiler(module, **_):
        if module.projection.weight_q.requires_grad:
            raise RuntimeError("no kernel in /usr/lib/x/kernel.so\nand more")
        return lambda x, **kwargs: module(x, **kwargs) * (1 if module.projection.stop_gradient else 2)

    monkeypatch.setattr(torch, "compile", compiler)
    record = measure(experiments.EXPERIMENTS["training-step"], step.case(**TINY, compiled=True), "cpu", seconds=0.01)
    assert set(record["repetitions"]) == {*step.VARIANTS, "stopped-compiled"}
    assert record["failures"]["learned-compiled"] == "RuntimeError: no kernel in kernel.so"
    assert "frozen compiled, output: expected a relative error" in record["failures"]["frozen-compiled"]
    assert "learned-compiled failed" in summary.line(record)
    assert [row["arm"] for row in experiments.speedups([record])] == ["frozen", "stopped"]


def test_the_closed_forms_know_every_case():
    for device in cli.DEVICES:
        for case in step.cases(device):
            assert isinstance(summary.declared(case, "stopped"), cost.Cost)
            assert case["d"] % case["H"] == 0


@pytest.mark.parametrize(("wrong", "message"), [({"scope": "model"}, "scope: expected one of"), ({"N": 0}, "N: ")])
def test_an_impossible_case_is_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        step.case(**wrong)
