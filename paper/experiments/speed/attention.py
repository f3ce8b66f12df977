"""The attention function alone, forward and backward, of every mechanism beside PyTorch's fused softmax attention.

A case holds several arms (`attention_variants`) at one length. Each is first checked against its definition; then all
are timed in turn. A short arm runs several times in a row, and the mean counts. Four experiments measure like this:
kernels; memories that erase; patterns; and softmax attention itself, materialised, in tiles, and by PyTorch's kernels,
each by its name.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ortho.attention.recurrence import CHUNK
from ortho.checks import one_of
from paper.experiments.engine.records import Case
from paper.experiments.speed import attention_variants as variants
from paper.experiments.speed import benchmark
from paper.experiments.speed.attention_variants import SETS, YARDSTICK, Attention, Operands
from paper.experiments.speed.benchmark import PASSES, Budget, Timing

SEEDS = {"inputs": variants.SEED, "order": 1}

CALL_SECONDS = {"cpu": 0.2, "cuda": 0.01}  # the length of one timing, filled by calls in a row
BUDGETS = {"cpu": Budget(8.0, 3, 15), "cuda": Budget(4.0, 5, 31)}  # without warm-up: every arm has run at its size
RATES = {"cpu": {"float32": 8e10}, "cuda": {"bfloat16": 3e14, "float32": 1e13}}  # FLOPs a second, about


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
) -> Case:
    """One configuration: operands (B, H, N, K), and which arms (`variants.SETS`).

    Causal mechanisms work in chunks of at most `chunk`. Raises TypeError or ValueError for sizes below 1 and unknown
    names.
    """
    return {
        "device": one_of("device", device, RATES),
        "arms": one_of("arms", arms, SETS),
        **benchmark.sizes(B=B, H=H, N=N, K=K, chunk=chunk),
        "dtype": one_of("dtype", dtype, RATES[device]),
        "compiled": False,
    }


def _on_cuda(N: int, arms: str = "main", dtype: str = "bfloat16", **sizes: int) -> Case:
    return case(N, arms, device="cuda", dtype=dtype, **sizes)


def cases(device: str) -> list[Case]:
    """The cases of kernels, the most informative first.

    Chunks follow one another in a loop: on CUDA long sequences have at most 128 of them.
    """
    if device == "cpu":
        lengths = [case(N) for N in (4096, 2048, 1024, 512, 8192)]
        others = [case(N, "recurrent") for N in (512, 1024, 2048)] + [case(N, "family") for N in (4096, 1024)]
        return [*lengths, *others, case(16384)]

    def at(N: int, arms: str = "main", dtype: str = "bfloat16") -> Case:
        return _on_cuda(N, arms, dtype, chunk=max(CHUNK, N // 128))

    main = [at(N) for N in (4096, 16384, 65536, 1024, 8192, 32768, 131072, 2048)]
    others = [at(2048, "recurrent"), at(4096, "family")]
    single = [at(N, dtype="float32") for N in (4096, 16384, 1024, 8192, 32768, 2048, 65536)]
    return [*main, *others, *single]


def memory_cases(device: str) -> list[Case]:
    """The delta rule, plain and gated, at lengths at which softmax attention takes minutes; and all other memories.

    Chunks follow one another in a loop: on CUDA long sequences have at most 128 of them.
    """
    if device == "cpu":
        beside = [case(N, "delta") for N in (4096, 1024, 2048, 512, 8192)]
        alone = [case(N, "delta alone") for N in (2048, 4096, 8192, 16384, 32768)]
        return [*beside, *alone, case(4096, "memories"), case(1024, "memories")]

    def at(N: int, arms: str = "delta", dtype: str = "bfloat16") -> Case:
        return _on_cuda(N, arms, dtype, K=128, chunk=max(CHUNK, N // 128))

    lengths = [at(N) for N in (4096, 16384, 1024, 65536, 8192, 2048, 32768)]
    return [*lengths, at(4096, "memories"), at(4096, dtype="float32")]


def pattern_cases(device: str) -> list[Case]:
    """Windows at lengths at which softmax attention takes minutes, and every other pattern and choice of keys."""
    if device == "cuda":
        lengths = [_on_cuda(N, "patterns") for N in (4096, 16384, 1024, 8192)]
        in_one_kernel = [_on_cuda(N, "compiled patterns") for N in (4096, 16384)]
        return [*in_one_kernel, *lengths, *(_on_cuda(N, "dynamic") for N in (4096, 16384))]
    alone = [case(N, "window alone") for N in (2048, 4096, 8192, 16384, 32768)]
    return [case(4096, "patterns"), *alone, case(4096, "dynamic"), case(1024, "patterns"), case(1024, "dynamic")]


def flash_cases(device: str) -> list[Case]:
    """Softmax attention itself, the most informative first."""
    if device == "cpu":
        return [*(case(N, "exact") for N in (1024, 4096, 256, 2048, 512)), case(2048, "kernels")]
    lengths = [_on_cuda(N, "exact") for N in (4096, 1024, 16384, 512, 2048, 8192)]
    kernels = [_on_cuda(N, "kernels") for N in (4096, 1024, 16384)] + [_on_cuda(4096, "kernels", "float32")]
    single = [_on_cuda(N, "exact", "float32") for N in (1024, 4096)]
    return [*lengths, *kernels, *single, *(_on_cuda(N, "exact", K=128) for N in (1024, 4096))]


def run(case: Case, seconds: float | None = None) -> dict[str, Any]:
    """Measure one case: check every arm against its definition, then time them in turn.

    `seconds` bounds the time of the repetitions, but there are always a few. Raises AssertionError if an arm's output
    or gradients are off. An arm that runs out of the device's memory and a kernel that does not serve the call are
    recorded as failures, not timed; if the yardstick fails, so does the case.
    """
    shared, upstream = variants.draw(case)
    arms: dict[str, Timing] = {}
    facts: dict[str, Any] = {}
    failures: dict[str, str] = {}

    def operands_of(arm: str) -> Operands:
        return (*shared, *variants.draw(case, arm)[0][len(shared) :]) if variants.gated(arm) else shared

    def enter(name: str, call: Attention) -> None:
        step = partial(benchmark.timed, call, operands_of(name), upstream)
        facts[name] = _first_steps(case["device"], step)
        arms[name] = partial(step, facts[name]["calls"])

    for name in variants.arms_of(case):
        call = variants.function(name, case["chunk"])
        try:
            variants.check(case, name, call)
            enter(name, call)
        except (RuntimeError, TypeError, ValueError) as error:
            if not (isinstance(error, torch.OutOfMemoryError) or variants.by_name(name)):
                raise
            failures[name] = benchmark.reason(error)
        _give_back(case["device"])
    if YARDSTICK in failures:
        raise RuntimeError(f"{YARDSTICK}: expected to fit into the device, got {failures[YARDSTICK]}")
    return benchmark.compare(arms, BUDGETS[case["device"]], SEEDS, seconds, facts=facts, failures=failures)


def _first_steps(device: str, step: Callable[[int], dict[str, float]]) -> dict[str, int]:
    """How many calls make a timing, and the most bytes that one takes, besides q, k, v and the upstream gradient."""
    times, facts = benchmark.peak(device, partial(step, 1))
    if sum(times[f"{phase}_s"] for phase in PASSES) < 10 * CALL_SECONDS[device]:  # else it is one call in any case
        times = step(1)  # warm, and without the counting
    return facts | {"calls": benchmark.calls_in(CALL_SECONDS[device], sum(times[f"{phase}_s"] for phase in PASSES))}


def _give_back(device: str) -> None:
    """Free the memory that an arm no longer uses, so that the next one finds the device as the first did."""
    if device == "cuda":
        torch.cuda.empty_cache()


label = "{arms} N={N} K={K} {dtype}".format_map
