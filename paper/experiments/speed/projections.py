"""How long it takes to make queries and keys by dense frozen matrices and by structured ones.

First q, k and the gradient of x of every arm are checked in float64 against the matrices that it stands for. Then all
run in turn, in an order drawn anew for each repetition, several calls in a row: the projection alone, without a graph
(`forward`), and with the gradient of x from those of q and k (`step`). Heads have width 64.
"""

import copy
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ortho.checks import one_of, positive_int
from ortho.heads import split_heads
from ortho.projections import FrozenProjection, Projection, StructuredProjection
from ortho.projections.structured import factors
from paper.experiments.engine.records import Case, Record
from paper.experiments.speed import benchmark
from paper.experiments.speed.analysis import Row, by_arm, ratio, row_of
from paper.experiments.speed.benchmark import Budget, Timing

DENSE = "dense"
ROUNDS = {"structured": 1, "structured, 2 rounds": 2, "structured, 3 rounds": 3}
ARMS = (DENSE, *ROUNDS)
PHASES = ("forward", "step")
HEAD_DIM = 64

SEEDS = {"weights": 0, "inputs": 1, "order": 2}
WIDTHS = {"cpu": (768, 256, 1024, 512, 128, 2048, 384, 4096), "cuda": (1024, 4096, 768, 2048, 512, 8192)}
LENGTHS = {"cpu": (2048, 512), "cuda": (4096,)}
BATCH = {"cpu": 1, "cuda": 8}
DTYPES = {"cpu": "float32", "cuda": "bfloat16"}
CALL_SECONDS = 0.02
BUDGETS = {"cpu": Budget(12.0, 5, 25, warm_up=1), "cuda": Budget(4.0, 7, 31, warm_up=1)}
RATES = {"cpu": 5e10, "cuda": 3e14}  # FLOPs a second, about
CHECKED = 256  # tokens
STAGES = 16  # roundings in a row: four a round (two matrices, two products), and the sum of two gradients


def case(d: int = 768, *, device: str = "cpu", B: int = 1, N: int = 2048, dtype: str = "float32") -> Case:
    """One configuration: x (B, N, d), heads of width 64.

    Raises TypeError or ValueError for sizes below 1, unknown names, and a d that is not a multiple of 64.
    """
    if positive_int("d", d) % HEAD_DIM:
        raise ValueError(f"d: expected a multiple of {HEAD_DIM}, the width of a head, got {d}")
    return {
        "device": one_of("device", device, RATES),
        **benchmark.sizes(B=B, N=N, d=d),
        "dtype": one_of("dtype", dtype, ("float32", "bfloat16")),
    }


def cases(device: str) -> list[Case]:
    """All configurations for a device, the most informative first."""
    kind: dict[str, Any] = {"device": device, "B": BATCH[device], "dtype": DTYPES[device]}
    return [case(d, N=N, **kind) for N in LENGTHS[device] for d in WIDTHS[device]]


def build(case: Case) -> dict[str, Projection]:
    """A projection for each arm, float64, on the CPU."""
    generator = torch.Generator().manual_seed(SEEDS["weights"])
    kind: dict[str, Any] = {"generator": generator, "dtype": torch.float64}
    d, heads = case["d"], case["d"] // HEAD_DIM
    # Gaussian: any matrix takes the same time to multiply, and an orthogonal one would have to be factored.
    arms: dict[str, Projection] = {DENSE: FrozenProjection(d, heads, draw="gaussian", **kind)}
    return arms | {arm: StructuredProjection(d, heads, rounds=rounds, **kind) for arm, rounds in ROUNDS.items()}


def draw(case: Case, N: int) -> tuple[Tensor, Tensor, Tensor]:
    """x of N tokens, and the gradients of q and k, of all heads, (B, N, d) each."""
    x, dq, dk = benchmark.drawn(case, (case["B"], N, case["d"]), 3, SEEDS["inputs"])
    return x, dq, dk


def run(case: Case, seconds: float | None = None) -> dict[str, Any]:
    """Measure one case: check every arm against its matrices, then time all in turn.

    `seconds` bounds the time of the repetitions, but there are always a few. Raises AssertionError if queries, keys or
    a gradient are off.
    """
    device = case["device"]
    operands = draw(case, case["N"])
    arms: dict[str, Timing] = {}
    facts: dict[str, Any] = {}
    for arm, exact in build(case).items():
        projection = copy.deepcopy(exact).to(device, benchmark.dtype(case))
        check(case, arm, projection, exact)
        passes = _passes(projection, *operands)
        calls = {}
        for phase, call in passes.items():
            call()
            first = _timed({phase: call}, {phase: 1}, cuda=device == "cuda")[f"{phase}_s"]
            calls[phase] = benchmark.calls_in(CALL_SECONDS, first)
        facts[arm] = {"calls": calls}
        arms[arm] = partial(_timed, passes, calls, cuda=device == "cuda")
    return benchmark.compare(arms, BUDGETS[device], SEEDS, seconds, facts=facts)


def check(case: Case, arm: str, projection: Projection, exact: Projection) -> None:
    """Raise AssertionError unless q, k and the gradient of x are those of the exact projection's matrices in float64,
    up to the rounding of sums over d numbers."""
    x, dq, dk = draw({**case, "B": 1}, min(case["N"], CHECKED))
    bound = benchmark.rounding_error(STAGES, case["d"], x.dtype)
    w_q, w_k = (w.to(x.device) for w in (exact.weight_q, exact.weight_k))  # stored as in torch.nn.Linear
    wanted = {
        "q": x.double() @ w_q.T,
        "k": x.double() @ w_k.T,
        "gradient of x": dq.double() @ w_q + dk.double() @ w_k,
    }
    x.requires_grad_()
    q, k = projection(x)
    (dx,) = torch.autograd.grad((q, k), x, _heads(projection, dq, dk))
    got = {"q": q.transpose(1, 2).flatten(2), "k": k.transpose(1, 2).flatten(2), "gradient of x": dx}
    benchmark.assert_all_close(arm, got, wanted, bound)


def _heads(projection: Projection, *rows: Tensor) -> tuple[Tensor, ...]:
    return tuple(split_heads(row, projection.num_heads) for row in rows)


def _passes(projection: Projection, x: Tensor, dq: Tensor, dk: Tensor) -> dict[str, Callable[[], Any]]:
    """The function that is timed in each phase."""
    leaf, upstream = x.detach().requires_grad_(), _heads(projection, dq, dk)

    def forward() -> None:
        with torch.no_grad():
            projection(x)

    return {"forward": forward, "step": lambda: torch.autograd.grad(projection(leaf), leaf, upstream)}


def _timed(passes: dict[str, Callable[[], Any]], calls: dict[str, int], *, cuda: bool) -> dict[str, float]:
    """Mean seconds of a call of each phase, over some calls in a row."""

    found: dict[str, float] = {}
    for phase, call in passes.items():
        count = calls[phase]
        found |= benchmark.mean_seconds(benchmark.repeated(call, count), count, cuda=cuda, quantity=phase)
    return found


def flops(case: Case, arm: str) -> int:
    """FLOPs of the matrix products that make q and k; the gradient of x takes the same number again."""
    d = case["d"]
    numbers = 2 * d if arm == DENSE else ROUNDS[arm] * 2 * sum(factors(d, HEAD_DIM))
    return int(2 * case["B"] * case["N"] * d * numbers)


def rows(records: Iterable[Record]) -> list[Row]:
    """One row per record and structured arm: how many times as fast as dense it is, `forward` and `step`,
    (q1, median, q3) of the ratios within repetitions; the ratio of `flops`; and the `factors` of a token's table."""
    found = []
    for record in records:
        case, times = record["configuration"], {phase: by_arm(record, phase) for phase in PHASES}
        for arm, own in times["step"].items():
            if arm in ROUNDS:  # earlier records have others, too
                row = row_of(record, arm=arm, repetitions=len(own))
                row |= {phase: ratio(each[DENSE], each[arm]) for phase, each in times.items()}
                row["flops"] = flops(case, DENSE) / flops(case, arm)
                row["factors"] = factors(case["d"], HEAD_DIM)
                found.append(row)
    return found


def enough(d: int) -> str:
    """The arm with the fewest rounds whose scores spread like those of random matrices: one round if a head lies in a
    row of the table, else two, as with one the last transform cancels, at least in part, between q and k."""
    return "structured" if factors(d, HEAD_DIM)[1] % HEAD_DIM == 0 else "structured, 2 rounds"


def crossover(records: Iterable[Record], *, phase: str = "step") -> dict[tuple[str, int], int | None]:
    """(device, N) -> the smallest measured d from which on structured matrices with `enough` rounds are faster than
    dense ones, by the median, at every measured d; None if they are slower at the largest.

    Raises ValueError for an unknown phase.
    """
    one_of("phase", phase, PHASES)
    chosen = sorted((row for row in rows(records) if row["arm"] == enough(row["d"])), key=lambda row: -row["d"])
    found: dict[tuple[str, int], int | None] = {}
    closed = set()
    for row in chosen:  # from the widest down
        where = (row["device"], row["N"])
        found.setdefault(where, None)
        if row[phase][1] <= 1:
            closed.add(where)
        elif where not in closed:
            found[where] = row["d"]
    return found


label = "d={d} N={N} B={B} {dtype}".format_map
