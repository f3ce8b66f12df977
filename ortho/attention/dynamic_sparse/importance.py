r"""Attention to the most important keys, the same for all queries: the largest by norm, or a sample weighted by norm.

A key's importance is one number, made of that key alone. In a causal call a query attends to the `num_keys` most
important keys up to its own. A key that has been pushed out never comes back, so only `num_keys` keys have to be
carried on. Selecting costs comparisons and no products; a key that only one query needs is not found. Among keys of
equal importance the first are kept.

`sampled_importance` selects a random sample without replacement, in which a key is drawn in proportion to its norm. In
a causal call it is such a sample at every length (Efraimidis & Spirakis 2006, Inf. Proc. Lett. 97, 181-185; here with
logarithms, after Gumbel).
"""

from typing import NamedTuple

import torch
from torch.nn.functional import pad

from ortho import checks
from ortho._typing import Bool, Float, Int, State, Tensor
from ortho.attention.call import Call, attention_function, no_autocast, upcast
from ortho.attention.dynamic_sparse.selection import (
    attend_joined,
    attend_to_mask,
    best,
    best_positions,
    continued,
    first_position,
    flat,
    joined,
    mask_function,
    new_keys,
    positions_of,
    reachable,
)
from ortho.attention.kernel import uncompiled
from ortho.attention.mechanism import Mechanism
from ortho.attention.sparse.block_mask import ABSENT, TILE, BlockMask, consecutive, gather_rows

NUM_KEYS = 64


def _selected(call: Call, numbers: Float[Tensor, "*batch M"], num_keys: int) -> Bool[Tensor, "*batch N M"]:
    """The most important keys: of all, or in a causal call of those up to each query."""
    checks.positive_int("num_keys", num_keys)
    if not call.is_causal:
        return best(numbers, num_keys)[..., None, :].expand(*call.q.shape[:-1], -1)
    return best(numbers[..., None, :].masked_fill(~reachable(call), -torch.inf), num_keys)


@mask_function
def importance_mask(
    call: Call, *, num_keys: int = NUM_KEYS, importance: Float[Tensor, "*batch M"] | None = None
) -> Bool[Tensor, "*batch N M"]:
    """The pairs that are kept. In a causal call the last query is at the last key's position."""
    return _selected(call, _importance(call, importance), num_keys)


@uncompiled
@attention_function(beside=("importance",))
def importance_attention_reference(
    call: Call, *, num_keys: int = NUM_KEYS, importance: Float[Tensor, "*batch M"] | None = None
) -> tuple[Float[Tensor, "*batch N V"], State]:
    """Softmax attention under `importance_mask`. All keys are kept if there are no more than `num_keys`.

    `importance`, by default the squared lengths of the keys, gets no gradient. The state is (keys, values, importance).

    Raises ValueError for a mask that is not the same for all queries, or that comes with an `initial_state`.
    """
    numbers = _importance(call, importance)
    return attend_to_mask(call, _selected(call, numbers, num_keys)), (numbers,)


@uncompiled
@attention_function(keeps="fewer keys", beside=("importance",))
def importance_attention(
    call: Call, *, num_keys: int = NUM_KEYS, importance: Float[Tensor, "*batch M"] | None = None
) -> tuple[Float[Tensor, "*batch N V"], State]:
    """`importance_attention_reference` in time and memory linear in N, in float32 at least; not differentiable twice.

    The state holds the keys that later queries may attend to, at most `num_keys`.
    """
    numbers = _importance(call, importance).reshape(-1, call.k.shape[-2])
    count, x = min(checks.positive_int("num_keys", num_keys), call.k.shape[-2]), flat(call)
    if x.is_causal:
        held = _held(x, numbers, count)
        block_masks, last = _causal_block_masks(x, held), held.last
    else:
        last = best_positions(numbers, count)
        block_masks = [_same_keys(x, last)]
    o = attend_joined(x, block_masks).view(*call.q.shape[:-1], -1)  # hidden keys have importance -inf
    if not call.return_state:
        return o, ()
    index = last.clamp(min=0)
    numbers = numbers.gather(1, index).masked_fill(last < 0, -torch.inf)
    parts = (*(gather_rows(each, index) for each in (x.k, x.v)), numbers)
    return o, tuple(part.view(*call.q.shape[:-2], *part.shape[1:]) for part in parts)


def key_norms(k: Float[Tensor, "*batch M K"]) -> Float[Tensor, "*batch M"]:
    """The squared length of each key, in float32 at least."""
    with torch.no_grad(), no_autocast(k):
        return upcast(k).square().sum(-1)


def sampled_importance(
    k: Float[Tensor, "*batch M K"], *, generator: torch.Generator | None = None
) -> Float[Tensor, "*batch M"]:
    """An importance whose highest values are a sample of keys without replacement, in proportion to their lengths."""
    norms = key_norms(k)
    uniform = torch.rand(norms.shape, generator=generator, dtype=norms.dtype, device=norms.device)
    tiny = torch.finfo(norms.dtype).tiny
    return norms.clamp(min=tiny).log() / 2 - (-uniform.clamp(min=tiny).log()).clamp(min=tiny).log()


def _importance(call: Call, importance: Tensor | None) -> Float[Tensor, "*batch M"]:
    """The importance of all keys, by default their squared lengths; -inf for hidden ones."""
    k = new_keys(call)
    if call.state and call.attn_mask is not None:
        raise ValueError("attn_mask: expected None beside an initial_state, of which some keys are no longer there")
    checks.gate("importance", importance, k.shape[:-1])
    numbers = key_norms(k) if importance is None else importance.detach().to(k.dtype)
    if call.key_mask is not None:
        numbers = numbers.masked_fill(~call.key_mask, -torch.inf)
    return continued(call, "importance", numbers)


# --------------------------------------------------------------------------------------------- the fast form's tiles


class _Held(NamedTuple):
    """The keys that queries keep in a causal call."""

    tile: int  # queries processed per tile
    before: Int[Tensor, "T G count"]  # positions of the keys kept before each tile, `ABSENT` where there are fewer
    until: Int[Tensor, "G M"]  # number of the first query that no longer keeps this key
    last: Int[Tensor, "G count"]  # positions of the keys kept at the end


def _held(call: Call, numbers: Float[Tensor, "G M"], count: int) -> _Held:
    (G, M), N = numbers.shape, call.q.shape[1]
    tile, position, first = min(TILE, N), torch.arange(M, device=numbers.device), first_position(call)
    until = numbers.new_zeros(G, M + 1, dtype=torch.long)  # and one entry for absent keys
    held = best_positions(numbers[:, :first], count)
    held = pad(held, (0, count - held.shape[1]), value=ABSENT)
    before = []
    for start in range(0, N, tile):
        before.append(held)
        own = position[first + start : first + min(N, start + tile)]
        candidates = torch.cat([held, own.expand(G, -1)], 1)
        theirs = numbers.gather(1, candidates.clamp(min=0)).masked_fill(candidates < 0, -torch.inf)
        # what each query keeps, (G, n, count + n)
        kept = best(theirs[:, None].masked_fill(candidates[:, None] > own[:, None], -torch.inf), count)
        behind = (own[:, None] - first + 1) * kept
        until.scatter_reduce_(1, torch.where(candidates < 0, M, candidates), behind.amax(1), "amax")
        found = positions_of(kept[:, -1], count)
        held = candidates.gather(1, found.clamp(min=0)).masked_fill(found < 0, ABSENT)
    return _Held(tile, torch.stack(before), until[:, :M], held)


def _causal_block_masks(call: Call, held: _Held) -> list[BlockMask]:
    """Block masks of the tile's own keys, and of the keys kept before each tile, one by one."""
    (G, N), M, first, until = call.q.shape[:2], call.k.shape[1], first_position(call), held.until.flatten()
    T = len(held.before)

    def kept(i: Tensor, j: Tensor) -> Tensor:
        i, j = i.clamp(min=0), j.clamp(min=0)
        return (j % M <= first + i % N) & (i % N < until[j])

    queries, number = _queries(call, held.tile)
    own = (number + first).masked_fill(number < 0, ABSENT).expand(G, -1, -1)
    keys = joined(own, M).transpose(0, 1).flatten(0, 1)
    block_masks = [BlockMask(queries, keys, torch.arange(T * G, device=until.device)[:, None], kept)]
    # At most this many keys: an empty key, the last one, takes the place of a hidden one.
    most = (first + held.tile * torch.arange(T, device=until.device)).clamp(max=held.last.shape[1])
    if not int(most[-1]):
        return block_masks
    table = joined(held.before.transpose(0, 1), M).transpose(0, 1)  # (T, G, count)
    there = torch.arange(table.shape[-1], device=until.device) < most[:, None, None]
    table = torch.where(there & (table < 0), G * M, table).flatten(0, 1)
    each = torch.arange(G * M + 1, device=until.device)[:, None]
    return [*block_masks, BlockMask(queries, each.masked_fill(each == G * M, ABSENT), table, kept)]


def _same_keys(call: Call, selected: Int[Tensor, "G count"]) -> BlockMask:
    """The block mask with the same keys for all queries of a sequence."""
    queries, number = _queries(call, min(TILE, call.q.shape[1]))
    own = torch.arange(len(selected), device=selected.device).repeat(len(number))[:, None]
    return BlockMask(queries, joined(selected, call.k.shape[1]), own)


def _queries(call: Call, tile: int) -> tuple[Tensor, Int[Tensor, "T tile"]]:
    """The queries in tiles (the first of each sequence, then the second of each, and so on), and their numbers."""
    G, N = call.q.shape[:2]
    number = consecutive(0, N, tile, call.q.device)
    return joined(number.expand(G, -1, -1), N).transpose(0, 1).flatten(0, 1), number


# ---------------------------------------------------------------------------------------------------------------- cost


MECHANISM = Mechanism(
    name="importance",
    family="dynamic_sparse",
    source="Efraimidis & Spirakis 2006",
    reference=importance_attention_reference,
    fast=importance_attention,
)
