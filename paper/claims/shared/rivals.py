"""The rivals of softmax attention, a row each: what they can still find, and from which length on they are faster."""

from ortho.attention.linear.favor import FEATURES
from paper import experiments
from paper.claims.report import Shown, table
from paper.experiments.speed import attention_analysis as clock

__all__ = ["HEADERS", "rival_rows", "rivals"]

HEADERS = ("", "can still find", "faster on the CPU", "faster on the GPU")

# Arm of the records -> its name, what a head with it finds at most (chapters 10 to 12), the study that timed it.
_RIVALS = {
    "linear": ("linear attention", "at most as many tokens as a key has features", "attention-speed"),
    "favor": (
        "FAVOR+",
        f"the same; with {FEATURES} features its weights can be further from softmax's than equal weights are",
        "attention-speed",
    ),
    "delta": (
        "delta rule",
        "at most as many unrelated pairs as a key has numbers; of each key the last value",
        "memory-speed",
    ),
}


def rival_rows(*names: str) -> list[tuple[str, ...]]:
    """A row of `HEADERS` for each mechanism: attention alone, causal, beside PyTorch's fused softmax attention."""
    return [_row(name) for name in names]


def rivals(*names: str) -> Shown:
    """The table of `rival_rows`."""
    return table(rival_rows(*names), HEADERS)


def _row(name: str) -> tuple[str, ...]:
    label, finds, study = _RIVALS[name]
    found = [
        row
        for row in clock.crossovers(experiments.load(study))
        if row["arm"] == f"{name} causal" and row["arms"] in {"main", name} and not row["compiled"]
    ]
    (cpu,), (gpu,) = ([row for row in found if experiments.on_cpu(row["device"]) == on] for on in (True, False))
    return label, finds, clock.in_words(cpu["alike"]), clock.in_words(gpu["alike"])
