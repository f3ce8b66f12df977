"""`attention_speed` for patterns: windows, at lengths that take softmax attention minutes, and every other pattern."""

from dataclasses import replace

from ortho.attention import MECHANISMS
from ortho.experiments.attention_arms import SETS, YARDSTICK
from ortho.experiments.attention_speed import ATTENTION_SPEED, SOURCES, case
from ortho.experiments.records import Case

HEADS = ("columns", "summaries")  # are the second heads of 'strided' and 'fixed', and timed with the first
PATTERNS = [name for name, m in MECHANISMS.items() if m.family == "pattern" and name not in HEADS]
SETS["window alone"] = ("window", "window causal")
SETS["patterns"] = (YARDSTICK, "sdpa causal", *(f"{name}{way}" for name in PATTERNS for way in ("", " causal")))


def cases(device: str) -> list[Case]:
    """All configurations for a device, the most informative first."""
    if device == "cuda":
        return [case(N, "patterns", device="cuda", dtype="bfloat16") for N in (4096, 16384, 1024, 8192)]
    alone = [case(N, "window alone") for N in (2048, 4096, 8192, 16384, 32768)]
    return [case(4096, "patterns"), *alone, case(1024, "patterns")]


PATTERN_SPEED = replace(
    ATTENTION_SPEED,
    name="pattern-speed",
    title="time and memory of sparse attention, forward and backward, beside the fused softmax attention",
    cases=cases,
    sources=(
        *SOURCES,
        "attention/block_sparse.py",
        "attention/dilated.py",
        "attention/fixed_factorised.py",
        "attention/global_local.py",
        "attention/kept.py",
        "attention/layouts.py",
        "attention/orders.py",
        "attention/parts.py",
        "attention/patterns.py",
        "attention/strided.py",
        "attention/window.py",
        "experiments/pattern_speed.py",
    ),
    needs=replace(ATTENTION_SPEED.needs, arms=("window causal",)),
)
