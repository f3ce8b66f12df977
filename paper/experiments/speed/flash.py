"""`attention_speed` for softmax attention itself: materialised, in tiles, and by PyTorch kernels, each by its name."""

from dataclasses import replace

from paper.experiments.engine.records import Case
from paper.experiments.speed.attention import ATTENTION_SPEED, case
from paper.experiments.speed.attention_variants import YARDSTICK


def cases(device: str) -> list[Case]:
    """All configurations for a device, the most informative first."""
    if device == "cuda":

        def at(N: int, dtype: str = "bfloat16", K: int = 64) -> Case:
            return case(N, "exact", device="cuda", dtype=dtype, K=K)

        lengths = (4096, 1024, 16384, 512, 2048, 8192)
        kernels = [case(N, "kernels", device="cuda", dtype="bfloat16") for N in (4096, 1024, 16384)]
        kernels.append(case(4096, "kernels", device="cuda"))
        others = [*(at(N, "float32") for N in (1024, 4096)), *(at(N, K=128) for N in (1024, 4096))]
        return [*map(at, lengths), *kernels, *others]
    return [*(case(N, "exact") for N in (1024, 4096, 256, 2048, 512)), case(2048, "kernels")]


FLASH_SPEED = replace(
    ATTENTION_SPEED,
    name="flash-speed",
    title="time and memory of softmax attention, materialised, in tiles and fused, forward and backward",
    cases=cases,
    needs=replace(ATTENTION_SPEED.needs, arms=(YARDSTICK,)),
)
