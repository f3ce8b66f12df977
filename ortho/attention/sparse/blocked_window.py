"""Windows of blocks: a query attends to the keys of its block (Qiu et al. 2019, arXiv:1911.02972), which may overlap
others (Beltagy et al. 2020, arXiv:2004.05150)."""

from dataclasses import dataclass

from torch import Tensor

from ortho import checks
from ortho.attention.sparse.block_mask import TILE, BlockMask, Section, band, evenly
from ortho.attention.sparse.pattern import Pattern, pattern_mechanism

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


def tile_width(block: int, most: int = TILE) -> int:
    """A number of queries, at most `most`, whose tiles cross as few borders of blocks of `block` tokens as possible."""
    return most // block * block if block <= most else evenly(block, most)


MECHANISMS = (
    pattern_mechanism("blocked-window", BlockedWindow, "Qiu et al. 2019, arXiv:1911.02972"),
    pattern_mechanism("overlapping-blocks", BlockedWindow, "Beltagy et al. 2020, arXiv:2004.05150", hop=128),
)
blocked_window_attention, overlapping_blocks_attention = (m.fast for m in MECHANISMS)
