"""The sizes of `ortho.attention.selected.nsa`, and how many keys a query reads with them."""

from dataclasses import dataclass
from typing import Any

from ortho import _checks
from ortho._checks import checked

ALWAYS = 3  # blocks that each query reads: the first, its own, and the one before


@dataclass(frozen=True)
class Sizes:
    """In tokens, but for `count`, in blocks; the defaults are the paper's.

    Raises TypeError or ValueError for sizes that are none; `length` and `block` are multiples of `stride`, and there
    are at least 3 blocks, which every query reads.
    """

    length: int = 32
    stride: int = 16
    block: int = 64
    count: int = 16
    window: int = 512

    def __post_init__(self) -> None:
        for name in ("length", "stride", "block", "count", "window"):
            _checks.positive_int(name, getattr(self, name))
        for name in ("length", "block"):
            if getattr(self, name) % self.stride:
                raise ValueError(f"{name}: expected a multiple of stride = {self.stride}, got {getattr(self, name)}")
        if self.count < ALWAYS:
            raise ValueError(f"count: expected at least {ALWAYS}, got {self.count}")

    def compressed(self, t: int) -> int:
        """Compressed tokens of t tokens."""
        return max(0, (t - self.length) // self.stride + 1)

    def keys(self, t: int) -> int:
        """Keys that a query behind t - 1 others reads, as the paper counts them: with whole blocks and windows."""
        return self.compressed(t) + self.count * self.block + self.window

    def kept(self, t: int) -> int:
        """Pairs of the t-th query: its own block up to itself, and no more past than there is."""
        past = min(self.count - 1, (t - 1) // self.block)
        return self.compressed(t) + past * self.block + (t - 1) % self.block + 1 + min(self.window, t)


SIZES = Sizes()


@checked
def known_sizes(sizes: Any) -> Sizes:
    """`sizes` if they are such, else TypeError."""
    if not isinstance(sizes, Sizes):
        raise TypeError(f"sizes: expected Sizes, got {_checks.describe(sizes)}")
    return sizes
