"""Mechanisms that select their pairs, with sizes so small that short sequences leave most pairs out."""

from dataclasses import replace
from functools import cache, partial

import torch
from seeded import draw

from ortho.attention.dynamic_sparse import importance, routing, sparse_linear, top_k
from ortho.attention.dynamic_sparse.routing import draw_centroids
from ortho.attention.linear.feature_maps import Taylor

ENTRIES = [m.MECHANISM for m in (top_k, importance, routing, sparse_linear)]
# Sums of at most 1e3 rounded products, the largest about 10 (error 2e-13); one pair too many would show at 1e-2.
TOLERANCE = {"atol": 1e-11, "rtol": 1e-11}
FORMS = ["reference", "fast"]


def qkv(*lead, length, width=4, values=5, seed=0, keys=None):
    M = length if keys is None else keys
    return [draw(*lead, n, w, seed=3 * seed + i) for i, (n, w) in enumerate(((length, width), (M, width), (M, values)))]


def with_sizes(name, entry, cost=None, **sizes):
    """The entry with these sizes; its closed form gets them by the same names, or gets `cost` instead."""
    forms = {form: partial(entry.form(form), **sizes) for form in FORMS}
    return replace(entry, name=name, cost=partial(entry.cost, **(sizes if cost is None else cost)), **forms)


@cache
def centroids(width):
    return draw_centroids(width, clusters=4, generator=torch.Generator().manual_seed(1))


def few_clusters(function, *args, **kwargs):
    """The function called with centroids for keys of any width."""
    return function(*args, centroids=centroids(args[0].shape[-1]), **kwargs)


def wrapped(wrapper, entry):
    return replace(entry, **{form: partial(wrapper, entry.form(form)) for form in FORMS})


def _small():
    routing_cost = {"clusters": 4, "width": 3}
    yield with_sizes("top-k, 3", top_k.MECHANISM, num_keys=3)
    yield with_sizes("top-k, 1", top_k.MECHANISM, num_keys=1)
    yield with_sizes("importance, 3", importance.MECHANISM, num_keys=3)
    nearest = with_sizes(
        "routing, nearest", routing.MECHANISM, cost=routing_cost | {"balanced": False}, width=3, balanced=False
    )
    yield replace(wrapped(few_clusters, nearest), positional=True)
    balanced = with_sizes(
        "routing, balanced", routing.MECHANISM, cost=routing_cost | {"balanced": True}, width=3, balanced=True
    )
    yield replace(wrapped(few_clusters, balanced), causal=False)
    yield with_sizes("sparse-linear, 3", sparse_linear.MECHANISM, window=3)
    yield with_sizes("sparse-linear, all", sparse_linear.MECHANISM, window=10**4)
    yield with_sizes("sparse-linear, taylor", sparse_linear.MECHANISM, window=5, feature_map=Taylor(2))


SMALL = {m.name: m for m in _small()}
ALL = {m.name: m for m in ENTRIES} | SMALL
