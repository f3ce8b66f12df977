"""The attention function alone, forward and backward, of every mechanism beside PyTorch's fused softmax attention.

A case holds several arms (`attention_arms`) at one length. Each is held to its definition first; then, in each
repetition, all run one after the other in an order drawn anew, so that a ratio is taken within repetitions. An arm that
is over soon runs several times in a row, and counts with the mean.
"""

import re
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ortho._checks import one_of, positive_int
from ortho.attention.chunking import CHUNK
from ortho.cost.counting import Allocations
from paper.experiments.engine.records import Case, Needs
from paper.experiments.engine.runner import Experiment
from paper.experiments.engine.stopwatch import interleaved
from paper.experiments.speed import (
    attention_analysis as attention_rows,
)
from paper.experiments.speed import (
    attention_variants as attention_arms,
)
from paper.experiments.speed.attention_variants import (
    SETS,
    YARDSTICK,
    Attention,
    Operands,
)

PHASES = ("forward", "backward")
SEEDS = {"inputs": attention_arms.SEED, "order": 1}

# How long a timing should take, by calls in a row, and how long all repetitions of a case, and how many there are.
CALL_SECONDS = {"cpu": 0.2, "cuda": 0.01}
SECONDS = {"cpu": 8.0, "cuda": 4.0}
REPETITIONS = {"cpu": (3, 15), "cuda": (5, 31)}
RATES = {"cpu": {"float32": 8e10}, "cuda": {"bfloat16": 3e14, "float32": 1e13}}  # FLOPs a second, about
START_SECONDS = {"cpu": 2.0, "cuda": 6.0}  # until the first timing
COMPILE_SECONDS = 40.0  # an arm


def case(
    N: int,
    arms: str = "main",
    *,
    device: str = "cpu",
    B: int = 1,
    H: int = 8,
    K: int = 64,
    dtype: str = "float32",
    chunk: int = CHUNK,
    compiled: bool = False,
) -> Case:
    """One configuration: operands (B, H, N, K), and which arms (`attention_arms.SETS`).

    Causal mechanisms go in chunks of at most `chunk`. `compiled` adds to each mechanism its `torch.compile`d twin.
    Raises TypeError or ValueError for sizes below 1 and unknown names.
    """
    return {
        "device": one_of("device", device, SECONDS),
        "arms": one_of("arms", arms, SETS),
        "B": positive_int("B", B),
        "H": positive_int("H", H),
        "N": positive_int("N", N),
        "K": positive_int("K", K),
        "dtype": one_of("dtype", dtype, RATES[device]),
        "chunk": positive_int("chunk", chunk),
        "compiled": compiled,
    }


def cases(device: str) -> list[Case]:
    """All configurations for a device, the most informative first."""
    if device == "cuda":
        return _cuda_cases()
    lengths = [case(N) for N in (4096, 2048, 1024, 512, 8192)]
    others = [case(N, "recurrent") for N in (512, 1024, 2048)] + [case(N, "family") for N in (4096, 1024)]
    return [*lengths, *others, case(16384)]


def _cuda_cases() -> list[Case]:
    """Chunks follow one another in a loop: long sequences have at most 128 of them, 16 where the loop is compiled."""

    def at(N: int, arms: str = "main", dtype: str = "bfloat16", compiled: bool = False) -> Case:
        chunk = max(CHUNK, N // (16 if compiled else 128))
        return case(N, arms, device="cuda", dtype=dtype, chunk=chunk, compiled=compiled)

    main = [at(N) for N in (4096, 16384, 65536, 1024, 8192, 32768, 131072, 2048)]
    others = [at(2048, "recurrent"), at(4096, "family"), at(4096, compiled=True)]
    single = [at(N, dtype="float32") for N in (4096, 16384, 1024, 8192, 32768, 2048, 65536)]
    return [*main, *others, *single, at(32768, compiled=True)]


def run(case: Case, seconds: float | None = None) -> dict[str, Any]:
    """Measure one case: check every arm against its definition, then time them in turn.

    `seconds` bounds the time of the repetitions, of which there are always a few. Raises AssertionError if an arm's
    output or gradients are off. An arm that runs out of the device's memory, a kernel that does not serve the call, and
    a compiled twin that fails or is off, is recorded as a failure and not timed; the yardstick's failure is the case's.
    """
    shared, upstream = attention_arms.draw(case)
    arms: dict[str, Callable[[], dict[str, float]]] = {}
    facts: dict[str, Any] = {}
    failures: dict[str, str] = {}

    def operands_of(arm: str) -> Operands:
        return (*shared, *attention_arms.draw(case, arm)[0][len(shared) :]) if attention_arms.gated(arm) else shared

    def enter(name: str, call: Attention) -> None:
        step = partial(timed, call, operands_of(name), upstream)
        facts[name] = _first_steps(case["device"], step)
        arms[name] = partial(step, facts[name]["calls"])

    for name in attention_arms.arms_of(case):
        call = attention_arms.function(name, case["chunk"])
        try:
            attention_arms.check(case, name, call)
            enter(name, call)
        except (RuntimeError, TypeError, ValueError) as error:
            if not (isinstance(error, torch.OutOfMemoryError) or attention_arms.by_name(name)):
                raise
            failures[name] = _reason(error)
        _give_back(case["device"])
    if YARDSTICK in failures:
        raise RuntimeError(f"{YARDSTICK}: expected to fit into the device, got {failures[YARDSTICK]}")
    if case["compiled"]:
        torch.compiler.reset()  # its count of recompilations is per process, and a case must not meet an earlier one's
        for name in [name for name in arms if not name.startswith(YARDSTICK)]:
            twin = f"{name} compiled"
            try:
                call = torch.compile(attention_arms.function(name, case["chunk"]), fullgraph=True, dynamic=False)
                attention_arms.check_twin(case, name, call, operands_of(name), upstream)
                enter(twin, call)
            except Exception as error:  # whatever a compiler raises is its result here
                failures[twin] = _reason(error)
            _give_back(case["device"])
    times, order = interleaved(
        arms,
        warm_up=0,  # every arm has run at this size
        repetitions=REPETITIONS[case["device"]],
        seconds=SECONDS[case["device"]] if seconds is None else seconds,
        seed=SEEDS["order"],
    )
    return {"seeds": SEEDS, "repetitions": times, "facts": facts | {"order": order}, "failures": failures}


def _first_steps(device: str, step: Callable[[int], dict[str, float]]) -> dict[str, int]:
    """How many calls make a timing, and the bytes that one takes at most, besides q, k, v and the upstream gradient.

    On CUDA by the allocator; on a CPU the tensors', counted, and those of the largest.
    """
    if device == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        times = step(1)
        facts = {"peak_bytes": torch.cuda.max_memory_allocated() - before}
    else:
        with Allocations() as memory:
            times = step(1)
        facts = {"peak_bytes": memory.peak, "largest_bytes": memory.largest}
    if sum(times[f"{phase}_s"] for phase in PHASES) < 10 * CALL_SECONDS[device]:  # else it is one call in any case
        times = step(1)  # warm, and without the counting
    return facts | {"calls": max(1, round(CALL_SECONDS[device] / sum(times[f"{phase}_s"] for phase in PHASES)))}


def timed(call: Attention, operands: Operands, upstream: Tensor, calls: int) -> dict[str, float]:
    """Seconds of a forward pass and of a backward pass, the means over some calls in a row.

    On a CPU both the wall's (`forward_s`) and the process's own (`forward_cpu_s`), which other load does not lengthen.
    On CUDA by events, behind an untimed call: the timed ones are queued while the device is still at work, and the
    host's time to launch kernels does not show unless it is the longer.
    """
    cuda = upstream.is_cuda
    marks: list[Any] = []

    def mark() -> None:
        marks.append(_event() if cuda else (time.perf_counter(), time.process_time()))

    def step() -> None:
        mark()
        o = call(*operands)
        mark()
        gradients = torch.autograd.grad(o, operands, upstream)
        mark()
        del o, gradients  # their memory is given back off the clock

    if cuda:
        step()
        marks.clear()
    for _ in range(calls):
        step()
    if cuda:
        torch.cuda.synchronize()
    seconds = {}
    for index, phase in enumerate(PHASES):
        pairs = list(zip(marks[index::3], marks[index + 1 :: 3], strict=True))
        if cuda:
            seconds[f"{phase}_s"] = sum(start.elapsed_time(end) for start, end in pairs) / 1e3 / calls
            continue
        for clock, quantity in enumerate((f"{phase}_s", f"{phase}_cpu_s")):
            seconds[quantity] = sum(end[clock] - start[clock] for start, end in pairs) / calls
    return {quantity: round(value, 9) for quantity, value in seconds.items()}


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _give_back(device: str) -> None:
    """Return the memory that an arm no longer uses, so that the next one meets the device as the first did."""
    if device == "cuda":
        torch.cuda.empty_cache()


def _reason(error: Exception) -> str:
    """What went wrong, in one line and without the paths of the machine."""
    line = next(iter(str(error).strip().splitlines()), "")
    return re.sub(r"(/[\w.+-]+)+/", "", f"{type(error).__name__}: {line}")[:300]


def work(case: Case) -> float:
    """Seconds that a case takes, roughly; the runner corrects them by what like cases took."""
    device = case["device"]
    rate, shortest = RATES[device][case["dtype"]], CALL_SECONDS[device]
    arms = attention_arms.arms_of(case)
    flops = [attention_arms.declared(case, arm) for arm in arms]
    one_round = sum(max(shortest, (cost.forward + cost.backward) / rate) for cost in flops)
    least, most = REPETITIONS[device]
    rounds = 1 + min(most, max(least, SECONDS[device] / one_round))
    return float(START_SECONDS[device] + COMPILE_SECONDS * len(arms) * case["compiled"] + rounds * one_round)


def label(case: Case) -> str:
    """A case in a few words."""
    words = [case["arms"], f"N={case['N']}", case["dtype"]]
    return " ".join(words + (["compiled"] if case["compiled"] else []))


# What a timed call runs, whatever the mechanism.

ATTENTION_SPEED = Experiment(
    name="attention-speed",
    title="time and memory of attention alone, forward and backward, beside the fused softmax attention",
    cases=cases,
    run=run,
    work=work,
    label=label,
    line=attention_rows.line,
    show=attention_rows.table,
    needs=Needs(
        configuration={name: type(value) for name, value in case(1).items()},
        arms=(YARDSTICK,),
        quantities=tuple(f"{phase}_s" for phase in PHASES),
    ),
    quiet=True,
)
