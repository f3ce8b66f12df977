"""The chunks that `ortho.attention.selected.sparse_linear` goes through."""

from functools import cached_property

import torch
from torch import Tensor

WINDOW = 256


class Band:
    """Of keys that may be near a chunk of C queries: their chunks, by offset from the queries'.

    `chunks` is how many there are, of queries and of keys: none is further off than the last from the first.
    """

    def __init__(self, window: int, chunk: int, is_causal: bool, chunks: int) -> None:
        self.window, self.chunk, self.is_causal = window, chunk, is_causal
        reach = min(-(-(window - 1) // chunk), chunks - 1)
        self.offsets = list(range(-reach, 1 if is_causal else reach + 1))

    @cached_property
    def mixed(self) -> list[int]:
        """Offsets of chunks of which some queries find some keys far."""
        return [o for o in self.offsets if self._reaches(o)]

    def _reaches(self, offset: int) -> bool:
        low, high = -offset * self.chunk - self.chunk + 1, -offset * self.chunk + self.chunk - 1  # of i - j
        return high >= self.window or (not self.is_causal and low <= -self.window)

    def _distance(self, offsets: list[int], device: torch.device) -> Tensor:
        """i - j, (C, C times the offsets)."""
        place = torch.arange(self.chunk, device=device)
        return torch.cat([place[:, None] - place - o * self.chunk for o in offsets], 1)

    def near(self, device: torch.device) -> Tensor:
        distance = self._distance(self.offsets, device)
        near = distance.abs() < self.window
        return near & (distance >= 0) if self.is_causal else near

    def far(self, device: torch.device) -> Tensor:
        distance = self._distance(self.mixed, device)
        return distance >= self.window if self.is_causal else distance.abs() >= self.window
