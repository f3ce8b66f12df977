"""Time and memory of a stack of blocks, forward and backward, with activations kept or recomputed."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ortho.checks import one_of
from ortho.cost import Cost
from ortho.cost.models import recomputed
from ortho.layers.block import TransformerBlock
from ortho.layers.checkpointed import Checkpointed, CheckpointedAttention
from paper.experiments.engine.records import Case, Record
from paper.experiments.speed import benchmark
from paper.experiments.speed.analysis import Row, by_arm, ratio, row_of
from paper.experiments.speed.benchmark import Budget, Timing

KEPT, MATERIALISED, SELECTIVE = "kept", "materialised", "attention again"
ALIKE = {SELECTIVE: MATERIALISED}  # the arm that an arm must agree with and is compared with; by default `KEPT`
SEEDS = {"weights": 0, "inputs": 1, "order": 2}
BUDGETS = {"cpu": Budget(60.0, 5, 15), "cuda": Budget(8.0, 7, 31)}  # without warm-up: every arm has run before
RATES = {"cpu": 4e10, "cuda": 2e14}  # FLOPs a second, about
ROUNDING = 64  # successive roundings; the same products are made again, by kernels that may add in another order


def case(*, device: str = "cpu", B: int = 1, N: int = 512, L: int = 6, dtype: str = "float32") -> Case:
    """One configuration: L blocks of GPT-2's width on x (B, N, 768).

    Raises TypeError or ValueError for sizes below 1 and unknown names.
    """
    return {
        "device": one_of("device", device, RATES),
        **benchmark.sizes(B=B, N=N, d=768, H=12, L=L),
        "dtype": one_of("dtype", dtype, ("float32", "bfloat16")),
    }


def cases(device: str) -> list[Case]:
    """All configurations for a device, the most informative first."""
    if device == "cuda":
        return [case(device="cuda", B=16, N=N, L=12, dtype="bfloat16") for N in (1024, 2048)]
    return [case()]


def segments_of(case: Case) -> dict[str, int]:
    """Arm -> number of segments that the blocks are cut into, for arms that recompute whole blocks."""
    L = case["L"]
    return {f"segments of {length}": L // length for length in (1, 2, 3, L) if L % length == 0}


def declared(case: Case, arm: str) -> Cost | None:
    """The closed form of an arm whose blocks are recomputed whole, or kept; None for other arms."""
    segments = {KEPT: 0, **segments_of(case)}.get(arm)
    if segments is None:
        return None
    sizes = {size: case[size] for size in ("B", "N", "d", "H", "L")}
    return recomputed(**sizes, segments=segments, itemsize=benchmark.dtype(case).itemsize)


def run(case: Case, seconds: float | None = None) -> dict[str, Any]:
    """Measure one case: check each arm against the one that it must agree with, then time all in turn.

    `seconds` bounds the time of the repetitions, but there are always a few. Raises AssertionError if an output or
    gradient is off.
    """
    device = case["device"]
    x, upstream = benchmark.drawn(case, (case["B"], case["N"], case["d"]), 2, SEEDS["inputs"])
    x.requires_grad_()
    modules = build(case)
    steps: dict[str, Timing] = {}
    results: dict[str, list[Tensor]] = {}
    bound = benchmark.rounding_error(ROUNDING, 0, x.dtype)
    for arm, module in modules.items():
        operands = (x, *(weight for weight in module.parameters() if weight.requires_grad))
        call = partial(_first, module)
        y = call(*operands)
        results[arm] = [y.detach(), *torch.autograd.grad(y, operands, upstream)]
        for got, want in zip(results[arm], results[ALIKE.get(arm, KEPT)], strict=True):
            benchmark.assert_close(arm, got, want, bound)
        steps[arm] = partial(benchmark.timed, call, operands, upstream, 1)
    results.clear()
    # Bytes of a step for the gradient of x alone: it needs all activations, kept or recomputed. The weights' gradients,
    # which no recomputation makes smaller, would hide them.
    alone = {arm: partial(benchmark.timed, module, (x,), upstream, 1) for arm, module in modules.items()}
    facts = {arm: {"peak_bytes": benchmark.peak(device, step)[1]["peak_bytes"]} for arm, step in alone.items()}
    return benchmark.compare(steps, BUDGETS[device], SEEDS, seconds, facts=facts)


def build(case: Case) -> dict[str, nn.Module]:
    """A module for each arm. All have the same weights, drawn on the CPU; those with the same attention share them."""

    def blocks(**attention: Any) -> list[nn.Module]:
        generator = torch.Generator().manual_seed(SEEDS["weights"])
        made = [TransformerBlock(case["d"], case["H"], generator=generator, **attention) for _ in range(case["L"])]
        return [block.to(case["device"], benchmark.dtype(case)) for block in made]

    fused = blocks()
    modules: dict[str, nn.Module] = {KEPT: nn.Sequential(*fused)}
    modules |= {arm: Checkpointed(fused, segments) for arm, segments in segments_of(case).items()}
    modules[MATERIALISED] = nn.Sequential(*blocks(form="reference"))
    modules[SELECTIVE] = nn.Sequential(*blocks(attention=CheckpointedAttention()))
    return modules


def _first(module: nn.Module, x: Tensor, *_: Tensor) -> Tensor:
    y: Tensor = module(x)
    return y


def rows(records: Sequence[Record]) -> list[Row]:
    """One row per record and arm: `time` and `bytes` over those of the arm that it is compared with, the time within
    repetitions as (q1, median, q3); `peak_bytes`; and, if there is a closed form, `flops` of a step over those of
    `KEPT`."""
    found = []
    for record in records:
        case, times = record["configuration"], by_arm(record)
        whole = declared(case, KEPT)
        for arm, own in times.items():
            like, cost = ALIKE.get(arm, KEPT), declared(case, arm)
            row = row_of(record, arm=arm, like=like, repetitions=len(own), time=ratio(own, times[like]))
            peaks = [record["facts"].get(name, {}).get("peak_bytes") for name in (arm, like)]
            row |= {"peak_bytes": peaks[0], "bytes": peaks[0] / peaks[1] if all(peaks) else None}
            found.append(row | {"flops": cost.step / whole.step if cost and whole else None})
    return found


label = "B={B} N={N} L={L} {dtype}".format_map
