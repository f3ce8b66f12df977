r"""Attention within groups of tokens, of each query to the latest keys of its group: what hashing and clustering share.

The keys of a group, in their order, are cut into chunks of `width`. A query's own chunk is that of the last key of its
group up to its own position, and it may attend to that chunk and the one before: in a causal call to the last `width` +
1 to 2 `width` keys of its group, or to all if there are fewer. Tokens behind a query change neither its chunk nor
anything in the chunks before: nothing leaks. (Kitaev et al. 2020 sort all tokens by group and cut the result, so that
where a chunk begins depends on how many tokens, later ones too, are in other groups.)

In the fast form a chunk is a block of keys, and queries of one chunk make up tiles; how many there are of both has a
bound that does not depend on the groups, and so many are computed.
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
    """The pairs that are kept, from their definition; of each token the number of its group, or `ABSENT`."""
    i, j = call.places[:, None], torch.arange(of_keys.shape[1], device=of_keys.device)
    of_keys = of_keys if call.visible is None else of_keys.masked_fill(~call.visible, ABSENT)
    mates = (of_queries[:, :, None] == of_keys[:, None]) & (of_keys >= 0)[:, None]
    rank = ((of_keys[:, :, None] == of_keys[:, None]) & (j < j[:, None])).sum(-1)  # in its group
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
    found: Int[Tensor, "G N"]  # keys that a query finds, of which one is sure to be if there are any


def chunk_round(
    of_queries: Int[Tensor, "G N"], of_keys: Int[Tensor, "G M"], call: Call, count: int, width: int
) -> Round:
    """The chunks of groups with labels below `count`."""
    of_keys = of_keys if call.visible is None else of_keys.masked_fill(~call.visible, ABSENT)
    M = of_keys.shape[1]
    tiles = tiles_by_label(of_keys, count, width)
    # Keys of a query's group up to its position: by bisection among all keys, sorted by group and position.
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
    """Tilings, for `attend_joined`, of the pairs that any round finds, each in the first one.

    With `skip_self` no query attends to its own token, but for one that finds nothing else; as many queries as keys are
    then expected, behind those of a state.
    """
    N, M, causal, first = call.q.shape[1], call.k.shape[1], call.is_causal, call.first
    tilings: list[Tiling] = []
    earlier: list[tuple[Tensor, ...]] = []  # of the rounds before
    for each in rounds:
        S, width = each.keys.shape[1:]
        tiles = tiles_by_label(each.own, S, _tile(width, N))
        before = (tiles.labels - 1).masked_fill(~each.continues.gather(1, tiles.labels.clamp(min=0)), ABSENT)
        table = joined(torch.stack([tiles.labels, before], -1), S).flatten(0, 1)
        # All tiles read two chunks: in place of one that is absent, a chunk of nothing.
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
    """Which pairs of two chunks are kept, by the tokens' numbers in all sequences: none that an earlier round found."""

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
    """Each query that finds no other key in any round, with its own token's."""
    (G, N), M = call.q.shape[:2], call.k.shape[1]
    number = torch.arange(N, device=call.q.device)
    itself = call.first + number
    # A key of its own is found in its own chunk, if its group is the query's.
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
    """What the tilings of N queries and M keys compute for a sequence, in groups with labels below `count`."""
    width = min(width, M)
    size = _tile(width, N)
    T = tile_count(N, tile_count(M, count, width), size)
    return [Work(T, 2 * T, size, width)] * rounds


def _tile(width: int, N: int) -> int:
    """Queries of a chunk that are computed together: fewer than its keys, since a tile of each chunk is not full."""
    return max(1, min(width // 4, N))
