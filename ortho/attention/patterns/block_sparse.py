"""Block-sparse attention: any table of pairs of blocks; and BigBird's (Zaheer et al. 2020, arXiv:2007.14062)."""

from abc import abstractmethod
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ortho._checks import positive_int
from ortho.attention.patterns.layouts import both_ways
from ortho.attention.patterns.parts import ABSENT, Part, in_order
from ortho.attention.patterns.pattern import Pattern, pattern_mechanism

Rows = tuple[tuple[int, ...], ...]  # the blocks of keys that each block of queries attends to


@dataclass(frozen=True)
class Blocks(Pattern):
    """All pairs of the tokens of some pairs of blocks, of `width` tokens each."""

    width: int

    def __post_init__(self) -> None:
        positive_int("width", self.width)

    @abstractmethod
    def rows(self, count: int) -> Rows:
        """Those of the first `count` blocks of queries, among as many blocks of keys."""

    def allowed(self, i: Tensor, j: Tensor) -> Tensor:
        i, j = i // self.width, j // self.width
        count = int(max(i.max(), j.max())) + 1
        kept = torch.zeros(count, count, dtype=torch.bool)
        for t, row in enumerate(self.rows(count)):
            kept[t, [b for b in row if b < count]] = True
        return kept.to(i.device)[i, j]

    def pairs(self, n: int, *, is_causal: bool = False) -> int:
        sizes = [min(self.width, n - start) for start in range(0, n, self.width)]
        kept = 0
        for t, (size, row) in enumerate(zip(sizes, self.rows(len(sizes)), strict=True)):
            kept += size * sum(sizes[b] for b in row if b < (t if is_causal else len(sizes)))
            kept += size * (size + 1) // 2 if is_causal and t in row else 0
        return kept

    def parts(self, first: int, stop: int, keys: int, *, is_causal: bool, device: torch.device) -> tuple[Part, ...]:
        tile = self.width if stop - first > 1 else 1  # of a lone query, which is decoded, as many rows as it needs
        queries, blocks = in_order(first, stop, tile, device), in_order(0, keys, self.width, device)
        count = len(blocks.positions)
        owns = [t * tile // self.width for t in range(first // tile, -(-stop // tile))]
        rows = self.rows(max(count, owns[-1] + 1))
        if not is_causal:
            table = _table([[b for b in rows[own] if b < count] for own in owns], device)
            return (Part(queries, blocks, table),)
        earlier = _table([[b for b in rows[own] if b < own] for own in owns], device)
        diagonal = _table([[b for b in rows[own] if b == own] for own in owns], device)
        return Part(queries, blocks, earlier), Part(queries, blocks, diagonal, lambda i, j: j <= i, relative=True)


def _table(rows: list[list[int]], device: torch.device) -> Tensor:
    """Rows of different lengths, filled up by `ABSENT`; sorted, since blocks that lie side by side need no copy."""
    width = max(map(len, rows))
    filled = [sorted(row) + [ABSENT] * (width - len(row)) for row in rows]
    return torch.tensor(filled, dtype=torch.long, device=device).view(len(rows), width)


@dataclass(frozen=True)
class BlockSparse(Blocks):
    """The pairs of blocks in a table: `blocks[t]` are those of keys that block t of queries attends to.

    More tokens than the table has blocks of queries for raise ValueError.
    """

    blocks: Rows

    def __post_init__(self) -> None:
        super().__post_init__()
        for t, row in enumerate(self.blocks):
            if any(isinstance(b, bool) or not isinstance(b, int) or b < 0 for b in row) or len(set(row)) < len(row):
                raise ValueError(f"blocks: expected numbers of blocks, each once, in row {t}, got {row!r}")

    def rows(self, count: int) -> Rows:
        if count > len(self.blocks):
            tokens, known = count * self.width, len(self.blocks)
            raise ValueError(
                f"blocks: expected a row for each of the {count} blocks of {tokens} tokens, got {known} rows"
            )
        return self.blocks[:count]


@dataclass(frozen=True)
class BigBird(Blocks):
    """Blocks that are less than `reach` away; the first `leading` ones, which attend to all and all to them; and
    `random` others before each block, drawn from a `seed`, of which a call that is not causal takes both directions.

    The draws for a block do not depend on how many follow it: a sequence can be continued.
    """

    reach: int = 2
    leading: int = 1
    random: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        positive_int("reach", self.reach)
        for name in ("leading", "random", "seed"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ValueError(f"{name}: expected an integer of at least 0, got {value!r}")

    def rows(self, count: int) -> Rows:
        before = _drawn(count, self.reach, self.leading, self.random, self.seed)
        rows = [set(row) | {t} for t, row in enumerate(before)]
        for t, row in enumerate(before):
            for b in row:
                rows[b].add(t)
        return tuple(tuple(sorted(row)) for row in rows)

    def pairs(self, n: int, *, is_causal: bool = False) -> int:
        whole, rest = divmod(n, self.width)
        most = self.reach + self.leading + self.random  # blocks that a block reads, itself included
        short = min(whole, most)  # blocks that have fewer before them, or just as many
        others = short * (short - 1) // 2 + (whole - short) * (most - 1)
        last = rest * min(whole, most - 1)
        causal = self.width * (self.width * others + last) + whole * self.width * (self.width + 1) // 2
        return both_ways(causal + rest * (rest + 1) // 2, n, is_causal)


@lru_cache
def _drawn(count: int, reach: int, leading: int, random: int, seed: int) -> Rows:
    """The blocks before each block that it attends to."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for t in range(count):
        near = max(0, t - reach + 1)
        far = max(0, near - leading)  # blocks between the leading and the near ones
        drawn = torch.randperm(far, generator=generator)[:random] + leading
        rows.append((*range(min(leading, near)), *drawn.tolist(), *range(near, t)))
    return tuple(rows)


SOURCE = "Zaheer et al. 2020, arXiv:2007.14062"
MECHANISMS = (
    pattern_mechanism("block-sparse", BigBird(64, random=0), SOURCE),  # near and leading blocks alone
    pattern_mechanism("big-bird", BigBird(64), SOURCE),
)
