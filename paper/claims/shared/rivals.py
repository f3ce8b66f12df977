"""The rivals of softmax attention, a row each: what they save, what they can still find, and where a clock says so."""

from ortho.attention.linear.favor import FEATURES
from paper import experiments
from paper.claims.report import Shown, table
from paper.experiments.speed import attention_analysis as clock

__all__ = ["HEADERS", "rival_rows", "rivals"]

HEADERS = ("", "saves", "can still find", "faster on the CPU", "faster on the GPU")

# Arm of the records -> its name, what a head with it finds at most (chapters 10 to 12), the study that timed it.
_RIVALS = {
    "linear": ("linear attention", "at most $m$ tokens, with $m$ features", "attention-speed"),
    "favor": (
        "FAVOR+",
        f"at most $m$ tokens; at width 64, {FEATURES} features and unit scores it is worse than equal weights",
        "attention-speed",
    ),
    "delta": ("delta rule", "at most $d_k$ unrelated pairs, each key's last value", "memory-speed"),
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
    return label, r"$N \times N$ work", finds, clock.in_words(cpu["alike"]), clock.in_words(gpu["alike"])
