"""Softmax attention with the gradient of its values alone, by the exchanged pass, beside PyTorch's with all three."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ortho._cost import causal_pairs
from ortho.attention.softmax.frozen_qk import channels, frozen_qk_attention
from ortho.attention.softmax.softmax_attention import softmax_attention_reference
from ortho.cost.mechanisms.softmax import frozen_qk_cost, softmax_cost
from paper.experiments.engine.records import Case, Record
from paper.experiments.speed import benchmark, training_step
from paper.experiments.speed.analysis import Row, by_arm, ratio, row_of
from paper.experiments.speed.training_step import BUDGETS, SEEDS

SDPA, EXCHANGED = ARMS = ("sdpa", "exchanged")
STAGES = 12  # successive results of a call and its gradient, each rounded once

Operands = tuple[Tensor, ...]


def case(N: int = 512, d: int = 768, **options: Any) -> Case:
    """One configuration: N tokens, heads of width 64; `options` are the other arguments of `training_step.case`."""
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
    operands, upstream = draw(case)
    timings = {arm: partial(benchmark.timed, *call(case, arm, operands), upstream, 1) for arm in ARMS}
    return benchmark.compare(timings, BUDGETS[case["device"]], SEEDS, seconds)


def draw(case: Case) -> tuple[Operands, Tensor]:
    """q, k and v (B, H, N, K), laid out as a layer's are, and the gradient of the output."""
    shape = (case["B"], case["N"], case["H"], case["d"] // case["H"])
    *operands, upstream = (x.transpose(1, 2) for x in benchmark.drawn(case, shape, 4, SEEDS["inputs"]))
    return tuple(operands), upstream


def call(case: Case, arm: str, operands: Operands) -> tuple[Callable[..., Tensor], Operands]:
    """The function that an arm calls, and the operands that it is called with and differentiated by."""
    if arm == SDPA:
        own = tuple(x.detach().requires_grad_() for x in operands)
        return partial(scaled_dot_product_attention, is_causal=case["causal"]), own
    q, k, v = operands
    stopped = partial(frozen_qk_attention, q, k, is_causal=case["causal"])
    return cast(Callable[..., Tensor], stopped), (v.detach().requires_grad_(),)


def check(case: Case) -> None:
    """Raise AssertionError unless, on a short sequence, both arms give the definition's output and gradient of v, up to
    the rounding of sums over keys."""
    small = {**case, "B": 1, "N": min(case["N"], training_step.CHECKED_LENGTH)}
    operands, upstream = draw(small)
    bound = benchmark.rounding_error(STAGES, small["N"], upstream.dtype)
    q, k, v = (x.double() for x in operands)
    definition = partial(softmax_attention_reference, q, k, is_causal=case["causal"])
    want = _results(cast(Callable[..., Tensor], definition), (v.requires_grad_(),), upstream.double())
    for arm in ARMS:
        benchmark.assert_all_close(arm, _results(*call(small, arm, operands), upstream), want, bound)


def _results(function: Callable[..., Tensor], operands: Operands, upstream: Tensor) -> dict[str, Tensor]:
    o = function(*operands)
    (gradient,) = torch.autograd.grad(o, operands[-1], upstream)
    return {"output": o.detach(), "gradient of v": gradient}


def declared(case: Case, arm: str) -> tuple[int, int]:
    """FLOPs of an arm, forward and backward."""
    K, itemsize = case["d"] // case["H"], benchmark.dtype(case).itemsize
    form = softmax_cost if arm == SDPA else frozen_qk_cost
    found = form(case["B"], case["N"], case["H"], K, K, causal=case["causal"], itemsize=itemsize)
    return found.forward, found.backward - (0 if arm == SDPA else spared(case, case["H"]))


def spared(case: Mapping[str, Any], heads: int) -> int:
    """FLOPs of the backward pass that the closed form of `heads` heads counts and a GPU's own kernel saves: it needs no
    channels for the log-sum-exp. 0 where another kernel runs."""
    itemsize = benchmark.dtype(case).itemsize
    if case["device"] == "cpu" or itemsize != 2:
        return 0
    pairs = causal_pairs(case["N"]) if case["causal"] else case["N"] ** 2
    return case["B"] * heads * int(pairs) * 4 * channels(itemsize)


def rows(records: Iterable[Record]) -> list[Row]:
    """One row per record: how many times as fast as PyTorch's kernel the exchanged pass is, in the `backward` pass and
    in `both` passes, (q1, median, q3), and the ratios of FLOPs, `backward_bound` and `both_bound`."""
    found = []
    for record in records:
        row = row_of(record)
        for name, phase in (("backward", "backward"), ("both", "")):
            times = by_arm(record, phase)
            row[name] = ratio(times[SDPA], times[EXCHANGED])
        (forward, backward), (own_forward, own_backward) = (declared(record["configuration"], arm) for arm in ARMS)
        row["backward_bound"] = backward / own_backward
        row["both_bound"] = (forward + backward) / (own_forward + own_backward)
        found.append(row)
    return found


label = "N={N} d={d} B={B} {dtype} causal={causal}".format_map
