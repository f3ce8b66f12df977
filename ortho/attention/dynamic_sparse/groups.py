r"""Attention of each query to the latest keys of its group of tokens: of clusters.

The keys of a group, in their order, are cut into chunks of `width`. A query's own chunk is the one with the last key
of its group up to the query's position. It may attend to that chunk and the one before: in a causal call to the last
`width` + 1 to 2 `width` keys of its group, or to all if there are fewer. Tokens after a query change neither its chunk
nor anything in the chunks before: nothing leaks.

In the fast form a chunk is a block of keys, and queries of one chunk form tiles. The number of either has a bound that
does not depend on the groups, and that many are computed.
"""

import torch

from ortho._typing import Bool, Float, Int, Tensor
from ortho.attention.call import Call
from ortho.attention.dynamic_sparse.selection import (
    ABSENT,
    attend_chosen,
    gather_rows,
    placed,
    positions,
    tiles_by_label,
)


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


def attend_in_groups(
    of_queries: Int[Tensor, "G N"], of_keys: Int[Tensor, "G M"], call: Call, count: int, width: int
) -> Float[Tensor, "G N V"]:
    """Attention over the kept pairs of groups with labels below `count`."""
    of_keys, M, N = _unmasked(of_keys, call), of_keys.shape[1], of_queries.shape[1]
    chunks = tiles_by_label(of_keys, count, width)
    # The number of keys in a query's group up to its position, by bisection in all keys, sorted by group and position.
    key = of_keys.masked_fill(of_keys < 0, count) * (M + 1) + torch.arange(M, device=of_keys.device)
    group, i = of_queries.clamp(min=0), positions(call).clamp(max=M - 1)
    place = torch.searchsorted(key.sort(1).values, group * (M + 1) + i, right=True) - chunks.starts.gather(1, group)
    own = chunks.first.gather(1, group) + (place - 1).clamp(min=0) // width
    own = own.masked_fill((of_queries < 0) | (chunks.sizes.gather(1, group) == 0), ABSENT)
    tiles = tiles_by_label(own, chunks.labels.shape[1], tile_width(width, N))
    # A tile reads its queries' own chunk and, where that continues a group, the one before.
    at = tiles.labels.clamp(min=0)
    before = (at - 1).clamp(min=0)
    continues = (at > 0) & (chunks.labels.gather(1, at) == chunks.labels.gather(1, before))
    read = torch.stack([before.masked_fill(~continues, ABSENT), tiles.labels], -1)  # (G, T, 2)
    keys = gather_rows(chunks.positions, read.clamp(min=0)).masked_fill((read < 0)[..., None], ABSENT)
    return placed(attend_chosen(call, tiles.positions, keys.flatten(2)), tiles.positions, N)


def tile_width(width: int, N: int) -> int:
    """Queries of a chunk that are computed together: fewer than its keys, as one tile of each chunk is not full."""
    return max(1, min(width // 4, N))
