r"""Routing attention: tokens see the tokens near the same centroid (Roy et al. 2020, arXiv:2003.05997, section 4).

Queries and keys are normalised, $(x - \mathrm{mean}(x)) / \mathrm{std}(x)$, and compared with centroids $\mu$ by
$\mu^T x$. There are two ways to make clusters from these products:

- balanced, as in the paper: each centroid takes the `width` queries and keys with the highest products. Softmax
  attention is computed within each cluster, and a query's output is the mean over the clusters that took it and in
  which it sees a key. A query that no cluster took gets zeros. In a causal call the selection leaks: a later token can
  push out an earlier one.
- nearest: each token is in the cluster of its highest product, and a query sees the latest keys of its cluster
  (`ortho.attention.dynamic_sparse.groups`). Nothing leaks. A query gets zeros if its cluster has no key up to it, or
  none at all.

By default a causal call takes the nearest clusters and any other the balanced ones. In the paper, causal attention has
keys equal to its queries, so that a token always sees itself; pass q as k for that. Half of the heads there attend to a
window instead.
"""

import torch
from torch.nn.functional import one_hot

from ortho import checks
from ortho._typing import Bool, Float, Int, State, Tensor
from ortho.attention.call import Call, attention_function, no_autocast, upcast
from ortho.attention.draws import drawn_once
from ortho.attention.dynamic_sparse.groups import attend_in_groups, group_mask
from ortho.attention.dynamic_sparse.selection import (
    attend_chosen,
    attend_to_mask,
    best_positions,
    continued,
    first_position,
    flat,
    new_keys,
    placed,
    positions,
    products,
)
from ortho.attention.mechanism import Mechanism
from ortho.attention.scores import masked_softmax
from ortho.attention.uncompiled import uncompiled

CLUSTERS, WIDTH = 16, 64
SEED = 2003_05997  # of the default centroids, the same in every call; a number that nobody seeds data with
DECAY = 0.999
TINY = 1e-6  # added to a variance


def normalised(x: Float[Tensor, "*batch N K"]) -> Float[Tensor, "*batch N K"]:
    """Layer normalisation without trained parameters, in float32 at least; a row of equal numbers becomes 0.

    Raises ValueError, on the CPU, if a variance exceeds the range of that dtype: such a row would become 0.
    """
    own = x.to(torch.promote_types(x.dtype, torch.float32))
    own = own - own.mean(-1, keepdim=True)
    variances = own.square().mean(-1, keepdim=True)
    checks.within("x", "variances", variances, 0, torch.finfo(own.dtype).max)
    return (own * (variances + TINY).rsqrt()).to(x.dtype)


def _products(x: Float[Tensor, "*batch N K"], centroids: Float[Tensor, "... c K"]) -> Float[Tensor, "*batch N c"]:
    """The products of each normalised row with each centroid."""
    with torch.no_grad(), no_autocast(x):
        return products(normalised(upcast(x)), centroids)


def nearest(x: Float[Tensor, "*batch N K"], centroids: Float[Tensor, "... clusters K"]) -> Int[Tensor, "*batch N"]:
    """The cluster of each row: that of the centroid with the highest product."""
    return _products(x, centroids).argmax(-1)


def _clusters(call: Call, mu: Tensor) -> tuple[Int[Tensor, "*batch N"], Int[Tensor, "*batch M"]]:
    """The nearest clusters of the queries and of all keys, those of the state before the new ones."""
    return nearest(call.q, mu), continued(call, "clusters", nearest(new_keys(call), mu))


@uncompiled
@attention_function(beside=("clusters",))
def routing_attention_reference(
    call: Call,
    *,
    centroids: Float[Tensor, "... clusters K"] | None = None,
    width: int = WIDTH,
    balanced: bool | None = None,
    same_tokens: bool = False,
) -> tuple[Float[Tensor, "*batch N V"], State]:
    """Attention with materialised weights of all pairs: within nearest clusters, or the mean over balanced ones.

    `centroids` are (clusters, K), or have leading axes that are the last of q's; the default are 16, the same in
    every call. No gradient reaches them; `update_centroids` moves them. `width` is the size of a balanced cluster, or
    of a chunk of a nearest one. `same_tokens` says that query i and key i are the same token: the queries at hidden
    keys' positions are then left out of balanced clusters. With nearest clusters the state is (keys, values, clusters
    of the keys).

    Raises ValueError for a mask that is not the same for all queries, and for a state with balanced clusters, which
    look at the whole sequence.
    """
    mu = _centroids(centroids, call.q)
    if not _is_balanced(balanced, call.is_causal):
        of_queries, of_keys = _clusters(call, mu)
        return attend_to_mask(call, group_mask(of_queries, of_keys, call, width)), (of_keys,)
    masks = _clusters_mask(call, *members_of(call, mu, width, same_tokens))  # (..., clusters, N, M)
    scores = call.q @ call.k.mT * call.factor
    weights = [masked_softmax(scores, ~mask, empty_rows=True) for mask in masks.unbind(-3)]
    clusters = masks.any(-1).sum(-2).clamp(min=1)[..., None]  # number in which a query sees a key
    return sum(weights[1:], weights[0]) / clusters @ call.v, ()


@uncompiled
@attention_function(beside=("clusters",))
def routing_attention(
    call: Call,
    *,
    centroids: Float[Tensor, "... clusters K"] | None = None,
    width: int = WIDTH,
    balanced: bool | None = None,
    same_tokens: bool = False,
) -> tuple[Float[Tensor, "*batch N V"], State]:
    """`routing_attention_reference` in time and memory linear in N for a fixed number of clusters, in float32 at
    least."""
    mu, x = _centroids(centroids, call.q), flat(call)
    parts: State = ()
    if _is_balanced(balanced, call.is_causal):
        members = (each.reshape(-1, *each.shape[-2:]) for each in members_of(call, mu, width, same_tokens))
        o = _within_clusters(x, *members)
    else:
        of_queries, of_keys = _clusters(call, mu)
        queries, keys = (each.reshape(-1, each.shape[-1]) for each in (of_queries, of_keys))
        o = attend_in_groups(queries, keys, x, mu.shape[-2], min(width, call.k.shape[-2]))
        parts = (of_keys,)
    return o.view(*call.q.shape[:-1], -1), parts


# --------------------------------------------------------------------------------------------------- balanced clusters

Members = tuple[Int[Tensor, "*batch clusters n"], Int[Tensor, "*batch clusters m"]]  # positions of queries and keys


def _is_balanced(balanced: bool | None, is_causal: bool) -> bool:
    """Whether clusters are balanced: by default in calls that are not causal."""
    return not is_causal if balanced is None else balanced


def members_of(call: Call, mu: Tensor, width: int, same_tokens: bool) -> Members:
    """The queries and keys that each centroid takes, `ABSENT` where there are fewer."""
    for name, part in (("initial_state", call.state), ("return_state", call.return_state)):
        checks.expect(not part, name, "none with balanced clusters, which look at the whole sequence", "one")
    N, M = call.q.shape[-2], call.k.shape[-2]
    checks.expect(not same_tokens or N == M, "same_tokens", f"False for {N} queries and {M} keys", same_tokens)
    found = []
    for x, there in ((call.q, call.key_mask if same_tokens else None), (call.k, call.key_mask)):
        scores = _products(x, mu).mT  # (..., clusters, N)
        if there is not None:
            scores = scores.masked_fill(~there[..., None, :], -torch.inf)
        found.append(best_positions(scores, width))
    return found[0], found[1]


def _clusters_mask(
    call: Call, queries: Int[Tensor, "*batch c n"], keys: Int[Tensor, "*batch c m"]
) -> Bool[Tensor, "*batch c N M"]:
    """The pairs of each cluster."""
    i, j = torch.arange(call.q.shape[-2], device=keys.device), torch.arange(call.k.shape[-2], device=keys.device)
    of_queries, of_keys = (queries[..., None] == i).any(-2), (keys[..., None] == j).any(-2)
    both = of_queries[..., None] & of_keys[..., None, :]
    return both & (j <= positions(call)[:, None]) if call.is_causal else both


def _within_clusters(call: Call, of_queries: Int[Tensor, "G c n"], of_keys: Int[Tensor, "G c m"]) -> Tensor:
    """Attention within each cluster; a query's output is the mean over those in which it sees a key."""
    N, M = call.q.shape[1], call.k.shape[1]
    o = attend_chosen(call, of_queries, of_keys)
    # A query sees a key of its cluster if it sees the first one.
    least = of_keys.masked_fill(of_keys < 0, M).amin(-1, keepdim=True)
    sees = (of_queries >= 0) & (least < M)
    if call.is_causal:
        sees = sees & (least <= of_queries + first_position(call))
    clusters = placed(sees[..., None].to(o), of_queries, N)
    return placed(o, of_queries, N) / clusters.clamp(min=1)


# ----------------------------------------------------------------------------------------------------------- centroids


def _centroids(centroids: Tensor | None, q: Tensor) -> Float[Tensor, "... clusters K"]:
    """The centroids, or the default ones, in float32 at least."""
    if centroids is None:
        return _default_centroids(q.shape[-1], torch.promote_types(q.dtype, torch.float32), q.device)
    shape, lead = tuple(centroids.shape), tuple(q.shape[:-2])
    fits = centroids.dim() >= 2 and shape[-1] == q.shape[-1] and 0 not in shape
    if not fits or shape[:-2] != lead[len(lead) - len(shape) + 2 :]:
        wanted = f"(clusters, {q.shape[-1]}), with leading axes like the last of {lead} or none"
        raise ValueError(f"centroids: expected shape {wanted}, got {shape}")
    return centroids.detach().to(q.device, torch.promote_types(q.dtype, torch.float32))


@drawn_once
def _default_centroids(K: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return draw_centroids(K, generator=torch.Generator().manual_seed(SEED)).to(device, dtype)


def draw_centroids(
    K: int, *, clusters: int = CLUSTERS, generator: torch.Generator | None = None
) -> Float[Tensor, "clusters K"]:
    """Normalised standard normal vectors, as the authors' code draws them."""
    return normalised(torch.randn((clusters, K), generator=generator, dtype=torch.float64))


def update_centroids(
    centroids: Float[Tensor, "... clusters K"],
    q: Float[Tensor, "*batch N K"],
    k: Float[Tensor, "*batch M K"],
    *,
    decay: float = DECAY,
) -> Float[Tensor, "... clusters K"]:
    r"""$\lambda \mu + (1 - \lambda)\, m$, where m is the mean of the normalised queries and keys nearest to a centroid.

    Centroids (clusters, K) are shared by all sequences; (H, clusters, K) are those of each head of (B, H, N, K). A
    centroid to which no token is nearest stays unchanged. (The paper adds (1 - lambda)/2 times the *sums* of queries
    and keys, so that centroids would grow with the batch; its code divides by their number, as this does.)
    """
    checks.expect(0 <= decay <= 1, "decay", "a number from 0 to 1", decay)
    centroids = _centroids(centroids, q)
    with torch.no_grad(), no_autocast(q):
        x = normalised(torch.cat([upcast(q), upcast(k)], -2))
        chosen = one_hot(products(x, centroids).argmax(-1), centroids.shape[-2]).to(x)
        sums, counts = chosen.mT @ x, chosen.sum(-2)[..., None]  # (*batch, clusters, K or 1)
        lead = centroids.shape[:-2]
        sums, counts = (each.reshape(-1, *lead, *each.shape[-2:]).sum(0) for each in (sums, counts))
        return torch.where(counts > 0, decay * centroids + (1 - decay) * sums / counts.clamp(min=1), centroids)


MECHANISM = Mechanism(
    name="routing",
    family="dynamic_sparse",
    source="Roy et al. 2020, arXiv:2003.05997",
    reference=routing_attention_reference,
    fast=routing_attention,
    same_tokens=True,
)
