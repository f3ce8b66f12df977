r"""Attention of each query to the latest keys of its group of tokens: shared by hashing and clustering.

The keys of a group, in their order, are cut into chunks of `width`. A query's own chunk is the one with the last key
of its group up to the query's position. It may attend to that chunk and the one before: in a causal call to the last
`width` + 1 to 2 `width` keys of its group, or to all if there are fewer. Tokens after a query change neither its chunk
nor anything in the chunks before: nothing leaks. (Kitaev et al. 2020 sort all tokens by group and cut the result. There
the start of a chunk depends on how many tokens, including later ones, are in other groups.)

In the fast form a chunk is a block of keys, and queries of one chunk form tiles. The number of either has a bound that
does not depend on the groups, and that many are computed.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from ortho._typing import Bool, Int, Tensor
from ortho.attention.selected.call import Call
from ortho.attention.selected.selection import joined, tile_count, tiles_by_label
from ortho.attention.sparse.tiling import ABSENT, Tiling, TokenBlocks, Work


def group_mask(
    of_queries: Int[Tensor, "G N"], of_keys: Int[Tensor, "G M"], call: Call, width: int
) -> Bool[Tensor, "G N M"]:
    """The pairs that are kept, by definition. Each token is given by the number of its group, or `ABSENT`."""
    i, j = call.places[:, None], torch.arange(of_keys.shape[1], device=of_keys.device)
    of_keys = of_keys if call.visible is None else of_keys.masked_fill(~call.visible, ABSENT)
    mates = (of_queries[:, :, None] == of_keys[:, None]) & (of_keys >= 0)[:, None]
    rank = ((of_keys[:, :, None] == of_keys[:, None]) & (j < j[:, None])).sum(-1)  # of each key in its group
    place = (mates & (j <= i)).sum(-1)
    gap = (place - 1).clamp(min=0)[..., None] // width - rank[:, None] // width
    kept = mates & (gap >= 0) & (gap <= 1)
    return kept & (j <= i) if call.is_causal else kept


class Round(NamedTuple):
    """Chunks of the keys, and which of them each query reads: its own and, where that `continues` a group, the one
    before."""

    keys: Int[Tensor, "G S width"]
    continues: Bool[Tensor, "G S"]
    of_keys: Int[Tensor, "G M"]
    own: Int[Tensor, "G N"]
    # The number of keys in a query's group up to its position, also those that are too far back to be read; in a call
    # that is not causal at least min(width, the group's size). It is 0 or 1 exactly if the query finds 0 or 1 keys.
    found: Int[Tensor, "G N"]


def chunk_round(
    of_queries: Int[Tensor, "G N"], of_keys: Int[Tensor, "G M"], call: Call, count: int, width: int
) -> Round:
    """The chunks of groups with labels below `count`."""
    of_keys = of_keys if call.visible is None else of_keys.masked_fill(~call.visible, ABSENT)
    M = of_keys.shape[1]
    tiles = tiles_by_label(of_keys, count, width)
    # The number of keys in a query's group up to its position, by bisection in all keys, sorted by group and position.
    key = of_keys.masked_fill(of_keys < 0, count) * (M + 1) + torch.arange(M, device=of_keys.device)
    group, i = of_queries.clamp(min=0), call.places.clamp(max=M - 1)
    place = torch.searchsorted(key.sort(1).values, group * (M + 1) + i, right=True) - tiles.starts.gather(1, group)
    chunk, size = (place - 1).clamp(min=0) // width, tiles.sizes.gather(1, group)
    none = (of_queries < 0) | (size == 0)
    joins = tiles.labels[:, 1:] == tiles.labels[:, :-1]
    return Round(
        tiles.positions,
        torch.cat([joins.new_zeros(len(joins), 1), joins], 1),
        tiles.of,
        (tiles.first.gather(1, group) + chunk).masked_fill(none, ABSENT),
        (place if call.is_causal else torch.maximum(place, size.clamp(max=width))).masked_fill(none, 0),
    )


def group_tilings(rounds: Sequence[Round], call: Call, *, skip_self: bool = False) -> list[Tiling]:
    """Tilings, for `attend_joined`, of the pairs that any round finds; each pair belongs to the first such round.

    With `skip_self` a query attends to its own token only if it finds nothing else. As many queries as keys are then
    expected, after those of a state.
    """
    N, M, causal, first = call.q.shape[1], call.k.shape[1], call.is_causal, call.first
    tilings: list[Tiling] = []
    earlier: list[tuple[Tensor, ...]] = []  # of the rounds before
    for each in rounds:
        S, width = each.keys.shape[1:]
        tiles = tiles_by_label(each.own, S, _tile(width, N))
        before = (tiles.labels - 1).masked_fill(~each.continues.gather(1, tiles.labels.clamp(min=0)), ABSENT)
        table = joined(torch.stack([tiles.labels, before], -1), S).flatten(0, 1)
        # All tiles read two chunks: an empty chunk takes the place of an absent one.
        keys = torch.cat([joined(each.keys, M).flatten(0, 1), each.keys.new_full((1, width), ABSENT)])
        table = table.masked_fill(table < 0, len(keys) - 1)
        queries = joined(tiles.positions, N).flatten(0, 1)
        tilings.append(
            Tiling(TokenBlocks(queries), TokenBlocks(keys), table, _allowed(N, M, first, causal, skip_self, earlier))
        )
        own, of_keys = joined(each.own, S).flatten(), joined(each.of_keys, S).flatten()
        previous = torch.where(each.continues.gather(1, each.own.clamp(min=0)).flatten(), own - 1, own)
        earlier = [*earlier, (own, previous.masked_fill(own < 0, ABSENT), of_keys.masked_fill(of_keys < 0, 2 * ABSENT))]
    return [*tilings, _alone(rounds, call)] if skip_self else tilings


def _allowed(
    N: int, M: int, first: int, causal: bool, skip_self: bool, earlier: Sequence[tuple[Tensor, ...]]
) -> Callable[[Tensor, Tensor], Tensor]:
    """Which pairs of two chunks are kept, by the tokens' numbers in all sequences: not those of an earlier round."""

    def allowed(i: Tensor, j: Tensor) -> Tensor:
        i, j = i.clamp(min=0), j.clamp(min=0)
        at, of = first + i % N, j % M
        kept = of <= at if causal else torch.ones_like(i + j, dtype=torch.bool)
        if skip_self:
            kept = kept & (of != at)
        for own, previous, of_keys in earlier:
            kept = kept & (of_keys[j] != own[i]) & (of_keys[j] != previous[i])
        return kept

    return allowed


def _alone(rounds: Sequence[Round], call: Call) -> Tiling:
    """Each query that finds no other key in any round, with its own token's key."""
    (G, N), M = call.q.shape[:2], call.k.shape[1]
    number = torch.arange(N, device=call.q.device)
    itself = call.first + number
    # A query finds its own token's key, in its own chunk, if that key is in the query's group.
    nothing = [each.found <= ((each.of_keys[:, itself] == each.own) & (each.own >= 0)) for each in rounds]
    alone = torch.stack(nothing).all(0)
    if call.visible is not None:
        alone &= call.visible[:, itself]
    of_queries = alone.flatten()
    queries, keys = (joined(x.expand(G, N), size).flatten()[:, None] for x, size in ((number, N), (itself, M)))
    each_its_own = torch.arange(G * N, device=call.q.device)[:, None]
    return Tiling(
        TokenBlocks(queries), TokenBlocks(keys), each_its_own, lambda i, j: of_queries[i.clamp(min=0)] & (j >= 0)
    )


def group_work(N: int, M: int, *, rounds: int, count: int, width: int) -> list[Work]:
    """The work per sequence of the tilings of N queries and M keys, in groups with labels below `count`."""
    width = min(width, M)
    size = _tile(width, N)
    T = tile_count(N, tile_count(M, count, width), size)
    return [Work(T, 2 * T, size, width)] * rounds


def _tile(width: int, N: int) -> int:
    """Queries of a chunk that are computed together: fewer than its keys, as one tile of each chunk is not full."""
    return max(1, min(width // 4, N))
