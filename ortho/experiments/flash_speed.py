"""`attention_speed` for softmax attention itself: materialised, in tiles, and by PyTorch's fused kernels."""

from dataclasses import replace

from ortho.experiments.attention_speed import ATTENTION_SPEED, SOURCES, case
from ortho.experiments.records import Case


def cases(device: str) -> list[Case]:
    """All configurations for a device, the most informative first."""
    if device == "cuda":

        def at(N: int, dtype: str = "bfloat16", K: int = 64) -> Case:
            return case(N, "exact", device="cuda", dtype=dtype, K=K)

        lengths = (4096, 1024, 16384, 512, 2048, 8192)
        return [*map(at, lengths), *(at(N, "float32") for N in (1024, 4096)), *(at(N, K=128) for N in (1024, 4096))]
    return [case(N, "exact") for N in (1024, 4096, 256, 2048, 512)]


FLASH_SPEED = replace(
    ATTENTION_SPEED,
    name="flash-speed",
    title="time and memory of softmax attention, materialised, in tiles and fused, forward and backward",
    cases=cases,
    sources=(*SOURCES, "attention/flash.py", "experiments/flash_speed.py"),
    needs=replace(ATTENTION_SPEED.needs, arms=("materialised",)),
)
