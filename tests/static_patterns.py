"""The static patterns and, for each, its rule for one query and one key, as a reader of its source would write it."""

from dataclasses import dataclass

import torch

from ortho.attention.sparse.block_mask import ABSENT, BlockMask, consecutive
from ortho.attention.sparse.block_sparse import BigBird, BlockSparse
from ortho.attention.sparse.blocked_window import BlockedWindow
from ortho.attention.sparse.dilated import Dilated, LocalDilated, NeitherFarNorMultiple
from ortho.attention.sparse.fixed import Fixed, FixedColumns
from ortho.attention.sparse.global_local import GlobalLocal
from ortho.attention.sparse.pattern import Pattern
from ortho.attention.sparse.strided import LocalStrided, Strided
from ortho.attention.sparse.window import Window

HUGE = 10**12  # more than any sequence has tokens


@dataclass(frozen=True)
class Parity(Pattern):
    """Keys of the query's parity and, in a tiling of its own, the key before it; a tiling between the two reads
    nothing. Every third query has no key."""

    def allowed(self, i, j):
        return (i % 3 != 2) & (((i - j) % 2 == 0) | (i - j == 1))

    def block_masks(self, section):
        first, stop, keys, is_causal, device = section
        queries, others = consecutive(first, stop, 8, device), consecutive(0, keys, 4, device)
        table = torch.arange(len(others), device=device).expand(len(queries), -1)
        nothing = torch.full_like(table, ABSENT)

        def even(i, j):
            return self.rule(is_causal)(i, j) & ((i - j) % 2 == 0)

        def before(i, j):
            return self.rule(is_causal)(i, j) & ((i - j) % 2 != 0)

        return (
            BlockMask(queries, others, table, even),
            BlockMask(queries, others, nothing),
            BlockMask(queries, others, table, before),
        )


def window(w):
    return Window(w), lambda i, j: i - w < j < i + w


def blocked(w, hop=None):
    def rule(i, j):
        starts = range(0, min(i, j) + 1, hop or w)
        return any(start <= min(i, j) and max(i, j) < start + w for start in starts)

    return BlockedWindow(w, hop), rule


def dilated(w, step):
    return Dilated(w, step), lambda i, j: abs(i - j) in range(0, w * step, step)


def columns(stride):
    return Strided(stride), lambda i, j: i % stride == j % stride


def strided(stride, width=None):
    return LocalStrided(stride, width), lambda i, j: i % stride == j % stride or abs(i - j) < (width or stride)


def local_dilated(k):
    return LocalDilated(k), lambda i, j: abs(i - j) <= k or abs(i - j) % k == 0


def inverted(k):
    return NeitherFarNorMultiple(k), lambda i, j: not (abs(i - j) > k or abs(i - j) % k == 0)


def summaries(stride, c):
    return FixedColumns(stride, c), lambda i, j: j % stride in range(stride - c, stride)


def fixed(stride, c):
    return Fixed(stride, c), lambda i, j: i // stride == j // stride or j % stride in range(stride - c, stride)


def global_local(w, g):
    return GlobalLocal(w, g), lambda i, j: abs(i - j) < w or i < g or j < g


def blocks(width, table):
    return BlockSparse(width, table), lambda i, j: j // width in table[i // width]


def big_bird(*sizes):
    """The rule knows which blocks were drawn, and nothing else about the pattern."""
    pattern = BigBird(*sizes)
    count = -(-LONGEST // pattern.width)
    rows = pattern.rows(count, count)
    return pattern, lambda i, j: j // pattern.width in rows[i // pattern.width]


LONGEST = 260  # the number of tokens for which the tables below have rows
SOME = tuple(tuple(sorted({t, t * 7 % 30, 33}) if t % 3 else [t * 5 % 29]) for t in range(30))
FEW_LONG = tuple(tuple(range(80)) if t % 30 == 7 else (t * 3 % 40,) for t in range(87))

RULES = [
    *(window(w) for w in (1, 5, 64, 65, 129, HUGE)),
    *(blocked(*sizes) for sizes in ((1,), (5,), (64,), (100,), (HUGE,), (5, 2), (7, 1), (64, 32), (100, 33), (6, 6))),
    *(dilated(*sizes) for sizes in ((1, 5), (3, 2), (40, 3), (2, 70), (HUGE, 4), (3, HUGE), (4, 1))),
    *(columns(stride) for stride in (1, 3, 16, 70, HUGE)),
    *(strided(*sizes) for sizes in ((1,), (4,), (16,), (90,), (HUGE,), (5, 6), (4, 19), (7, 2), (3, 1))),
    *(local_dilated(k) for k in (1, 5, 40, HUGE)),
    *(inverted(k) for k in (1, 2, 9, 80, HUGE)),
    *(summaries(*sizes) for sizes in ((1, 1), (4, 1), (7, 7), (16, 3), (100, 3), (64, 8), (HUGE, 2))),
    *(fixed(*sizes) for sizes in ((1, 1), (4, 1), (7, 7), (16, 3), (100, 5), (64, 8), (HUGE, 2))),
    *(global_local(*sizes) for sizes in ((1, 1), (3, 2), (2, 9), (70, 3), (3, 100), (HUGE, HUGE))),
    *(
        big_bird(*sizes)
        for sizes in ((3,), (64,), (5, 1, 0, 0), (3, 3, 2, 4, 7), (2, 1, 9, 0), (1, 2, 0, 5), (2, 1, 1, 0))
    ),
    (Parity(), lambda i, j: i % 3 != 2 and ((i - j) % 2 == 0 or i - j == 1)),
    blocks(9, SOME),
    blocks(20, ((),) * 13),
    blocks(3, FEW_LONG),
]
IDS = [str(pattern).replace(str(HUGE), "huge")[:60] for pattern, _ in RULES]
