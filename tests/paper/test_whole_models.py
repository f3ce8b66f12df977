"""The experiments whole-models and generation: right before they are timed, whole records, what readers get."""

import dataclasses

import pytest
import torch
from experiment_fakes import within

from ortho.cost.configurations import CONFIGURATIONS
from ortho.models.language_model import LanguageModel
from paper.experiments import measure
from paper.experiments.engine.benchmark import timed_step
from paper.experiments.speed import generation
from paper.experiments.speed import whole_models as whole
from paper.experiments.speed import whole_models_analysis as model_rows

SMALL = {
    "BERT-base": {"vocab_size": 19, "max_length": 24},
    "GPT-2 medium": {"vocab_size": 23, "max_length": 64, "bias": True},
    "ViT-Base": {"image_size": 12, "patch_size": 4, "num_classes": 5, "channels": 3},
}
LENGTHS = {"BERT-base": 24, "GPT-2 medium": 64, "ViT-Base": 10}


@pytest.fixture(autouse=True)
def small_models(monkeypatch):
    """The three architectures at a size that a test can train, and a moment's timings."""
    for name, sizes in SMALL.items():
        made = dataclasses.replace(CONFIGURATIONS[name], N=LENGTHS[name], d=16, H=4, L=3, sizes=sizes, parameters=0)
        count = sum(x.numel() for x in made.build(device="meta").parameters())
        monkeypatch.setitem(CONFIGURATIONS, name, dataclasses.replace(made, parameters=count))
    for module in (whole, generation):
        monkeypatch.setitem(module.REPETITIONS, "cpu", (2, 2))
    monkeypatch.setitem(whole.EDGE, "cpu", 32)
    monkeypatch.setitem(generation.CALL_SECONDS, "cpu", 1e-3)


@pytest.mark.parametrize("model", SMALL)
def test_every_variant_runs_once_a_repetition(model):
    case = whole.case(model)
    record = measure(whole.WHOLE_MODELS, case, "cpu", seconds=0.01)
    assert set(record["repetitions"]) == set(whole.VARIANTS)
    assert all(sorted(order) == sorted([*whole.VARIANTS, whole.MATMUL]) for order in record["facts"]["order"])
    for variant in whole.VARIANTS:
        assert record["facts"][variant]["saved_bytes"] == model_rows.declared(case, variant).saved_bytes
    assert "% of the matmul rate" in whole.WHOLE_MODELS.line(record)
    assert all(f"  {variant} " in whole.WHOLE_MODELS.show([record]) for variant in whole.VARIANTS)


@pytest.mark.parametrize("variant", whole.VARIANTS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", SMALL)
def test_correct_variants_pass_the_check(model, dtype, variant):
    whole.check(whole.case(model, dtype=dtype), variant)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_wrong_gradient_is_not_timed(monkeypatch, dtype):
    """Of one weight, a tenth too large, in the last of the modules that are compared."""
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


@pytest.mark.parametrize("model", SMALL)
def test_the_variants_are_told_apart(monkeypatch, model):
    """A stopped model that passes the gradient through q and k, as the frozen one does."""
    right = whole.build

    def leaking(case, variant, configuration, **kwargs):
        return right(case, variant if kwargs else "frozen", configuration, **kwargs)

    monkeypatch.setattr(whole, "build", leaking)
    with pytest.raises(AssertionError, match="stopped, gradient of .*: expected a relative error"):
        whole.check(whole.case(model), "stopped")


def test_a_model_of_another_size_is_not_timed(monkeypatch):
    monkeypatch.setitem(
        CONFIGURATIONS, "ViT-Base", dataclasses.replace(CONFIGURATIONS["ViT-Base"], parameters=86_567_656)
    )
    with pytest.raises(AssertionError, match="ViT-Base: expected 86567656 parameters, got"):
        whole.build(whole.case("ViT-Base"), "learned", CONFIGURATIONS["ViT-Base"])


def timings(step, optimiser=0.0):
    return {"forward_s": [step / 2] * 3, "backward_s": [step / 2] * 3, "optimiser_s": [optimiser] * 3}


def test_rows():
    case = whole.case("BERT-base") | {"edge": 10}
    steps = {"learned": timings(4.0, 2.0), "frozen": timings(2.0, 1.0), "stopped": timings(1.0, 1.0)}
    facts = {"learned": {"saved_bytes": 7}, whole.MATMUL: {"product_s": [0.5] * 3}}
    record = {"configuration": case, "device": "cpu-test", "repetitions": steps, "facts": facts}
    record["provenance"] = {"threads": 2}
    found = {row["variant"]: row for row in model_rows.rows([record])}
    assert found["frozen"]["speedup"] == (2.0, 2.0, 2.0)
    assert found["stopped"]["speedup_with_optimiser"] == (3.0, 3.0, 3.0)
    assert found["learned"]["seconds"] == (6.0, 6.0, 6.0)
    assert found["learned"]["saved_bytes"] == 7
    flops = model_rows.declared(case, "learned").step
    assert found["learned"]["rate"] == flops / 4
    assert found["learned"]["of_matmul"] == (flops / 4) / (2 * 10**3 / 0.5)
    assert found["stopped"]["bound"] > found["frozen"]["bound"] > found["learned"]["bound"] == 1


def test_generation():
    case = generation.case(2, N=20)
    record = measure(generation.GENERATION, case, "cpu", seconds=0.01)
    assert set(record["repetitions"]) == set(generation.ARMS)
    found = {row["arm"]: row for row in generation.rows([record])}
    held = {arm: row["held_bytes"] for arm, row in found.items()}
    assert held["learned"] == held["frozen"] == 4 * held["multi-query"] == 3 * 2 * 2 * (20 + generation.STEPS) * 16 * 4
    assert found["learned"]["speedup"] == (1.0, 1.0, 1.0)
    assert found["learned"]["weight_bytes"] == 4 * CONFIGURATIONS["GPT-2 medium"].parameters
    assert all(f"{arm} " in generation.GENERATION.show([record]) for arm in generation.ARMS)
    assert generation.work(case) > 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("arm", generation.ARMS)
def test_models_that_decode_rightly_pass_the_check(arm, dtype):
    generation.check(generation.case(N=20, dtype=dtype), arm, torch.randint(23, (1, 40)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_that_decodes_wrongly_is_not_timed(monkeypatch, dtype):
    """Each token at the first place."""
    embed = LanguageModel._embed
    calls = []

    def lost(self, tokens, past):
        calls.append(past)
        return embed(self, tokens, 0 if next(self.parameters()).dtype == getattr(torch, dtype) else past)

    monkeypatch.setattr(LanguageModel, "_embed", lost)
    with pytest.raises(AssertionError, match="learned: expected a relative error of at most"):
        generation.check(generation.case(N=20, dtype=dtype), "learned", torch.randint(23, (1, 40)))
    assert max(calls) == 39


@pytest.mark.parametrize("experiment", [whole.WHOLE_MODELS, generation.GENERATION], ids=lambda e: e.name)
def test_the_sources_are_all_that_a_timed_step_runs(experiment):
    if experiment is whole.WHOLE_MODELS:
        runs = []
        for model in SMALL:
            case = whole.case(model)
            arm = whole._arm("stopped", whole.build(case, "stopped", CONFIGURATIONS[model]))
            x = whole.inputs(case)
            runs.append((timed_step, arm, x, whole._gradient(arm.module, x)))
    else:
        tokens, runs = torch.arange(8)[None], []
        for arm in generation.ARMS:
            module = generation.build(generation.case(N=20), arm)
            runs.append((generation.timed, module, module.new_caches(8), tokens, 2))
    with within(experiment):
        for function, *arguments in runs:
            function(*arguments)


def test_errors():
    with pytest.raises(ValueError, match="model: expected one of 'BERT-base'"):
        whole.case("BERT-large")
    with pytest.raises(ValueError, match="N: expected at most 48 tokens, got 49"):
        generation.case(N=49)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("model", SMALL)
def test_a_case_runs_on_cuda(model):
    case = whole.case(model, device="cuda", B=2, dtype="bfloat16")
    record = measure(whole.WHOLE_MODELS, case, "cuda", seconds=0.05)
    assert all(record["facts"][variant]["activation_bytes"] > 0 for variant in whole.VARIANTS)
