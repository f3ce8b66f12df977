"""A window: a query attends to the keys around it (Beltagy et al. 2020, arXiv:2004.05150)."""

from dataclasses import dataclass

from torch import Tensor

from ortho.attention.sparse.block_mask import TILE, BlockMask, Section, band
from ortho.attention.sparse.pattern import Pattern, pattern_mechanism


@dataclass(frozen=True)
class Window(Pattern):
    """The keys less than `width` positions away: `width` of them in a causal call, else 2 width - 1.

    A window of w keys on each side, besides the query's own, is `Window(w + 1)`.
    """

    width: int = 256

    def allowed(self, i: Tensor, j: Tensor) -> Tensor:
        return (i - j).abs() < self.width

    def kv_window(self) -> tuple[int, int]:
        return 0, self.width

    def block_masks(self, section: Section) -> tuple[BlockMask, ...]:
        reach = min(self.width, max(section.stop, section.keys)) - 1
        tile = TILE if self.width > TILE else TILE // 2  # queries of a narrow window share few keys
        return (band(section, lambda i: i - reach, lambda i: i + reach, self.allowed, tile=tile),)


MECHANISM = pattern_mechanism("window", Window, "Beltagy et al. 2020, arXiv:2004.05150")
window_attention = MECHANISM.fast
