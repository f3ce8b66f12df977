"""What parts of pairs say, read pair by pair: what several files of tests hold the engine and the patterns against."""

from itertools import product

import torch


def kept_by(parts, G, N, M, start=0):
    """Whether each pair is one of the parts', (G, N, M), of queries from `start` on; none may be in two."""
    count = torch.zeros(G, N, M, dtype=torch.long)
    for part in parts:
        queries, keys, table = (_of_each(x, G) for x in (part.queries.positions, part.keys.positions, part.table))
        for g, t in product(range(G), range(table.shape[1])):
            blocks = [b for b in table[g, t].tolist() if b >= 0]
            assert len(set(blocks)) == len(blocks)
            for block in blocks:
                i, j = queries[g, t][:, None], keys[g, block]
                kept = (i >= 0) & (j >= 0)
                if part.allowed is not None:
                    kept = kept & part.allowed(i, j)
                for a, b in kept.nonzero().tolist():
                    count[g, int(i[a]) - start, int(j[b])] += 1
    assert int(count.max()) <= 1
    return count > 0


def _of_each(x, G):
    return x.expand(G, *x.shape[-2:]) if x.dim() == 2 else x


def masked_attention(q, k, v, kept, scale):
    """Softmax attention of q (G, N, K), k (G, M, K), v (G, M, V) over the pairs that are kept, (G, N, M); a row
    without any is 0."""
    scores = (scale * q @ k.mT).masked_fill(~kept, -torch.inf)
    weights = (scores - scores.detach().amax(-1, keepdim=True).clamp(min=-1e300)).exp()
    total = weights.sum(-1, keepdim=True)
    return weights / torch.where(total == 0, 1, total) @ v
