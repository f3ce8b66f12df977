"""A forward pass without gradients, frozen against learned: does freezing W_Q and W_K make inference faster?

The two layers hold the same numbers and run the same kernels on them, so that a difference could only come from the way
the machine treats memory. A second learned layer is the control: what two like layers seem to differ by is what the
measurement cannot tell from nothing. Every arm is copied anew before it is timed, so that none keeps a lucky place.
"""

import copy
import time
from collections.abc import Iterable, Sequence
from functools import partial
from math import comb
from typing import Any

import torch
from torch import Tensor, nn

from ortho.adapters.conversion import to_standard
from paper.experiments.engine.benchmark import interleaved
from paper.experiments.engine.records import Case, Needs, Record, by_device
from paper.experiments.engine.runner import Experiment
from paper.experiments.speed import analysis as summary
from paper.experiments.speed import training_step

ARMS = STANDARD, FROZEN, CONTROL = "learned", "frozen", "learned-again"
SEEDS = {"weights": training_step.SEEDS["weights"], "inputs": training_step.SEEDS["inputs"], "order": 3}
CONFIDENCE = 0.99

# How long one timing and how long all repetitions of a case should take, and how many there are at least and at most.
CALL_SECONDS = {"cpu": 0.02, "cuda": 0.01}
SECONDS = {"cpu": 40.0, "cuda": 4.0}
REPETITIONS = (31, 301)


def cases(device: str) -> list[Case]:
    """One token, as in decoding without a cache, and whole sequences; d = 768."""
    cuda = device == "cuda"
    dtype = "bfloat16" if cuda else "float32"
    return [
        training_step.case("layer", N, device=device, B=B if cuda else 1, dtype=dtype, input_grad=False)
        for N, B in ((512, 64), (1, 64), (128, 256), (1024, 32))
    ]


def run(case: Case, seconds: float | None = None) -> dict[str, Any]:
    """Measure one case; raises AssertionError unless all arms give the same output, bit for bit, and the right one."""
    device = case["device"]
    frozen = training_step.build(case, "frozen").requires_grad_(False)
    training_step.check(case, "frozen", training_step.build(case, "frozen"))
    arms: dict[str, nn.Module] = {STANDARD: to_standard(frozen), FROZEN: frozen, CONTROL: to_standard(frozen)}
    x = torch.randn(case["B"], case["N"], case["d"], generator=torch.Generator().manual_seed(SEEDS["inputs"]))
    x = x.to(device, getattr(torch, case["dtype"]))
    with torch.no_grad():
        expected = frozen(x)
        for name, module in arms.items():
            if not torch.equal(module(x), expected):
                raise AssertionError(f"{name}: expected the frozen layer's output, bit for bit")
        calls = max(1, round(CALL_SECONDS[device] / _forward(frozen, x, 3)["forward_s"]))
        times, order = interleaved(
            {name: partial(_forward, module, x, calls) for name, module in arms.items()},
            warm_up=1,
            repetitions=REPETITIONS,
            seconds=SECONDS[device] if seconds is None else seconds,
            seed=SEEDS["order"],
        )
    return {"seeds": SEEDS, "repetitions": times, "facts": {"calls": calls, "order": order}}


def _forward(module: nn.Module, x: Tensor, calls: int) -> dict[str, float]:
    """Seconds of one call, from `calls` in a row after one that does not count; by events on CUDA."""
    module = copy.deepcopy(module)
    module(x)
    if x.is_cuda:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(calls):
            module(x)
        end.record()
        torch.cuda.synchronize()
        return {"forward_s": round(start.elapsed_time(end) / 1e3 / calls, 9)}
    began = time.perf_counter(), time.process_time()
    for _ in range(calls):
        module(x)
    ended = time.perf_counter(), time.process_time()
    wall, own = ((b - a) / calls for a, b in zip(began, ended, strict=True))
    return {"forward_s": round(wall, 9), "forward_cpu_s": round(own, 9)}


def median_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> tuple[float, float, float]:
    """(low, median, high): a confidence interval of the median whatever the distribution, from order statistics.

    The median lies outside the k-th smallest and k-th largest of n values with probability 2 P(Bin(n, 1/2) < k).
    Raises ValueError for too few values.
    """
    ordered, n = sorted(values), len(values)
    k, outside = 0, 0.0
    while (outside := outside + 2 * comb(n, k) / 2**n) <= 1 - confidence and k < n // 2:
        k += 1
    if k == 0:
        raise ValueError(f"values: expected enough for a confidence of {confidence}, got {n}")
    return ordered[k - 1], (ordered[(n - 1) // 2] + ordered[n // 2]) / 2, ordered[n - k]


def gains(records: Iterable[Record]) -> list[dict[str, Any]]:
    """One row a record: by how many per cent the frozen arm and the control are faster than the learned one.

    `frozen` and `control` are (low, median, high), the interval of the median over the ratios within repetitions.
    """
    rows = []
    for record in records:
        seconds = {arm: summary.seconds(record, arm, "forward") for arm in ARMS}
        row = {**record["configuration"], "device": record["device"], "repetitions": len(seconds[STANDARD])}
        for name, arm in (("frozen", FROZEN), ("control", CONTROL)):
            pairs = zip(seconds[STANDARD], seconds[arm], strict=True)
            row[name] = median_interval([100 * (standard / other - 1) for standard, other in pairs])
        rows.append(row)
    return rows


def work(case: Case) -> float:
    """Seconds that a case takes, roughly."""
    return SECONDS[case["device"]] + 5.0


def line(record: Record) -> str:
    """One case in a line."""
    (row,) = gains([record])
    return ", ".join(f"{name} {_interval(row[name])}" for name in ("frozen", "control"))


def table(records: Sequence[Record]) -> str:
    """The stored gains, a table per device."""
    texts = []
    for device, group in by_device(records).items():
        head = f"{'N':>6}{'d':>6}{'B':>5}{'n':>4}  {'frozen [99 % interval]':30}{'control [99 % interval]':30}"
        texts += [f"\n{device} ({group[0]['provenance']['device_name']})", head, "-" * len(head)]
        texts += [
            f"{row['N']:6}{row['d']:6}{row['B']:5}{row['repetitions']:4}"
            f"  {_interval(row['frozen']):30}{_interval(row['control']):30}"
            for row in sorted(gains(group), key=lambda row: (row["d"], row["N"]))
        ]
    return "\n".join(texts)


def _interval(values: tuple[float, float, float]) -> str:
    low, middle, high = values
    return f"{middle:+.2f} % [{low:+.2f}, {high:+.2f}]"


INFERENCE = Experiment(
    name="inference",
    title="forward passes without gradients, learned, frozen, and learned once more as a control",
    cases=cases,
    run=run,
    work=work,
    label=training_step.label,
    line=line,
    show=table,
    needs=Needs(training_step.TRAINING_STEP.needs.configuration, ARMS, ("forward_s",)),
    quiet=True,
)
