"""The training step of published models at their sizes, learned, frozen and stopped q and k.

As in `training_step`, all variants of a case run one after the other in an order drawn anew in each repetition. A
square matrix product runs beside them: what it reaches is the rate that a model's step is compared with.
"""

import copy
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import prod, sqrt
from typing import Any

import torch
from torch import Tensor, nn

from ortho._checks import one_of, positive_int
from ortho.configurations import CONFIGURATIONS, Configuration
from ortho.cost.counting import saved_bytes
from ortho.experiments import model_rows, training_step
from ortho.experiments.records import Case, Needs
from ortho.experiments.runner import Experiment
from ortho.experiments.stopwatch import PHASES, Arm, cuda_memory, interleaved, timed_step
from ortho.layers import MultiheadAttention

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
    timings[MATMUL] = partial(_product, _square(case), 1 if device == "cpu" else 8)
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
    """Raise AssertionError unless two blocks of the model, in the case's dtype, compute what their definition does.

    Compared are the output and all gradients together, as a relative error, with the reference in float32 at least.
    """
    small = {**case, "B": 1}
    configuration = replace(CONFIGURATIONS[case["model"]], L=CHECKED_LAYERS)
    module = build(small, variant, configuration)
    exact = copy.deepcopy(module).to(torch.float64 if case["device"] == "cpu" else torch.float32)
    for part in exact.modules():
        if isinstance(part, MultiheadAttention):
            part.form = "reference"
    x = inputs(small)
    upstream = _gradient(module, x)
    wide = x.to(next(exact.parameters()).dtype) if x.is_floating_point() else x
    got, want = _results(module, x, upstream), _results(exact, wide, upstream)
    error = _norm([a.double() - b.double() for a, b in zip(got, want, strict=True)])
    size = _norm(want)
    terms = max(prod(upstream.shape[:-1]), 4 * configuration.d)
    rounding, single = (torch.finfo(dtype).eps / 2 for dtype in (getattr(torch, case["dtype"]), torch.float32))
    bound = STAGES * (rounding + sqrt(terms) * single)
    if not error <= bound * size:  # also where the error is NaN
        raise AssertionError(f"{variant}: expected a relative error of at most {bound:.2g}, got {error / size:.2g}")


def _norm(tensors: list[Tensor]) -> float:
    return sqrt(sum(float(tensor.double().square().sum()) for tensor in tensors))


def _results(module: nn.Module, x: Tensor, upstream: Tensor) -> list[Tensor]:
    """The output and the gradient of each trained weight; raises AssertionError if a frozen one has a gradient."""
    y = module(x)
    y.backward(upstream.to(y.dtype))
    if any(buffer.grad is not None for buffer in module.buffers()):
        raise AssertionError("a frozen weight has a gradient")
    return [y.detach(), *(p.grad for p in module.parameters() if p.grad is not None)]


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
    if matrix.is_cuda:
        torch.mm(matrix, matrix)
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        marks[0].record()
        for _ in range(calls):
            torch.mm(matrix, matrix)
        marks[1].record()
        torch.cuda.synchronize()
        return {"product_s": round(marks[0].elapsed_time(marks[1]) / 1e3 / calls, 9)}
    began = time.perf_counter(), time.process_time()
    for _ in range(calls):
        torch.mm(matrix, matrix)
    ended = time.perf_counter(), time.process_time()
    wall, own = (round((b - a) / calls, 9) for a, b in zip(began, ended, strict=True))
    return {"product_s": wall, "product_cpu_s": own}


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


SOURCES = (
    *training_step.TRAINING_STEP.sources,
    "_tokens.py",
    "configurations.py",
    "encoders.py",
    "models.py",
    "experiments/whole_models.py",
)

WHOLE_MODELS = Experiment(
    name="whole-models",
    title="the training step of published models, learned, frozen and stopped q and k",
    cases=cases,
    run=run,
    sources=SOURCES,
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
