r"""Attention to the most important keys, the same for all queries: those with the largest norms, or a sample by them.

A key's importance is one number, made of itself alone. In a causal call a query attends to the `count` most important
of the keys up to its own, so that a key which has once been pushed out never comes back, and `count` keys are all that
has to be carried on. Choosing costs comparisons and no products; a key that only one query needs is not found. Of keys
of equal importance the first are kept.

The keys of `sampled_importance` are a random sample without replacement, in which a key is drawn in proportion to its
norm; of a causal call it is such a sample at every length (Efraimidis & Spirakis 2006, Inf. Proc. Lett. 97, 181-185;
here with logarithms, after Gumbel).
"""

from typing import NamedTuple

import torch
from torch.nn.functional import pad

from ortho import _checks
from ortho._autocast import no_autocast
from ortho._checks import checked
from ortho._typing import Bool, Float, Int, State, Tensor
from ortho.attention.indexing import indexing
from ortho.attention.mechanism import Mechanism
from ortho.attention.operands import carried, with_past, working
from ortho.attention.recurrent.memory import gate
from ortho.attention.selected.importance_cost import COUNT, importance_cost
from ortho.attention.selected.selection import (
    Call,
    attend_joined,
    attend_reference,
    begin,
    best,
    best_places,
    choice_call,
    flat_numbers,
    joined,
    places_of,
)
from ortho.attention.sparse.tiling import ABSENT, TILE, Tiling, TokenBlocks, consecutive
from ortho.attention.transforms import uncompiled


@checked
def key_norms(k: Float[Tensor, "*batch M K"]) -> Float[Tensor, "*batch M"]:
    """The squared length of each key, in float32 at least."""
    with torch.no_grad(), no_autocast(k):
        return working(k).square().sum(-1)


@checked
def sampled_importance(
    k: Float[Tensor, "*batch M K"], *, generator: torch.Generator | None = None
) -> Float[Tensor, "*batch M"]:
    """An importance whose highest are a sample without replacement, each key in proportion to its length."""
    norms = key_norms(k)
    uniform = torch.rand(norms.shape, generator=generator, dtype=norms.dtype, device=norms.device)
    tiny = torch.finfo(norms.dtype).tiny
    return norms.clamp(min=tiny).log() / 2 - (-uniform.clamp(min=tiny).log()).clamp(min=tiny).log()


@checked(shapes=False)
@indexing()
def importance_mask(
    q: Float[Tensor, "*batch N K"],
    k: Float[Tensor, "*batch M K"],
    *,
    count: int = COUNT,
    importance: Float[Tensor, "*batch M"] | None = None,
    is_causal: bool = False,
    attn_mask: Bool[Tensor, "..."] | None = None,
) -> Bool[Tensor, "*batch N M"]:
    """The pairs that are kept. The last query of a causal call stands at the last key."""
    with_past(q, k, k, False, attn_mask, None)
    call = choice_call(q, k, is_causal=is_causal, attn_mask=attn_mask, scale=None)
    numbers = flat_numbers(_importance(importance, k))
    if call.visible is not None:
        numbers = numbers.masked_fill(~call.visible, -torch.inf)
    return _mask(call, numbers, count).reshape(*q.shape[:-1], k.shape[-2])


@checked(shapes=False)
@uncompiled
@indexing()
def importance_attention_reference(
    q: Float[Tensor, "*batch N K"],
    k: Float[Tensor, "*batch M K"],
    v: Float[Tensor, "*batch M V"],
    *,
    count: int = COUNT,
    importance: Float[Tensor, "*batch M"] | None = None,
    is_causal: bool = False,
    attn_mask: Bool[Tensor, "..."] | None = None,
    scale: float | None = None,
    initial_state: State | None = None,
    return_state: bool = False,
) -> Float[Tensor, "*batch N V"] | tuple[Float[Tensor, "*batch N V"], State]:
    """`softmax_attention_reference` under `importance_mask`. All keys are kept where there are no more than `count`.

    `importance`, by default the squared lengths of the keys, gets no gradient. The state is (keys, values, importance).

    Raises ValueError for a mask that is not the same for all queries, or that stands beside a state.
    """
    keys, values, numbers, call = _begin(q, k, v, importance, is_causal, attn_mask, scale, initial_state)
    o = attend_reference(q, keys, values, call, _mask(call, flat_numbers(numbers), count))
    return (o, (keys, values, numbers)) if return_state else o


@checked(shapes=False)
@uncompiled
@indexing()
def importance_attention(
    q: Float[Tensor, "*batch N K"],
    k: Float[Tensor, "*batch M K"],
    v: Float[Tensor, "*batch M V"],
    *,
    count: int = COUNT,
    importance: Float[Tensor, "*batch M"] | None = None,
    is_causal: bool = False,
    attn_mask: Bool[Tensor, "..."] | None = None,
    scale: float | None = None,
    initial_state: State | None = None,
    return_state: bool = False,
) -> Float[Tensor, "*batch N V"] | tuple[Float[Tensor, "*batch N V"], State]:
    """`importance_attention_reference` in time and memory linear in N, in float32 at least; not differentiable twice.

    The state holds the keys that later queries may attend to, at most `count`.
    """
    keys, values, numbers, call = _begin(q, k, v, importance, is_causal, attn_mask, scale, initial_state)
    count, of_keys = min(_checks.positive_int("count", count), keys.shape[-2]), flat_numbers(numbers)
    if is_causal:
        held = _held(call, of_keys, count)
        o, last = attend_joined(q, keys, values, call.scale, _causal_parts(call, held)), held.last
    else:
        last = best_places(of_keys, count)
        o = attend_joined(q, keys, values, call.scale, [_part(call, last)])
    if not return_state:
        return o
    index = last.clamp(min=0).reshape(*keys.shape[:-2], count)
    numbers = numbers.take_along_dim(index, -1).masked_fill(last.view_as(index) < 0, -torch.inf)
    return o, (*(x.take_along_dim(index[..., None], -2) for x in (keys, values)), numbers)


class _Held(NamedTuple):
    """What the queries keep in a causal call."""

    tile: int  # queries for which it is found out together
    before: Int[Tensor, "T G count"]  # positions of the keys kept before each tile, `ABSENT` where there are fewer
    until: Int[Tensor, "G M"]  # number of the first query that no longer keeps a key
    last: Int[Tensor, "G count"]  # positions of the keys kept in the end


def _held(call: Call, numbers: Float[Tensor, "G M"], count: int) -> _Held:
    (G, M), N = numbers.shape, call.q.shape[1]
    tile, position = min(TILE, N), torch.arange(M, device=numbers.device)
    until = numbers.new_zeros(G, M + 1, dtype=torch.long)  # and one for what is absent
    held = _padded(best_places(numbers[:, : call.first], count), count)
    before = []
    for start in range(0, N, tile):
        before.append(held)
        own = position[call.first + start : call.first + min(N, start + tile)]
        candidates = torch.cat([held, own.expand(G, -1)], 1)
        theirs = numbers.gather(1, candidates.clamp(min=0)).masked_fill(candidates < 0, -torch.inf)
        # (G, n, count + n): of each query
        kept = best(theirs[:, None].masked_fill(candidates[:, None] > own[:, None], -torch.inf), count)
        behind = (own[:, None] - call.first + 1) * kept
        until.scatter_reduce_(1, torch.where(candidates < 0, M, candidates), behind.amax(1), "amax")
        found = places_of(kept[:, -1], count)
        held = candidates.gather(1, found.clamp(min=0)).masked_fill(found < 0, ABSENT)
    return _Held(tile, torch.stack(before), until[:, :M], held)


def _padded(positions: Int[Tensor, "G n"], count: int) -> Int[Tensor, "G count"]:
    return pad(positions, (0, count - positions.shape[1]), value=ABSENT)


def _causal_parts(call: Call, held: _Held) -> list[Tiling]:
    """The keys kept before each tile, one by one; and the tile's own."""
    (G, N), M, first, until = call.q.shape[:2], call.k.shape[1], call.first, held.until.flatten()
    T = len(held.before)

    def kept(i: Tensor, j: Tensor) -> Tensor:
        i, j = i.clamp(min=0), j.clamp(min=0)
        return (j % M <= first + i % N) & (i % N < until[j])

    queries, number = _queries(call, held.tile)
    own = (number + first).masked_fill(number < 0, ABSENT).expand(G, -1, -1)
    keys = TokenBlocks(joined(own, M).transpose(0, 1).flatten(0, 1))
    parts = [Tiling(queries, keys, torch.arange(T * G, device=until.device)[:, None], kept)]
    # So many keys at most: in place of one that is hidden, a key of nothing, which is the last.
    most = (first + held.tile * torch.arange(T, device=until.device)).clamp(max=held.last.shape[1])
    if not int(most[-1]):
        return parts
    table = joined(held.before.transpose(0, 1), M).transpose(0, 1)  # (T, G, count)
    there = torch.arange(table.shape[-1], device=until.device) < most[:, None, None]
    table = torch.where(there & (table < 0), G * M, table).flatten(0, 1)
    each = torch.arange(G * M + 1, device=until.device)[:, None]
    return [*parts, Tiling(queries, TokenBlocks(each.masked_fill(each == G * M, ABSENT)), table, kept)]


def _part(call: Call, chosen: Int[Tensor, "G count"]) -> Tiling:
    """The same keys for all queries of a sequence."""
    queries, number = _queries(call, min(TILE, call.q.shape[1]))
    own = torch.arange(len(chosen), device=chosen.device).repeat(len(number))[:, None]
    return Tiling(queries, TokenBlocks(joined(chosen, call.k.shape[1])), own)


def _queries(call: Call, tile: int) -> tuple[TokenBlocks, Int[Tensor, "T tile"]]:
    """The queries in tiles: the first of each sequence, the second of each, and so on; and their numbers."""
    G, N = call.q.shape[:2]
    number = consecutive(0, N, tile, call.q.device).positions
    return TokenBlocks(joined(number.expand(G, -1, -1), N).transpose(0, 1).flatten(0, 1)), number


def _mask(call: Call, numbers: Float[Tensor, "G M"], count: int) -> Bool[Tensor, "G N M"]:
    _checks.positive_int("count", count)
    if not call.is_causal:
        return best(numbers, count)[:, None].expand(-1, call.q.shape[1], -1)
    return best(numbers[:, None].masked_fill(~call.reachable(call.places), -torch.inf), count)


def _begin(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    importance: Tensor | None,
    is_causal: bool,
    attn_mask: Tensor | None,
    scale: float | None,
    initial_state: State | None,
) -> tuple[Tensor, Tensor, Tensor, Call]:
    """(keys, values, their importance, call)."""
    state = None if initial_state is None else _checks.state(initial_state, "keys", "values", "importance")
    if state is not None and attn_mask is not None:
        raise ValueError("attn_mask: expected None beside an initial_state, of which some keys are no longer there")
    keys, values, call = begin(q, k, v, is_causal, attn_mask, scale, None if state is None else state[:2])
    numbers = _importance(importance, k)
    if call.visible is not None:
        numbers = numbers.masked_fill(~call.visible.view_as(numbers), -torch.inf)
    if state is not None:
        shape = (*numbers.shape[:-1], call.first)
        numbers = torch.cat([carried("importance", state[2], shape, numbers.dtype), numbers], -1)
    return keys, values, numbers, call._replace(visible=None)


def _importance(importance: Tensor | None, k: Tensor) -> Float[Tensor, "*batch M"]:
    """Checked, in float32 at least; or the default."""
    if importance is None:
        return key_norms(k)
    gate("importance", importance, k, k.shape[:-1])
    _checks.finite("importance", importance)
    return importance.detach().to(torch.promote_types(k.dtype, torch.float32))


MECHANISM = Mechanism(
    name="importance",
    family="dynamic",
    source="Efraimidis & Spirakis 2006",
    reference=importance_attention_reference,
    fast=importance_attention,
    causal=True,
    exact=False,
    cost=importance_cost,
)
