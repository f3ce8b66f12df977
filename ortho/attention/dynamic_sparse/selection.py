"""Shared by the mechanisms that select pairs by the contents of queries and keys.

A selection is made once and is not differentiated: gradients reach only the scores and values of the selected pairs.
Both forms of a mechanism select with the same function, in float32 at least, so that rounding cannot make them differ.
Definitions work on the leading axes of the caller; fast forms on G sequences, `flat`.
"""

from collections.abc import Iterator
from dataclasses import replace
from math import prod
from typing import NamedTuple

import torch
from torch.utils.checkpoint import checkpoint

from ortho import checks
from ortho._typing import Bool, Float, Int, Tensor
from ortho.attention.call import Call
from ortho.attention.scores import masked_softmax

ABSENT = -1  # in place of the number of a token, or of a group
# Scores processed together: as many as in a few tiles of a fused kernel, so that memory stays linear.
SCORES = 2**22

# --------------------------------------------------------------------------------------------- what a call may reach


def first_position(call: Call) -> int:
    """The position of the first query; the first key's is 0. In a causal call the last query stands at the last key."""
    return call.k.shape[-2] - call.q.shape[-2] if call.is_causal else call.past


def positions(call: Call) -> Int[Tensor, "N"]:
    """The queries' positions."""
    first = first_position(call)
    return torch.arange(first, first + call.q.shape[-2], device=call.q.device)


def reachable(call: Call, queries: slice = slice(None)) -> Bool[Tensor, "*batch n M"]:
    """Whether each query could attend to each key."""
    i, j = positions(call)[queries, None], torch.arange(call.k.shape[-2], device=call.k.device)
    free = j <= i if call.is_causal else torch.ones_like(i + j, dtype=torch.bool)
    free = free if call.key_mask is None else free & call.key_mask[..., None, :]
    return free.expand(*call.q.shape[:-2], *free.shape[-2:])


def products(x: Float[Tensor, "*batch n K"], y: Float[Tensor, "... m K"]) -> Float[Tensor, "*batch n m"]:
    """The products of rows by which choices are made, in float32, without a gradient.

    Equal rows have equal products, whatever their place and number: how a product rounds depends on these, so it is
    computed in float64, where that changes its rounding to float32 in one of 1e8 cases.
    """
    found = x.detach().double() @ y.detach().double().mT
    return found.float().clamp(min=torch.finfo(torch.float32).min)  # -inf stands for pairs that may not be chosen


def tiles_of_queries(call: Call, width: int) -> Iterator[slice]:
    """All queries, in tiles of about `SCORES` numbers each, `width` numbers per query."""
    N = call.q.shape[-2]
    step = max(1, SCORES // (prod(call.q.shape[:-2]) * width))
    for start in range(0, N, step):
        yield slice(start, min(N, start + step))


def new_keys(call: Call) -> Float[Tensor, "*batch M K"]:
    """The keys that are not from a state, without a gradient."""
    return call.k.detach()[..., call.past :, :]


def continued(call: Call, name: str, numbers: Tensor) -> Tensor:
    """Numbers of the new keys (..., M) after those of earlier keys, the only other part of the state."""
    if not call.past:
        return numbers
    (earlier,) = call.state
    return torch.cat([checks.carried(name, earlier, (*numbers.shape[:-1], call.past), numbers), numbers], -1)


# ------------------------------------------------------------------------------------------- attending to what is kept


def attend_to_mask(call: Call, kept: Bool[Tensor, "*batch N M"]) -> Float[Tensor, "*batch N V"]:
    """Softmax attention over the kept pairs, by its formula; zeros for a query without any."""
    scores = call.q @ call.k.mT * call.factor
    return masked_softmax(scores, ~kept, empty_rows=True) @ call.v


def flat(call: Call) -> Call:
    """The call on G sequences along one leading axis, with a mask (G, 1, M) of keys or none."""
    q, k, v = (x.reshape(-1, *x.shape[-2:]) for x in (call.q, call.k, call.v))
    mask = None if call.key_mask is None else call.key_mask.reshape(-1, 1, k.shape[-2])
    return replace(call, q=q, k=k, v=v, attn_mask=mask)


def attend_chosen(
    call: Call,
    queries: Int[Tensor, "G T B"],
    keys: Int[Tensor, "G T C"],
    allowed: Bool[Tensor, "G T B C"] | None = None,
) -> Float[Tensor, "G T B V"]:
    """Softmax attention of each tile of queries, given by their numbers, to its own keys; zeros for a query without
    any. A place without a token is `ABSENT`. `allowed` says which pairs count, by default all; in a causal call no key
    after the query. About `SCORES` numbers exist at a time; they are computed again for the gradient."""
    first = first_position(call)

    def attend(some: slice) -> Tensor:
        i, j = queries[:, some], keys[:, some]
        hidden = (i < 0)[..., None] | (j < 0)[..., None, :]
        if allowed is not None:
            hidden = hidden | ~allowed[:, some]
        elif call.is_causal:
            hidden = hidden | (j[..., None, :] > first + i[..., None])
        q, k, v = (gather_rows(x, at.clamp(min=0)) for x, at in ((call.q, i), (call.k, j), (call.v, j)))
        return masked_softmax(q @ k.mT * call.factor, hidden, empty_rows=True) @ v

    (G, T, B), (C, K) = queries.shape, (keys.shape[-1], call.k.shape[-1])
    step = max(1, SCORES // (G * C * max(B, K)))
    tiles = (slice(start, start + step) for start in range(0, T, step))
    return torch.cat([checkpoint(attend, some, use_reentrant=False, preserve_rng_state=False) for some in tiles], 1)


def gather_rows(x: Tensor, index: Int[Tensor, "G *at"]) -> Tensor:
    """The rows of x (G, n, ·) at these numbers, (G, *at, ·)."""
    offsets = x.shape[1] * torch.arange(len(x), device=x.device).view(-1, *(1,) * (index.dim() - 1))
    return x.flatten(0, 1).index_select(0, (index + offsets).flatten()).unflatten(0, index.shape)


def placed(o: Float[Tensor, "G T B V"], queries: Int[Tensor, "G T B"], N: int) -> Float[Tensor, "G N V"]:
    """The sum of the rows of o at each of N queries."""
    rows = torch.where(queries < 0, N, queries).flatten(1)[..., None].expand(-1, -1, o.shape[-1])
    return o.new_zeros(len(o), N + 1, o.shape[-1]).scatter_add(1, rows, o.flatten(1, 2))[:, :N]


# ------------------------------------------------------------------------------------------------------------- choosing


def best(scores: Float[Tensor, "... M"], k: int) -> Bool[Tensor, "... M"]:
    """True for the `k` highest of each row, the first of equal ones; never for -inf."""
    there = scores > -torch.inf
    if k >= scores.shape[-1]:
        return there
    highest = scores.topk(k).values
    least = highest[..., -1:]
    level = scores == least
    room = (highest == least).sum(-1, keepdim=True)
    return ((scores > least) | (level & (level.cumsum(-1, dtype=torch.int32) <= room))) & there


def positions_of(kept: Bool[Tensor, "... M"], k: int) -> Int[Tensor, "... k"]:
    """The positions of the first `k` True in each row, filled up with `ABSENT`."""
    M = kept.shape[-1]
    number = torch.arange(M, dtype=torch.int32, device=kept.device)
    found = torch.where(kept, number, M).topk(min(k, M), largest=False, sorted=True).values.long()
    return found.masked_fill_(found == M, ABSENT)


def best_positions(scores: Float[Tensor, "... M"], k: int) -> Int[Tensor, "... k"]:
    """The positions of the `k` highest of each row."""
    return positions_of(best(scores, k), k)


def mask_of(positions: Int[Tensor, "*batch N k"], M: int) -> Bool[Tensor, "*batch N M"]:
    """True at these positions."""
    mask = torch.zeros(*positions.shape[:-1], M + 1, dtype=torch.bool, device=positions.device)
    return mask.scatter(-1, torch.where(positions < 0, M, positions), True)[..., :M]  # not in place, for vmap


# ------------------------------------------------------------------------------------------------- tiles of one label


class Tiles(NamedTuple):
    """Tokens in tiles of B with the same label, in their order."""

    positions: Int[Tensor, "G T B"]
    labels: Int[Tensor, "G T"]  # of the tiles; `ABSENT` for a tile that is not needed
    first: Int[Tensor, "G L"]  # first tile of each label
    starts: Int[Tensor, "G L"]  # number of tokens with lower labels
    sizes: Int[Tensor, "G L"]


def tile_count(tokens: int, labels: int, size: int) -> int:
    """A number of tiles of `size`, with one label each, that is enough for any tokens with labels below `labels`."""
    return (tokens + min(labels, tokens) * (size - 1)) // size


def tiles_by_label(labels: Int[Tensor, "G n"], count: int, size: int) -> Tiles:
    """Tokens with labels below `count` in tiles of `size`; without those that are `ABSENT`."""
    (G, n), T = labels.shape, tile_count(labels.shape[1], count, size)
    number, absent = torch.arange(n, device=labels.device).expand(G, n), labels < 0
    label = labels.masked_fill(absent, count)
    sizes = labels.new_zeros(G, count + 1).scatter_add_(1, label, torch.ones_like(label))
    starts = sizes.cumsum(1) - sizes
    tiles = -(-sizes // size)
    first = tiles.cumsum(1) - tiles
    order = label.argsort(dim=1, stable=True)
    rank = torch.empty_like(label).scatter_(1, order, number) - starts.gather(1, label)
    tile = (first.gather(1, label) + rank // size).masked_fill(absent, T)  # the last tile, which is left out below
    positions = labels.new_full((G, (T + 1) * size), ABSENT)
    positions.scatter_(1, tile * size + (rank % size).masked_fill(absent, 0), number)
    of_tiles = labels.new_full((G, T + 1), ABSENT).scatter_(1, tile, labels)
    return Tiles(
        positions.unflatten(1, (-1, size))[:, :T],
        of_tiles[:, :T],
        first[:, :count],
        starts[:, :count],
        sizes[:, :count],
    )
