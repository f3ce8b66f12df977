"""How much larger or smaller gradients become through a stack, by the records of `paper.experiments.learning.depth`."""

from collections.abc import Callable
from math import log10

from paper import experiments
from paper.experiments.learning.depth import SEEDS, STAGES, D, L
from paper.experiments.resampling import paired_difference
from paper.experiments.statistics import Decision, Interval, decide

__all__ = ["DECISION", "SEEDS", "STAGES", "D", "L", "compared", "decades", "measured", "sizes"]
# Fixed before any run: changes of the gradient's size through the stack that differ by less than twofold are alike.
DECISION = Decision(margin=log10(2), level=0.05, higher_is_better=False)


def measured() -> dict[tuple[str, bool, str, int], list[float]]:
    """Arm, residual sums or none, stage and seed -> the gradient's length at each block and at the top."""
    records = experiments.load("depth")
    device = experiments.judged_device(records)
    found = {}
    for record in records:
        if record["device"] == device:
            case = record["configuration"]
            for stage, lengths in record["facts"]["gradients"].items():
                found[case["arm"], case["residual"], stage, case["seed"]] = lengths
    return found


def sizes(arm: str, residual: bool, stage: str, seed: int) -> list[float]:
    """The gradient's length at the input of each block, and at the output of the last; KeyError if not measured."""
    return measured()[arm, residual, stage, seed]


def decades(arm: str, residual: bool, stage: str, seed: int) -> float:
    """By how many powers of ten the gradient's length differs between the two ends of the stack, up or down."""
    first, *_, last = sizes(arm, residual, stage, seed)
    return abs(log10(first / last))


def compared(
    arm: str, residual: bool, stage: str, *, measure: Callable[..., float] = decades
) -> tuple[tuple[float, Interval], str]:
    """The mean difference to learned heads with its interval, and the rule's outcome."""
    ours, theirs = ([measure(name, residual, stage, seed) for seed in SEEDS] for name in (arm, "learned"))
    found = paired_difference(ours, theirs, confidence=DECISION.confidence())
    return (found.mean, found.interval), decide(found.interval, DECISION)
