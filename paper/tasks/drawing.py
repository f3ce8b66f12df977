"""What several of the tasks draw."""

import torch


def orders(*shape: int, generator: torch.Generator) -> torch.Tensor:
    """Independent random orders, each along the last axis: the numbers from 0 to its length, in that order."""
    return torch.rand(*shape, generator=generator).argsort(-1)
