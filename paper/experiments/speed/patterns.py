"""`attention_speed` for patterns: windows at lengths that take softmax attention minutes, and every other pattern and
choice of keys beside it.
"""

from dataclasses import replace

from paper.experiments.engine.records import Case
from paper.experiments.speed.attention import ATTENTION_SPEED, case


def cases(device: str) -> list[Case]:
    """All configurations for a device, the most informative first."""
    if device == "cuda":

        def at(N: int, arms: str = "patterns") -> Case:
            return case(N, arms, device="cuda", dtype="bfloat16")

        return [*(at(N) for N in (4096, 16384, 1024, 8192)), at(4096, "dynamic"), at(16384, "dynamic")]
    alone = [case(N, "window alone") for N in (2048, 4096, 8192, 16384, 32768)]
    return [case(4096, "patterns"), *alone, case(4096, "dynamic"), case(1024, "patterns"), case(1024, "dynamic")]


PATTERN_SPEED = replace(
    ATTENTION_SPEED,
    name="pattern-speed",
    title="time and memory of sparse attention, forward and backward, beside the fused softmax attention",
    cases=cases,
    needs=replace(ATTENTION_SPEED.needs, arms=()),
)
