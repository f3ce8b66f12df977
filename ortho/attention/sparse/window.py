"""A window: a query attends to the keys around it (Beltagy et al. 2020, arXiv:2004.05150)."""

from dataclasses import dataclass

from ortho._typing import Size, Tensor
from ortho.attention.sparse.block_mask import BLOCK, TILE, BlockMask, Section, band
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

    @property
    def tile(self) -> int:
        """The number of queries in a tile: fewer for a narrow window, whose queries share few keys."""
        return TILE if self.width > TILE else TILE // 2

    def block_masks(self, section: Section) -> tuple[BlockMask, ...]:
        reach = min(self.width, max(section.stop, section.keys)) - 1

        def near(i: Tensor, j: Tensor) -> Tensor:
            return (i - j).abs() <= reach

        return (band(section, lambda i: i - reach, lambda i: i + reach, near, tile=self.tile),)

    def computed_pairs(self, N: Size, *, is_causal: bool = False, last: bool = False) -> Size:
        """Takes symbols, too: N is then a multiple of `TILE`, and longer than the window reaches."""
        if isinstance(N, int):
            return super().computed_pairs(N, is_causal=is_causal, last=last)
        if last:
            return self.width
        tile, reach = self.tile, -(-(self.width - 1) // BLOCK)  # in blocks
        one_side = N / tile * reach - sum(range(reach, 0, -tile // BLOCK))  # fewer blocks before the first tiles
        return (N / BLOCK + (one_side if is_causal else 2 * one_side)) * tile * BLOCK


MECHANISM = pattern_mechanism("window", Window, "Beltagy et al. 2020, arXiv:2004.05150")
window_attention = MECHANISM.fast
