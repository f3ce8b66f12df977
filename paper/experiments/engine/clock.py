"""The time of something that is repeated, as one who runs it meets it."""

import time
from collections.abc import Callable

import torch


def mean_seconds(steps: Callable[[], None], count: int, *, cuda: bool, quantity: str = "step") -> dict[str, float]:
    """Seconds of one of the `count` steps that a call makes, the mean.

    On a CPU both the wall's (`step_s`) and the process's own (`step_cpu_s`), which other load does not lengthen. On
    CUDA the wall's until the device is done, with the host's time to launch kernels.
    """
    if cuda:
        torch.cuda.synchronize()
    began = time.perf_counter(), time.process_time()
    steps()
    if cuda:
        torch.cuda.synchronize()
    ended = time.perf_counter(), time.process_time()
    wall, own = (round((b - a) / count, 9) for a, b in zip(began, ended, strict=True))
    return {f"{quantity}_s": wall} if cuda else {f"{quantity}_s": wall, f"{quantity}_cpu_s": own}
