"""A forward pass without gradients, frozen against learned: does freezing W_Q and W_K make inference faster?

The two layers hold the same numbers and run the same kernels on them, so a difference could only come from the way the
machine treats memory. A second learned layer is the control: the difference that two equal layers seem to have is what
this measurement cannot tell from zero. Every arm is copied anew before it is timed, so that none keeps a lucky place in
memory.
"""

import copy
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ortho.adapters.conversion import to_standard
from paper.experiments.engine.records import Case, Record
from paper.experiments.speed import benchmark, training_step
from paper.experiments.speed.analysis import Row, by_arm, row_of
from paper.experiments.speed.benchmark import Budget
from paper.experiments.statistics import median_interval

ARMS = STANDARD, FROZEN, CONTROL = "learned", "frozen", "learned-again"
SEEDS = {"weights": training_step.SEEDS["weights"], "inputs": training_step.SEEDS["inputs"], "order": 3}
CONFIDENCE = 0.99

CALL_SECONDS = {"cpu": 0.02, "cuda": 0.01}  # the length of one timing
BUDGETS = {"cpu": Budget(40.0, 31, 301, warm_up=1), "cuda": Budget(4.0, 31, 301, warm_up=1)}


def cases(device: str) -> list[Case]:
    """One token, as in decoding without a cache, and whole sequences; d = 768."""
    cuda = device == "cuda"
    dtype = "bfloat16" if cuda else "float32"
    return [
        training_step.case("layer", N, device=device, B=B if cuda else 1, dtype=dtype, input_grad=False)
        for N, B in ((512, 64), (1, 64), (128, 256), (1024, 32))
    ]


def run(case: Case, seconds: float | None = None) -> dict[str, Any]:
    """Measure one case; raises AssertionError unless all arms give the same output, bit for bit, and the right one."""
    device = case["device"]
    frozen = training_step.build(case, "frozen").requires_grad_(False)
    training_step.check(case, "frozen", training_step.build(case, "frozen"))
    arms: dict[str, nn.Module] = {STANDARD: to_standard(frozen), FROZEN: frozen, CONTROL: to_standard(frozen)}
    (x,) = benchmark.drawn(case, (case["B"], case["N"], case["d"]), 1, SEEDS["inputs"])
    with torch.no_grad():
        expected = frozen(x)
        for name, module in arms.items():
            if not torch.equal(module(x), expected):
                raise AssertionError(f"{name}: expected the frozen layer's output, bit for bit")
        calls = benchmark.calls_in(CALL_SECONDS[device], _forward(frozen, x, 3)["forward_s"])
        timings = {name: partial(_forward, module, x, calls) for name, module in arms.items()}
        return benchmark.compare(timings, BUDGETS[device], SEEDS, seconds, facts={"calls": calls})


def _forward(module: nn.Module, x: Tensor, calls: int) -> dict[str, float]:
    """Seconds of one call, from `calls` in a row after one that does not count; by events on CUDA."""
    module = copy.deepcopy(module)
    module(x)
    steps = benchmark.repeated(partial(module, x), calls)
    return benchmark.mean_seconds(steps, calls, cuda=x.is_cuda, quantity="forward", events=True)


def gains(records: Iterable[Record]) -> list[Row]:
    """One row per record: by how many per cent the frozen arm and the control are faster than the learned one.

    `frozen` and `control` are (low, median, high), the interval of the median over the ratios within repetitions.
    """
    rows = []
    for record in records:
        times = by_arm(record, "forward")
        row = row_of(record, repetitions=len(times[STANDARD]))
        for name, arm in (("frozen", FROZEN), ("control", CONTROL)):
            pairs = zip(times[STANDARD], times[arm], strict=True)
            row[name] = median_interval([100 * (standard / other - 1) for standard, other in pairs], CONFIDENCE)
        rows.append(row)
    return rows


label = training_step.label
