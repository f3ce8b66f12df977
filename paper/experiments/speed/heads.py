"""The training step of layers whose heads are stopped, or of several kinds, beside that of the standard layer.

Measured as in `training_step`: all arms of a case are interleaved, after each was held to its definition.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from ortho import cost
from ortho.cost.layers import hybrid
from ortho.layers.block import TransformerBlock
from ortho.layers.hybrid import HybridAttention
from paper.experiments.engine import benchmark
from paper.experiments.engine.benchmark import PHASES
from paper.experiments.engine.records import Case, Record
from paper.experiments.speed import training_step
from paper.experiments.speed.analysis import Row
from paper.experiments.speed.training_step import STANDARD

SPLITS: dict[str, Callable[[int], dict[str, int]]] = {  # of H heads
    "stopped": lambda H: {"stopped": H},
    "structured": lambda H: {"structured-stopped": H},
    "quarter": lambda H: {"learned": H // 4, "structured-stopped": H - H // 4},
    "one": lambda H: {"learned": 1, "positional": H - 1},
}
ARMS = (STANDARD, *SPLITS)


def cases(device: str) -> list[Case]:
    """All configurations for a device, the most informative first."""
    case, ways = training_step.case, (False, True)
    if device == "cpu":
        found = [case("layer", N, causal=causal) for N in (512, 2048, 1024, 4096) for causal in ways]
        return found + [case("block", N, causal=causal) for N in (512, 2048) for causal in ways]

    def at(scope: str, N: int, d: int, causal: bool) -> Case:
        kind: dict[str, Any] = {"dtype": "bfloat16", "causal": causal, "compiled": True}
        return case(scope, N, d, device="cuda", B=max(1, training_step.TOKENS // N), **kind)

    lengths, scopes = (4096, 1024, 16384, 32768), ("layer", "block")
    found = [at(scope, N, 768, causal) for N in lengths for causal in ways for scope in scopes]
    return found + [at("layer", N, d, causal) for d in (2048, 1024) for N in (1024, 4096, 32768) for causal in ways]


def run(case: Case, seconds: float | None = None) -> dict[str, Any]:
    """Measure one case, see `training_step.compare`."""
    return training_step.compare(case, ARMS, build, declared, seconds)


def build(case: Case, arm: str) -> nn.Module:
    """The layer or block of an arm. Weights are drawn on the CPU in float32, so that every device has the same."""
    if arm == STANDARD:
        return training_step.build(case, arm)
    make: Any = HybridAttention if case["scope"] == "layer" else partial(TransformerBlock, layer=HybridAttention)
    generator = torch.Generator().manual_seed(training_step.SEEDS["weights"])
    module = make(case["d"], case["H"], heads=SPLITS[arm](case["H"]), generator=generator, dtype=torch.float32)
    return cast(nn.Module, module.to(case["device"], benchmark.dtype(case)))


def declared(case: Mapping[str, Any], arm: str) -> cost.Cost:
    """The closed form of an arm."""
    B, N, d, H = (case[name] for name in ("B", "N", "d", "H"))
    options: dict[str, Any] = {"causal": case["causal"], "itemsize": benchmark.dtype(case).itemsize}
    kind: dict[str, Any] = {} if arm == STANDARD else {"heads": SPLITS[arm](H)}
    form: Callable[..., cost.Cost] = cost.layer if arm == STANDARD else hybrid
    if case["scope"] == "block":
        return cost.block(B, N, d, H, layer=form, **options, **kind)
    return form(B, N, d, H, input_grad=case["input_grad"], **options, **kind)


def speedups(records: Iterable[Record]) -> list[Row]:
    """One row per record and arm other than the standard, see `training_step.speedups`; and the `share` of its bound
    that an arm reaches, of forward and backward."""
    found = training_step.speedups(records, declared)
    return [row | {"share": row["speedup"][1] / row["bound"]} for row in found]


HEADS_SPEED = benchmark.experiment(
    "heads-speed",
    "the training step of layers with stopped heads and with heads of several kinds",
    cases=cases,
    run=run,
    work=partial(training_step.work, variants=ARMS, declared=declared),
    label=training_step.label,
    line=partial(training_step.line, declared=declared),
    show=partial(training_step.table, declared=declared),
    like=training_step.case(),
    arms=ARMS,
    quantities=PHASES,
)
