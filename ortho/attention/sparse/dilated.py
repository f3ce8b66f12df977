"""Dilated windows (Beltagy et al. 2020, arXiv:2004.05150, section 3.1), alone and beside a window."""

from dataclasses import dataclass

from torch import Tensor

from ortho.attention.sparse.block_mask import BlockMask, Section, band
from ortho.attention.sparse.pattern import Pattern, pattern_mechanism
from ortho.attention.sparse.strided import LocalStrided, residue_band


@dataclass(frozen=True)
class Dilated(Pattern):
    """The keys m times `dilation` positions away, for m from 0 to `width` - 1."""

    width: int = 64
    dilation: int = 4

    def allowed(self, i: Tensor, j: Tensor) -> Tensor:
        return ((i - j) % self.dilation == 0) & ((i - j).abs() < self.width * self.dilation)

    def kv_window(self) -> tuple[int, int]:
        return 0, (self.width - 1) * self.dilation + 1

    def block_masks(self, section: Section) -> tuple[BlockMask, ...]:
        reach = min(self.width, max(section.stop, section.keys)) - 1
        return (residue_band(section, self.dilation, lambda s: s - reach, lambda s: s + reach, self.allowed),)


@dataclass(frozen=True)
class LocalDilated(Pattern):
    """The keys at most `reach` positions away, and those a multiple of `reach` away.

    A causal call keeps the same pairs as `LocalStrided` in its paper's convention: the two are one pattern.
    """

    reach: int = 64

    def allowed(self, i: Tensor, j: Tensor) -> Tensor:
        return ((i - j).abs() <= self.reach) | ((i - j) % self.reach == 0)

    def block_masks(self, section: Section) -> tuple[BlockMask, ...]:
        return LocalStrided(self.reach, self.reach + 1).block_masks(section)


@dataclass(frozen=True)
class NeitherFarNorMultiple(Pattern):
    """The keys that are neither more than `reach` positions away nor a multiple of `reach`.

    A mask that hides what is far or a multiple of `reach` leaves the keys from 1 to reach - 1 positions away. The
    query's own key, 0 positions away, is not among them.
    """

    reach: int = 64

    def allowed(self, i: Tensor, j: Tensor) -> Tensor:
        return ((i - j).abs() <= self.reach) & ((i - j) % self.reach != 0)

    def kv_window(self) -> tuple[int, int]:
        return 0, self.reach

    def block_masks(self, section: Section) -> tuple[BlockMask, ...]:
        reach = self.reach - 1
        return (band(section, lambda i: i - reach, lambda i: i + reach, self.allowed),)


SOURCE = "Beltagy et al. 2020, arXiv:2004.05150"
MECHANISMS = (
    pattern_mechanism("dilated", Dilated, SOURCE),
    pattern_mechanism("local-dilated", LocalDilated, "Child et al. 2019, arXiv:1904.10509"),
)
dilated_attention, local_dilated_attention = (m.fast for m in MECHANISMS)
