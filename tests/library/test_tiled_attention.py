"""Attention by tilings: any arrangement of tiles and blocks equals materialised weights; large scores; memory."""

from functools import partial
from itertools import product

import pytest
import torch
from drawn_tilings import KINDS, SHUFFLED, G, M, N, band, counted, dilated, drawn_part, operands
from seeded import draw

from ortho.attention.sparse import tiled_attention as engine
from ortho.attention.sparse.block_mask import ABSENT, BlockMask, consecutive
from ortho.attention.sparse.tiled_attention import tiled_attention
from ortho.cost.counting import Allocations

# Sums of at most 40 float64 products of size 10, in another order, after exponentials of scores up to 10.
close = partial(torch.testing.assert_close, atol=1e-12, rtol=1e-12)


def masked_attention(q, k, v, kept, scale):
    """Softmax attention of q (G, N, K), k (G, M, K), v (G, M, V) over the pairs that are kept, (G, N, M); a row without
    a pair is 0."""
    scores = (scale * q @ k.mT).masked_fill(~kept, -torch.inf)
    weights = (scores - scores.detach().amax(-1, keepdim=True).clamp(min=-1e300)).exp()
    total = weights.sum(-1, keepdim=True)
    return weights / torch.where(total == 0, 1, total) @ v


def compare(parts, leaves, *, start=0, mask=None, scale=0.7):
    """Assert that the output and all gradients are right; return the pairs that count."""
    kept, _ = counted(parts, len(leaves[0]), leaves[0].shape[1], leaves[1].shape[1], start)
    assert int(kept.max()) <= 1
    kept = kept > 0 if mask is None else (kept > 0) & mask
    o = tiled_attention(*leaves, parts, scale=scale, start=start, attn_mask=mask)
    expected = masked_attention(*leaves, kept, scale)
    d_o = draw(*o.shape, seed=9)
    close(o, expected)
    close(*(torch.autograd.grad(x, leaves, d_o) for x in (o, expected)))
    return kept


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("start", [0, 6])
def test_one_part(kind, start, monkeypatch):
    """Every arrangement, with all pairs of the table and with some, also with tiles that read nothing, however many
    numbers are computed together."""
    queries, keys, table = KINDS[kind]
    for (seed, together), some in product(enumerate((1, 50, 2**18)), (False, True)):
        monkeypatch.setattr(engine, "NUMBERS", {"cpu": together})
        g = torch.Generator().manual_seed(seed)
        labels = torch.randint(0, 2, (start + N, M), generator=g) if some else None
        part = drawn_part(g, start=start, labels=labels, queries=queries, keys=keys, table=table)
        kept = compare([part], operands(), start=start)
        assert kept.any()


def test_rows_without_pairs_are_zero_and_have_no_gradient():
    """Exactly so: a query may have no tile, its tile may read nothing, or all that it reads may be left out."""
    tokens = torch.tensor([[0, 1], [2, 3], [4, ABSENT]])  # 5 is in no tile
    table = torch.tensor([[0, 1], [ABSENT, ABSENT], [1, ABSENT]])
    parts = [BlockMask(tokens, consecutive(0, 4, 2), table, lambda i, j: i != 1)]
    leaves = operands(length=6, keys=4)
    kept = compare(parts, leaves, scale=1.0)
    empty = ~kept.any(-1)[0]
    assert empty.tolist() == [False, True, True, True, False, True]
    o = tiled_attention(*leaves, parts, scale=1.0)
    d_q = torch.autograd.grad(o.sum(), leaves[0])[0]
    assert not o[:, empty].any() and not d_q[:, empty].any()
    # Nothing at all: no tile reads, or all is masked.
    nothing = [part._replace(table=torch.full((3, width), ABSENT)) for part, width in product(parts, (0, 2))]
    hidden = {"attn_mask": torch.zeros(1, 1, 1, dtype=torch.bool)}
    for given, kwargs in (*(([part], {}) for part in nothing), (parts, hidden), (nothing, {})):
        o = tiled_attention(*leaves, given, scale=1.0, **kwargs)
        for x in (o, *torch.autograd.grad(o, leaves, torch.ones_like(o))):
            assert not x.any() and x.isfinite().all()


@pytest.mark.parametrize("scores", [1, 40, 200, 2**18])
def test_pairs_that_depend_on_distance_alone(monkeypatch, scores):
    """Equal tiles share what is computed for one, however many are worked on together; tiles at the ends differ."""
    monkeypatch.setattr(engine, "NUMBERS", {"cpu": scores})
    for length, width, tile, block in ((40, 5, 4, 4), (41, 9, 4, 4), (40, 8, 2, 4), (37, 7, 8, 2), (40, 1, 4, 4)):
        part = band(length, width, tile, block)
        kept = compare([part], operands(length=length, keys=length))
        i, j = torch.arange(length)[:, None], torch.arange(length)
        assert torch.equal(kept[0], (i >= j) & (i - j < width))
        mask = draw(1, length, length) > 0
        compare([part], operands(length=length, keys=length), mask=mask)
    for length, width, step, block in ((48, 3, 3, 4), (41, 4, 2, 4), (47, 5, 5, 4)):
        kept = compare([dilated(length, width, step, block)], operands(length=length, keys=length))
        assert int(kept[0].sum()) == sum(min(width, i // step + 1) for i in range(length))


def test_gradients_of_some():
    """If only v needs a gradient, the scores' gradients are not computed. Whichever gradients are asked for are the
    same, for operands in any layout and for an upstream gradient that is one number everywhere."""
    parts = [band(N, 6, 4, 4), drawn_part(torch.Generator().manual_seed(0), queries=(4, SHUFFLED))]
    parts[1] = parts[1]._replace(allowed=lambda i, j: j > i)
    leaves = operands(keys=N)
    whole = torch.autograd.grad(tiled_attention(*leaves, parts, scale=1.0).sum(), leaves)
    for wanted in ([2], [0], [1, 2], [0, 1, 2]):
        some = [x.detach().mT.contiguous().mT.requires_grad_(i in wanted) for i, x in enumerate(leaves)]
        found = torch.autograd.grad(tiled_attention(*some, parts, scale=1.0).sum(), [some[i] for i in wanted])
        for one, i in zip(found, wanted, strict=True):
            close(one, whole[i])


def halves(labels, tile=4, block=5):
    """Two tilings of all pairs: those of label 0, and those of label 1."""
    queries, keys = consecutive(0, labels.shape[0], tile), consecutive(0, labels.shape[1], block)
    table = torch.arange(len(keys)).expand(len(queries), -1)
    return [BlockMask(queries, keys, table, lambda i, j, p=p: labels[i, j] == p) for p in (0, 1)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1e3, 1e6, 1e12, 1e18])
def test_large_scores(dtype, size):
    """A score of s is rounded by s eps, which changes a weight by this share, in both forms. Where this is not small,
    outputs are still means of values, also over several tilings, and gradients are finite."""
    labels = torch.randint(0, 2, (N, M), generator=torch.Generator().manual_seed(5))
    parts = halves(labels)
    leaves = operands(dtype=dtype, size=size)
    o = tiled_attention(*leaves, parts, scale=1.0)
    found = [o, *torch.autograd.grad(o, leaves, draw(*o.shape, seed=9).to(dtype))]
    assert all(x.isfinite().all() for x in found)
    v, eps = leaves[2], torch.finfo(dtype).eps
    slack = 4 * eps * v.abs().max()
    assert (o <= v.amax(1, keepdim=True) + slack).all() and (o >= v.amin(1, keepdim=True) - slack).all()
    # Products of 4 numbers of size 3: scores of up to 40 sizes, a few roundings each; twice that for values up to 3.
    bound = 1000 * size * eps
    if bound < 0.1:
        expected = masked_attention(*(x.double() for x in leaves), torch.ones(G, N, M, dtype=torch.bool), 1.0)
        torch.testing.assert_close(o.double(), expected, atol=bound, rtol=0)


def many_parts(length):
    """A band in spans; and what lies four or more places before it, in a shuffled order, a token of each block."""
    g = torch.Generator().manual_seed(0)
    order = torch.randperm(length, generator=g)[: length // 4 * 4].unflatten(0, (-1, 4))
    far = BlockMask(order, order, torch.arange(len(order))[:, None], lambda i, j: i - j >= 16)
    return [band(length, 12, 8, 8), far]


def test_no_more_is_made_at_once():
    """The largest tensor, forward and backward, has no more than `NUMBERS` numbers: for the scores of a tiling with all
    pairs, and for keys that lone queries gather, with 64 numbers for each score, eight times `NUMBERS` in all."""
    tiles, blocks, each = consecutive(0, 1024, 64), consecutive(0, 1024, 16), consecutive(0, 2048, 1)
    gathered = torch.stack([torch.randperm(2048)[:32] for _ in range(2048)])
    cases = [
        (
            operands(length=1024, keys=1024, dtype=torch.float32),
            BlockMask(tiles, blocks, torch.arange(64).expand(16, 64)),
        ),
        ([draw(1, 2048, 64, seed=s).float().requires_grad_() for s in range(3)], BlockMask(each, each, gathered)),
    ]
    for leaves, part in cases:
        with Allocations() as memory:
            o = tiled_attention(*leaves, [part], scale=1.0)
            torch.autograd.grad(o, leaves, torch.ones_like(o))
        assert memory.largest <= 4 * engine.NUMBERS["cpu"] < 2**22


def test_memory_is_linear(monkeypatch):
    """The bytes of the largest tensor, and of all at once, grow linearly, forward and backward. What scales with N^2
    would be 16 times as much for 4 times as many tokens, and as booleans 16 MB at 4096."""
    monkeypatch.setattr(engine, "NUMBERS", {"cpu": 2**12})
    largest, peak = {}, {}
    for length in (1024, 4096):
        parts, leaves = many_parts(length), operands(length=length, keys=length, dtype=torch.float32, sequences=1)
        with Allocations() as memory:
            o = tiled_attention(*leaves, parts, scale=1.0)
            torch.autograd.grad(o, leaves, torch.ones_like(o))
        largest[length], peak[length] = memory.largest, memory.peak
    assert largest[4096] <= 4 * largest[1024] and peak[4096] <= 4.1 * peak[1024]
    assert largest[4096] < 2**20
