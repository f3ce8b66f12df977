"""`attention_speed` for memories: the delta rule, plain and gated, at lengths that take softmax attention minutes, and
every other memory beside it.
"""

from dataclasses import replace

from ortho.attention.chunking import CHUNK
from paper.experiments.engine.records import Case
from paper.experiments.speed.attention import ATTENTION_SPEED, case


def cases(device: str) -> list[Case]:
    """All configurations for a device, the most informative first.

    Chunks follow one another in a loop: on CUDA long sequences have at most 128 of them, 64 where it is compiled.
    """
    if device == "cuda":

        def at(N: int, arms: str = "delta", dtype: str = "bfloat16", compiled: bool = False) -> Case:
            chunk = max(CHUNK, N // (64 if compiled else 128))
            return case(N, arms, device="cuda", K=128, dtype=dtype, chunk=chunk, compiled=compiled)

        lengths = [at(N) for N in (4096, 16384, 1024, 65536, 8192, 2048, 32768)]
        compiled = [at(N, compiled=True) for N in (4096, 1024, 16384)]
        return [*lengths, *compiled, at(4096, "memories"), at(4096, dtype="float32")]
    yardstick = [case(N, "delta") for N in (4096, 1024, 2048, 512, 8192)]
    alone = [case(N, "delta alone") for N in (2048, 4096, 8192, 16384, 32768)]
    return [*yardstick, *alone, case(4096, "memories"), case(1024, "memories")]


MEMORY_SPEED = replace(
    ATTENTION_SPEED,
    name="memory-speed",
    title="time and memory of memories that erase, forward and backward, beside the fused softmax attention",
    cases=cases,
    needs=replace(ATTENTION_SPEED.needs, arms=("delta causal",)),
)
