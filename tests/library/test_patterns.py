"""Static patterns: rules, counts and tilings of each; attention by them, and what it refuses."""

from functools import partial
from itertools import product

import pytest
import torch
from refusals import refuses
from seeded import draw
from static_patterns import IDS, RULES, Parity

from ortho import MECHANISMS
from ortho.attention.softmax.softmax_attention import softmax_attention_reference
from ortho.attention.sparse import block_sparse, tiled_attention
from ortho.attention.sparse.block_mask import ABSENT, Section
from ortho.attention.sparse.block_sparse import BigBird, BlockSparse
from ortho.attention.sparse.blocked_window import BlockedWindow
from ortho.attention.sparse.dilated import Dilated, LocalDilated, NeitherFarNorMultiple
from ortho.attention.sparse.fixed import Fixed, FixedColumns
from ortho.attention.sparse.global_local import GlobalKeys, GlobalLocal
from ortho.attention.sparse.pattern import (
    pattern_attention,
    pattern_attention_reference,
)
from ortho.attention.sparse.strided import LocalStrided, Strided
from ortho.attention.sparse.window import Window
from ortho.cost.mechanisms.sparse import pattern_cost

FORMS = {"reference": pattern_attention_reference, "fast": pattern_attention}
# Sums of at most 300 float64 products of size 10, in another order, after exponentials of scores up to 10.
TOLERANCE = {"atol": 1e-12, "rtol": 1e-12}
K, V = 4, 5

# ------------------------------------------------------------------------------------------------- rules and counts


@pytest.mark.parametrize(("pattern", "rule"), RULES, ids=IDS)
def test_masks_follow_their_rules(pattern, rule):
    n = 45
    kept = [[rule(i, j) for j in range(n)] for i in range(n)]
    assert pattern.mask(n).tolist() == kept
    causal = [[kept[i][j] and j <= i for j in range(n)] for i in range(n)]
    assert pattern.mask(n, is_causal=True).tolist() == causal
    assert pattern.mask(30, n, first=11).tolist() == kept[11:30]


def test_published_counts():
    """Child et al. 2019, n = 256 and l = 16: window of l + 1 keys, or l as in the authors' code; columns; both in one
    head. Beltagy et al. 2020, n = 256: 8 to each side and 4 global tokens."""
    n, l, w, D = 256, 16, 8, 3
    causal = {Window(l + 1): 4216, Window(l): 3976, Strided(l): 2176, LocalStrided(l): 5896, BlockedWindow(l): 2176}
    assert {p: p.pairs(n, is_causal=True) for p in causal} == causal
    both = {
        Window(w + 1): (2 * w + 1) * n - w * (w + 1),
        Dilated(w + 1, D): (2 * w + 1) * n - D * w * (w + 1),
        GlobalLocal(w + 1, 4): 6244,
    }
    assert {p: p.pairs(n) for p in both} == both


@pytest.mark.parametrize("sizes", [(2, 1, 3, 0), (1, 0, 2, 5), (3, 2, 0, 1)])
def test_big_bird(sizes):
    """A window of blocks, leading blocks, and before each block the number of others asked for, or all; both ways."""
    reach, leading, random, seed = sizes
    rows = BigBird(1, *sizes).rows(40, 40)
    draws = set()
    for t, row in enumerate(rows):
        assert all((b in row) == (t in rows[b]) for b in range(40))
        wanted = {b for b in range(40) if abs(t - b) < reach or min(t, b) < leading}
        assert wanted <= set(row)
        drawn = {b for b in set(row) - wanted if b < t}
        assert len(drawn) == max(0, min(random, t - reach + 1 - leading))
        draws.add(tuple(t - b for b in sorted(drawn)))
    assert (len(draws) > 20) == (random > 0)
    assert (BigBird(1, reach, leading, random, seed + 1).rows(40, 40) != rows) == (random > 0)
    # What is drawn for a block does not depend on the blocks after it.
    assert torch.equal(BigBird(1, *sizes).mask(60)[:40, :40], BigBird(1, *sizes).mask(40))


def test_masks_on_another_default_device():
    """New tensors go to another device by default; the seed is one that nothing was drawn with yet."""
    pattern = BigBird(4, 2, 1, 3, seed=1234)
    with torch.device("meta"):
        kept = pattern.mask(60, device="cpu")
        (tiling,) = pattern.block_masks(Section(0, 60, 60))
    assert kept.device == tiling.table.device == torch.device("cpu")
    assert int(kept.sum()) == pattern.pairs(60)


# ---------------------------------------------------------------------------------------------------------- tilings


def counted(tilings, G, N, M, start=0):
    """For each pair, with queries from `start` on: how many tilings hold it, and how many read it, (G, N, M) each."""
    kept, read = torch.zeros(2, G, N, M, dtype=torch.long)
    for tiling in tilings:
        i, table = tiling.queries[:, :, None], tiling.table  # (T, B, 1)
        j = (
            tiling.keys[table.clamp(min=0)].masked_fill((table < 0)[..., None], ABSENT).flatten(1)[:, None]
        )  # (T, 1, W B)
        there = (i >= 0) & (j >= 0)
        allowed = there if tiling.allowed is None else there & tiling.allowed(i, j)
        for count, some in ((kept, allowed), (read, there)):
            some, rows, columns = torch.broadcast_tensors(some, i - start, j)
            for g in range(G):
                count[g].index_put_((rows[some], columns[some]), torch.tensor(1), accumulate=True)
    return kept, read


@pytest.mark.parametrize(("pattern", "rule"), RULES, ids=IDS)
@pytest.mark.parametrize("causal", [False, True])
def test_tilings_hold_the_mask(pattern, rule, causal):
    """Each kept pair is in one tiling: whole sequences, queries after a state, a lone query, other numbers of keys."""
    sections = [(0, n, n) for n in (1, 2, 5, 16, 63, 64, 65, 100, 197)]
    sections += [(a, b, b) for a, b in ((1, 2), (37, 38), (199, 200), (3, 70), (60, 130), (64, 128), (130, 137))]
    if not causal:
        sections += [(0, 40, 100), (0, 100, 40), (7, 9, 150), (0, 1, 30)]
    for first, stop, keys in sections:
        tilings = pattern.block_masks(Section(first, stop, keys, causal))
        kept, read = counted(tilings, 1, stop - first, keys, first)
        assert torch.equal(kept[0], pattern.mask(stop, keys, first=first, is_causal=causal).long()), (first, stop, keys)
        assert int(read.max()) <= len(tilings)


def test_a_row_for_each_block_of_queries():
    """There may be more blocks of keys than rows, and fewer than the rows name."""
    pattern = BlockSparse(16, ((0, 1, 2),))
    for keys in (128, 20):
        assert torch.equal(pattern.mask(16, keys), (torch.arange(keys) < 48).expand(16, keys))
        (tiling,) = pattern.block_masks(Section(0, 16, keys))
        assert tiling.table.tolist() == [[0, 1, 2][: -(-keys // 16)]]


N = 4096
# Computed pairs over kept pairs of 4096 tokens, causal and not. Tiles of 64 queries read 63 keys that not all of them
# keep; a column of 64 tokens is cut into two tiles, a column of 32 is one tile.
WASTE = {
    Window(256): (1.25, 1.13),
    BlockedWindow(256): (1.25, 1),
    BlockedWindow(256, 128): (1.17, 1),
    Dilated(256, 4): (1.25, 1.11),
    Strided(64): (1.48, 1),
    Strided(128): (1.94, 1),
    LocalStrided(64): (1.51, 1.18),
    LocalStrided(128): (1.57, 1.23),
    LocalDilated(64): (1.85, 1.35),
    FixedColumns(64, 8): (1.03, 1),
    Fixed(64, 8): (1.12, 1.02),
    Fixed(128, 8): (1.18, 1.03),
    GlobalLocal(256, 16): (1.24, 1.12),
    BigBird(64): (1.1, 1),
}


@pytest.mark.parametrize("pattern", WASTE, ids=str)
@pytest.mark.parametrize("causal", [True, False])
def test_little_is_computed_in_vain(pattern, causal):
    """A lone query reads only what it keeps, in whole blocks of a table or of summaries."""
    computed = pattern.computed_pairs(N, is_causal=causal)
    most = WASTE[pattern][not causal]
    assert most - 0.02 < computed / pattern.pairs(N, is_causal=causal) <= most
    if causal:
        computed = pattern.computed_pairs(N, is_causal=True, last=True)
        assert computed == int(pattern.mask(N, first=N - 1, is_causal=True).sum())


LONG_ROWS = {
    "leading": BigBird(1, 2, 1, 0),
    "leading and drawn": BigBird(5),
    "any": BlockSparse(1, tuple(tuple(range(1500) if t % 500 == 7 else [t]) for t in range(2000))),
    "of all lengths": BlockSparse(1, tuple(tuple(range(2000 // (t + 1))) for t in range(2000))),
}


@pytest.mark.parametrize("pattern", LONG_ROWS.values(), ids=LONG_ROWS)
@pytest.mark.parametrize("causal", [False, True])
def test_tables_hold_little_but_blocks(pattern, causal):
    """However few rows are long, a table is at most four times what it would be if all rows had the average length. Up
    to one entry for each token there is one table: a further tiling would cost more than it saves."""
    n = 2000
    tilings = pattern.block_masks(Section(0, n, n, causal))
    tables = [tiling.table for tiling in tilings]
    read = sum(int((table >= 0).sum()) for table in tables)
    assert sum(table.numel() for table in tables) <= 4 * len(tables) * read
    assert len(tables) == 2 or not isinstance(pattern, BigBird)
    kept, _ = counted(tilings, 1, n, n)
    assert torch.equal(kept[0], pattern.mask(n, is_causal=causal).long())
    assert [len(BigBird(64).block_masks(Section(0, 64 * rows, 64 * rows))) for rows in (64, 65)] == [1, 2]


# -------------------------------------------------------------------------------------------------------- attention

EACH = [Window(20), BlockedWindow(9, 5), Dilated(5, 3), LocalStrided(7), LocalDilated(8), NeitherFarNorMultiple(9)]
EACH += [FixedColumns(16, 3), Fixed(12, 2), GlobalLocal(6, 3), BigBird(5), Parity()]


def qkv(*lead, length, keys=None, dtype=torch.float64):
    shapes = (length, K), (keys or length, K), (keys or length, V)
    return [draw(*lead, *shape, seed=s).to(dtype).requires_grad_() for s, shape in enumerate(shapes)]


def compare(leaves, **kwargs):
    """Assert that both forms have equal outputs, states, and gradients of all operands and of the state."""
    state = kwargs.get("initial_state", ())
    results = []
    for function in FORMS.values():
        o, carried = function(*leaves, return_state=True, **kwargs)
        gradients = torch.autograd.grad(o, [*leaves, *state], draw(*o.shape, seed=9).to(o.dtype))
        results.append([o, *carried, *gradients])
    torch.testing.assert_close(*results, **TOLERANCE)
    return results[0][0]


@pytest.mark.parametrize("together", [1000, 2**18])
@pytest.mark.parametrize("pattern", EACH, ids=str)
def test_fast_equals_reference(pattern, together, monkeypatch):
    """Any leading axes, lengths, masks and states, however many numbers are computed together."""
    monkeypatch.setattr(tiled_attention, "NUMBERS", {"cpu": together})
    g = torch.Generator().manual_seed(3)
    past = tuple(draw(2, 70, width, seed=s).requires_grad_() for s, width in ((5, K), (6, V)))
    for causal, length in product((False, True), (1, 66)):
        compare(qkv(2, length=length), pattern=pattern, is_causal=causal, initial_state=past)
    for causal, shape in product((False, True), ((90, 90), (2, 1, 90), (2, 90, 90))):
        mask = torch.rand(shape, generator=g) < 0.4
        o = compare(qkv(2, length=90), pattern=pattern, is_causal=causal, attn_mask=mask)
        kept = mask.expand(2, 90, 90) & pattern.mask(90, is_causal=causal)
        assert not o[~kept.any(-1)].any()
    for lead, length, keys in (((), 5, 150), ((2, 1, 2), 150, 5), ((3,), 64, 65)):  # both count from 0
        o = compare(qkv(*lead, length=length, keys=keys), pattern=pattern, scale=-0.3)
        assert not o[..., ~pattern.mask(length, keys).any(1), :].any()


@pytest.mark.parametrize("causal", [False, True])
def test_masks_of_every_shape(causal):
    """Every shape that broadcasts, with a state and without; rows may be left without a key."""
    g, call = torch.Generator().manual_seed(3), {"pattern": Parity(), "is_causal": causal}
    for shape in ((), (70,), (70, 1), (1, 70), (3, 1, 70), (2, 1, 70, 70), (2, 3, 70, 1), (1, 1, 70, 70)):
        compare(qkv(2, 3, length=70), attn_mask=torch.rand(shape, generator=g) < 0.5, **call)
    past = tuple(draw(2, 3, 30, width, seed=s).requires_grad_() for s, width in ((5, K), (6, V)))
    for shape in ((100,), (70, 100), (2, 1, 1, 100)):
        compare(qkv(2, 3, length=70), attn_mask=torch.rand(shape, generator=g) < 0.5, initial_state=past, **call)


@pytest.mark.parametrize("pattern", [*EACH, Window(150)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_the_definition_is_softmax_attention_under_the_mask(pattern, causal):
    leaves, kept = qkv(1, length=150), pattern.mask(150, is_causal=causal)
    expected = softmax_attention_reference(*leaves, attn_mask=kept)
    torch.testing.assert_close(FORMS["reference"](*leaves, pattern=pattern, is_causal=causal), expected, **TOLERANCE)


@pytest.mark.parametrize("name", [name for name, m in MECHANISMS.items() if m.family == "sparse"])
@pytest.mark.parametrize("causal", [False, True])
def test_mechanisms(name, causal):
    """At the registered sizes, on a sequence longer than they reach; float32 and half precision are near float64.

    A score of 5 is rounded by a relative 3e-7, and so are sums of weighted values of 4; 2e-5 leaves a factor of 10.
    bfloat16 rounds operands and outputs by a relative 2^-9: 0.1 for scores of 5 and values of 4.
    """
    mechanism, leaves = MECHANISMS[name], [x.detach() for x in qkv(2, length=700)]
    exact = mechanism.reference(*leaves, is_causal=causal)
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 2e-5), (torch.bfloat16, 0.1)):
        o = mechanism.fast(*(x.to(dtype) for x in leaves), is_causal=causal)
        torch.testing.assert_close(o.double(), exact, atol=tolerance, rtol=0)


# ----------------------------------------------------------------------------------------------------------- errors


@pytest.mark.bad_input
def test_errors():
    """Sizes that do not fit together, and tables."""
    for make in {type(pattern) for pattern in EACH} - {Parity}:
        refuses("^[a-z]+: expected an integer of at least 1, got 0", make, 0)
    refuses("hop: expected at most the width, 4, or tokens are left out, got 5", BlockedWindow, 4, 5)
    for make in (FixedColumns, Fixed):
        refuses("summaries: expected at most the stride, 4, got 5", make, 4, 5)
    for name, bad in product(("leading", "random", "seed"), (-1, 1.5)):
        refuses(f"{name}: expected an integer of at least 0, got", BigBird, 4, **{name: bad})
    for row in ((1, 1), (-1,), (0.5,)):
        refuses("blocks: expected numbers of blocks, each once, in row 1, got", BlockSparse, 4, ((0,), row))
    short = BlockSparse(4, ((0,), (0, 1)))
    assert short.pairs(8) == 48
    for ask in (short.pairs, short.mask, lambda n: short.block_masks(Section(0, n, n, True))):
        refuses("blocks: expected a row for each of the 3 blocks .* got 2 rows", ask, 9)


def test_draws_know_nothing_of_the_caller_s_transform():
    block_sparse._drawn.kept.clear()
    block_sparse._both.cache_clear()
    x = draw(3, 2, 130, 4)
    attend = partial(pattern_attention_reference, pattern=BigBird(64))
    ours = torch.func.vmap(lambda q: attend(q, x[0], x[0]))(x)
    assert torch.allclose(ours, torch.stack([attend(q, x[0], x[0]) for q in x]), **TOLERANCE)


def test_queries_that_are_all_global_read_nothing():
    x = draw(1, 4, 3).requires_grad_()
    o = pattern_attention(x, x, x, pattern=GlobalKeys(4, 8))
    assert not o.any()
    assert not torch.autograd.grad(o.sum(), x)[0].any()
    assert pattern_cost(1, 4, 1, 3, 3, pattern=GlobalKeys(4, 8)).forward == 0


@pytest.mark.bad_input
def test_a_table_of_lists_is_one_of_tuples():
    assert BlockSparse(2, [[0], [0, 1]]) == BlockSparse(2, ((0,), (0, 1)))
    assert hash(BlockSparse(2, [[0], [0, 1]])) == hash(BlockSparse(2, ((0,), (0, 1))))
