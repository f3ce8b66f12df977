r"""Sparse attention that chooses positions by content; and sparse beside linear attention.

S1, section 2.3: by clusters or by importance. "Importance sampling" is read literally: drawing keys by their
importance. (In statistics the term also stands for a division by the probability of what was drawn; the source says
nothing of that.)

S4, on what is open: do chosen keys hold more of the softmax's weight than equally many keys of a window? Is softmax
attention within a window plus linear attention beyond it nearer to full softmax attention than the window alone? Both
are tested on five kinds of input, `DRAWS` causal sequences each.
"""

from collections.abc import Callable
from functools import cache
from math import inf, sqrt
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ortho.attention import MECHANISMS
from ortho.attention.dynamic_sparse.importance import importance_mask, key_norms, sampled_importance
from ortho.attention.dynamic_sparse.routing import draw_centroids, nearest, routing_mask, update_centroids
from ortho.attention.dynamic_sparse.sparse_linear import sparse_linear_weights
from ortho.attention.dynamic_sparse.top_k import top_k_mask
from ortho.attention.linear.feature_maps import EluPlusOne, FeatureMap, Taylor
from ortho.attention.sparse.window import Window
from ortho.cost.mechanisms.sparse import sparse_linear_cost
from ortho.theory.estimates import SIGMAS
from paper.claims.figures import Interval
from paper.claims.ledger import evidence
from paper.claims.rules import all_of, counted, holds, improves, region
from paper.claims.shared.common import mean_interval, saves, seeded
from paper.claims.verdicts import Finding, Parts

CHAPTER = "16-dynamic-sparsity"

# -------------------------------------------------------------------------------------------------------- choices of S1

FEW, NARROW, KEPT = 64, 8, 8  # N; K; keys that a query keeps at most, in clusters and by importance
KEY_LENGTHS, SAMPLES = (1.0, 2.0, 3.0, 4.0), 4000
Choice = Callable[[Tensor, Tensor], Tensor]


def four_centroids() -> Tensor:
    return draw_centroids(NARROW, clusters=4, generator=seeded(0))


def by_clusters(q: Tensor, k: Tensor) -> Tensor:
    """Up to `KEPT` keys nearest to the same centroid (N, N)."""
    return routing_mask(q, k, centroids=four_centroids(), width=KEPT // 2, is_causal=True)


def by_sample(q: Tensor, k: Tensor) -> Tensor:
    """`KEPT` keys drawn by their lengths, with the same random numbers for any keys (N, N)."""
    drawn = sampled_importance(k, generator=seeded(1))
    return importance_mask(q, k, num_keys=KEPT, importance=drawn, is_causal=True)


BY_CONTENT: dict[str, Choice] = {"clusters": by_clusters, "sample by importance": by_sample}


def operands(seed: int) -> tuple[Tensor, Tensor]:
    q, k = torch.randn(2, FEW, NARROW, generator=seeded(seed), dtype=torch.float64)
    return q, k


def differing(choose: Choice) -> int:
    """In how many pairs the choices for two inputs differ."""
    return int((choose(*operands(2)) != choose(*operands(3))).sum())


def off_by() -> float:
    """How often keys of four lengths are drawn first, against their shares of the total length: the largest difference,
    in standard errors."""
    lengths = torch.tensor(KEY_LENGTHS, dtype=torch.float64)
    k = lengths[:, None].expand(SAMPLES, -1, 1)
    assert torch.equal(key_norms(k[0]), lengths.square())
    first = sampled_importance(k, generator=seeded(4)).argmax(-1)
    shares, expected = torch.bincount(first, minlength=len(KEY_LENGTHS)) / SAMPLES, lengths / lengths.sum()
    return float(((shares - expected).abs() / (expected * (1 - expected) / SAMPLES).sqrt()).max())


@evidence("S1.2.3b", chapter=CHAPTER)
def chosen_by_content() -> Finding:
    q, k = operands(2)
    mates = nearest(q, four_centroids())[:, None] == nearest(k, four_centroids())
    parts = {
        "kept pairs that differ between two inputs": region(
            (1, inf), {name: differing(choose) for name, choose in BY_CONTENT.items()}
        ),
        "of clusters, kept pairs across them": counted({"": 0}, {"": int((by_clusters(q, k) & ~mates).sum())}),
        "of a sample": holds("a key is drawn in proportion to its importance, in standard errors", off_by(), SIGMAS),
    }
    return all_of(parts).noting(
        f"({SAMPLES:,} draws.) Clusters depend on query and key, importance on the key alone; and the $O(n k d)$ "
        "beside it is without the choice"
    )


# -------------------------------------- inputs in which the softmax's weight lies in different places, each differently

DRAWS, TOKENS, WIDTH = 16, 256, 16  # sequences, N, K = V
TOPICS, STRETCH = 8, 8  # of `topics`: how many, and tokens that one lasts


class Operands(NamedTuple):
    """(DRAWS, N, K) each."""

    q: Tensor
    k: Tensor
    v: Tensor


def _normal(generator: torch.Generator) -> Tensor:
    return torch.randn(DRAWS, TOKENS, WIDTH, generator=generator, dtype=torch.float64)


def flat(generator: torch.Generator) -> Operands:
    """Everything independent; scores have a standard deviation of 1/2."""
    return Operands(_normal(generator) / 2, _normal(generator), _normal(generator))


def peaked(generator: torch.Generator) -> Operands:
    """The same, with scores of standard deviation 3."""
    return Operands(3 * _normal(generator), _normal(generator), _normal(generator))


def drifting(generator: torch.Generator) -> Operands:
    """Tokens near in position are alike: queries and keys follow a path with a correlation of 0.95 a step."""
    steps = _normal(generator)
    path = [steps[:, 0]]
    for step in steps[:, 1:].unbind(1):
        path.append(0.95 * path[-1] + sqrt(1 - 0.95**2) * step)
    x = torch.stack(path, 1)
    k = x + _normal(generator) / 2
    return Operands(x + _normal(generator) / 2, k, k)


def topics(generator: torch.Generator) -> Operands:
    """Stretches of tokens about one of a few topics, the same in all sequences, each of which comes again."""
    centres = torch.randn(TOPICS, WIDTH, generator=seeded(0), dtype=torch.float64)
    which = torch.randint(TOPICS, (DRAWS, TOKENS // STRETCH), generator=generator)
    x = centres[which.repeat_interleave(STRETCH, 1)]
    k = x + _normal(generator) / 2
    return Operands(x + _normal(generator) / 2, k, k)


def far_key(generator: torch.Generator) -> Operands:
    """Each query is twice one key, anywhere up to its own."""
    k = _normal(generator)
    shares = torch.rand(DRAWS, TOKENS, generator=generator, dtype=torch.float64)
    of = (shares * torch.arange(1, TOKENS + 1)).long()
    return Operands(2 * k.take_along_dim(of[..., None], 1), k, k)


INPUTS: dict[str, Callable[[torch.Generator], Operands]] = {
    "flat": flat,
    "peaked": peaked,
    "drifting": drifting,
    "topics": topics,
    "one far key": far_key,
}


@cache
def drawn(kind: str, seed: int = 1) -> Operands:
    return INPUTS[kind](seeded(seed))


@cache
def weights(kind: str) -> Tensor:
    """The weights of causal softmax attention (DRAWS, N, N)."""
    q, k, _ = drawn(kind)
    scores = q @ k.mT / sqrt(WIDTH)
    return scores.masked_fill(torch.ones(TOKENS, TOKENS).triu(1).bool(), -inf).softmax(-1)


# ---------------------------------------------------------------------------------------------- a region that is chosen

WINDOW = 32  # keys of a query


@cache
def centroids(kind: str) -> Tensor:
    """Centroids moved towards the queries and keys of other sequences of the kind."""
    mu, (q, k, _) = draw_centroids(WIDTH, clusters=TOPICS, generator=seeded(2)), drawn(kind, seed=3)
    for _ in range(20):
        mu = update_centroids(mu, q, k, decay=0.5)
    return mu


def choosing(mask: Callable[..., Tensor], **sizes: Any) -> Callable[[str], Tensor]:
    """A choice of keys for the queries of each kind of input."""
    return lambda kind: mask(*drawn(kind)[:2], **sizes)


by_top_k = choosing(top_k_mask, num_keys=WINDOW, is_causal=True)


def by_cluster(kind: str) -> Tensor:
    return routing_mask(*drawn(kind)[:2], centroids=centroids(kind), width=20, is_causal=True)


# Sizes are such that none keeps more pairs than the window.
CHOICES: dict[str, Callable[[str], Tensor]] = {
    "top-k": by_top_k,
    "importance": choosing(importance_mask, num_keys=WINDOW, is_causal=True),
    "clusters": by_cluster,
}
SIZES = {
    "top-k": ("count",),
    "importance": ("count",),
    "clusters": ("clusters", "width"),
}


def by_window(_: str) -> Tensor:
    return Window(WINDOW).mask(TOKENS, is_causal=True)


@cache
def held(choice: Callable[[str], Tensor], kind: str) -> Tensor:
    """The share of the softmax's weight on kept keys (DRAWS,): the mean over queries with more keys than a window."""
    return (weights(kind) * choice(kind))[:, WINDOW:].sum(-1).mean(-1)


def percent_interval(samples: Tensor) -> Interval:
    return mean_interval(100 * samples)


def gains(choice: Callable[[str], Tensor]) -> dict[str, Interval]:
    """How much more weight the chosen keys have than those of the window, in per cent of all weight, by input."""
    return {kind: percent_interval(held(choice, kind) - held(by_window, kind)) for kind in INPUTS}


def depends_on_input(choice: Callable[[str], Tensor]) -> int:
    """In how many pairs the choices for two sequences of one kind differ."""
    first, second = choice("peaked")[:2]
    return int((first != second).sum())


def fixed(choice: Callable[[str], Tensor]) -> tuple[int, int]:
    """How many pairs a choice and a window keep in all sequences of a kind, for queries with more keys than a
    window."""
    always = [mask("peaked").expand(DRAWS, -1, -1)[:, WINDOW:].all(0) for mask in (choice, by_window)]
    ours, window = (int(pairs.sum()) for pairs in always)
    return ours, window


@evidence("S4.4a", chapter=CHAPTER)
def chosen_region() -> Finding:
    parts = {
        "kept pairs that differ between two inputs": region(
            (1, inf), {name: depends_on_input(choice) for name, choice in CHOICES.items()}
        ),
        **{
            name: improves(f"more weight than the last {WINDOW} keys", gains(choice), unit=" points")
            for name, choice in CHOICES.items()
        },
        "fewer pairs set by hand": saves("than by a window", {name: fixed(choice) for name, choice in CHOICES.items()}),
    }
    sizes = ", ".join(f"{name} {len(SIZES[name])}" for name in CHOICES)
    return all_of(parts).noting(
        f"No choice keeps more pairs than the window. Of sizes to be set by hand none has fewer than the window's one: "
        f"{sizes}"
    )


# -------------------------------------------------------------------------------------------- sparse and linear at once

MAPS: dict[str, FeatureMap] = {"elu + 1": EluPlusOne(), "Taylor": Taylor(2)}


@cache
def windowed(kind: str, width: int) -> Tensor:
    """The output of softmax attention to the last `width` keys."""
    q, k, v = drawn(kind)
    scores = q @ k.mT / sqrt(WIDTH)
    return scores.masked_fill(~Window(width).mask(TOKENS, is_causal=True), -inf).softmax(-1) @ v


@cache
def both(kind: str, feature_map: FeatureMap) -> Tensor:
    """The output with linear attention to the keys beyond the window: Taylor features as they are, others by the mean
    of their products."""
    q, k, v = drawn(kind)
    b = q.new_zeros(q.shape[:-1]) if isinstance(feature_map, Taylor) else None
    return sparse_linear_weights(q, k, window=WINDOW, log_linear_weight=b, feature_map=feature_map, is_causal=True) @ v


@cache
def beside(choice: Callable[[str], Tensor], kind: str, feature_map: FeatureMap | None = None) -> Tensor:
    """The same with chosen keys in place of the window's; without a map, the output over the chosen alone, or zeros."""
    q, k, v = drawn(kind)
    chosen = choice(kind)
    w = (q @ k.mT / sqrt(WIDTH)).exp() * chosen
    if feature_map is not None:
        f = feature_map(q, k)
        far = 1 if isinstance(feature_map, Taylor) else 1 / WIDTH
        w = w + far * (f.q @ f.k.mT).tril() * ~chosen
    return w / w.sum(-1, keepdim=True).clamp(min=torch.finfo(w.dtype).tiny) @ v


def error(o: Tensor, kind: str) -> Tensor:
    """How far an output is from softmax attention's over all keys, relatively (DRAWS,)."""
    exact = weights(kind) @ drawn(kind).v
    return (o - exact).flatten(1).norm(dim=1) / exact.flatten(1).norm(dim=1)


def less(kind: str, ours: Tensor, other: Tensor) -> Interval:
    """By how many per cent the error of one output is below that of the other."""
    return percent_interval(1 - error(ours, kind) / error(other, kind))


def less_than_window(feature_map: FeatureMap, width: int) -> dict[str, Interval]:
    """How much less both parts err than a window of this width alone, in per cent, by input."""
    return {kind: less(kind, both(kind, feature_map), windowed(kind, width)) for kind in INPUTS}


def flops(n: int, feature_map: FeatureMap) -> int:
    """FLOPs of a forward pass of n tokens in one head, with the mechanism's own sizes."""
    return sparse_linear_cost(1, n, 1, 64, 64, feature_map=feature_map, causal=True).forward


LENGTHS = (1024, 4096, 16384)


def beside_dense() -> dict[str, tuple[int, int]]:
    """FLOPs of both parts, and of dense attention."""
    dense = {n: MECHANISMS["softmax"].cost(1, n, 1, 64, 64, causal=True).forward for n in LENGTHS}
    return {
        f"{name} at $N = {n:,}$": (flops(n, feature_map), dense[n])
        for name, feature_map in MAPS.items()
        for n in LENGTHS
    }


@evidence("S4.4c", chapter=CHAPTER)
def sparse_and_linear() -> Parts:
    wider = WINDOW + WIDTH  # a feature costs as many FLOPs as a key, and elu + 1 has K of them
    n = LENGTHS[0]
    bends = {name: flops(3 * n, f) - 2 * flops(2 * n, f) + flops(n, f) for name, f in MAPS.items()}
    return {
        "FLOPs beyond linear in $N$": counted(dict.fromkeys(MAPS, 0), bends),
        "fewer FLOPs": saves("than dense attention", beside_dense()),
        **{
            f"error with {name}": improves(
                "less than of the window alone", less_than_window(feature_map, WINDOW), unit=" %"
            )
            for name, feature_map in MAPS.items()
        },
        f"with elu + 1, for the same FLOPs as a window of {wider}": improves(
            "less", less_than_window(MAPS["elu + 1"], wider), unit=" %"
        ),
        **{
            f"with {name} beside the choice of top-k": improves(
                "less than of the choice alone",
                {kind: less(kind, beside(by_top_k, kind, feature_map), beside(by_top_k, kind)) for kind in INPUTS},
                unit=" %",
            )
            for name, feature_map in MAPS.items()
        },
    }
