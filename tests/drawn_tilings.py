"""Operands, and tilings of every kind, which several test files share."""

from dataclasses import dataclass

import torch
from seeded import draw

from ortho.attention.sparse.block_mask import ABSENT, BlockMask, consecutive
from ortho.attention.sparse.pattern import Pattern

G, N, M = 3, 23, 17
K, V = 4, 5


def operands(*, length=N, keys=M, dtype=torch.float64, size=1.0, sequences=G):
    q, k, v = (draw(sequences, *shape, seed=s) for s, shape in enumerate(((length, K), (keys, K), (keys, V))))
    return [x.to(dtype).requires_grad_() for x in (size * q, k, v)]


def shuffled(first, stop, block, g, *, left_out=0, holes=0):
    """The tokens from `first` to `stop` in random order, in blocks; some are left out, and some places hold none."""
    tokens = first + torch.randperm(stop - first, generator=g)[left_out:]
    tokens = torch.cat([tokens, torch.full((holes + -(len(tokens) + holes) % block,), ABSENT)])
    return tokens[torch.randperm(len(tokens), generator=g)].unflatten(0, (-1, block))


def drawn_table(queries, keys, g, *, most=4):
    """For each tile, up to `most` blocks in random order, then absent ones; the first tile has at least one block."""
    T, S = queries.shape[-2], keys.shape[-2]
    rows = torch.full((T, min(most, S)), ABSENT)
    for t, row in enumerate(rows):
        number = int(torch.randint(int(t == 0), rows.shape[1] + 1, (), generator=g))
        row[:number] = torch.randperm(S, generator=g)[:number]
    return rows


def drawn_part(g, *, start=0, label=1, labels=None, queries=(4, {}), keys=(3, {}), table=None):
    """A tiling of the pairs with that label, from these orders of tokens (by default spans) and a drawn table."""

    def order(first, stop, block, kwargs):
        return shuffled(first, stop, block, g, **kwargs) if kwargs else consecutive(first, stop, block)

    queries, keys = order(start, start + N, *queries), order(0, M, *keys)
    allowed = None if labels is None else lambda i, j: labels[i, j] == label
    return BlockMask(queries, keys, drawn_table(queries, keys, g, **(table or {})), allowed)


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


SHUFFLED = {"left_out": 0}
# name: queries, keys, table
KINDS = {
    "spans": ((4, {}), (3, {}), {}),
    "wide blocks": ((32, {}), (32, {}), {}),
    "single tokens": ((1, {}), (1, {}), {"most": 9}),
    "shuffled": ((4, SHUFFLED), (3, SHUFFLED), {}),
    "shuffled queries": ((4, SHUFFLED), (3, {}), {}),
    "shuffled keys": ((4, {}), (3, SHUFFLED), {}),
    "holes": ((4, {"left_out": 5, "holes": 4}), (5, {"left_out": 3, "holes": 2}), {}),
}


def band(length, width, tile, block):
    """The keys 0 to `width` - 1 places before a query, in spans."""
    queries, keys = consecutive(0, length, tile), consecutive(0, length, block)
    i = tile * torch.arange(len(queries))[:, None]
    low, high = (i - width + 1).clamp(min=0) // block, (i + tile - 1).clamp(max=length - 1) // block
    table = low + torch.arange(int((high - low).max()) + 1)
    table = table.masked_fill(table > high, ABSENT)
    return BlockMask(queries, keys, table, lambda i, j: (i - j >= 0) & (i - j < width))


def dilated(length, width, step, block):
    """The keys 0, step, ... places before a query, up to `width` of them; tokens are ordered by their residue."""
    rows = []
    for residue in range(step):
        tokens = torch.arange(residue, length, step)
        rows.append(torch.cat([tokens, torch.full((-len(tokens) % block,), ABSENT)]))
    order = torch.cat(rows).unflatten(0, (-1, block))
    t = torch.arange(len(order))[:, None]
    table = torch.cat([t, (t - 1).clamp(min=ABSENT)], 1)
    allowed = lambda i, j: (i >= j) & ((i - j) % step == 0) & (i - j < width * step)  # noqa: E731
    assert width <= block + 1
    return BlockMask(order, order, table, allowed)


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
