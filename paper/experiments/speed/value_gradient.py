"""Softmax attention with the gradient of its values alone, by the exchanged pass, beside PyTorch's with all three."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ortho.attention.softmax.softmax_attention import softmax_attention_reference, softmax_cost
from ortho.attention.softmax.value_gradient import value_gradient_attention, value_gradient_cost
from paper.experiments.engine.closeness import assert_close
from paper.experiments.engine.records import Case, Needs, Record, by_device
from paper.experiments.engine.runner import Experiment
from paper.experiments.engine.stopwatch import interleaved
from paper.experiments.speed import training_step
from paper.experiments.speed.analysis import quartiles, seconds, step_seconds
from paper.experiments.speed.attention import PHASES, timed

SDPA, EXCHANGED = ARMS = ("sdpa", "exchanged")
STAGES = 12  # results of a call and its gradient that follow one another, each rounded once

Operands = tuple[Tensor, ...]


def case(N: int = 512, d: int = 768, **options: Any) -> Case:
    """One configuration: N tokens, heads of width 64, and what `training_step.case` takes besides."""
    found = training_step.case("layer", N, d, **options)
    return {name: found[name] for name in ("device", "B", "N", "d", "H", "dtype", "causal")}


def cases(device: str) -> list[Case]:
    """All configurations for a device, the most informative first."""
    ways = (False, True)
    if device == "cpu":
        return [case(N, causal=causal) for N in (512, 2048, 1024, 4096) for causal in ways]

    def at(N: int, d: int, causal: bool) -> Case:
        return case(N, d, device="cuda", B=max(1, training_step.TOKENS // N), dtype="bfloat16", causal=causal)

    found = [at(N, 768, causal) for N in (4096, 1024, 16384, 32768) for causal in ways]
    return found + [at(4096, d, causal) for d in (2048, 1024) for causal in ways]


def run(case: Case, seconds: float | None = None) -> dict[str, Any]:
    """Measure one case. Raises AssertionError if an arm is off its definition."""
    check(case)
    device, (operands, upstream) = case["device"], draw(case)
    times, order = interleaved(
        {arm: partial(timed, *call(case, arm, operands), upstream, 1) for arm in ARMS},
        warm_up=training_step.WARM_UP[device],
        repetitions=training_step.REPETITIONS[device],
        seconds=training_step.SECONDS[device] if seconds is None else seconds,
        seed=training_step.SEEDS["order"],
    )
    return {"seeds": training_step.SEEDS, "repetitions": times, "facts": {"order": order}}


def draw(case: Case) -> tuple[Operands, Tensor]:
    """q, k and v (B, H, N, K), laid out as a layer's are, and the gradient of the output."""
    generator = torch.Generator().manual_seed(training_step.SEEDS["inputs"])
    shape = (case["B"], case["N"], case["H"], case["d"] // case["H"])
    to: dict[str, Any] = {"device": case["device"], "dtype": getattr(torch, case["dtype"])}
    *operands, upstream = (torch.randn(shape, generator=generator).to(**to).transpose(1, 2) for _ in range(4))
    return tuple(operands), upstream


def call(case: Case, arm: str, operands: Operands) -> tuple[Callable[..., Tensor], Operands]:
    """What an arm calls, and the operands that it is given and differentiates by."""
    if arm == SDPA:
        own = tuple(x.detach().requires_grad_() for x in operands)
        return partial(scaled_dot_product_attention, is_causal=case["causal"]), own
    q, k, v = operands
    stopped = partial(value_gradient_attention, q, k, is_causal=case["causal"])
    return cast(Callable[..., Tensor], stopped), (v.detach().requires_grad_(),)


def check(case: Case) -> None:
    """Raise AssertionError unless both arms give the definition's output and gradient of v, on a short sequence.

    Each of the results in a row is rounded once, and a sum over keys, accumulated in float32, adds sqrt(N) roundings of
    that precision.
    """
    small = {**case, "B": 1, "N": min(case["N"], training_step.CHECKED_LENGTH)}
    operands, upstream = draw(small)
    own, single = (torch.finfo(dtype).eps / 2 for dtype in (upstream.dtype, torch.float32))
    bound = STAGES * (own + small["N"] ** 0.5 * single)
    q, k, v = (x.double() for x in operands)
    definition = partial(softmax_attention_reference, q, k, is_causal=case["causal"])
    want = _results(cast(Callable[..., Tensor], definition), (v.requires_grad_(),), upstream.double())
    for arm in ARMS:
        got = _results(*call(small, arm, operands), upstream)
        for name, a, b in zip(("output", "gradient of v"), got, want, strict=True):
            assert_close(f"{arm}, {name}", a, b, bound)


def _results(function: Callable[..., Tensor], operands: Operands, upstream: Tensor) -> tuple[Tensor, Tensor]:
    """The output and the gradient of v."""
    o = function(*operands)
    (gradient,) = torch.autograd.grad(o, operands[-1], upstream)
    return o.detach(), gradient


def declared(case: Case, arm: str) -> tuple[int, int]:
    """FLOPs of an arm, forward and backward."""
    K, itemsize = case["d"] // case["H"], getattr(torch, case["dtype"]).itemsize
    form = softmax_cost if arm == SDPA else value_gradient_cost
    found = form(case["B"], case["N"], case["H"], K, K, causal=case["causal"], itemsize=itemsize)
    return found.forward, found.backward


def rows(records: Iterable[Record]) -> list[dict[str, Any]]:
    """One row per record: how many times as fast as PyTorch's kernel the exchanged pass is, of the backward pass and of
    `both`, (q1, median, q3), beside the ratios of FLOPs, `backward_bound` and `both_bound`."""
    found = []
    for record in records:
        case = record["configuration"]
        flops = {arm: declared(case, arm) for arm in ARMS}
        row: dict[str, Any] = {**case, "device": record["device"]}
        backward, both = ([of(record, arm) for arm in ARMS] for of in (_backward, step_seconds))
        row["backward"], row["both"] = (
            quartiles([a / b for a, b in zip(*times, strict=True)]) for times in (backward, both)
        )
        row["backward_bound"] = flops[SDPA][1] / flops[EXCHANGED][1]
        row["both_bound"] = sum(flops[SDPA]) / sum(flops[EXCHANGED])
        found.append(row)
    return found


def _backward(record: Record, arm: str) -> list[float]:
    return seconds(record, arm, "backward")


def line(record: Record) -> str:
    """One case in a line."""
    (row,) = rows([record])
    return "; ".join(_figures(row, name) for name in ("backward", "both"))


def _figures(row: dict[str, Any], name: str) -> str:
    low, middle, high = row[name]
    return f"{name} {middle:.3f} [{low:.3f}, {high:.3f}], FLOPs {row[f'{name}_bound']:.3f}"


def table(records: Sequence[Record]) -> str:
    """The stored speed-ups, a table per device."""
    texts = []
    for device, group in by_device(records).items():
        texts.append(f"\n{device} ({group[0]['provenance']['device_name']}), over PyTorch's kernel")
        for row in sorted(rows(group), key=lambda row: (row["d"], row["causal"], row["N"])):
            way = "causal" if row["causal"] else ""
            figures = "; ".join(_figures(row, name) for name in ("backward", "both"))
            texts.append(f"N={row['N']:<6} d={row['d']:<5} {row['dtype']:9}{way:7} {figures}")
    return "\n".join(texts)


def work(case: Case) -> float:
    """Seconds that a case takes, roughly; the runner corrects them by what like cases took."""
    rate = {"cpu": 5e10, "cuda": 2e14}[case["device"]]
    one_round = sum(sum(declared(case, arm)) for arm in ARMS) / rate
    least, most = training_step.REPETITIONS[case["device"]]
    repetitions = min(most, max(least, training_step.SECONDS[case["device"]] / one_round))
    rounds = training_step.WARM_UP[case["device"]] + repetitions
    return float(1 + rounds * one_round)


def label(case: Case) -> str:
    """A case in a few words."""
    words = [f"N={case['N']}", f"d={case['d']}", f"B={case['B']}", case["dtype"], "causal" if case["causal"] else ""]
    return " ".join(filter(None, words))


EXCHANGED_SPEED = Experiment(
    name="exchanged-speed",
    title="the gradient of the values alone, by a forward pass with q and k exchanged",
    cases=cases,
    run=run,
    work=work,
    label=label,
    line=line,
    show=table,
    needs=Needs(
        configuration={name: type(value) for name, value in case().items()},
        arms=ARMS,
        quantities=tuple(f"{phase}_s" for phase in PHASES),
    ),
    quiet=True,
)
