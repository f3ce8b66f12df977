"""The training step of published models at their sizes, learned, frozen and stopped q and k.

As in `training_step`, all variants of a case run one after the other in an order drawn anew in each repetition. A
square matrix product runs beside them: what it reaches is the rate that a model's step is compared with.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import prod, sqrt
from typing import Any

import torch
from torch import Tensor, nn

from ortho._checks import one_of, positive_int
from ortho.cost.configurations import CONFIGURATIONS, Configuration
from ortho.cost.counting import saved_bytes
from paper.experiments.engine.benchmark import (
    PHASES,
    Arm,
    assert_close,
    cuda_memory,
    interleaved,
    mean_seconds,
    relative_error,
    timed_step,
)
from paper.experiments.engine.records import Case, Needs
from paper.experiments.engine.runner import Experiment
from paper.experiments.speed import training_step
from paper.experiments.speed import whole_models_analysis as model_rows

VARIANTS = training_step.VARIANTS
MATMUL = model_rows.MATMUL
SEEDS = {"weights": 0, "inputs": 1, "order": 2}
EDGE = {"cpu": 2048, "cuda": 8192}  # of the square matrices
BATCHES = {"BERT-base": 64, "GPT-2 medium": 16, "ViT-Base": 256}  # on CUDA
WARM_UP = {"cpu": 1, "cuda": 3}
SECONDS = {"cpu": 90.0, "cuda": 15.0}
REPETITIONS = {"cpu": (5, 15), "cuda": (11, 31)}
RATES = {"cpu": 4e10, "cuda": 3e14}  # FLOPs a second, about
BUILD_SECONDS = 20.0
CHECKED_LAYERS = 2
STAGES = 60  # results that follow one another through two blocks and back, each rounded once
AS_FAR = 4  # times as far from what is exact as another computation in the same precision


def case(model: str, *, device: str = "cpu", B: int = 1, dtype: str = "float32") -> Case:
    """One configuration: a published model and B sequences or images.

    Raises TypeError or ValueError for sizes below 1 and unknown names.
    """
    return {
        "device": one_of("device", device, EDGE),
        "model": one_of("model", model, CONFIGURATIONS),
        "B": positive_int("B", B),
        "N": CONFIGURATIONS[model].N,
        "dtype": one_of("dtype", dtype, ("float32", "bfloat16")),
        "edge": EDGE[device],
    }


def cases(device: str) -> list[Case]:
    """All configurations for a device, the most informative first; on a CPU those whose variants fit beside another."""
    if device == "cuda":
        return [case(model, device="cuda", B=B, dtype="bfloat16") for model, B in BATCHES.items()]
    return [case(model) for model in ("BERT-base", "ViT-Base")]


def run(case: Case, seconds: float | None = None) -> dict[str, Any]:
    """Measure one case: check each variant, two blocks deep, against its definition, then time all in turn.

    `seconds` bounds the time of the repetitions, of which there are always a few. Raises AssertionError if a
    variant's output or gradients are off, or its parameters are not as many as were published.
    """
    device, known = case["device"], CONFIGURATIONS[case["model"]]
    for variant in VARIANTS:
        check(case, variant)
    x = inputs(case)
    arms = [_arm(variant, build(case, variant, known)) for variant in VARIANTS]
    upstream = _gradient(arms[0].module, x)
    timings: dict[str, Callable[[], dict[str, float]]] = {
        arm.name: partial(timed_step, arm, x, upstream) for arm in arms
    }
    timings[MATMUL] = partial(_product, _square(case), 1 if device == "cpu" else 32)
    times, order = interleaved(
        timings,
        warm_up=WARM_UP[device],
        repetitions=REPETITIONS[device],
        seconds=SECONDS[device] if seconds is None else seconds,
        seed=SEEDS["order"],
    )
    facts: dict[str, Any] = {arm.name: _memory(arm, x, upstream) for arm in arms}
    facts |= {"order": order, MATMUL: times.pop(MATMUL)}
    return {"seeds": SEEDS, "repetitions": times, "facts": facts}


def inputs(case: Case) -> Tensor:
    """What the model reads, drawn on the CPU, so that every device has the same."""
    generator = torch.Generator().manual_seed(SEEDS["inputs"])
    (x,) = CONFIGURATIONS[case["model"]].inputs(case["B"], generator=generator)
    return x.to(case["device"], getattr(torch, case["dtype"]) if x.is_floating_point() else x.dtype)


def build(case: Case, variant: str, configuration: Configuration, **kwargs: Any) -> nn.Module:
    """The model, its weights drawn on the case's device in float32.

    Raises AssertionError unless trained and frozen parameters together are as many as the configuration says.
    """
    device = case["device"]
    generator = torch.Generator(device).manual_seed(SEEDS["weights"])
    module = configuration.build(projection=variant, device=device, generator=generator, **kwargs)
    found = sum(tensor.numel() for tensor in (*module.parameters(), *module.buffers()))
    if configuration in CONFIGURATIONS.values() and not kwargs and found != configuration.parameters:
        raise AssertionError(f"{configuration.name}: expected {configuration.parameters} parameters, got {found}")
    return module.to(getattr(torch, case["dtype"]))


def _gradient(module: nn.Module, x: Tensor) -> Tensor:
    """A gradient of the output, of unit variance."""
    with torch.no_grad():
        y = module(x)
    generator = torch.Generator(x.device).manual_seed(SEEDS["inputs"])
    return torch.randn(y.shape, generator=generator, device=y.device, dtype=y.dtype)


def check(case: Case, variant: str) -> None:
    """Raise AssertionError unless two blocks of the model compute what their definition does: the output and the
    gradient of each trained weight.

    In float32 they are held to the definition in float64, or float32 on CUDA; in the case's own precision to be as far
    from it as the definition in that precision is, but for a factor.
    """
    single = {**case, "B": 1, "dtype": "float32"}
    configuration = replace(CONFIGURATIONS[case["model"]], L=CHECKED_LAYERS)
    wide = torch.float64 if case["device"] == "cpu" else torch.float32
    exact = build(single, variant, configuration, form="reference").to(wide)
    x = inputs(single)
    upstream = _gradient(exact, x.to(wide) if x.is_floating_point() else x)
    want = _results(exact, x, upstream)
    terms = max(prod(upstream.shape[:-1]), 4 * configuration.d)
    rounding = torch.finfo(torch.float32).eps / 2
    bounds = dict.fromkeys(want, STAGES * (1 + sqrt(terms)) * rounding)
    _assert_close(variant, _results(build(single, variant, configuration), x, upstream), want, bounds)
    if case["dtype"] != "float32":
        own, least = {**single, "dtype": case["dtype"]}, torch.finfo(getattr(torch, case["dtype"])).eps
        alike = _results(build(own, variant, configuration, form="reference"), x, upstream)
        bounds = {name: AS_FAR * relative_error(alike[name], tensor) + least for name, tensor in want.items()}
        _assert_close(variant, _results(build(own, variant, configuration), x, upstream), want, bounds)


def _results(module: nn.Module, x: Tensor, upstream: Tensor) -> dict[str, Tensor]:
    """The output and the gradient of each trained weight, by their names, but for the biases of keys: they add the same
    to all scores of a query, and have a gradient of 0, of which rounding leaves something.

    Raises AssertionError if one of these is missing, or if a frozen weight has a gradient.
    """
    kind = next(module.parameters()).dtype
    y = module(x.to(kind) if x.is_floating_point() else x)
    y.backward(upstream.to(kind))
    if any(buffer.grad is not None for buffer in module.buffers()):
        raise AssertionError("a frozen weight has a gradient")
    found = {"output": y.detach()}
    for name, weight in module.named_parameters():
        if weight.grad is None:
            raise AssertionError(f"gradient of {name}: there is none")
        if not name.endswith("bias_k"):
            found[f"gradient of {name}"] = weight.grad
    return found


def _assert_close(what: str, got: dict[str, Tensor], want: dict[str, Tensor], bounds: dict[str, float]) -> None:
    for name, tensor in want.items():
        assert_close(f"{what}, {name}", got[name], tensor, bounds[name])


def _arm(name: str, module: nn.Module) -> Arm:
    return Arm(name, module, module, torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True))


def _memory(arm: Arm, x: Tensor, upstream: Tensor) -> dict[str, int]:
    """Bytes of a step: measured on CUDA; on a CPU those that autograd keeps, counted."""
    if x.is_cuda:
        return cuda_memory(arm, x, upstream)
    with saved_bytes([*arm.module.parameters(), *arm.module.buffers()]) as kept:
        arm.call(x)
    return {"saved_bytes": kept()}


def _square(case: Case) -> Tensor:
    return torch.randn(case["edge"], case["edge"], device=case["device"], dtype=getattr(torch, case["dtype"]))


def _product(matrix: Tensor, calls: int) -> dict[str, float]:
    """Seconds of one square product, the mean over some in a row."""

    def products() -> None:
        for _ in range(calls):
            torch.mm(matrix, matrix)

    return mean_seconds(products, calls, cuda=matrix.is_cuda, quantity="product")


def work(case: Case) -> float:
    """Seconds that a case takes, roughly; the runner corrects them by what like cases took."""
    device, known = case["device"], CONFIGURATIONS[case["model"]]
    steps = sum(known.cost(case["B"], projection=variant).step for variant in VARIANTS)
    one_round = (2 if device == "cuda" else 1) * steps / RATES[device]
    least, most = REPETITIONS[device]
    rounds = WARM_UP[device] + min(most, max(least, SECONDS[device] / one_round))
    return float(BUILD_SECONDS + rounds * one_round)


def label(case: Case) -> str:
    """A case in a few words."""
    return f"{case['model']} B={case['B']} {case['dtype']}"


WHOLE_MODELS = Experiment(
    name="whole-models",
    title="the training step of published models, learned, frozen and stopped q and k",
    cases=cases,
    run=run,
    work=work,
    label=label,
    line=model_rows.line,
    show=model_rows.table,
    needs=Needs(
        configuration={name: type(value) for name, value in case("BERT-base").items()},
        arms=VARIANTS,
        quantities=tuple(f"{phase}_s" for phase in PHASES),
    ),
    quiet=True,
)
