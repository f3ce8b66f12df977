"""Attention by tilings: large scores; memory. (`test_patterns.py` compares it with the definition.)"""

import pytest
import torch
from seeded import draw

from ortho.attention.sparse import tiled_attention as engine
from ortho.attention.sparse.block_mask import ABSENT, BlockMask, consecutive
from ortho.attention.sparse.tiled_attention import tiled_attention
from ortho.cost.counting import Allocations

G, N, M, K, V = 3, 23, 17, 4, 5


def operands(*, length=N, keys=M, dtype=torch.float64, size=1.0, sequences=G):
    q, k, v = (draw(sequences, *shape, seed=s) for s, shape in enumerate(((length, K), (keys, K), (keys, V))))
    return [x.to(dtype).requires_grad_() for x in (size * q, k, v)]


def band(length, width, tile, block):
    """The keys 0 to `width` - 1 places before a query, in spans."""
    queries, keys = consecutive(0, length, tile), consecutive(0, length, block)
    i = tile * torch.arange(len(queries))[:, None]
    low, high = (i - width + 1).clamp(min=0) // block, (i + tile - 1).clamp(max=length - 1) // block
    table = low + torch.arange(int((high - low).max()) + 1)
    table = table.masked_fill(table > high, ABSENT)
    return BlockMask(queries, keys, table, lambda i, j: (i - j >= 0) & (i - j < width))


def masked_attention(q, k, v, kept, scale):
    """Softmax attention of q (G, N, K), k (G, M, K), v (G, M, V) over the pairs that are kept, (G, N, M); a row without
    a pair is 0."""
    scores = (scale * q @ k.mT).masked_fill(~kept, -torch.inf)
    weights = (scores - scores.detach().amax(-1, keepdim=True).clamp(min=-1e300)).exp()
    total = weights.sum(-1, keepdim=True)
    return weights / torch.where(total == 0, 1, total) @ v


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
