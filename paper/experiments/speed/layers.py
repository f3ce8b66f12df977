"""A whole attention layer by its mechanism: the training step, the forward pass alone, and memory.

Each arm is checked against its definition, as in `training_step`; then all arms of a case are timed in turn. The
forward pass alone, without gradients, is what reading a prompt costs.
"""

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ortho import cost
from ortho.layers.multihead import MultiheadAttention
from paper.experiments.engine.records import Case, Record
from paper.experiments.speed import benchmark, training_step
from paper.experiments.speed.analysis import Row, by_arm, quartiles, ratio, row_of
from paper.experiments.speed.benchmark import Arm, Budget, trained

STANDARD = "softmax"
ARMS = (STANDARD, "linear", "favor", "window")
MEMORIES = ("delta", "gated-delta")  # causal only
SEEDS = training_step.SEEDS
BUDGETS = {"cpu": Budget(20.0, 3, 15), "cuda": Budget(2.0, 10, 40, warm_up=3)}
LENGTHS = {"cpu": (4096, 512, 2048, 8192), "cuda": (4096, 512, 2048, 8192, 32768, 131072)}

case = partial(training_step.case, "layer")
label = training_step.label


def cases(device: str) -> list[Case]:
    """All configurations for a device, the most informative first. On a CPU softmax attention of width 2,048 takes
    minutes a step beyond 8,192 tokens."""
    make = case if device == "cpu" else partial(training_step.on_gpu, "layer")
    sizes = [(N, d) for d in (768, 2048) for N in LENGTHS[device]]
    sizes += [(N, 768) for N in (16384, 32768)] if device == "cpu" else []
    return [make(N, d, causal=causal) for N, d in sizes for causal in (False, True)]


def arms_of(case: Mapping[str, Any]) -> tuple[str, ...]:
    """The mechanisms of a case."""
    return (*ARMS, *MEMORIES) if case["causal"] else ARMS


def declared(case: Mapping[str, Any], arm: str) -> cost.Cost:
    """The closed form of an arm's layer."""
    sizes = (case[name] for name in ("B", "N", "d", "H"))
    itemsize = benchmark.dtype(case).itemsize
    return cost.layer(*sizes, attention=arm, causal=case["causal"], itemsize=itemsize)


def build(case: Mapping[str, Any], arm: str) -> MultiheadAttention:
    """An arm's layer. Weights are drawn on the CPU in float32, so that every device has the same."""
    generator = torch.Generator().manual_seed(SEEDS["weights"])
    layer = MultiheadAttention(case["d"], case["H"], attention=arm, generator=generator, dtype=torch.float32)
    return layer.to(case["device"], benchmark.dtype(case))


def run(case: Case, seconds: float | None = None) -> dict[str, Any]:
    """Measure one case. Raises AssertionError if an arm's output or gradients are off, or its count of weights."""
    options = {"is_causal": case["causal"]}
    arms = []
    for name in arms_of(case):
        layer = build(case, name)
        training_step.check(case, name, layer, declared)
        arms.append(trained(name, layer))
    x, upstream = training_step.inputs(case)
    facts = {}
    for arm in arms:
        kept = benchmark.step_bytes(arm, x, upstream, **options)
        facts[arm.name] = kept | _peak(arm, x, upstream, **options)
    timings = {arm.name: partial(timed, arm, x, upstream, **options) for arm in arms}
    return benchmark.compare(timings, BUDGETS[case["device"]], SEEDS, seconds, facts=facts)


def _peak(arm: Arm, x: Tensor, upstream: Tensor, **options: Any) -> dict[str, int]:
    """The most bytes of a forward and backward pass, without the optimiser's, whose state would hide the attention."""
    operands = (x, *(weight for weight in arm.module.parameters() if weight.requires_grad))
    step = partial(benchmark.timed, lambda x, *_: arm.module(x, **options), operands, upstream, 1)
    return benchmark.peak(str(x.device.type), step)[1]


def timed(arm: Arm, x: Tensor, upstream: Tensor, **options: Any) -> dict[str, float]:
    """Seconds of a training step by its phases, and of a forward pass without gradients."""
    step = benchmark.timed_step(arm, x, upstream, **options)
    with torch.no_grad():
        alone = benchmark.mean_seconds(partial(arm.module, x, **options), 1, cuda=x.is_cuda, quantity="prefill")
    return step | alone


def rows(records: Iterable[Record]) -> list[Row]:
    """One row per record and arm: `seconds` of forward and backward, `prefill` of a forward pass without gradients,
    and their ratios to softmax attention's within repetitions, (q1, median, q3) each; `saved_bytes`, `peak_bytes`."""
    found = []
    for record in records:
        steps, alone = by_arm(record), by_arm(record, "prefill")
        for arm, own in steps.items():
            figures = {"seconds": quartiles(own), "ratio": ratio(own, steps[STANDARD])}
            figures |= {"prefill": quartiles(alone[arm]), "prefill_ratio": ratio(alone[arm], alone[STANDARD])}
            found.append(row_of(record, arm=arm, **figures, **record["facts"][arm]))
    return found
