"""Static patterns keep what their rules say, and their closed forms count it."""

import pytest
import torch
from static_patterns import IDS, LONGEST, RULES

from ortho.attention.sparse.block_sparse import BigBird, BlockSparse
from ortho.attention.sparse.dilated import Dilated, LocalDilated, NeitherFarNorMultiple
from ortho.attention.sparse.fixed import Fixed, Summaries
from ortho.attention.sparse.global_local import GlobalLocal
from ortho.attention.sparse.strided import Columns, Strided
from ortho.attention.sparse.tiling import Section
from ortho.attention.sparse.window import BlockedWindow, Window


@pytest.mark.parametrize(("pattern", "rule"), RULES, ids=IDS)
def test_masks_follow_their_rules(pattern, rule):
    n = 45
    kept = [[rule(i, j) for j in range(n)] for i in range(n)]
    assert pattern.mask(n).tolist() == kept
    causal = [[kept[i][j] and j <= i for j in range(n)] for i in range(n)]
    assert pattern.mask(n, is_causal=True).tolist() == causal
    assert pattern.mask(30, n, first=11).tolist() == kept[11:30]


@pytest.mark.parametrize(("pattern", "rule"), RULES, ids=IDS)
@pytest.mark.parametrize("causal", [False, True])
def test_counts(pattern, rule, causal):
    """Every length up to 70 and some longer; what is kept of two tokens does not depend on those behind them."""
    whole = pattern.mask(LONGEST, is_causal=causal)
    for n in (*range(1, 71), 99, 100, 127, 128, 129, 200, 257, LONGEST):
        assert pattern.pairs(n, is_causal=causal) == int(whole[:n, :n].sum()), n


def test_published_counts():
    """Child et al. 2019, n = 256 and l = 16: window of l + 1 keys, or l as in the authors' code; columns; both in one
    head. Beltagy et al. 2020, n = 256: 8 to each side and 4 global tokens."""
    n, l = 256, 16
    causal = {
        Window(l + 1): (l + 1) * n - l * (l + 1) // 2,
        Window(l): 3976,
        Columns(l): 2176,
        Strided(l): 5896,
        Summaries(l, 2): sum((i // l) * 2 + max(0, i % l - l + 3) for i in range(n)),
        BlockedWindow(l): n * (l + 1) // 2,
    }
    assert {p: p.pairs(n, is_causal=True) for p in causal} == causal
    assert Window(l + 1).pairs(n, is_causal=True) == 4216
    w, D = 8, 3
    both = {
        Window(w + 1): (2 * w + 1) * n - w * (w + 1),
        Dilated(w + 1, D): (2 * w + 1) * n - D * w * (w + 1),
        GlobalLocal(w + 1, 4): 6244,
    }
    assert {p: p.pairs(n) for p in both} == both


def test_one_head_of_both_conventions():
    """The paper's set of i - l to i and the code's last l keys differ by a column's key: together they are the same."""
    for n, l in ((50, 7), (16, 16), (9, 20)):
        assert torch.equal(Strided(l).mask(n, is_causal=True), Strided(l, l + 1).mask(n, is_causal=True))
        assert torch.equal(LocalDilated(l).mask(n), Strided(l, l + 1).mask(n))


@pytest.mark.parametrize("reach", [1, 2, 5])
def test_the_inverted_rule_leaves_the_complement(reach):
    """Within a window of `reach` to each side it leaves what the other drops, and drops what it leaves: its own key."""
    n = 20
    window, left = Window(reach + 1).mask(n), NeitherFarNorMultiple(reach).mask(n)
    assert torch.equal(left, window & ~Columns(reach).mask(n))
    assert not left.diagonal().any()
    assert left.any() == (reach > 1)


def test_growth_of_strided_attention():
    """With a stride of about the root of n, fewer than 3/2 n^(3/2) pairs in both heads, and more than half as many in
    one of n^(3/2) pairs, at lengths that are no square as well."""
    for n in (100, 1000, 10_000, 123_456, 10**6):
        l = round(n**0.5)
        window, column = Window(l).pairs(n, is_causal=True), Columns(l).pairs(n, is_causal=True)
        assert 0.9 * n**1.5 < window < n**1.5 * 1.01
        assert 0.5 * n**1.5 < column < 0.56 * n**1.5


@pytest.mark.parametrize("sizes", [(2, 1, 3, 0), (1, 0, 2, 5), (3, 2, 0, 1)])
def test_big_bird(sizes):
    """A window of blocks, leading ones, and as many others before each as are asked for, or as there are; both ways."""
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
    # What is drawn for a block does not depend on those behind it.
    longer = BigBird(1, *sizes).mask(60)
    assert torch.equal(longer[:40, :40], BigBird(1, *sizes).mask(40))


def test_a_row_for_each_block_of_queries():
    """Of keys there may be more blocks than rows, and fewer than the rows name."""
    pattern = BlockSparse(16, ((0, 1, 2),))
    for keys in (128, 20):
        assert torch.equal(pattern.mask(16, keys), (torch.arange(keys) < 48).expand(16, keys))
        (part,) = pattern.tilings(Section(0, 16, keys))
        assert part.table.tolist() == [[0, 1, 2][: -(-keys // 16)]]


def test_masks_on_another_default_device():
    """Where new tensors go by default; a seed that nothing was drawn with yet."""
    pattern = BigBird(4, 2, 1, 3, seed=1234)
    with torch.device("meta"):
        kept = pattern.mask(60, device="cpu")
        (part,) = pattern.tilings(Section(0, 60, 60))
    assert kept.device == part.table.device == torch.device("cpu")
    assert int(kept.sum()) == pattern.pairs(60)


@pytest.mark.bad_input
@pytest.mark.parametrize("bad", [0, -3, 2.0, True, None, "8"])
def test_sizes_are_positive_integers(bad):
    error = ValueError if bad in (0, -3) and bad is not False else TypeError
    cases = {
        "width": [Window, BlockedWindow, lambda x: Dilated(x, 2), lambda x: GlobalLocal(x, 2), BigBird],
        "dilation": [lambda x: Dilated(2, x)],
        "stride": [Columns, Strided, lambda x: Summaries(x, 1), lambda x: Fixed(x, 1)],
        "summaries": [lambda x: Summaries(4, x), lambda x: Fixed(4, x)],
        "reach": [LocalDilated, NeitherFarNorMultiple, lambda x: BigBird(4, x)],
        "tokens": [lambda x: GlobalLocal(2, x)],
    }
    for name, makers in cases.items():
        for make in makers:
            with pytest.raises(error, match=f"{name}: expected an integer of at least 1, got"):
                make(bad)
    if bad is not None:
        for name, make in {"hop": lambda x: BlockedWindow(4, x), "width": lambda x: Strided(4, x)}.items():
            with pytest.raises(error, match=f"{name}: expected an integer of at least 1, got"):
                make(bad)


@pytest.mark.bad_input
def test_errors():
    with pytest.raises(ValueError, match="hop: expected at most the width, 4, or tokens are left out, got 5"):
        BlockedWindow(4, 5)
    for make in (Summaries, Fixed):
        with pytest.raises(ValueError, match="summaries: expected at most the stride, 4, got 5"):
            make(4, 5)
    for name in ("leading", "random", "seed"):
        for bad in (-1, 1.5, True):
            with pytest.raises(ValueError, match=f"{name}: expected an integer of at least 0, got"):
                BigBird(4, **{name: bad})
    for row in ((1, 1), (-1,), (0.5,)):
        with pytest.raises(ValueError, match="blocks: expected numbers of blocks, each once, in row 1, got"):
            BlockSparse(4, ((0,), row))
    short = BlockSparse(4, ((0,), (0, 1)))
    assert short.pairs(8) == 48
    for ask in (short.pairs, short.mask, lambda n: short.tilings(Section(0, n, n, True))):
        with pytest.raises(ValueError, match="blocks: expected a row for each of the 3 blocks .* got 2 rows"):
            ask(9)
