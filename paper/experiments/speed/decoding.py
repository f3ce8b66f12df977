"""One more token after a context of N: time and memory of decoding with each mechanism's cache.

An arm is a mechanism and a context, 'delta 4096'. A case holds the mechanisms of some families at all their contexts,
beside softmax attention at the shortest. Each mechanism is first read in pieces and checked against its definition.
Then, in each repetition, all arms run one after the other in an order drawn anew, so that the cost of a longer context
is a ratio within repetitions. A timing begins with a copy of the cache; its context grows by a few per cent during the
timing, and a processor's caches may hold as much of it as they have room for.
"""

import statistics
from collections.abc import Iterable
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ortho.attention import MECHANISMS
from ortho.attention.cache import Cache, new_cache
from ortho.attention.mechanism import Mechanism
from ortho.checks import one_of
from ortho.cost.attention import DecodeCost, decoded
from paper.experiments.engine.records import Case, Record
from paper.experiments.speed import attention_variants, benchmark
from paper.experiments.speed.analysis import Row, by_arm, quartiles, ratio, row_of
from paper.experiments.speed.attention_analysis import exponent
from paper.experiments.speed.benchmark import Budget, Timing

FAMILIES = {
    "softmax": ("softmax", "position_bias"),
    "recurrent": ("linear", "recurrent"),
    "patterns": ("sparse",),
    "dynamic": ("dynamic_sparse",),
}
SHARED = "multi-query"  # softmax attention whose query heads share one head of keys and values
LEFT_OUT = ("flash",)  # the same attention as softmax, for training
CONTEXTS = {"cpu": (1024, 4096, 16384, 65536), "cuda": (1024, 4096, 16384, 65536, 131072)}
YARDSTICK = "softmax 1024"

SEEDS = {"inputs": attention_variants.SEED, "order": 1}
READ_FLOPS = {"cpu": 1e12, "cuda": 1e15}  # at most, for reading the context; softmax attention itself has no limit
HELD_BYTES = {"cpu": 2**30, "cuda": 2**32}  # at most, of a cache
PIECE = 4096  # tokens
GROWTH = 32  # a timing adds at most one token for this many of the context
CALL_SECONDS = {"cpu": 0.01, "cuda": 0.02}
BUDGETS = {"cpu": Budget(30.0, 5, 25, warm_up=1), "cuda": Budget(15.0, 5, 31, warm_up=1)}
RATES = {"cpu": {"float32": 4e10}, "cuda": {"bfloat16": 1e14}}  # FLOPs a second, about, of reading

CHECKED_LENGTH, CHECKED_STEPS = 320, 4  # more tokens than a window has; how many of them one by one


def case(
    family: str, *, device: str = "cpu", B: int = 1, H: int = 8, K: int = 64, dtype: str = "float32", N: int = 0
) -> Case:
    """One configuration: B sequences in H heads of width K; contexts up to N, by default all of the device's.

    Raises TypeError or ValueError for sizes below 1 and unknown names.
    """
    return {
        "device": one_of("device", device, CONTEXTS),
        "family": one_of("family", family, FAMILIES),
        **benchmark.sizes(B=B, H=H, K=K, N=N or max(CONTEXTS[device])),
        "dtype": one_of("dtype", dtype, RATES[device]),
    }


def cases(device: str) -> list[Case]:
    """All configurations for a device, the most informative first."""
    kind: dict[str, Any] = {"device": "cuda", "B": 8, "dtype": "bfloat16"} if device == "cuda" else {}
    return [case(family, **kind) for family in FAMILIES]


def arms_of(case: Case) -> tuple[str, ...]:
    """The arms of a case: its mechanisms at the contexts that they can be read to, and the yardstick."""
    wanted = [m.name for m in MECHANISMS.values() if m.family in FAMILIES[case["family"]] and m.causal]
    names = [name for name in wanted if name not in LEFT_OUT]
    if case["family"] == "softmax":
        names.append(SHARED)
    contexts = [N for N in CONTEXTS[case["device"]] if case["N"] >= N]
    arms = [f"{name} {N}" for name in names for N in contexts if _readable(case, name, N)]
    return tuple(dict.fromkeys([YARDSTICK, *arms]))


def _readable(case: Case, name: str, N: int) -> bool:
    """Whether a context can be read in reasonable time and its cache fits into the limit of memory."""
    if name != "softmax":
        cost = _mechanism(name).cost(*_sizes(case, N), causal=True, itemsize=benchmark.dtype(case).itemsize)
        if cost.forward > READ_FLOPS[case["device"]]:
            return False
    return bool(declared(case, f"{name} {N}").nbytes <= HELD_BYTES[case["device"]])


def _sizes(case: Case, N: int) -> tuple[int, ...]:
    return case["B"], N, case["H"], case["K"], case["K"]


def _mechanism(name: str) -> Mechanism:
    return MECHANISMS["softmax" if name == SHARED else name]


def parts_of(arm: str) -> tuple[str, int]:
    """(name, context) of an arm."""
    name, context = arm.split()
    return name, int(context)


def declared(case: Case, arm: str) -> DecodeCost:
    """The closed form of a step: the token after the context."""
    name, N = parts_of(arm)
    shared = 1 if name == SHARED else None
    return decoded(
        _mechanism(name).name, *_sizes(case, N + 1), num_kv_heads=shared, itemsize=benchmark.dtype(case).itemsize
    )


def run(case: Case, seconds: float | None = None) -> dict[str, Any]:
    """Measure one case: check every mechanism's cache against its definition, then time the arms in turn.

    `seconds` bounds the time of the repetitions, but there are always a few. Raises AssertionError if an output is off.
    An arm whose context cannot be read, as it exceeds the mechanism's horizon or the device's memory, is recorded as a
    failure; if the yardstick fails, so does the case.
    """
    arms: dict[str, Timing] = {}
    facts: dict[str, Any] = {}
    failures: dict[str, str] = {}
    names = arms_of(case)
    for name in dict.fromkeys(parts_of(arm)[0] for arm in names):
        check(case, name)
    for arm in names:
        name, N = parts_of(arm)
        try:
            cache, tokens = _read(case, name, N, N // GROWTH)
            step = partial(timed, cache, tokens)
            first = step(1)
            calls = min(N // GROWTH, benchmark.calls_in(CALL_SECONDS[case["device"]], step(1)["step_s"]))
        except (torch.OutOfMemoryError, ValueError) as error:
            if arm == YARDSTICK or (isinstance(error, ValueError) and not str(error).startswith("horizon:")):
                raise
            failures[arm] = f"{type(error).__name__}: {error}"[:300]
            continue
        finally:
            if case["device"] == "cuda":
                torch.cuda.empty_cache()
        facts[arm] = {"held_bytes": cache.nbytes, "calls": calls, "first_s": first["step_s"]}
        arms[arm] = partial(step, calls)
    return benchmark.compare(arms, BUDGETS[case["device"]], SEEDS, seconds, facts=facts, failures=failures)


def _read(case: Case, name: str, N: int, more: int) -> tuple[Cache, list[dict[str, Any]]]:
    """A cache that has read N tokens and has room for `more`, and the operands of these further tokens.

    The intermediate results of a recurrent mechanism may be much larger than its tokens: it reads them in pieces.
    """
    operands = draw(case, name, N + more)
    cache = new_cache(_mechanism(name).name, N + more)
    piece = PIECE if _mechanism(name).family in FAMILIES["recurrent"] else N
    for start in range(0, N, piece):
        cache.attend(**_tokens(operands, start, min(N, start + piece)))
    return cache, [_tokens(operands, t, t + 1) for t in range(N, N + more)]


def _tokens(operands: dict[str, Tensor], start: int, stop: int) -> dict[str, Any]:
    """Some tokens' operands, in memory of their own; one that is not of tokens, as a scan's rates, is for all."""
    tokens = operands["q"].shape[2]
    cut = {name: x[:, :, start:stop] if x.shape[2] == tokens else x for name, x in operands.items()}
    return {name: x.clone(memory_format=torch.contiguous_format) for name, x in cut.items()}


def draw(case: Case, name: str, N: int) -> dict[str, Tensor]:
    """q, k, v and a mechanism's gates of N tokens, by their names."""
    found, _ = attention_variants.draw(case | {"N": N}, _mechanism(name).name)
    names = ("q", "k", "v", *_mechanism(name).gates)
    operands = dict(zip(names, (x.detach() for x in found), strict=True))
    if name == SHARED:
        operands |= {key: operands[key][:, :1] for key in ("k", "v")}
    return operands


def check(case: Case, name: str) -> None:
    """Raise AssertionError unless a cache that reads a short sequence in pieces gives what the definition does."""
    small = case | {"B": 1, "N": CHECKED_LENGTH}
    operands = draw(small, name, CHECKED_LENGTH)
    cache = new_cache(_mechanism(name).name, CHECKED_LENGTH)
    cuts = [0, CHECKED_LENGTH // 2, *range(CHECKED_LENGTH - CHECKED_STEPS, CHECKED_LENGTH + 1)]
    rows: list[Tensor] = [cache.attend(**_tokens(operands, start, stop)) for start, stop in pairwise(cuts)]
    got = torch.cat(rows, -2)
    working = torch.promote_types(got.dtype, torch.float32)
    spread: dict[str, Any] = {n: x.expand(-1, case["H"], *x.shape[2:]).to(working) for n, x in operands.items()}
    with torch.no_grad():
        want: Tensor = _mechanism(name).reference(**spread, is_causal=True)
    bound = attention_variants.tolerance(small) + attention_variants.tolerance(small | {"dtype": "float32"})
    benchmark.assert_close(name, got, want, bound)


def timed(cache: Cache, tokens: list[dict[str, Any]], calls: int) -> dict[str, float]:
    """Mean seconds of a step, over the first `calls` tokens, which a copy of the cache reads one after the other."""
    reader = cache.copy()

    def steps() -> None:
        for token in tokens[:calls]:
            reader.attend(**token)

    return benchmark.mean_seconds(steps, calls, cuda=tokens[0]["q"].is_cuda)


label = "{family} B={B} {dtype}".format_map


# ---------------------------------------------------------------------------------------------- what the records say


def rows(records: Iterable[Record]) -> list[Row]:
    """One row per record and arm: `name`, `context`, `seconds` of a step and their `ratio` to the yardstick's within
    repetitions, (q1, median, q3) each; `tokens_per_s`, of all sequences; `held_bytes`."""
    found = []
    for record in records:
        times = by_arm(record, "step")
        for arm, own in times.items():
            name, context = parts_of(arm)
            if name not in (SHARED, *MECHANISMS):  # a mechanism of earlier records
                continue
            row = row_of(record, name=name, context=context, repetitions=len(own), seconds=quartiles(own))
            row |= {"ratio": ratio(own, times[YARDSTICK]), "tokens_per_s": row["B"] / statistics.median(own)}
            found.append(row | {"held_bytes": record["facts"][arm].get("held_bytes")})
    return found


def slopes(records: Iterable[Record]) -> list[Row]:
    """One row per record and mechanism with two contexts or more: the exponent with which a step's time grows with the
    context, fitted in each repetition, (q1, median, q3); and the exponent of the bytes."""
    found = []
    for record in records:
        groups: dict[str, dict[int, str]] = {}
        for arm in record["repetitions"]:
            name, context = parts_of(arm)
            if name in (SHARED, *MECHANISMS):
                groups.setdefault(name, {})[context] = arm
        steps = by_arm(record, "step")
        for name, arms in groups.items():
            if len(arms) < 2:
                continue
            fits = [
                exponent(dict(zip(arms, each, strict=True)))
                for each in zip(*(steps[arm] for arm in arms.values()), strict=True)
            ]
            held = {context: record["facts"][arm]["held_bytes"] for context, arm in arms.items()}
            figures = {"time": quartiles(fits), "bytes": exponent(held)}
            found.append(row_of(record, name=name, contexts=sorted(arms), **figures))
    return found
