"""Windows: a query attends to the keys around it (Beltagy et al. 2020, arXiv:2004.05150), or to those of its block."""

from dataclasses import dataclass

from torch import Tensor

from ortho._checks import checked
from ortho._typing import Size
from ortho.attention.sparse.pattern import Pattern, pattern_mechanism
from ortho.attention.sparse.tiling import BLOCK, TILE, Section, Tiling, Work, band, window_band, window_tile


@checked
@dataclass(frozen=True)
class Window(Pattern):
    """The keys less than `width` positions away: `width` of them in a causal call, else 2 width - 1.

    A window of w keys on each side, besides the query's own, is `Window(w + 1)`.
    """

    width: int

    def allowed(self, i: Tensor, j: Tensor) -> Tensor:
        return (i - j).abs() < self.width

    def remembered(self) -> tuple[int, int]:
        return 0, self.width

    def causal_pairs(self, n: int) -> int:
        w = min(self.width, n)
        return w * n - w * (w - 1) // 2

    def tilings(self, section: Section) -> tuple[Tiling, ...]:
        return (window_band(section, self.width),)

    def work(self, N: Size, *, is_causal: bool = False, last: bool = False) -> tuple[Work, ...]:
        """Takes symbols, too: N is then a multiple of `TILE`, and longer than the window reaches."""
        if isinstance(N, int):
            return super().work(N, is_causal=is_causal, last=last)
        if last:
            return (Work(1, self.width, 1, 1),)
        tile, reach = window_tile(self.width), -(-(self.width - 1) // BLOCK)  # in blocks
        one_side = N / tile * reach - sum(range(reach, 0, -tile // BLOCK))  # fewer blocks before the first tiles
        return (Work(N / tile, N / BLOCK + (one_side if is_causal else 2 * one_side), tile, BLOCK),)


WHOLE = 256  # the most queries in a tile whose pairs are all allowed


@checked
@dataclass(frozen=True)
class BlockedWindow(Pattern):
    """The keys that share a block of `width` tokens with the query. A block begins every `hop` tokens.

    By default blocks do not overlap: where one ends, the next begins.
    """

    width: int
    hop: int | None = None

    def __post_init__(self) -> None:
        if self.hop is not None and self.hop > self.width:
            raise ValueError(f"hop: expected at most the width, {self.width}, or tokens are left out, got {self.hop}")

    @property
    def _hop(self) -> int:
        return self.width if self.hop is None else self.hop

    def _end(self, i: Tensor) -> Tensor:
        """The end of the last block that holds the token at i."""
        return i // self._hop * self._hop + self.width

    def allowed(self, i: Tensor, j: Tensor) -> Tensor:
        return (j < self._end(i)) & (i < self._end(j))

    def remembered(self) -> tuple[int, int]:
        return 0, self.width

    def causal_pairs(self, n: int) -> int:
        hop = self._hop
        whole = max(0, (n - self.width) // hop + 1)  # blocks
        rest = n - whole * hop  # tokens whose last block is cut off
        return whole * (hop * self.width - hop * (hop - 1) // 2) + rest * (rest + 1) // 2

    def tilings(self, section: Section) -> tuple[Tiling, ...]:
        def low(i: Tensor) -> Tensor:  # the start of the first block that holds i
            return ((i - self.width) // self._hop + 1) * self._hop

        tile = tile_width(self._hop, TILE if section.is_causal else max(TILE, min(self._hop, WHOLE)))
        return (band(section, low, lambda i: self._end(i) - 1, self.allowed, tile=tile),)


def evenly(length: int, most: int) -> int:
    """The width of equal pieces, at most `most`, of which as few as possible cover `length`."""
    return -(-length // -(-length // most))


def tile_width(block: int, most: int = TILE) -> int:
    """A number of queries, at most `most`, whose tiles cross as few borders of blocks of `block` tokens as possible."""
    return most // block * block if block <= most else evenly(block, most)


SOURCE = "Beltagy et al. 2020, arXiv:2004.05150"
MECHANISMS = (
    pattern_mechanism("window", Window(256), SOURCE),
    pattern_mechanism("blocked-window", BlockedWindow(256), "Qiu et al. 2019, arXiv:1911.02972"),
    pattern_mechanism("overlapping-blocks", BlockedWindow(256, hop=128), SOURCE),
)
