"""Balanced clusters: each centroid takes the tokens that are nearest to it, however many others take them too."""

import torch

from ortho import _checks
from ortho._autocast import no_autocast
from ortho._typing import Bool, Int, Tensor
from ortho.attention.operands import masked_softmax, working
from ortho.attention.selected.routing_centroids import products
from ortho.attention.selected.selection import Call, best_places, joined
from ortho.attention.sparse.tiled_attention import tiled_attention
from ortho.attention.sparse.tiling import ABSENT, Tiling, TokenBlocks

Members = tuple[Int[Tensor, "G clusters n"], Int[Tensor, "G clusters m"]]  # positions of queries and of keys


def members_of(q: Tensor, keys: Tensor, mu: Tensor, call: Call, width: int, same_tokens: bool) -> Members:
    """The queries and keys that each centroid takes, `ABSENT` where there are fewer."""
    _checks.positive_int("width", width)
    visible = call.visible
    found = []
    for x, there in ((q, visible if same_tokens else None), (keys, visible)):
        scores = products(x, mu).mT.reshape(len(call.q), mu.shape[-2], -1)  # (G, clusters, N)
        if there is not None:
            scores = scores.masked_fill(~there[:, None], -torch.inf)
        found.append(best_places(scores, width))
    return found[0], found[1]


def clusters_mask(call: Call, queries: Int[Tensor, "G c n"], keys: Int[Tensor, "G c m"]) -> Bool[Tensor, "G c N M"]:
    """The pairs of each cluster."""
    N, M = call.q.shape[1], call.k.shape[1]
    i, j = torch.arange(N, device=keys.device), torch.arange(M, device=keys.device)
    of_queries, of_keys = (queries[..., None] == i).any(-2), (keys[..., None] == j).any(-2)
    both = of_queries[..., None] & of_keys[..., None, :]
    return both & (j <= call.places[:, None]) if call.is_causal else both


def balanced_reference(q: Tensor, keys: Tensor, values: Tensor, call: Call, members: Members) -> Tensor:
    """The weights of each cluster, materialised, and their mean over the clusters in which a query sees a key."""
    with no_autocast(q):
        scores = working(q) @ working(keys).mT * call.scale
        masks = clusters_mask(call, *members).reshape(*q.shape[:-2], -1, q.shape[-2], keys.shape[-2])
        weights = [masked_softmax(scores, ~mask, empty_rows=True) for mask in masks.unbind(-3)]
        clusters = masks.any(-1).sum(-2).clamp(min=1)[..., None]
        return (sum(weights[1:], weights[0]) / clusters @ working(values)).to(q.dtype)


def balanced_fast(q: Tensor, keys: Tensor, values: Tensor, call: Call, members: Members) -> Tensor:
    """Each cluster's queries and keys are copied next to each other, and the outputs added up where they belong."""
    (G, N), M, (of_queries, of_keys) = call.q.shape[:2], call.k.shape[1], members
    rows, columns = (joined(of, n).flatten().clamp(min=0) for of, n in ((of_queries, N), (of_keys, M)))
    at = of_queries + call.first if call.is_causal else of_queries.new_full((), M)
    i, j = at.flatten(), of_keys.flatten()  # positions

    def allowed(a: Tensor, b: Tensor) -> Tensor:
        return j[b.clamp(min=0)] <= i[a.clamp(min=0)]

    queries, others = (_copies(of) for of in members)
    part = Tiling(queries, others, _numbers(queries.positions[:, :1]), allowed if call.is_causal else None)
    # The first key of a cluster says whether a query sees any.
    least = of_keys.masked_fill(of_keys < 0, M).amin(-1, keepdim=True)
    sees = (of_queries >= 0) & (least < M) & (least <= at)
    with no_autocast(q):
        operands = (q, rows), (keys, columns), (values, columns)
        own, theirs, their_values = (_of_all(x).index_select(0, index)[None] for x, index in operands)
        o = tiled_attention(own, theirs, their_values, [part], scale=call.scale)[0]
        share = sees.flatten().to(o)
        clusters = share.new_zeros(G * N).index_add_(0, rows, share).clamp_(min=1)
        share /= clusters.index_select(0, rows)
        o = o.new_zeros(G * N, o.shape[-1]).index_add(0, rows, o * share[:, None])
        return o.reshape(*q.shape[:-1], -1).to(q.dtype)


def _of_all(x: Tensor) -> Tensor:
    """The rows of all sequences."""
    return working(x).reshape(-1, x.shape[-1])


def _copies(members: Int[Tensor, "G clusters w"]) -> TokenBlocks:
    """The copied tokens, a cluster a block."""
    return TokenBlocks(_numbers(members).masked_fill(members < 0, ABSENT).flatten(0, 1))


def _numbers(x: Tensor) -> Tensor:
    """0, 1, 2, ... in the shape of x."""
    return torch.arange(x.numel(), device=x.device).view(x.shape)
