"""Windows: a query attends to the keys around it (Beltagy et al. 2020, arXiv:2004.05150), or to those of its block."""

from dataclasses import dataclass

from ortho import checks
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


WHOLE = 256  # the most queries in a tile whose pairs are all allowed


@dataclass(frozen=True)
class BlockedWindow(Pattern):
    """The keys that share a block of `width` tokens with the query. A block begins every `hop` tokens.

    By default blocks do not overlap: where one ends, the next begins.
    """

    width: int = 256
    hop: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hop is not None:
            hop, most = checks.positive_int("hop", self.hop), self.width
            checks.expect(hop <= most, "hop", f"at most the width, {most}, or tokens are left out", hop)

    @property
    def _hop(self) -> int:
        return self.width if self.hop is None else self.hop

    def _end(self, i: Tensor) -> Tensor:
        """The end of the last block that holds the token at i."""
        return i // self._hop * self._hop + self.width

    def allowed(self, i: Tensor, j: Tensor) -> Tensor:
        return (j < self._end(i)) & (i < self._end(j))

    def kv_window(self) -> tuple[int, int]:
        return 0, self.width

    def block_masks(self, section: Section) -> tuple[BlockMask, ...]:
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
    pattern_mechanism("window", Window, SOURCE),
    pattern_mechanism("blocked-window", BlockedWindow, "Qiu et al. 2019, arXiv:1911.02972"),
    pattern_mechanism("overlapping-blocks", BlockedWindow, SOURCE, hop=128),
)
window_attention, blocked_window_attention, overlapping_blocks_attention = (m.fast for m in MECHANISMS)
