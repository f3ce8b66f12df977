"""The training step of published models at their sizes, learned, frozen and stopped q and k.

As in `training_step`, all variants of a case run one after the other in an order drawn anew in each repetition. A
square matrix product runs beside them; a model's step is compared with the rate that it reaches.
"""

import statistics
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from ortho.checks import one_of
from ortho.cost import Cost
from ortho.cost.configurations import CONFIGURATIONS, Configuration
from paper.experiments.engine.records import Case, Record
from paper.experiments.speed import analysis, benchmark
from paper.experiments.speed.analysis import Row, clocked, quartiles, row_of, step_seconds
from paper.experiments.speed.benchmark import Budget, Timing, assert_all_close
from paper.experiments.speed.training_step import STANDARD, VARIANTS
from paper.memory import model_bytes

MATMUL = "matmul"
SEEDS = {"weights": 0, "inputs": 1, "order": 2}
EDGE = {"cpu": 2048, "cuda": 8192}  # of the square matrices
BATCHES = {"BERT-base": 64, "GPT-2 medium": 16, "ViT-Base": 256}  # on CUDA
BUDGETS = {"cpu": Budget(90.0, 5, 15, warm_up=1), "cuda": Budget(15.0, 11, 31, warm_up=3)}
CHECKED_LAYERS = 2
STAGES = 60  # successive results through two blocks and back, each rounded once
AS_FAR = 4  # an error may be this many times that of another computation in the same precision


def case(model: str, *, device: str = "cpu", B: int = 1, dtype: str = "float32") -> Case:
    """One configuration: a published model and B sequences or images.

    Raises TypeError or ValueError for sizes below 1 and unknown names.
    """
    return {
        "device": one_of("device", device, EDGE),
        "model": one_of("model", model, CONFIGURATIONS),
        **benchmark.sizes(B=B, N=CONFIGURATIONS[model].N),
        "dtype": one_of("dtype", dtype, ("float32", "bfloat16")),
        "edge": EDGE[device],
    }


def cases(device: str) -> list[Case]:
    """All configurations for a device, the most informative first; on a CPU those whose variants fit together."""
    if device == "cuda":
        return [case(model, device="cuda", B=B, dtype="bfloat16") for model, B in BATCHES.items()]
    return [case(model) for model in ("BERT-base", "ViT-Base")]


def run(case: Case, seconds: float | None = None) -> dict[str, Any]:
    """Measure one case: check each variant, two blocks deep, against its definition, then time all in turn.

    `seconds` bounds the time of the repetitions, but there are always a few. Raises AssertionError if a variant's
    output or gradients are off, or if its number of parameters is not the published one.
    """
    device, known = case["device"], CONFIGURATIONS[case["model"]]
    for variant in VARIANTS:
        check(case, variant)
    x = inputs(case)
    arms = [benchmark.trained(variant, build(case, variant, known)) for variant in VARIANTS]
    upstream = _gradient(arms[0].module, x)
    timings: dict[str, Timing] = {arm.name: partial(benchmark.timed_step, arm, x, upstream) for arm in arms}
    timings[MATMUL] = partial(_product, _square(case), 1 if device == "cpu" else 32)
    outcome = benchmark.compare(timings, BUDGETS[device], SEEDS, seconds)
    outcome["facts"] |= {arm.name: benchmark.step_bytes(arm, x, upstream) for arm in arms}
    outcome["facts"][MATMUL] = outcome["repetitions"].pop(MATMUL)
    return outcome


def inputs(case: Case) -> Tensor:
    """The model's input, drawn on the CPU, so that every device has the same."""
    generator = torch.Generator().manual_seed(SEEDS["inputs"])
    (x,) = CONFIGURATIONS[case["model"]].inputs(case["B"], generator=generator)
    return x.to(case["device"], benchmark.dtype(case) if x.is_floating_point() else x.dtype)


def build(case: Case, variant: str, configuration: Configuration, **kwargs: Any) -> nn.Module:
    """The model, its weights drawn on the case's device in float32.

    Raises AssertionError unless the number of trained and frozen parameters together is the configuration's.
    """
    device = case["device"]
    generator = torch.Generator(device).manual_seed(SEEDS["weights"])
    module = configuration.build(projection=variant, device=device, generator=generator, **kwargs)
    found = sum(tensor.numel() for tensor in (*module.parameters(), *module.buffers()))
    if configuration in CONFIGURATIONS.values() and not kwargs and found != configuration.parameters:
        raise AssertionError(f"{configuration.name}: expected {configuration.parameters} parameters, got {found}")
    return module.to(benchmark.dtype(case))


def _gradient(module: nn.Module, x: Tensor) -> Tensor:
    """A gradient of the output, of unit variance."""
    with torch.no_grad():
        y = module(x)
    generator = torch.Generator(x.device).manual_seed(SEEDS["inputs"])
    return torch.randn(y.shape, generator=generator, device=y.device, dtype=y.dtype)


def check(case: Case, variant: str) -> None:
    """Raise AssertionError unless two blocks of the model compute what their definition does: the output and the
    gradient of each trained weight.

    In float32 they are compared with the definition in float64 (float32 on CUDA). In the case's own precision, the
    error may be `AS_FAR` times that of the definition in that precision, plus the precision's eps.
    """
    single = {**case, "B": 1, "dtype": "float32"}
    configuration = replace(CONFIGURATIONS[case["model"]], L=CHECKED_LAYERS)
    wide = torch.float64 if case["device"] == "cpu" else torch.float32
    exact = build(single, variant, configuration, form="reference").to(wide)
    x = inputs(single)
    upstream = _gradient(exact, x.to(wide) if x.is_floating_point() else x)
    want = _results(exact, x, upstream)
    terms = max(prod(upstream.shape[:-1]), 4 * configuration.d)
    bound = benchmark.rounding_error(STAGES, terms, torch.float32)
    assert_all_close(variant, _results(build(single, variant, configuration), x, upstream), want, bound)
    if case["dtype"] != "float32":
        own, least = {**single, "dtype": case["dtype"]}, torch.finfo(benchmark.dtype(case)).eps
        alike = _results(build(own, variant, configuration, form="reference"), x, upstream)
        bounds = {n: AS_FAR * benchmark.relative_error(alike[n], tensor) + least for n, tensor in want.items()}
        assert_all_close(variant, _results(build(own, variant, configuration), x, upstream), want, bounds)


def _results(module: nn.Module, x: Tensor, upstream: Tensor) -> dict[str, Tensor]:
    """`benchmark.results` in the model's precision, without the biases of keys: they add the same to all scores of a
    query, so their exact gradient is 0, and only rounding errors would be compared."""
    kind = next(module.parameters()).dtype
    found = benchmark.results(module, module, x.to(kind) if x.is_floating_point() else x, upstream.to(kind))
    return {name: tensor for name, tensor in found.items() if not name.endswith("bias_k")}


def _square(case: Case) -> Tensor:
    return torch.randn(case["edge"], case["edge"], device=case["device"], dtype=benchmark.dtype(case))


def _product(matrix: Tensor, calls: int) -> dict[str, float]:
    """Mean seconds of one square product, over `calls` in a row."""
    products = benchmark.repeated(partial(torch.mm, matrix, matrix), calls)
    return benchmark.mean_seconds(products, calls, cuda=matrix.is_cuda, quantity="product")


label = "{model} B={B} {dtype}".format_map


# ---------------------------------------------------------------------------------------------- what the records say


def declared(case: Case, variant: str) -> Cost:
    """The closed form of a variant's step."""
    itemsize = benchmark.dtype(case).itemsize
    return CONFIGURATIONS[case["model"]].cost(case["B"], projection=variant, itemsize=itemsize)


def rows(records: Iterable[Record]) -> list[Row]:
    """One row per record and variant.

    Besides its `analysis.speedups`: the `seconds` of a whole step, (q1, median, q3); `bound`, the ratio of the matrix
    products' FLOPs to the standard model's; `of_matmul`, the FLOPs a second of the step's products, without the
    optimiser's time, over those of the square product timed beside; bytes as measured; and `counted_saved_bytes`, those
    of activations, as autograd keeps them on a CPU.
    """
    found = []
    for record in records:
        case = record["configuration"]
        square = 2 * case["edge"] ** 3 / statistics.median(clocked(record, record["facts"][MATMUL], "product"))
        for arm in record["repetitions"]:
            cost = declared(case, arm)
            row = row_of(record, variant=arm, **analysis.speedups(record, arm, STANDARD))
            row["seconds"] = quartiles(step_seconds(record, arm, optimiser=True))
            row["bound"] = declared(case, STANDARD).step / cost.step
            row["of_matmul"] = cost.step / statistics.median(step_seconds(record, arm)) / square
            row |= {name: value for name, value in record["facts"][arm].items() if name.endswith("_bytes")}
            kind = {"dtype": benchmark.dtype(case), "projection": arm}
            row["counted_saved_bytes"] = model_bytes(case["model"], case["B"], **kind)
            found.append(row)
    return found
