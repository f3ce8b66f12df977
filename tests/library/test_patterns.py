"""Static patterns: rules, counts and tilings of each; attention by them, large scores, and what it refuses."""

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
from ortho.attention.sparse.global_local import GlobalLocal
from ortho.attention.sparse.pattern import pattern_attention, pattern_attention_reference
from ortho.attention.sparse.strided import LocalStrided
from ortho.attention.sparse.window import Window

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
    assert (pattern.pairs(n), pattern.pairs(n, is_causal=True)) == tuple(sum(map(sum, rows)) for rows in (kept, causal))
    assert pattern.mask(30, n, first=11).tolist() == kept[11:30]


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


@pytest.mark.parametrize("pattern", [*EACH, Window(150)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_the_definition_is_softmax_attention_under_the_mask(pattern, causal):
    leaves, kept = qkv(1, length=150), pattern.mask(150, is_causal=causal)
    expected = softmax_attention_reference(*leaves, attn_mask=kept)
    torch.testing.assert_close(FORMS["reference"](*leaves, pattern=pattern, is_causal=causal), expected, **TOLERANCE)


@pytest.mark.parametrize("name", [name for name, m in MECHANISMS.items() if m.family == "sparse"])
@pytest.mark.parametrize("causal", [False, True])
def test_mechanisms(name, causal):
    """At the registered sizes, on a sequence longer than they reach."""
    o, exact = (MECHANISMS[name].form(form)(*qkv(2, length=700), is_causal=causal) for form in FORMS)
    torch.testing.assert_close(o, exact, **TOLERANCE)


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1e3, 1e6, 1e12, 1e18])
def test_large_scores(dtype, size):
    """A score of s is rounded by s eps, which changes a weight by this share, in both forms. Where this is not small,
    outputs are still means of values, also over several tilings, and gradients are finite."""
    q, k, v = (x.detach().to(dtype) for x in qkv(3, length=23))
    leaves, call = [x.requires_grad_() for x in (size * q, k, v)], {"pattern": Parity(), "scale": 1.0}
    o = pattern_attention(*leaves, **call)
    found = [o, *torch.autograd.grad(o, leaves, draw(*o.shape, seed=9).to(dtype))]
    assert all(x.isfinite().all() for x in found)
    rows, eps = o[:, Parity().mask(23).any(1)], torch.finfo(dtype).eps
    slack = 4 * eps * v.abs().max()
    assert (rows <= v.amax(1, keepdim=True) + slack).all() and (rows >= v.amin(1, keepdim=True) - slack).all()
    # Products of 4 numbers of size 3: scores of up to 40 sizes, a few roundings each; twice that for values up to 3.
    bound = 1000 * size * eps
    if bound < 0.1:
        expected = pattern_attention_reference(*(x.double() for x in leaves), **call)
        torch.testing.assert_close(o.double(), expected, atol=bound, rtol=0)
