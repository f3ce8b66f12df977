"""What every timing is made of: whether a fast form gives what its definition does, asked before anything is measured
of it; what is compared, in turn, in an order drawn anew for each repetition; and the clocks.
"""

import gc
import random
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

PHASES = ("forward", "backward", "optimiser")


def relative_error(got: Tensor, want: Tensor) -> float:
    """How far `got` is from `want`, as a share of the latter's norm; both are taken to float64."""
    want = want.detach().double()
    return float((got.detach().double() - want).norm() / want.norm())


def assert_close(what: str, got: Tensor, want: Tensor, bound: float) -> None:
    """Raise AssertionError, naming what was compared, unless the relative error is within the bound."""
    error = relative_error(got, want)
    if not error <= bound:  # also where the error is NaN
        raise AssertionError(f"{what}: expected a relative error of at most {bound:.2g}, got {error:.2g}")


def reason(error: Exception) -> str:
    """What went wrong, in one line and without the paths of the machine."""
    line = next(iter(str(error).strip().splitlines()), "")
    return re.sub(r"(/[\w.+-]+)+/", "", f"{type(error).__name__}: {line}")[:300]


@dataclass
class Arm:
    """One of the things compared: a module, what calls it (itself, or its compiled form), and its optimiser."""

    name: str
    module: nn.Module
    call: Callable[..., Tensor]
    optimiser: torch.optim.Optimizer


def interleaved(
    arms: Mapping[str, Callable[[], dict[str, float]]],
    *,
    warm_up: int,
    repetitions: tuple[int, int],
    seconds: float,
    seed: int,
) -> tuple[dict[str, dict[str, list[float]]], list[list[str]]]:
    """Call every arm once a repetition, in an order drawn anew; return what they measured, and the orders.

    The first result is arm -> quantity -> a number per repetition. As many repetitions as fit into `seconds`, within
    the two bounds, after `warm_up` rounds that do not count. The garbage collector waits meanwhile.
    """
    draw = random.Random(seed)
    names = list(arms)
    measured: dict[str, dict[str, list[float]]] = {name: {} for name in names}
    orders: list[list[str]] = []
    least, wanted = repetitions
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        for _ in range(warm_up):
            for name in names:
                arms[name]()
        began = time.perf_counter()
        while len(orders) < wanted:
            orders.append(draw.sample(names, len(names)))
            for name in orders[-1]:
                for quantity, value in arms[name]().items():
                    measured[name].setdefault(quantity, []).append(value)
            if len(orders) == 1:  # the first round says how many fit
                wanted = min(wanted, max(least, int(seconds / (time.perf_counter() - began))))
    finally:
        if enabled:
            gc.enable()
    return measured, orders


def timed_step(arm: Arm, x: Tensor, upstream: Tensor, **options: Any) -> dict[str, float]:
    """Seconds of one training step: forward, backward from the given gradient of the output, optimiser.

    On a CPU both the wall's (`forward_s`) and the process's own (`forward_cpu_s`), which other load does not lengthen.
    On CUDA by events (`forward_s`): an untimed step goes before, so that the timed one is queued while the device is
    still at work and the host's time to launch kernels does not show unless it is the longer.
    """
    cuda = x.is_cuda
    if cuda:
        _step(arm, x, upstream, options, lambda: None)
    marks: list[Any] = []
    _step(arm, x, upstream, options, lambda: marks.append(event() if cuda else _host()))
    if cuda:
        torch.cuda.synchronize()
        return {
            f"{phase}_s": round(start.elapsed_time(end) / 1e3, 7)
            for phase, start, end in zip(PHASES, marks, marks[1:], strict=False)
        }
    seconds = {}
    for phase, start, end in zip(PHASES, marks, marks[1:], strict=False):
        seconds[f"{phase}_s"] = round(end[0] - start[0], 7)
        seconds[f"{phase}_cpu_s"] = round(end[1] - start[1], 7)
    return seconds


def cuda_memory(arm: Arm, x: Tensor, upstream: Tensor, **options: Any) -> dict[str, int]:
    """Bytes of one training step on CUDA, after at least one step has made the optimiser's state.

    `peak_bytes`: the most that weights, optimiser state, gradients and activations hold at once, without x and the
    upstream gradient, and without other arms. `activation_bytes`: what the forward pass leaves allocated.
    """
    arm.optimiser.zero_grad(set_to_none=True)
    x.grad = None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    held: list[int] = []
    _step(arm, x, upstream, options, lambda: held.append(torch.cuda.memory_allocated()))
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    state = [value for slots in arm.optimiser.state.values() for value in slots.values()]
    own = [*arm.module.parameters(), *arm.module.buffers(), *state]
    kept = sum(t.numel() * t.element_size() for t in own if isinstance(t, Tensor) and t.is_cuda)
    return {"peak_bytes": peak + kept, "activation_bytes": held[1] - held[0]}


def _step(arm: Arm, x: Tensor, upstream: Tensor, options: dict[str, Any], mark: Callable[[], None]) -> None:
    arm.optimiser.zero_grad(set_to_none=True)
    x.grad = None
    mark()
    y = arm.call(x, **options)
    mark()
    y.backward(upstream)
    mark()
    arm.optimiser.step()
    mark()


def _host() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def event() -> torch.cuda.Event:
    """A mark on the device's own clock, now."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def mean_seconds(steps: Callable[[], None], count: int, *, cuda: bool, quantity: str = "step") -> dict[str, float]:
    """Seconds of one of the `count` steps that a call makes, the mean.

    On a CPU both the wall's (`step_s`) and the process's own (`step_cpu_s`), which other load does not lengthen. On
    CUDA the wall's until the device is done, with the host's time to launch kernels.
    """
    if cuda:
        torch.cuda.synchronize()
    began = time.perf_counter(), time.process_time()
    steps()
    if cuda:
        torch.cuda.synchronize()
    ended = time.perf_counter(), time.process_time()
    wall, own = (round((b - a) / count, 9) for a, b in zip(began, ended, strict=True))
    return {f"{quantity}_s": wall} if cuda else {f"{quantity}_s": wall, f"{quantity}_cpu_s": own}
