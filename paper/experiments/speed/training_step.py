"""The training step of the attention layer and of the whole block, measured for each way to make q and k.

One case holds every variant at one size. In each repetition the variants run one after the other in an order drawn
anew, so that a drift of the machine falls on all of them, and a speed-up is a median of ratios within repetitions.
"""

import copy
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from ortho._checks import one_of, positive_int
from ortho.cost import Cost
from ortho.cost.counting import saved_bytes
from ortho.layers.block import TransformerBlock
from ortho.layers.multihead import MultiheadAttention
from paper.experiments.engine.benchmark import (
    PHASES,
    Arm,
    assert_close,
    cuda_memory,
    interleaved,
    reason,
    timed_step,
)
from paper.experiments.engine.records import Case, Needs
from paper.experiments.engine.runner import Experiment
from paper.experiments.speed import analysis as summary

VARIANTS = ("learned", "frozen", "stopped")
SEEDS = {"weights": 0, "inputs": 1, "order": 2}
TOKENS = 32768  # B N on CUDA: the same work for the projections at every N, and enough of it to fill the device
CHECKED_LENGTH = 256  # the reference form materialises N x N weights in float64

# How long the repetitions of a case should take, and within which numbers.
SECONDS = {"cpu": 22.0, "cuda": 2.0}
REPETITIONS = {"cpu": (7, 31), "cuda": (10, 40)}
WARM_UP = {"cpu": 1, "cuda": 3}

# Stored results that follow one another from x to the last gradient; each is rounded once to the working precision.
_STAGES = {"layer": 12, "block": 28}


def case(
    scope: str = "layer",
    N: int = 512,
    d: int = 768,
    *,
    device: str = "cpu",
    B: int = 1,
    H: int | None = None,
    dtype: str = "float32",
    causal: bool = False,
    input_grad: bool = True,
    compiled: bool = False,
) -> Case:
    """One configuration: `scope` 'layer' or 'block', H heads (by default of width 64), and whether x needs a gradient.

    `compiled` adds to each variant its `torch.compile`d twin. Raises TypeError or ValueError for sizes below 1 and
    unknown names.
    """
    return {
        "device": one_of("device", device, SECONDS),
        "scope": one_of("scope", scope, _STAGES),
        "B": positive_int("B", B),
        "N": positive_int("N", N),
        "d": positive_int("d", d),
        "H": positive_int("H", d // 64 if H is None else H),
        "dtype": one_of("dtype", dtype, ("float32", "bfloat16", "float16", "float64")),
        "causal": causal,
        "input_grad": input_grad,
        "compiled": compiled,
    }


def cases(device: str) -> list[Case]:
    """All configurations for a device, the most informative first."""
    return _cuda_cases() if device == "cuda" else _cpu_cases()


def _cpu_cases() -> list[Case]:
    sizes = [(512, 768), (1024, 768), (128, 768), (256, 768), (196, 768), (2048, 768)]  # 196: ViT's patches
    sizes += [(512, 512), (1024, 512), (2048, 1024)]  # the other rows of the source's table 4.1
    both = [case(scope, N, d) for N, d in sizes for scope in ("layer", "block")]
    first_layer = [case("layer", N, 768, input_grad=False) for N in (128, 512, 1024)]
    return [*both, *first_layer, case("layer", 4096, 768)]


def _cuda_cases() -> list[Case]:
    def at(scope: str, N: int, d: int = 768, dtype: str = "bfloat16", **options: bool) -> Case:
        return case(scope, N, d, device="cuda", B=max(1, TOKENS // N), dtype=dtype, **options)

    scopes = ("layer", "block")
    grid = [at(s, N) for N in (512, 2048, 8192, 32768, 128, 1024, 4096, 16384, 256) for s in scopes]
    grid += [at(s, N, compiled=True) for N in (512, 4096) for s in scopes]
    grid += [at(s, N, causal=True) for N in (2048, 8192, 32768) for s in scopes]
    grid += [at(s, N, dtype="float32") for N in (512, 2048, 8192) for s in scopes]
    grid += [at(s, N, d) for d in (1024, 2048) for N in (512, 2048, 8192, 32768) for s in scopes]
    grid += [at("layer", N, input_grad=False) for N in (512, 8192)]
    grid += [at("layer", N, compiled=True) for N in (128, 32768)] + [at("layer", 2048, causal=True, compiled=True)]
    grid += [at("layer", N, dtype="float32") for N in (128, 32768)]
    return grid


def run(case: Case, seconds: float | None = None) -> dict[str, Any]:
    """Measure one case: check every variant against its definition, then time them in turn; see `compare`."""
    return compare(case, VARIANTS, build, summary.declared, seconds)


def compare(
    case: Case,
    variants: Sequence[str],
    build: Callable[[Case, str], nn.Module],
    declared: Callable[[Case, str], Cost],
    seconds: float | None = None,
) -> dict[str, Any]:
    """Check every variant against its definition, then time them in turn.

    `seconds` bounds the time of the repetitions, of which there are always a few. Raises AssertionError if a
    variant's output or gradients are off, or if it does not train what its closed form says. A compiled twin that fails
    or is off is recorded as a failure, not timed.
    """
    device, options = case["device"], {"is_causal": case["causal"]}
    x, upstream = _inputs(case)
    arms: list[Arm] = []
    failures: dict[str, str] = {}
    for variant in variants:
        module = build(case, variant)
        check(case, variant, module, declared)
        arms.append(_arm(variant, module, module))
    if case["compiled"]:
        torch.compiler.reset()  # its count of recompilations is per process, and a case must not meet an earlier one's
        for eager in arms[:]:
            try:
                arms.append(_compiled(case, eager, x, upstream))
            except Exception as error:  # whatever a compiler raises is its result here
                failures[f"{eager.name}-compiled"] = reason(error)
    times, order = interleaved(
        {arm.name: partial(timed_step, arm, x, upstream, **options) for arm in arms},
        warm_up=WARM_UP[device],
        repetitions=REPETITIONS[device],
        seconds=SECONDS[device] if seconds is None else seconds,
        seed=SEEDS["order"],
    )
    facts: dict[str, Any] = {arm.name: _memory(arm, x, upstream, options) for arm in arms}
    return {"seeds": SEEDS, "repetitions": times, "facts": facts | {"order": order}, "failures": failures}


def build(case: Case, variant: str) -> nn.Module:
    """The layer or block of a case. Weights are drawn on the CPU in float32, so that every device has the same."""
    make: type[nn.Module] = {"layer": MultiheadAttention, "block": TransformerBlock}[case["scope"]]
    generator = torch.Generator().manual_seed(SEEDS["weights"])
    module = make(case["d"], case["H"], projection=variant, form="fast", generator=generator, dtype=torch.float32)
    return module.to(case["device"], getattr(torch, case["dtype"]))


def check(
    case: Case, variant: str, module: nn.Module, declared: Callable[[Case, str], Cost] = summary.declared
) -> None:
    """Raise AssertionError unless a fast form, in the case's dtype, computes what the reference in float64 does.

    Compared on a shorter sequence: the output, the gradients of x and of every trained weight; a frozen weight must
    have none. The bound on the relative error: each of the stages in a row rounds its result once, and a sum of n
    terms of random sign, accumulated in float32, adds sqrt(n) roundings of that precision.
    """
    small = {**case, "B": 1, "N": min(case["N"], CHECKED_LENGTH), "input_grad": True}
    exact = copy.deepcopy(module).double()
    for part in exact.modules():
        if hasattr(part, "form"):
            cast(Any, part).form = "reference"
    x, upstream = _inputs(small)
    got, want = (
        _results(module, module, small, x, upstream),
        _results(exact, exact, small, x.double(), upstream.double()),
    )
    for (name, a), b in zip(got.items(), want.values(), strict=True):
        assert_close(f"{variant}, {name}", a, b, tolerance(small))
    trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
    expected = declared(small, variant).trained
    if trained != expected:
        raise AssertionError(f"{variant}: expected {expected} trained weights, got {trained}")


def tolerance(case: Case) -> float:
    """The relative error that rounding alone may make in a case's step, see `check`."""
    terms = max(4 * case["d"] if case["scope"] == "block" else case["d"], case["B"] * case["N"])
    rounding = torch.finfo(getattr(torch, case["dtype"])).eps / 2
    return _STAGES[case["scope"]] * (rounding + math.sqrt(terms) * torch.finfo(torch.float32).eps / 2)


def _inputs(case: Case) -> tuple[Tensor, Tensor]:
    """x and the gradient of the output, (B, N, d) each, of unit variance, as after a normalisation."""
    generator = torch.Generator().manual_seed(SEEDS["inputs"])
    shape, to = (case["B"], case["N"], case["d"]), {"device": case["device"], "dtype": getattr(torch, case["dtype"])}
    x, upstream = (torch.randn(shape, generator=generator).to(**to) for _ in range(2))
    return x.requires_grad_(case["input_grad"]), upstream


def _results(call: Any, module: nn.Module, case: Case, x: Tensor, upstream: Tensor) -> dict[str, Tensor]:
    """Output and gradients of one forward and backward pass: of x if it needs one, and of all that is trained.

    Raises AssertionError if one of these is missing, or if there is another.
    """
    module.zero_grad(set_to_none=True)
    x = x.detach().requires_grad_(case["input_grad"])
    y = call(x, is_causal=case["causal"])
    y.backward(upstream)
    found: dict[str, Tensor | None] = {"output": y.detach()}
    found |= {f"gradient of {name}": weight.grad for name, weight in module.named_parameters() if weight.requires_grad}
    if case["input_grad"]:
        found["gradient of x"] = x.grad
    frozen = [*module.buffers(), *(p for p in module.parameters() if not p.requires_grad)]
    if any(weight.grad is not None for weight in frozen):
        raise AssertionError("a frozen weight has a gradient")
    for name, tensor in found.items():
        if tensor is None:
            raise AssertionError(f"{name}: there is none")
    module.zero_grad(set_to_none=True)
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def _arm(name: str, module: nn.Module, call: Any) -> Arm:
    trained = [p for p in module.parameters() if p.requires_grad]
    return Arm(name, module, call, torch.optim.AdamW(trained, lr=1e-4, fused=True))


def _compiled(case: Case, eager: Arm, x: Tensor, upstream: Tensor) -> Arm:
    """The compiled twin of an arm, compared with it on the case's own input."""
    module = copy.deepcopy(eager.module)
    call = torch.compile(module, fullgraph=True, dynamic=False)
    got, want = (_results(c, module, case, x, upstream) for c in (call, module))
    for (name, a), b in zip(got.items(), want.values(), strict=True):
        assert_close(f"{eager.name} compiled, {name}", a, b, 2 * tolerance(case))  # both sides round
    return _arm(f"{eager.name}-compiled", module, call)


def _memory(arm: Arm, x: Tensor, upstream: Tensor, options: dict[str, Any]) -> dict[str, int]:
    """Bytes of a step: measured on CUDA; on a CPU those that autograd keeps, counted."""
    if x.is_cuda:
        return cuda_memory(arm, x, upstream, **options)
    with saved_bytes([*arm.module.parameters(), *arm.module.buffers()]) as kept:
        arm.call(x, **options)
    return {"saved_bytes": kept()}


def work(
    case: Case, variants: Sequence[str] = VARIANTS, declared: Callable[[Case, str], Cost] = summary.declared
) -> float:
    """Seconds that a case takes, roughly; the runner corrects them by what like cases took."""
    device = case["device"]
    rate = {"cpu": 6e10, "cuda": 3e14 if case["dtype"] == "bfloat16" else 3e13}[device]
    steps = (1 + case["compiled"]) * (2 if device == "cuda" else 1)
    one_round = steps * sum(declared(case, variant).step for variant in variants) / rate
    least, most = REPETITIONS[device]
    rounds = WARM_UP[device] + min(most, max(least, SECONDS[device] / one_round))
    return float(1 + 30 * case["compiled"] + rounds * one_round)


def label(case: Case) -> str:
    """A case in a few words."""
    words = [case["scope"], f"N={case['N']}", f"d={case['d']}", f"B={case['B']}", case["dtype"]]
    words += [name for name in ("causal", "compiled") if case[name]]
    return " ".join(words + ([] if case["input_grad"] else ["x without gradient"]))


TRAINING_STEP = Experiment(
    name="training-step",
    title="forward, backward and optimiser of the layer and the block, learned, frozen and stopped q and k",
    cases=cases,
    run=run,
    work=work,
    label=label,
    line=summary.line,
    show=summary.table,
    needs=Needs(
        configuration={name: type(value) for name, value in case().items()},
        arms=VARIANTS,
        quantities=tuple(f"{phase}_s" for phase in PHASES),
    ),
    quiet=True,
)
