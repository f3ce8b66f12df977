"""The training step of layers whose heads are stopped, or of several kinds, beside that of the standard layer.

Measured as in `training_step`: all arms of a case are interleaved, after each was held to its definition.
"""

from functools import partial
from typing import Any, cast

import torch
from torch import nn

from ortho.layers.block import TransformerBlock
from ortho.layers.hybrid import HybridAttention
from paper.experiments.engine.benchmark import PHASES
from paper.experiments.engine.records import Case, Needs
from paper.experiments.engine.runner import Experiment
from paper.experiments.speed import heads_analysis as heads_rows
from paper.experiments.speed import training_step
from paper.experiments.speed.heads_analysis import SPLITS, STANDARD, declared

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
    return cast(nn.Module, module.to(case["device"], getattr(torch, case["dtype"])))


HEADS_SPEED = Experiment(
    name="heads-speed",
    title="the training step of layers with stopped heads and with heads of several kinds",
    cases=cases,
    run=run,
    work=partial(training_step.work, variants=ARMS, declared=declared),
    label=training_step.label,
    line=heads_rows.line,
    show=heads_rows.table,
    needs=Needs(
        configuration={name: type(value) for name, value in training_step.case().items()},
        arms=ARMS,
        quantities=tuple(f"{phase}_s" for phase in PHASES),
    ),
    quiet=True,
)
