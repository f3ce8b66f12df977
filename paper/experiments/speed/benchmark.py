"""Helpers for all timings: check that what is timed is right, time variants in turn, read clocks and memory.

A fast form is compared with its definition before it is measured. Then all variants of a case run one after the other
in each repetition, in an order drawn anew: a drift of the machine affects all of them, and ratios are taken within
repetitions.
"""

import copy
import gc
import math
import random
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from ortho.checks import positive_int
from ortho.cost.counting import Allocations, saved_bytes
from paper.experiments.engine.records import Case

PHASES = ("forward", "backward", "optimiser")
PASSES = PHASES[:2]

Timing = Callable[[], dict[str, float]]


# ------------------------------------------------------------------------------------------- right before it is timed


def relative_error(got: Tensor, want: Tensor) -> float:
    """The distance of `got` from `want`, as a share of the norm of `want`; computed in float64."""
    want = want.detach().double()
    return float((got.detach().double() - want).norm() / want.norm())


def assert_close(what: str, got: Tensor, want: Tensor, bound: float) -> None:
    """Raise AssertionError, naming what was compared, unless the relative error is within the bound."""
    error = relative_error(got, want)
    if not error <= bound:  # also where the error is NaN
        raise AssertionError(f"{what}: expected a relative error of at most {bound:.2g}, got {error:.2g}")


def assert_all_close(
    what: str, got: Mapping[str, Tensor], want: Mapping[str, Tensor], bound: float | Mapping[str, float]
) -> None:
    """`assert_close` for each named result; `bound` is one for all, or one for each name."""
    for name, tensor in want.items():
        assert_close(f"{what}, {name}", got[name], tensor, bound[name] if isinstance(bound, Mapping) else bound)


def rounding_error(stages: int, terms: int, dtype: torch.dtype) -> float:
    """The relative error that rounding alone may cause.

    Each of the successive stages rounds its result once, and a sum of `terms` numbers of random sign, accumulated in
    float32, adds sqrt(terms) roundings of float32.
    """
    return stages * (torch.finfo(dtype).eps / 2 + math.sqrt(terms) * torch.finfo(torch.float32).eps / 2)


def results(
    call: Callable[..., Tensor], module: nn.Module, x: Tensor, upstream: Tensor, **options: Any
) -> dict[str, Tensor]:
    """Output and gradients of one forward and backward pass: of all trained weights, and of x if it needs one.

    Raises AssertionError if one of these is missing, or if a frozen weight has a gradient.
    """
    module.zero_grad(set_to_none=True)
    leaf = x.detach().requires_grad_(x.requires_grad)
    y = call(leaf, **options)
    y.backward(upstream)
    found: dict[str, Tensor | None] = {"output": y.detach()}
    found |= {f"gradient of {name}": weight.grad for name, weight in module.named_parameters() if weight.requires_grad}
    if x.requires_grad:
        found["gradient of x"] = leaf.grad
    frozen = [*module.buffers(), *(p for p in module.parameters() if not p.requires_grad)]
    if any(weight.grad is not None for weight in frozen):
        raise AssertionError("a frozen weight has a gradient")
    for name, tensor in found.items():
        if tensor is None:
            raise AssertionError(f"{name}: there is none")
    module.zero_grad(set_to_none=True)
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def defined(module: nn.Module) -> nn.Module:
    """A copy of a module whose attention computes as its definition reads."""
    exact = copy.deepcopy(module)
    for part in exact.modules():
        if hasattr(part, "form"):
            cast(Any, part).form = "reference"
    return exact


def reason(error: Exception) -> str:
    """What went wrong, in one line and without the paths of the machine."""
    line = next(iter(str(error).strip().splitlines()), "")
    return re.sub(r"(/[\w.+-]+)+/", "", f"{type(error).__name__}: {line}")[:300]


# ------------------------------------------------------------------------------------------------------------ in turn


@dataclass(frozen=True)
class Budget:
    """How many repetitions a case has: as many as fit into `seconds`, between `least` and `most`, after `warm_up`
    rounds that do not count."""

    seconds: float
    least: int
    most: int
    warm_up: int = 0


def compare(
    timings: Mapping[str, Timing],
    budget: Budget,
    seeds: Mapping[str, int],
    seconds: float | None = None,
    *,
    facts: Mapping[str, Any] | None = None,
    failures: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Call every timing once per repetition, in an order drawn anew; returns the parts of a record that are its own.

    `timings` are functions by the variants' names. The returned `repetitions` are variant -> quantity -> a number per
    repetition; the orders are added to the `facts`. `seconds` replaces the budget's own. The garbage collector is off
    meanwhile.
    """
    draw = random.Random(seeds["order"])
    names = list(timings)
    measured: dict[str, dict[str, list[float]]] = {name: {} for name in names}
    orders: list[list[str]] = []
    wanted = budget.most
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        for _ in range(budget.warm_up):
            for name in names:
                timings[name]()
        began = time.perf_counter()
        while len(orders) < wanted:
            orders.append(draw.sample(names, len(names)))
            for name in orders[-1]:
                for quantity, value in timings[name]().items():
                    measured[name].setdefault(quantity, []).append(value)
            if len(orders) == 1:  # the first round says how many fit
                fit = int((budget.seconds if seconds is None else seconds) / (time.perf_counter() - began))
                wanted = min(wanted, max(budget.least, fit))
    finally:
        if enabled:
            gc.enable()
    whole = {**(facts or {}), "order": orders}
    return {"seeds": dict(seeds), "repetitions": measured, "facts": whole, "failures": dict(failures or {})}


def sizes(**given: int) -> dict[str, int]:
    """Sizes of a case. Raises TypeError or ValueError, naming the first that is not an integer of at least 1."""
    return {name: positive_int(name, value) for name, value in given.items()}


def dtype(case: Mapping[str, Any]) -> torch.dtype:
    """The precision of a case."""
    found: torch.dtype = getattr(torch, case["dtype"])
    return found


def drawn(case: Case, shape: Sequence[int], count: int, seed: int) -> tuple[Tensor, ...]:
    """Normal numbers for a case, drawn on the CPU in float32, so that every device has the same."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(*shape, generator=generator).to(case["device"], dtype(case)) for _ in range(count))


# ------------------------------------------------------------------------------------------------------------- clocks


@dataclass
class Arm:
    """One of the things compared: a module and its optimiser."""

    name: str
    module: nn.Module
    optimiser: torch.optim.Optimizer


def trained(name: str, module: nn.Module) -> Arm:
    """A module with an optimiser for all its trained weights."""
    weights = [weight for weight in module.parameters() if weight.requires_grad]
    return Arm(name, module, torch.optim.AdamW(weights, lr=1e-4, fused=True))


def timed_step(arm: Arm, x: Tensor, upstream: Tensor, **options: Any) -> dict[str, float]:
    """Seconds of one training step, see `_phases`: forward, backward from the given gradient of the output, optimiser.

    On CUDA the untimed step before it is a training step, too.
    """
    return _phases(PHASES, lambda mark: _step(arm, x, upstream, options, mark), 1, cuda=x.is_cuda)


def timed(call: Callable[..., Tensor], operands: tuple[Tensor, ...], upstream: Tensor, calls: int) -> dict[str, float]:
    """Seconds of a call, forward and backward to all operands, see `_phases`: the means over `calls` in a row."""

    def step(mark: Callable[[], None]) -> None:
        mark()
        o = call(*operands)
        mark()
        gradients = torch.autograd.grad(o, operands, upstream)
        mark()
        del o, gradients  # their memory is freed off the clock

    return _phases(PASSES, step, calls, cuda=upstream.is_cuda)


def _phases(
    phases: Sequence[str], step: Callable[[Callable[[], None]], None], calls: int, *, cuda: bool
) -> dict[str, float]:
    """Mean seconds of each phase of a step; the step marks when the first phase begins and when each one ends.

    On a CPU both wall time (`forward_s`) and the process's CPU time (`forward_cpu_s`), which other load does not
    lengthen. On CUDA by events (`forward_s`): an untimed step goes first, so that the timed ones are queued while the
    device is still at work. The host's time to launch kernels then shows only if it is the longer.
    """
    if cuda:
        step(lambda: None)
    marks: list[Any] = []
    for _ in range(calls):
        step(lambda: marks.append(_event() if cuda else _host()))
    if cuda:
        torch.cuda.synchronize()
    seconds: dict[str, float] = {}
    every = len(phases) + 1  # marks a call
    for index, phase in enumerate(phases):
        pairs = list(zip(marks[index::every], marks[index + 1 :: every], strict=True))
        if cuda:
            seconds[f"{phase}_s"] = sum(start.elapsed_time(end) for start, end in pairs) / 1e3 / calls
            continue
        for clock, quantity in enumerate((f"{phase}_s", f"{phase}_cpu_s")):
            seconds[quantity] = sum(end[clock] - start[clock] for start, end in pairs) / calls
    return {quantity: round(value, 9) for quantity, value in seconds.items()}


def mean_seconds(
    steps: Callable[[], object], count: int, *, cuda: bool, quantity: str = "step", events: bool = False
) -> dict[str, float]:
    """Mean seconds of one of the `count` steps that a call makes, as its user experiences them.

    On a CPU both wall time (`step_s`) and the process's CPU time (`step_cpu_s`), which other load does not lengthen. On
    CUDA wall time until the device is done, with the host's time to launch kernels; with `events`, without it.
    """
    if cuda and events:
        start = _event()
        steps()
        end = _event()
        torch.cuda.synchronize()
        return {f"{quantity}_s": round(start.elapsed_time(end) / 1e3 / count, 9)}
    if cuda:
        torch.cuda.synchronize()
    began = _host()
    steps()
    if cuda:
        torch.cuda.synchronize()
    ended = _host()
    wall, own = (round((b - a) / count, 9) for a, b in zip(began, ended, strict=True))
    return {f"{quantity}_s": wall} if cuda else {f"{quantity}_s": wall, f"{quantity}_cpu_s": own}


def repeated(call: Callable[[], object], count: int) -> Callable[[], None]:
    """A function that makes `count` calls in a row."""

    def calls() -> None:
        for _ in range(count):
            call()

    return calls


def calls_in(seconds: float, one: float) -> int:
    """How many calls in a row take about `seconds`, if a single call takes `one` seconds; at least 1."""
    return max(1, round(seconds / one))


def _host() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _step(arm: Arm, x: Tensor, upstream: Tensor, options: dict[str, Any], mark: Callable[[], None]) -> None:
    arm.optimiser.zero_grad(set_to_none=True)
    x.grad = None
    mark()
    y = arm.module(x, **options)
    mark()
    y.backward(upstream)
    mark()
    arm.optimiser.step()
    mark()


# ------------------------------------------------------------------------------------------------------------- memory


def peak(device: str, call: Callable[[], Any]) -> tuple[Any, dict[str, int]]:
    """What a call returns, and the most bytes that it holds at once, besides what was there before.

    On CUDA as the allocator reports (`peak_bytes`); on a CPU the bytes of tensors, counted (`peak_bytes`), and those of
    the largest tensor (`largest_bytes`).
    """
    if device == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        result = call()
        return result, {"peak_bytes": torch.cuda.max_memory_allocated() - before}
    with Allocations() as memory:
        result = call()
    return result, {"peak_bytes": memory.peak, "largest_bytes": memory.largest}


def step_bytes(arm: Arm, x: Tensor, upstream: Tensor, **options: Any) -> dict[str, int]:
    """Bytes of one training step.

    On a CPU: `saved_bytes`, counted, what autograd keeps. On CUDA, after at least one step has made the optimiser's
    state: `peak_bytes`, the most that weights, optimiser state, gradients and activations hold at once, without x, the
    upstream gradient and other arms; `activation_bytes`, what the forward pass leaves allocated.
    """
    own = [*arm.module.parameters(), *arm.module.buffers()]
    if not x.is_cuda:
        with saved_bytes(own) as kept:
            arm.module(x, **options)
        return {"saved_bytes": kept()}
    arm.optimiser.zero_grad(set_to_none=True)
    x.grad = None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    held: list[int] = []
    _step(arm, x, upstream, options, lambda: held.append(torch.cuda.memory_allocated()))
    torch.cuda.synchronize()
    most = torch.cuda.max_memory_allocated() - before
    own += [value for slots in arm.optimiser.state.values() for value in slots.values()]
    weights = sum(x.numel() * x.element_size() for x in own if isinstance(x, Tensor) and x.is_cuda)
    return {"peak_bytes": most + weights, "activation_bytes": held[1] - held[0]}
