"""Block-sparse attention: any table of pairs of blocks; and BigBird's (Zaheer et al. 2020, arXiv:2007.14062)."""

from abc import abstractmethod
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ortho import checks
from ortho.attention.draws import drawn_once
from ortho.attention.sparse.block_mask import ABSENT, BlockMask, Section, consecutive
from ortho.attention.sparse.pattern import Pattern, pattern_mechanism

Rows = tuple[tuple[int, ...], ...]  # the blocks of keys that each block of queries attends to

LONGER = 4  # rows with more than this many times a table's average number of blocks get a table of their own


@dataclass(frozen=True)
class Blocks(Pattern):
    """All pairs of tokens in some pairs of blocks, of `width` tokens each."""

    width: int = 64

    @abstractmethod
    def rows(self, queries: int, keys: int) -> Rows:
        """Which of the first `keys` blocks of keys each of the first `queries` blocks of queries attends to."""

    def allowed(self, i: Tensor, j: Tensor) -> Tensor:
        queries, keys = int(i.max()) + 1, int(j.max()) + 1
        rows = self.rows(-(-queries // self.width), -(-keys // self.width))
        if i.numel() == 1:  # a token that is decoded needs one row of the table
            kept = torch.isin(j // self.width, torch.tensor(rows[-1], dtype=j.dtype, device=j.device))
            return kept.expand(torch.broadcast_shapes(i.shape, j.shape))
        table = torch.zeros(len(rows), -(-keys // self.width), dtype=torch.bool, device="cpu")
        for t, row in enumerate(rows):
            table[t, list(row)] = True
        return table.to(i.device)[i // self.width, j // self.width]

    def block_masks(self, section: Section) -> tuple[BlockMask, ...]:
        first, stop, keys, is_causal, device = section
        tile = self.width if stop - first > 1 else 1  # a lone query, in decoding, needs one row
        queries, blocks = consecutive(first, stop, tile, device), consecutive(0, keys, self.width, device)
        owns = [t * tile // self.width for t in range(first // tile, -(-stop // tile))]
        rows = self.rows(owns[-1] + 1, len(blocks))
        if not is_causal:
            return _split(queries, blocks, [[*rows[own]] for own in owns])
        earlier = _split(queries, blocks, [[b for b in rows[own] if b < own] for own in owns])
        diagonal = _table([[b for b in rows[own] if b == own] for own in owns], device)
        return *earlier, BlockMask(queries, blocks, diagonal, section.rule(None))


def _split(queries: Tensor, keys: Tensor, rows: list[list[int]]) -> tuple[BlockMask, ...]:
    """Block masks that pair each tile of queries with its row of blocks.

    One table would pad all rows to the longest. So rows that are much longer than the others, such as BigBird's leading
    ones, go to further block masks of their tiles alone. A table with at most one entry a token is never split.
    """
    most = max(queries.shape[1], LONGER * sum(map(len, rows)) / len(rows))
    long = [t for t, row in enumerate(rows) if len(row) > most]
    one = BlockMask(queries, keys, _table([row if len(row) <= most else [] for row in rows], queries.device))
    return (one, *_split(queries[long], keys, [rows[t] for t in long])) if long else (one,)


def _table(rows: list[list[int]], device: torch.device) -> Tensor:
    """A table of rows of different lengths, padded with `ABSENT`; sorted, since adjacent blocks need no copy."""
    width = max(map(len, rows))
    filled = [sorted(row) + [ABSENT] * (width - len(row)) for row in rows]
    return torch.tensor(filled, dtype=torch.long, device=device).view(len(rows), width)


@dataclass(frozen=True)
class BlockSparse(Blocks):
    """The pairs of blocks in a table: `blocks[t]` are the blocks of keys that block t of queries attends to.

    Raises ValueError for more queries than the table has blocks for.
    """

    blocks: Rows = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        for t, row in enumerate(self.blocks):
            fits = len(set(row)) == len(row) and all(isinstance(b, int) and b >= 0 for b in row)
            checks.expect(fits, "blocks", f"numbers of blocks, each once, in row {t}", row)
        object.__setattr__(self, "blocks", tuple(map(tuple, self.blocks)))  # of lists, too, so that it can be hashed

    def rows(self, queries: int, keys: int) -> Rows:
        wanted, known = f"a row for each of the {queries} blocks of {queries * self.width} tokens", len(self.blocks)
        checks.expect(queries <= known, "blocks", wanted, f"{known} rows")
        return tuple(tuple(b for b in row if b < keys) for row in self.blocks[:queries])


@dataclass(frozen=True)
class BigBird(Blocks):
    """Blocks less than `reach` away, the first `leading` blocks, and `random` others before each block.

    Leading blocks attend to all blocks, and all blocks to them. The others are drawn from a `seed`; a call that is not
    causal takes them in both directions. The draws for a block do not depend on how many blocks follow it, so a
    sequence can be continued.
    """

    reach: int = 2
    leading: int = 1
    random: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("width", "reach"):
            checks.positive_int(name, getattr(self, name))
        for name in ("leading", "random", "seed"):
            value = getattr(self, name)
            checks.expect(isinstance(value, int) and value >= 0, name, "an integer of at least 0", value)

    def rows(self, queries: int, keys: int) -> Rows:
        return _both(queries, keys, self.reach, self.leading, self.random, self.seed)

    def kv_window(self) -> tuple[int, int] | None:
        return None if self.random else (self.leading * self.width, self.reach * self.width)


@lru_cache
def _both(queries: int, keys: int, reach: int, leading: int, random: int, seed: int) -> Rows:
    """For each of the first `queries` blocks: which of the first `keys` blocks it attends to or is attended by."""
    most = max(queries, keys)
    # Drawn for a power of 2 of blocks: a sequence that grows seldom draws its rows again.
    before = _drawn(1 << (most - 1).bit_length(), reach, leading, random, seed)[:most]
    rows = [set(row) | {t} for t, row in enumerate(before)]
    for t, row in enumerate(before):
        for b in row:
            rows[b].add(t)
    return tuple(tuple(sorted(b for b in row if b < keys)) for row in rows[:queries])


@drawn_once
def _drawn(count: int, reach: int, leading: int, random: int, seed: int) -> Rows:
    """For each of the first `count` blocks: the blocks before it that it attends to."""
    rows, generator = [], torch.Generator().manual_seed(seed)
    for t in range(count):
        near = max(0, t - reach + 1)
        far = max(0, near - leading)  # blocks between the leading and the near ones
        drawn = torch.randperm(far, generator=generator, device="cpu")[:random] + leading
        rows.append((*range(min(leading, near)), *drawn.tolist(), *range(near, t)))
    return tuple(rows)


SOURCE = "Zaheer et al. 2020, arXiv:2007.14062"
MECHANISMS = (
    pattern_mechanism("block-sparse", BigBird, SOURCE, random=0),  # near and leading blocks alone
    pattern_mechanism("big-bird", BigBird, SOURCE),
)
block_sparse_attention, big_bird_attention = (m.fast for m in MECHANISMS)
