r"""Routing attention: tokens see those that are near the same centroid (Roy et al. 2020, arXiv:2003.05997, section 4).

Queries and keys are normalised, $(x - \mathrm{mean}(x)) / \mathrm{std}(x)$, and compared with centroids $\mu$ by
$\mu^T x$. There are two ways to make clusters of that:

- balanced, as published: each centroid takes the `width` queries and keys with the highest products. Softmax attention
  is computed within each cluster, and a query's output is the mean over the clusters that took it and in which it sees
  a key. A query that none took gets zeros. In a causal call the choice leaks: a later token can push out an earlier
  one.
- nearest: each token is in the cluster of its highest product, from which a query sees the latest keys
  (`ortho.attention.selected.groups`). Nothing leaks. A query gets zeros if its cluster has no key up to it, or at all.

Unless said otherwise a causal call takes the nearest clusters and any other the balanced ones. As published, causal
attention has keys equal to its queries, so that a token always sees itself; hand in q as k for that. Half of the heads
there attend to a window instead.
"""

import torch

from ortho import _checks
from ortho._checks import checked
from ortho._typing import Bool, Float, State, Tensor
from ortho.attention.indexing import indexing
from ortho.attention.mechanism import Mechanism
from ortho.attention.operands import carried, known_tokens, with_past
from ortho.attention.selected.groups import chunk_round, group_mask, group_parts
from ortho.attention.selected.routing_balanced import balanced_fast, balanced_reference, clusters_mask, members_of
from ortho.attention.selected.routing_centroids import WIDTH, given_centroids, is_balanced, nearest
from ortho.attention.selected.routing_cost import routing_cost
from ortho.attention.selected.selection import Call, attend_joined, attend_reference, begin, choice_call, flat_numbers
from ortho.attention.transforms import uncompiled


@checked(shapes=False)
@indexing()
def routing_mask(
    q: Float[Tensor, "*batch N K"],
    k: Float[Tensor, "*batch M K"],
    *,
    centroids: Float[Tensor, "... clusters K"] | None = None,
    width: int = WIDTH,
    balanced: bool | None = None,
    is_causal: bool = False,
    attn_mask: Bool[Tensor, "..."] | None = None,
    same_tokens: bool = False,
) -> Bool[Tensor, "*batch N M"]:
    """The pairs that are kept, of balanced clusters in any of them. The last query of a causal call stands at the last
    key."""
    with_past(q, k, k, False, attn_mask, None)
    known_tokens(same_tokens, q, k)
    call = choice_call(q, k, is_causal=is_causal, attn_mask=attn_mask, scale=None)
    mu = given_centroids(centroids, q)
    if is_balanced(balanced, is_causal):
        chosen = clusters_mask(call, *members_of(q, k, mu, call, width, same_tokens)).any(1)
    else:
        chosen = group_mask(flat_numbers(nearest(q, mu)), flat_numbers(nearest(k, mu)), call, width)
    return chosen.reshape(*q.shape[:-1], k.shape[-2])


@checked(shapes=False)
@uncompiled
@indexing()
def routing_attention_reference(
    q: Float[Tensor, "*batch N K"],
    k: Float[Tensor, "*batch M K"],
    v: Float[Tensor, "*batch M V"],
    *,
    centroids: Float[Tensor, "... clusters K"] | None = None,
    width: int = WIDTH,
    balanced: bool | None = None,
    is_causal: bool = False,
    attn_mask: Bool[Tensor, "..."] | None = None,
    scale: float | None = None,
    initial_state: State | None = None,
    return_state: bool = False,
    same_tokens: bool = False,
) -> Float[Tensor, "*batch N V"] | tuple[Float[Tensor, "*batch N V"], State]:
    """The weights of all pairs, materialised: those of `routing_mask`, or the mean over balanced clusters.

    `centroids`, (clusters, K) or with leading axes that broadcast to those of q, are by default 16 that are the same in
    every call; no gradient reaches them, `update_centroids` moves them. `width` is the size of a balanced cluster, or
    of a chunk of a nearest one. With `same_tokens`, query i and key i being the same token, the queries at hidden keys'
    positions are left out of balanced clusters. The state of nearest clusters is (keys, values, clusters of the keys).

    Raises ValueError for a mask that is not the same for all queries, and for a state beside balanced clusters, which
    look at the whole sequence.
    """
    keys, values, labels, mu, call = _begin(
        q, k, v, centroids, balanced, is_causal, attn_mask, scale, initial_state, return_state, same_tokens
    )
    if labels is None:
        return balanced_reference(q, keys, values, call, members_of(q, keys, mu, call, width, same_tokens))
    chosen = group_mask(flat_numbers(nearest(q, mu)), flat_numbers(labels), call, _checks.positive_int("width", width))
    o = attend_reference(q, keys, values, call, chosen)
    return (o, (keys, values, labels)) if return_state else o


@checked(shapes=False)
@uncompiled
@indexing()
def routing_attention(
    q: Float[Tensor, "*batch N K"],
    k: Float[Tensor, "*batch M K"],
    v: Float[Tensor, "*batch M V"],
    *,
    centroids: Float[Tensor, "... clusters K"] | None = None,
    width: int = WIDTH,
    balanced: bool | None = None,
    is_causal: bool = False,
    attn_mask: Bool[Tensor, "..."] | None = None,
    scale: float | None = None,
    initial_state: State | None = None,
    return_state: bool = False,
    same_tokens: bool = False,
) -> Float[Tensor, "*batch N V"] | tuple[Float[Tensor, "*batch N V"], State]:
    """`routing_attention_reference` in time and memory linear in N for a fixed number of clusters, in float32 at least;
    not differentiable twice."""
    keys, values, labels, mu, call = _begin(
        q, k, v, centroids, balanced, is_causal, attn_mask, scale, initial_state, return_state, same_tokens
    )
    if labels is None:
        return balanced_fast(q, keys, values, call, members_of(q, keys, mu, call, width, same_tokens))
    width = min(_checks.positive_int("width", width), keys.shape[-2])
    chunks = chunk_round(flat_numbers(nearest(q, mu)), flat_numbers(labels), call, mu.shape[-2], width)
    o = attend_joined(q, keys, values, call.scale, group_parts([chunks], call))
    return (o, (keys, values, labels)) if return_state else o


def _begin(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    centroids: Tensor | None,
    balanced: bool | None,
    is_causal: bool,
    attn_mask: Tensor | None,
    scale: float | None,
    initial_state: State | None,
    return_state: bool,
    same_tokens: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Call]:
    """(keys, values, their clusters or None for balanced ones, centroids, call)."""
    known_tokens(same_tokens, q, k)
    if is_balanced(balanced, is_causal):
        if initial_state is not None or return_state:
            name = "return_state" if return_state else "initial_state"
            raise ValueError(f"{name}: expected none with balanced clusters, which look at the whole sequence, got one")
        keys, values, call = begin(q, k, v, is_causal, attn_mask, scale, None)
        return keys, values, None, given_centroids(centroids, q), call
    state = None if initial_state is None else _checks.state(initial_state, "keys", "values", "clusters")
    keys, values, call = begin(q, k, v, is_causal, attn_mask, scale, None if state is None else state[:2])
    mu = given_centroids(centroids, q)
    labels = nearest(k, mu)
    if state is not None:
        shape = (*labels.shape[:-1], state[0].shape[-2])
        labels = torch.cat([carried("clusters", state[2], shape, labels.dtype), labels], -1)
    return keys, values, labels, mu, call


MECHANISM = Mechanism(
    name="routing",
    family="dynamic",
    source="Roy et al. 2020, arXiv:2003.05997",
    reference=routing_attention_reference,
    fast=routing_attention,
    causal=True,
    exact=False,
    same_tokens=True,
    cost=routing_cost,
)
