r"""Attention to the most important keys, the same for all queries: the largest by norm, or a sample weighted by norm.

A key's importance is one number, made of that key alone. In a causal call a query attends to the `num_keys` most
important keys up to its own. A key that has been pushed out never comes back, so only `num_keys` keys have to be
carried on. Selecting costs comparisons and no products; a key that only one query needs is not found. Among keys of
equal importance the first are kept.

`sampled_importance` selects a random sample without replacement, in which a key is drawn in proportion to its norm. In
a causal call it is such a sample at every length (Efraimidis & Spirakis 2006, Inf. Proc. Lett. 97, 181-185; here with
logarithms, after Gumbel).
"""

import torch
from torch.nn.functional import pad

from ortho import checks
from ortho._typing import Bool, Float, State, Tensor
from ortho.attention.call import Call, attention_function, no_autocast, upcast
from ortho.attention.dynamic_sparse.selection import (
    ABSENT,
    attend_chosen,
    attend_to_mask,
    best,
    best_positions,
    continued,
    first_position,
    flat,
    gather_rows,
    new_keys,
    positions_of,
    reachable,
)
from ortho.attention.mechanism import Mechanism
from ortho.attention.uncompiled import uncompiled

NUM_KEYS = 64
TILE = 64  # queries whose choices are found together


def _selected(call: Call, numbers: Float[Tensor, "*batch M"], num_keys: int) -> Bool[Tensor, "*batch N M"]:
    """The most important keys: of all, or in a causal call of those up to each query."""
    checks.positive_int("num_keys", num_keys)
    if not call.is_causal:
        return best(numbers, num_keys)[..., None, :].expand(*call.q.shape[:-1], -1)
    return best(numbers[..., None, :].masked_fill(~reachable(call), -torch.inf), num_keys)


@uncompiled
@attention_function(beside=("importance",))
def importance_attention_reference(
    call: Call, *, num_keys: int = NUM_KEYS, importance: Float[Tensor, "*batch M"] | None = None
) -> tuple[Float[Tensor, "*batch N V"], State]:
    """Softmax attention to the most important keys. All keys are kept if there are no more than `num_keys`.

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
    """`importance_attention_reference` in time and memory linear in N, in float32 at least.

    The state holds the keys that later queries may attend to, at most `num_keys`.
    """
    numbers = _importance(call, importance).reshape(-1, call.k.shape[-2])  # -inf for hidden keys
    count, x = min(checks.positive_int("num_keys", num_keys), call.k.shape[-2]), flat(call)
    o, last = (_causal if x.is_causal else _bidirectional)(x, numbers, count)
    if not call.return_state:
        return o.view(*call.q.shape[:-1], -1), ()
    index = last.clamp(min=0)
    numbers = numbers.gather(1, index).masked_fill(last < 0, -torch.inf)
    parts = (*(gather_rows(each, index) for each in (x.k, x.v)), numbers)
    return o.view(*call.q.shape[:-1], -1), tuple(part.view(*call.q.shape[:-2], *part.shape[1:]) for part in parts)


def _bidirectional(call: Call, numbers: Float[Tensor, "G M"], count: int) -> tuple[Tensor, Tensor]:
    """(the outputs (G, N, V), the positions of the keys that are kept): all queries of a sequence read the same."""
    (G, N), kept = call.q.shape[:2], best_positions(numbers, count)
    queries = torch.arange(N, device=kept.device).expand(G, 1, -1)
    return attend_chosen(call, queries, kept[:, None])[:, 0], kept


def _causal(call: Call, numbers: Float[Tensor, "G M"], count: int) -> tuple[Tensor, Tensor]:
    """(the outputs (G, N, V), the positions of the keys that are kept at the end): a tile of queries reads its own keys
    and those that were kept before it."""
    (G, N), first, rows = call.q.shape[:2], first_position(call), []
    held = best_positions(numbers[:, :first], count)
    for start in range(0, N, TILE):
        own = torch.arange(start, min(N, start + TILE), device=numbers.device)
        keys = torch.cat([held, (first + own).expand(G, -1)], 1)
        theirs = numbers.gather(1, keys.clamp(min=0)).masked_fill(keys < 0, -torch.inf)
        there = keys[:, None] <= (first + own)[:, None]
        kept = best(theirs[:, None].masked_fill(~there, -torch.inf), count)  # by each query, (G, n, C)
        rows.append(attend_chosen(call, own.expand(G, 1, -1), keys[:, None], kept[:, None])[:, 0])
        found = positions_of(kept[:, -1], count)
        held = keys.gather(1, found.clamp(min=0)).masked_fill(found < 0, ABSENT)
    return torch.cat(rows, 1), pad(held, (0, count - held.shape[1]), value=ABSENT)


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


MECHANISM = Mechanism(
    name="importance",
    family="dynamic_sparse",
    source="Efraimidis & Spirakis 2006",
    reference=importance_attention_reference,
    fast=importance_attention,
)
