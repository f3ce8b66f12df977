"""Tokens a second that a whole language model decodes, depending on what its attention keeps of the context.

Operations are launched one by one, as PyTorch does by default: with few sequences, a fast device waits for the
launches.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ortho.attention.cache import Cache
from ortho.checks import one_of, positive_int
from ortho.cost.configurations import CONFIGURATIONS, Configuration
from ortho.models.language_model import LanguageModel
from paper.experiments.engine.records import Case, Record
from paper.experiments.speed import benchmark
from paper.experiments.speed.analysis import Row, by_arm, quartiles, ratio, row_of
from paper.experiments.speed.benchmark import Budget, assert_close

MODEL = "GPT-2 medium"
STANDARD = "learned"
ARMS: dict[str, dict[str, Any]] = {
    STANDARD: {},
    "frozen": {"projection": "frozen"},
    "multi-query": {"num_kv_heads": 1},
    "window": {"attention": "window"},
    "linear": {"attention": "linear"},
    "delta": {"attention": "delta"},
}
SEEDS = {"weights": 0, "inputs": 1, "order": 2}
CONTEXT = 512
CHECKED_LAYERS, CHECKED_LENGTH, CHECKED_STEPS = 2, 264, 4  # more tokens than a window has; the last ones one by one
STEPS = 16  # at most, one after the other: the context grows by as many tokens during one timing
CALL_SECONDS = {"cpu": 0.5, "cuda": 0.2}
BUDGETS = {"cpu": Budget(40.0, 5, 15, warm_up=1), "cuda": Budget(12.0, 5, 31, warm_up=1)}
RATES = {"cpu": 4e10, "cuda": 1e14}  # FLOPs a second, about, of reading
STAGES = 200  # roundings: some 20 successive results, of sums whose errors are some ten roundings
AS_FAR = 4  # an error may be this many times that of another computation in the same precision


def case(B: int = 1, *, device: str = "cpu", dtype: str = "float32", N: int = CONTEXT) -> Case:
    """One configuration: B sequences, decoded after N tokens each.

    Raises TypeError or ValueError for sizes below 1, unknown names, and a context that leaves no room.
    """
    most = CONFIGURATIONS[MODEL].N - STEPS
    if positive_int("N", N) > most:
        raise ValueError(f"N: expected at most {most} tokens, got {N}")
    return {
        "device": one_of("device", device, RATES),
        "model": MODEL,
        "B": positive_int("B", B),
        "N": N,
        "dtype": one_of("dtype", dtype, ("float32", "bfloat16")),
    }


def cases(device: str) -> list[Case]:
    """All configurations for a device, the most informative first."""
    if device == "cuda":
        return [case(B, device="cuda", dtype="bfloat16") for B in (32, 1)]
    return [case()]


def run(case: Case, seconds: float | None = None) -> dict[str, Any]:
    """Measure one case: check that each model decodes what it computes for the whole text, then time all in turn.

    `seconds` bounds the time of the repetitions, but there are always a few. Raises AssertionError if logits are off.
    """
    device = case["device"]
    generator = torch.Generator().manual_seed(SEEDS["inputs"])
    (tokens,) = CONFIGURATIONS[MODEL].inputs(case["B"], generator=generator)
    tokens = tokens[:, : case["N"] + STEPS].to(device)
    timings, facts = {}, {}
    for arm in ARMS:
        check(case, arm, tokens)
        module = build(case, arm)
        caches = module.new_caches(case["N"] + STEPS)
        module(tokens[:, : case["N"]], caches=caches)
        step = partial(timed, module, caches, tokens[:, case["N"] :])
        step(1)
        calls = min(STEPS, benchmark.calls_in(CALL_SECONDS[device], step(1)["step_s"]))
        weights = sum(x.nbytes for x in (*module.parameters(), *module.buffers()))
        facts[arm] = {"held_bytes": sum(cache.nbytes for cache in caches), "weight_bytes": weights, "calls": calls}
        timings[arm] = partial(step, calls)
    return benchmark.compare(timings, BUDGETS[device], SEEDS, seconds, facts=facts)


def build(case: Case, arm: str, configuration: Configuration | None = None, **kwargs: Any) -> LanguageModel:
    """The model of an arm, its weights drawn on the case's device in float32."""
    generator = torch.Generator(case["device"]).manual_seed(SEEDS["weights"])
    made = CONFIGURATIONS[MODEL] if configuration is None else configuration
    module = made.build(device=case["device"], generator=generator, **ARMS[arm], **kwargs)
    if not isinstance(module, LanguageModel):
        raise TypeError(f"model: expected a LanguageModel, got {type(module).__name__}")
    return module.to(benchmark.dtype(case))


def check(case: Case, arm: str, tokens: Tensor) -> None:
    """Raise AssertionError unless two blocks of an arm's model decode what their definition computes for the whole.

    They are compared in float32, after more tokens than a window has. In the case's own precision, the error may be
    `AS_FAR` times that of the definition in that precision.
    """
    small = replace(CONFIGURATIONS[MODEL], L=CHECKED_LAYERS)
    few = tokens[:1, : min(CHECKED_LENGTH, tokens.shape[1])]
    exact = build(case | {"dtype": "float32"}, arm, small, form="reference")
    with torch.no_grad():
        want = exact(few).double()
    single = _decoded(build(case | {"dtype": "float32"}, arm, small), few)
    assert_close(arm, single, want, benchmark.rounding_error(STAGES, 0, torch.float32))
    if case["dtype"] != "float32":
        with torch.no_grad():
            bound = AS_FAR * benchmark.relative_error(build(case, arm, small, form="reference")(few), want)
        assert_close(arm, _decoded(build(case, arm, small), few), want, bound)


def _decoded(module: LanguageModel, tokens: Tensor) -> Tensor:
    """The logits of all tokens; the last few tokens are read one by one."""
    caches, N = module.new_caches(tokens.shape[1]), tokens.shape[1] - CHECKED_STEPS
    pieces = [tokens[:, :N], *tokens[:, N:].split(1, 1)]
    return torch.cat([module(piece, caches=caches) for piece in pieces], 1)


def timed(module: LanguageModel, caches: Sequence[Cache], tokens: Tensor, calls: int) -> dict[str, float]:
    """Mean seconds of a step, over the first `calls` tokens, which copies of the caches read one after the other."""
    readers = [cache.copy() for cache in caches]

    def steps() -> None:
        for token in tokens[:, :calls].split(1, 1):
            module(token, caches=readers)

    return benchmark.mean_seconds(steps, calls, cuda=tokens.is_cuda)


def rows(records: Sequence[Record]) -> list[Row]:
    """One row per record and arm: `tokens_per_s` of all sequences and `speedup` over the standard model (the ratio
    within repetitions), (q1, median, q3) each; `held_bytes` of the caches and `weight_bytes`."""
    found = []
    for record in records:
        times = by_arm(record, "step")
        for arm, own in times.items():
            row = row_of(record, arm=arm, repetitions=len(own), speedup=ratio(times[STANDARD], own))
            row["tokens_per_s"] = quartiles([row["B"] / value for value in own])
            facts = record["facts"].get(arm, {})
            found.append(row | {name: facts.get(name) for name in ("held_bytes", "weight_bytes")})
    return found


label = "{model} B={B} N={N} {dtype}".format_map
