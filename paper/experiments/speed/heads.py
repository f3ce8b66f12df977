"""The training step of layers whose heads are stopped, or of several kinds, compared with that of the standard layer.

Measured as in `training_step`: each arm is checked against its definition, then all arms of a case are interleaved.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from ortho import cost
from ortho.cost.layers import hybrid
from ortho.layers.block import TransformerBlock
from ortho.layers.hybrid import HybridAttention
from paper.experiments.engine.records import Case, Record
from paper.experiments.speed import benchmark, training_step, value_gradient
from paper.experiments.speed.analysis import Row
from paper.experiments.speed.training_step import STANDARD, on_gpu

SPLITS: dict[str, Callable[[int], dict[str, int]]] = {  # of H heads
    "stopped": lambda H: {"stopped": H},
    "structured": lambda H: {"structured-stopped": H},
    "quarter": lambda H: {"learned": H // 4, "structured-stopped": H - H // 4},
    "one": lambda H: {"learned": 1, "positional": H - 1},
    "induction": lambda H: {"induction": 2, "positional": H - 2},
    "selective": lambda H: {"selective-induction": 2, "positional": H - 2},
    "positional": lambda H: {"positional": H},  # no retrieval: the most that cheaper retrieval can save
}
EXCHANGED = ("stopped", "structured-stopped", "induction", "selective-induction")  # backward by the exchanged pass
ARMS = (STANDARD, "stopped", "structured", "quarter", "one")
RETRIEVING = (STANDARD, "one", "induction", "selective", "positional")

# The first cases of a GPU asked for compiled twins, too, which all failed. Nothing makes them any more, but the
# configurations stay as they are.
ASKED = {"compiled": True}


def cases(device: str) -> list[Case]:
    """The configurations of `heads-speed` for a device, the most informative first."""
    case, ways = training_step.case, (False, True)
    if device == "cpu":
        found = [case("layer", N, causal=causal) for N in (512, 2048, 1024, 4096) for causal in ways]
        return found + [case("block", N, causal=causal) for N in (512, 2048) for causal in ways]

    lengths, scopes = (4096, 1024, 16384, 32768), ("layer", "block")
    sizes = [(scope, N, 768, causal) for N in lengths for causal in ways for scope in scopes]
    sizes += [("layer", N, d, causal) for d in (2048, 1024) for N in (1024, 4096, 32768) for causal in ways]
    return [on_gpu(scope, N, d, causal=causal) | ASKED for scope, N, d, causal in sizes]


def retrieving_cases(device: str) -> list[Case]:
    """The configurations of `induction-speed`, all causal, as untrained retrieval is."""
    if device == "cpu":
        sizes = [("layer", N) for N in (2048, 512, 8192, 1024, 4096)] + [("block", 2048), ("block", 512)]
        return [training_step.case(scope, N, causal=True) for scope, N in sizes]
    sizes = [(scope, N) for N in (4096, 1024, 16384, 32768) for scope in ("layer", "block")]
    return [on_gpu(scope, N, causal=True) | ASKED for scope, N in sizes]


def run(case: Case, seconds: float | None = None, *, arms: Sequence[str] = ARMS) -> dict[str, Any]:
    """Measure these arms of one case, see `training_step.compare`."""
    return training_step.compare(case, arms, build, declared, seconds)


retrieving_run = partial(run, arms=RETRIEVING)


def build(case: Case, arm: str) -> nn.Module:
    """The layer or block of an arm. Weights are drawn on the CPU in float32, so that every device has the same."""
    if arm == STANDARD:
        return training_step.build(case, arm)
    make: Any = HybridAttention if case["scope"] == "layer" else partial(TransformerBlock, layer=HybridAttention)
    generator = torch.Generator().manual_seed(training_step.SEEDS["weights"])
    module = make(case["d"], case["H"], heads=SPLITS[arm](case["H"]), generator=generator, dtype=torch.float32)
    return cast(nn.Module, module.to(case["device"], benchmark.dtype(case)))


def declared(case: Mapping[str, Any], arm: str) -> cost.Cost:
    """The closed form of an arm, less what a GPU's own kernel saves."""
    B, N, d, H = (case[name] for name in ("B", "N", "d", "H"))
    options: dict[str, Any] = {"causal": case["causal"], "itemsize": benchmark.dtype(case).itemsize}
    kind: dict[str, Any] = {} if arm == STANDARD else {"heads": SPLITS[arm](H)}
    form: Callable[..., cost.Cost] = cost.layer if arm == STANDARD else hybrid
    if case["scope"] == "block":
        found = cost.block(B, N, d, H, layer=form, **options, **kind)
    else:
        found = form(B, N, d, H, input_grad=case["input_grad"], **options, **kind)
    exchanged = 0 if arm == STANDARD else sum(SPLITS[arm](H).get(name, 0) for name in EXCHANGED)
    return replace(found, backward=found.backward - value_gradient.spared(case, exchanged))


def speedups(records: Iterable[Record]) -> list[Row]:
    """One row per record and arm other than the standard, see `training_step.speedups`; `share` is the fraction of its
    bound that an arm reaches, forward and backward."""
    found = training_step.speedups(records, declared)
    return [row | {"share": row["speedup"][1] / row["bound"]} for row in found]
