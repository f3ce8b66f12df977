"""Layers, blocks and whole models that are timed: each variant agrees with its definition and with what is declared."""

import dataclasses

import pytest
import torch
from tiny_arms import shrink_models

from ortho.cost.configurations import CONFIGURATIONS
from ortho.cost.counting import flops_of
from ortho.cost.layers import projection_cost
from paper import experiments
from paper.experiments import measure
from paper.experiments.learning import fitting, language
from paper.experiments.learning.arms import arms
from paper.experiments.speed import benchmark, language_models, projections, recomputation
from paper.experiments.speed import training_step as step
from paper.experiments.speed import whole_models as whole
from paper.memory import model_bytes

TINY = {"N": 24, "d": 64, "H": 4}


@pytest.fixture
def models(monkeypatch):
    """The architectures at a size that a test can train."""
    shrink_models(monkeypatch)


# ------------------------------------------------------------------------------------------- layers and blocks


@pytest.mark.parametrize("variant", step.VARIANTS)
@pytest.mark.parametrize("settings", [{"causal": True}, {"dtype": "bfloat16"}, {"scope": "block"}], ids=str)
def test_correct_variants_pass_the_check(variant, settings):
    case = step.case(**{**TINY, **settings})
    step.check(case, variant, step.build(case, variant))


def test_what_is_compared_holds_no_graph():
    case = step.case(**TINY)
    module = step.build(case, "learned")
    found = benchmark.results(module, module, *step._inputs(case))
    assert "gradient of x" in found and not any(x.requires_grad for x in found.values())


@pytest.mark.parametrize("scope", ["layer", "block"])
def test_saved_bytes_follow_the_formulas(scope):
    experiment = experiments.EXPERIMENTS["training-step"]
    record = measure(experiment, step.case(scope, causal=True, **TINY), "cpu", seconds=0.0)
    rows = step.memory([record])
    assert [row["variant"] for row in rows] == list(step.VARIANTS)
    assert all(row["saved_bytes"] == row["counted_saved_bytes"] > 0 for row in rows)


@pytest.mark.parametrize("scope", ["layer", "block"])
def test_the_bound_is_the_ratio_of_the_flops(scope):
    case = step.case(scope, 1024, 768)
    r, own = 1024 / 768, 48 if scope == "block" else 0
    bounds = [step.declared(case, "learned").step / step.declared(case, v).step for v in ("frozen", "stopped")]
    standard = 24 + own + 14 * r  # units of N d^2; the fused kernel computes the scores again
    assert bounds == pytest.approx([standard / (20 + own + 14 * r), standard / (16 + own + 14 * r)])


def test_recomputation_in_half_precision_agrees():
    case = recomputation.case(N=8, L=2, dtype="bfloat16") | {"d": 16, "H": 2}
    assert set(recomputation.run(case, seconds=0.0)["repetitions"]) == set(recomputation.arms_of(case))


# ------------------------------------------------------------------------------------------------- projections


@pytest.mark.parametrize("d", [128, 384, 768])
def test_flops_of_projections_are_counted(d):
    sizes = projections.case(d, N=4)
    x = torch.randn(1, 4, d, dtype=torch.float64)
    for arm, projection in projections.build(sizes).items():
        assert flops_of(projection, x) == projections.flops(sizes, arm)
    kinds = {"frozen": projections.DENSE} | ({"structured": "structured"} if d != 128 else {})
    for name, arm in kinds.items():
        assert projection_cost(name, 1, 4, d, d // 64, 64, d // 64).forward == projections.flops(sizes, arm)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("d", [192, 768])  # 3 x 64 and 12 x 64, whose transforms are rounded
def test_projections_are_their_matrices(monkeypatch, d, dtype):
    monkeypatch.setattr(projections, "CALL_SECONDS", 1e-6)
    outcome = projections.run(projections.case(d, N=8, dtype=dtype), seconds=0.0)
    assert tuple(outcome["repetitions"]) == projections.ARMS


# ------------------------------------------------------------------------------------------------ whole models


@pytest.mark.parametrize("variant", whole.VARIANTS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", ["BERT-base", "ViT-Base"])
def test_correct_models_pass_the_check(models, model, dtype, variant):
    whole.check(whole.case(model, dtype=dtype), variant)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_wrong_gradient_is_not_timed(monkeypatch, models, dtype):
    """The gradient of one weight is a tenth too large, in the last of the modules that are compared."""
    right, calls = whole._results, []

    def one_is_off(*arguments):
        found = right(*arguments)
        calls.append(1)
        if len(calls) == (2 if dtype == "float32" else 4):
            found["gradient of blocks.0.attention.weight_v"] *= 1.1
        return found

    monkeypatch.setattr(whole, "_results", one_is_off)
    with pytest.raises(AssertionError, match="stopped, gradient of blocks.0.attention.weight_v: expected a relative"):
        whole.check(whole.case("ViT-Base", dtype=dtype), "stopped")


@pytest.mark.parametrize("model", ["BERT-base", "ViT-Base"])
def test_the_variants_are_told_apart(monkeypatch, models, model):
    """The check finds a stopped model that passes the gradient through q and k, as the frozen one does."""
    right = whole.build

    def leaking(case, variant, configuration, **kwargs):
        return right(case, variant if kwargs else "frozen", configuration, **kwargs)

    monkeypatch.setattr(whole, "build", leaking)
    with pytest.raises(AssertionError, match="stopped, gradient of .*: expected a relative error"):
        whole.check(whole.case(model), "stopped")


def test_models_are_of_the_published_size_and_keep_what_is_declared(monkeypatch, models):
    monkeypatch.setitem(whole.BUDGETS, "cpu", dataclasses.replace(whole.BUDGETS["cpu"], least=2))
    monkeypatch.setitem(whole.EDGE, "cpu", 32)
    case = whole.case("ViT-Base")
    facts = whole.run(case, seconds=0.0)["facts"]
    for variant in whole.VARIANTS:
        assert facts[variant]["saved_bytes"] == model_bytes("ViT-Base", case["B"], projection=variant)
    known = dataclasses.replace(CONFIGURATIONS["ViT-Base"], parameters=86_567_656)
    monkeypatch.setitem(CONFIGURATIONS, "ViT-Base", known)
    with pytest.raises(AssertionError, match="ViT-Base: expected 86567656 parameters, got"):
        whole.build(case, "learned", known)


def test_models_of_a_machine_without_timings_are_set_beside_those_of_another_of_its_kind():
    records = [{"device": name, "configuration": {"device": name[:3]}} for name in ("cpu-b", "cpu-a", "gpu")]
    found = [language_models.beside(device, records) for device in ("cpu-b", "cpu-c", "nvidia")]
    assert [one["device"] for one in found] == ["cpu-b", "cpu-a", "gpu"]
    assert language_models.beside("nvidia", records[:2]) is None


def test_the_arms_and_sizes_of_bytes_speed_are_those_of_the_language_models():
    for device in fitting.DEVICES:
        (case,) = language_models.cases(device)
        runs = language.of_equal_flop(device)
        assert all({name: run[name] for name in case} == case for run in runs)
        assert set(arms(case["H"], case["N"])) == {run["arm"] for run in runs}
    assert experiments.EXPERIMENTS["bytes-speed"].cases("cpu") == language_models.cases("cpu")
