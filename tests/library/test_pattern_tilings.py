"""The parts of static patterns: disjoint, together the mask; and they compute little that is not kept."""

import pytest
import torch
from static_patterns import IDS, RULES

from ortho.attention.sparse import tiled_attention as engine
from ortho.attention.sparse.block_sparse import BigBird, BlockSparse
from ortho.attention.sparse.dilated import Dilated, LocalDilated
from ortho.attention.sparse.fixed import Fixed, Summaries
from ortho.attention.sparse.global_local import GlobalLocal
from ortho.attention.sparse.strided import Columns, Strided
from ortho.attention.sparse.tiling import Section
from ortho.attention.sparse.window import BlockedWindow, Window



def kept_by(parts, first, stop, keys):
    """How many parts hold each pair, (queries, keys), and how many read it."""
    kept, read = (torch.zeros(stop - first, keys, dtype=torch.long) for _ in range(2))
    for part in parts:
        i = part.queries.positions[:, :, None]  # (T, B, 1)
        j = part.keys.positions[part.table.clamp(min=0)]
        j = j.masked_fill((part.table < 0)[..., None], -1).flatten(1)[:, None]  # (T, 1, W B)
        there = (i >= 0) & (j >= 0)
        for count, some in ((read, there), (kept, there if part.allowed is None else there & part.allowed(i, j))):
            some, rows, columns = torch.broadcast_tensors(some, i - first, j)
            count.index_put_((rows[some], columns[some]), torch.tensor(1), accumulate=True)
    return kept, read


@pytest.mark.parametrize(("pattern", "rule"), RULES, ids=IDS)
@pytest.mark.parametrize("causal", [False, True])
def test_parts_hold_the_mask(pattern, rule, causal):
    """Each kept pair in one part: whole sequences, queries behind a state, a lone query, other numbers of keys."""
    whole = [(0, n, n) for n in (1, 2, 5, 16, 63, 64, 65, 100, 197)]
    behind = [
        (first, stop, stop) for first, stop in ((1, 2), (37, 38), (199, 200), (3, 70), (60, 130), (64, 128), (130, 137))
    ]
    for first, stop, keys in (
        *whole,
        *behind,
        *(() if causal else ((0, 40, 100), (0, 100, 40), (7, 9, 150), (0, 1, 30))),
    ):
        parts = pattern.tilings(Section(first, stop, keys, causal))
        kept, read = kept_by(parts, first, stop, keys)
        assert torch.equal(kept, pattern.mask(stop, keys, first=first, is_causal=causal).long()), (first, stop, keys)
        assert int(read.max()) <= len(parts)


N = 4096
# What is computed over what is kept of 4096 tokens, causal and not. Tiles of 64 queries read 63 keys that not all of
# them keep; a column of 64 tokens is cut into two tiles, one of 32 is one.
WASTE = {
    Window(256): (1.25, 1.13),
    BlockedWindow(256): (1.25, 1),
    BlockedWindow(256, 128): (1.17, 1),
    Dilated(256, 4): (1.25, 1.11),
    Columns(64): (1.48, 1),
    Columns(128): (1.94, 1),
    Strided(64): (1.51, 1.18),
    Strided(128): (1.57, 1.23),
    LocalDilated(64): (1.85, 1.35),
    Summaries(64, 8): (1.03, 1),
    Fixed(64, 8): (1.12, 1.02),
    Fixed(128, 8): (1.18, 1.03),
    GlobalLocal(256, 16): (1.24, 1.12),
    BigBird(64): (1.1, 1),
}


@pytest.mark.parametrize("pattern", WASTE, ids=str)
@pytest.mark.parametrize("causal", [True, False])
def test_little_is_computed_in_vain(pattern, causal):
    computed = sum(work.pairs for work in pattern.work(N, is_causal=causal))
    ratio = computed / pattern.pairs(N, is_causal=causal)
    most = WASTE[pattern][not causal]
    assert most - 0.02 < ratio <= most


@pytest.mark.parametrize("pattern", [p for p in WASTE if not isinstance(p, BigBird)], ids=str)
@pytest.mark.parametrize("causal", [True, False])
def test_keys_are_read_as_they_lie(pattern, causal):
    """No block of keys is copied for each tile that reads it."""
    for part in pattern.tilings(Section(0, N, N, causal)):
        assert all(tiles.run is not None for tiles in engine._tiles(part, 8, 64))


LONG_ROWS = {
    "leading": BigBird(1, 2, 1, 0),
    "leading and drawn": BigBird(5),
    "any": BlockSparse(1, tuple(tuple(range(1500) if t % 500 == 7 else [t]) for t in range(2000))),
    "of all lengths": BlockSparse(1, tuple(tuple(range(2000 // (t + 1))) for t in range(2000))),
}


@pytest.mark.parametrize("pattern", LONG_ROWS.values(), ids=LONG_ROWS)
@pytest.mark.parametrize("causal", [True, False])
def test_tables_hold_little_but_blocks(pattern, causal):
    """However few rows are long: a table is at most four times what it would be if all were as long as on average."""
    n = 2000
    parts = pattern.tilings(Section(0, n, n, causal))
    tables = [part.table for part in parts]
    read = sum(int((table >= 0).sum()) for table in tables)
    assert sum(table.numel() for table in tables) <= 4 * len(tables) * read
    if isinstance(pattern, BigBird):
        assert len(tables) == 2
    kept, _ = kept_by(parts, 0, n, n)
    assert torch.equal(kept, pattern.mask(n, is_causal=causal).long())


def test_one_table_where_it_is_small():
    """Up to an entry a token a further part would cost more than it saves."""
    for n, parts in ((64 * 64, 1), (65 * 64, 2)):
        assert len(BigBird(64).tilings(Section(0, n, n))) == parts


@pytest.mark.parametrize("pattern", WASTE, ids=str)
def test_a_lone_query_reads_what_it_keeps(pattern):
    """In blocks of a table, or of summaries, the whole block; else not a key more."""
    computed = sum(work.pairs for work in pattern.work(N, is_causal=True, last=True))
    kept = int(pattern.mask(N, first=N - 1, is_causal=True).sum())
    assert computed == kept
