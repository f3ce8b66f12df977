"""Strided attention of the Sparse Transformer (Child et al. 2019, arXiv:1904.10509, section 4.3)."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from ortho import checks
from ortho.attention.sparse.block_mask import ABSENT, BLOCK, TILE, BlockMask, Bound, Rule, Section, block_ranges, evenly
from ortho.attention.sparse.pattern import Pattern, pattern_mechanism
from ortho.attention.sparse.window import Window

CAUSAL_TILE = 32  # queries in a tile of a column: a column has few, and hides half of what its last tiles read


@dataclass(frozen=True)
class Strided(Pattern):
    """The keys a multiple of `stride` positions away: a column, if the sequence fills rows of `stride` tokens."""

    stride: int = 64

    def allowed(self, i: Tensor, j: Tensor) -> Tensor:
        return (i - j) % self.stride == 0

    def block_masks(self, section: Section) -> tuple[BlockMask, ...]:
        return (_column(self, section, self.stride, 0),)


@dataclass(frozen=True)
class LocalStrided(Pattern):
    """The `Window` and the `Strided` of the Sparse Transformer in one head.

    `width` is the window's; by default it is the stride, as in the authors' code. The paper's sets, of the keys from
    i - stride to i, hold one key more.
    """

    stride: int = 64
    width: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.width is not None:
            checks.positive_int("width", self.width)

    @property
    def window(self) -> Window:
        return Window(self.stride if self.width is None else self.width)

    def allowed(self, i: Tensor, j: Tensor) -> Tensor:
        return self.window.allowed(i, j) | Strided(self.stride).allowed(i, j)

    def block_masks(self, section: Section) -> tuple[BlockMask, ...]:
        return *self.window.block_masks(section), _column(self, section, self.stride, self.window.width)


def _column(pattern: Pattern, section: Section, stride: int, beyond: int) -> BlockMask:
    """The block mask of a pattern's pairs whose distance is a multiple of `stride` and at least `beyond`."""
    rows = min(-(-beyond // stride), section.keys)  # rows that lie nearer
    return residue_band(
        section,
        stride,
        torch.zeros_like,
        lambda s: s - rows if section.is_causal else torch.full_like(s, section.keys),
        lambda i, j: pattern.allowed(i, j) & ((i - j).abs() >= beyond),
        tile=CAUSAL_TILE if section.is_causal else TILE,
    )


def residue_band(section: Section, step: int, low: Bound, high: Bound, allowed: Rule, *, tile: int = TILE) -> BlockMask:
    """The block mask in which each query reads keys at multiples of `step` from it, those from low(s) to high(s).

    Tokens with the same position modulo `step` form a class, and s is a token's number within its class. Which pairs
    count depends on i - j alone.
    """
    first, stop, keys, device = section.first, section.stop, section.keys, section.device
    step = min(step, max(stop, keys))  # further classes would hold no token
    tile = evenly(-(-(stop - first) // step), tile)
    block = evenly(-(-keys // step), BLOCK if stop - first > 1 else 1)
    classes = torch.arange(step, device=device)
    starts = torch.arange(first, stop, step * tile, device=device)[:, None] + classes[: stop - first]
    # Tiles are computed in runs: of one class or over all classes, whichever are longer.
    starts = (starts.T if starts.shape[0] > starts.shape[1] else starts).flatten()
    i = starts[:, None] + step * torch.arange(tile, device=device)
    j = classes[:, None] + torch.arange(0, keys, step, device=device)
    j = pad(j, (0, -j.shape[1] % block), value=keys)
    own, s = starts % step, starts // step
    last = torch.minimum(s + tile, (stop - own + step - 1) // step) - 1
    highest = torch.minimum(section.last_keys(high(last), last), (keys - own + step - 1) // step - 1) // block
    table = block_ranges(low(s).clamp(min=0) // block, highest.masked_fill(starts >= stop, ABSENT))
    table = torch.where(table < 0, ABSENT, table + own[:, None] * (j.shape[1] // block))
    tiles, blocks = i.masked_fill(i >= stop, ABSENT), j.masked_fill(j >= keys, ABSENT).view(-1, block)
    return BlockMask(tiles, blocks, table, section.rule(allowed))


SOURCE = "Child et al. 2019, arXiv:1904.10509"
MECHANISMS = (
    pattern_mechanism("strided", Strided, SOURCE),
    pattern_mechanism("local-strided", LocalStrided, SOURCE),
)
strided_attention, local_strided_attention = (m.fast for m in MECHANISMS)
