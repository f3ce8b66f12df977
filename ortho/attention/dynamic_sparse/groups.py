r"""Attention of each query to the latest keys of its group of tokens: of clusters.

The keys of a group, in their order, are cut into chunks of `width`. A query's own chunk is the one with the last key
of its group up to the query's position. It may attend to that chunk and the one before: in a causal call to the last
`width` + 1 to 2 `width` keys of its group, or to all if there are fewer. Tokens after a query change neither its chunk
nor anything in the chunks before: nothing leaks.

In the fast form a chunk is a block of keys, and queries of one chunk form tiles. The number of either has a bound that
does not depend on the groups, and that many are computed.
"""

from typing import NamedTuple

import torch

from ortho._typing import Bool, Int, Tensor
from ortho.attention.call import Call
from ortho.attention.dynamic_sparse.selection import first_position, joined, positions, tiles_by_label
from ortho.attention.sparse.block_mask import ABSENT, BlockMask


def group_mask(
    of_queries: Int[Tensor, "*batch N"], of_keys: Int[Tensor, "*batch M"], call: Call, width: int
) -> Bool[Tensor, "*batch N M"]:
    """The pairs that are kept, by definition. Each token is given by the number of its group, or `ABSENT`."""
    i, j = positions(call)[:, None], torch.arange(of_keys.shape[-1], device=of_keys.device)
    of_keys = _unmasked(of_keys, call)
    mates = (of_queries[..., :, None] == of_keys[..., None, :]) & (of_keys >= 0)[..., None, :]
    rank = ((of_keys[..., :, None] == of_keys[..., None, :]) & (j < j[:, None])).sum(-1)  # of each key in its group
    place = (mates & (j <= i)).sum(-1)
    gap = (place - 1).clamp(min=0)[..., None] // width - rank[..., None, :] // width
    kept = mates & (gap >= 0) & (gap <= 1)
    return kept & (j <= i) if call.is_causal else kept


def _unmasked(of_keys: Int[Tensor, "*batch M"], call: Call) -> Int[Tensor, "*batch M"]:
    """The groups of the keys, `ABSENT` for masked ones."""
    return of_keys if call.key_mask is None else of_keys.masked_fill(~call.key_mask, ABSENT)


class Chunks(NamedTuple):
    """Chunks of the keys, and which of them each query reads: its own and, where that `continues` a group, the one
    before."""

    keys: Int[Tensor, "G S width"]
    continues: Bool[Tensor, "G S"]
    own: Int[Tensor, "G N"]


def chunks_of(
    of_queries: Int[Tensor, "G N"], of_keys: Int[Tensor, "G M"], call: Call, count: int, width: int
) -> Chunks:
    """The chunks of groups with labels below `count`."""
    of_keys = _unmasked(of_keys, call)
    M = of_keys.shape[1]
    tiles = tiles_by_label(of_keys, count, width)
    # The number of keys in a query's group up to its position, by bisection in all keys, sorted by group and position.
    key = of_keys.masked_fill(of_keys < 0, count) * (M + 1) + torch.arange(M, device=of_keys.device)
    group, i = of_queries.clamp(min=0), positions(call).clamp(max=M - 1)
    place = torch.searchsorted(key.sort(1).values, group * (M + 1) + i, right=True) - tiles.starts.gather(1, group)
    chunk = (place - 1).clamp(min=0) // width
    none = (of_queries < 0) | (tiles.sizes.gather(1, group) == 0)
    joins = tiles.labels[:, 1:] == tiles.labels[:, :-1]
    return Chunks(
        tiles.positions,
        torch.cat([joins.new_zeros(len(joins), 1), joins], 1),
        (tiles.first.gather(1, group) + chunk).masked_fill(none, ABSENT),
    )


def group_tiling(chunks: Chunks, call: Call) -> BlockMask:
    """The block mask of the kept pairs, for `attend_joined`."""
    N, M, first = call.q.shape[1], call.k.shape[1], first_position(call)
    S, width = chunks.keys.shape[1:]
    tiles = tiles_by_label(chunks.own, S, _tile(width, N))
    before = (tiles.labels - 1).masked_fill(~chunks.continues.gather(1, tiles.labels.clamp(min=0)), ABSENT)
    table = joined(torch.stack([tiles.labels, before], -1), S).flatten(0, 1)
    # All tiles read two chunks: an empty chunk takes the place of an absent one.
    keys = torch.cat([joined(chunks.keys, M).flatten(0, 1), chunks.keys.new_full((1, width), ABSENT)])
    table = table.masked_fill(table < 0, len(keys) - 1)
    queries = joined(tiles.positions, N).flatten(0, 1)

    def allowed(i: Tensor, j: Tensor) -> Tensor:
        at, of = first + i.clamp(min=0) % N, j.clamp(min=0) % M
        return of <= at if call.is_causal else torch.ones_like(i + j, dtype=torch.bool)

    return BlockMask(queries, keys, table, allowed)


def _tile(width: int, N: int) -> int:
    """Queries of a chunk that are computed together: fewer than its keys, as one tile of each chunk is not full."""
    return max(1, min(width // 4, N))
