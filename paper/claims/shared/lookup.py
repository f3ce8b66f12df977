r"""A task that distinguishes the methods by what their weights can see: looking up an entry of a dictionary.

A sequence holds p entries, each a key and a value, in random order. The token with key $a$ has to return the value that
stands beside key $a + 1$ (modulo p); only the content says where that is. Everything is float64.
"""

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ortho.attention import MECHANISMS
from ortho.layers.multihead import MultiheadAttention
from paper.claims.shared.common import seeded

ENTRIES, VALUES, D_MODEL, HEADS = 16, 8, 64, 8
SOLVED = 1e-6  # an error that counts as none
GAP = 12.0  # between the score of the wanted key and the others': 4 (p - 1)^2 exp(-2 GAP) is below SOLVED
DRAWS = 20  # of frozen matrices
TOKENS = 9_600  # to fit: with some 200 unknowns per number, some 2 % fits by chance


class Embedding(NamedTuple):
    """The vectors that stand for keys and for values; a token is the sum of one of each."""

    keys: Tensor  # (p, d)
    values: Tensor  # (c, d), multiplies a value's c numbers


class Sequences(NamedTuple):
    x: Tensor  # (n, p, d)
    target: Tensor  # (n, p, c), numbers 1 and -1


def apart(entries: int = ENTRIES) -> Embedding:
    """Keys and values along axes of their own, half of a token's square norm d for each, as after a LayerNorm."""
    axes = (D_MODEL / 2) ** 0.5 * torch.eye(D_MODEL, dtype=torch.float64)
    return Embedding(axes[:entries], axes[entries : entries + VALUES] / VALUES**0.5)


def sequences(embedding: Embedding, count: int = 200) -> Sequences:
    """`count` random dictionaries in this embedding, with values of independent random signs."""
    g = seeded(1)
    p, c = len(embedding.keys), len(embedding.values)
    order = torch.stack([torch.randperm(p, generator=g) for _ in range(count)])
    value = 2.0 * torch.randint(2, (count, p, c), generator=g, dtype=torch.float64) - 1  # of each key
    item = torch.arange(count)[:, None]
    x = embedding.keys[order] + value[item, order] @ embedding.values
    return Sequences(x, value[item, (order + 1) % p])


def error(y: Tensor, target: Tensor) -> float:
    """Mean square error of y's first c numbers, as a share of the target's mean square."""
    return float((y.detach()[..., : target.shape[-1]] - target).square().sum() / target.square().sum())


def codes(entries: int, width: int) -> Tensor:
    """(entries, width) unit vectors whose products are 1 with themselves and at most 0 with each other."""
    if entries > 2 * width:
        raise ValueError(f"entries: expected at most 2 width = {2 * width}, got {entries}")
    axes = torch.eye(width, dtype=torch.float64)
    return torch.cat([axes, -axes])[:entries]


def attention_layer(
    projection: str, *, heads: int = HEADS, draw: int = 0, attention: str = "softmax"
) -> MultiheadAttention:
    made: Any = {"generator": seeded(10_000 + draw), "dtype": torch.float64}
    return MultiheadAttention(D_MODEL, heads, projection=projection, attention=attention, form="reference", **made)


@torch.no_grad()
def pass_values(layer: MultiheadAttention, embedding: Embedding) -> MultiheadAttention:
    """Let the first head carry a token's value to the first numbers of the output, the other heads nothing."""
    layer.weight_v.zero_()
    layer.weight_o.zero_()
    layer.weight_v[:VALUES] = torch.linalg.pinv(embedding.values).T
    layer.weight_o[:VALUES, :VALUES] = torch.eye(VALUES, dtype=torch.float64)
    return layer


@torch.no_grad()
def standard_solution(embedding: Embedding) -> MultiheadAttention:
    """A standard layer that solves the task: key a asks for the code of a + 1 and answers to that of a."""
    layer = attention_layer("learned")
    p, K = len(embedding.keys), D_MODEL // HEADS
    code = (GAP * K**0.5) ** 0.5 * codes(p, K)
    to_key = torch.linalg.pinv(embedding.keys)  # (d, p): which key a token has
    for weight, wanted in ((layer.projection.weight_q, code.roll(-1, 0)), (layer.projection.weight_k, code)):
        weight.zero_()
        weight[:K] = (to_key @ wanted).T
    return pass_values(layer, embedding)


@torch.no_grad()
def linear_solution(embedding: Embedding) -> MultiheadAttention:
    """A layer of linear attention that solves the task as well, though one of its heads cannot.

    Each head looks up one key fewer than it has features. All tokens share the remaining feature: queries that look for
    none of the head's keys get the mean of all values from it. One more head subtracts these means again.
    """
    layer = attention_layer("learned", attention="linear")
    p, K = len(embedding.keys), D_MODEL // HEADS
    groups = torch.arange(p).split(K - 1)
    if len(groups) >= HEADS:
        raise ValueError(f"embedding: expected at most {(HEADS - 1) * (K - 1)} keys, got {p}")
    to_key = torch.linalg.pinv(embedding.keys)  # (d, p): which key a token has
    for weight in (layer.projection.weight_q, layer.projection.weight_k, layer.weight_v, layer.weight_o):
        weight.zero_()
    for head, wanted in enumerate((*groups, torch.arange(0))):
        query, key = -GAP * torch.ones(2, p, K, dtype=torch.float64)  # features of exp(-GAP)
        query[:, -1] = key[:, -1] = GAP
        asking, feature = (wanted - 1) % p, torch.arange(len(wanted))
        query[asking, -1] = -GAP
        query[asking, feature] = key[wanted, feature] = GAP
        rows = slice(K * head, K * (head + 1))
        layer.projection.weight_q[rows], layer.projection.weight_k[rows] = (to_key @ query).T, (to_key @ key).T
        layer.weight_v[rows][:VALUES] = torch.linalg.pinv(embedding.values).T
        share = 1 if len(wanted) else 1 - len(groups)
        layer.weight_o[:VALUES, rows][:, :VALUES] = share * torch.eye(VALUES, dtype=torch.float64)
    return layer


@torch.no_grad()
def frozen_solution(draw: int = 0, *, norm: float | None = None) -> tuple[Embedding, Tensor]:
    """An embedding with which a frozen layer solves the task, and the layer's outputs on `sequences` in it.

    W_Q and W_K stay as drawn. The keys' embedding is chosen so that the first head's queries and keys are those of
    `standard_solution`; the values' embedding, so that this head does not see them. `norm` sets the length of every key
    to norm times sqrt(d), to see what that does to the scores; by default keys are as long as needed.
    """
    layer = attention_layer("frozen", draw=draw)
    K = D_MODEL // HEADS
    seen = torch.cat([layer.projection.weight_q[:K], layer.projection.weight_k[:K]])  # (2K, d), of full rank
    code = (GAP * K**0.5) ** 0.5 * codes(ENTRIES, K)
    keys = torch.cat([code.roll(-1, 0), code], 1) @ torch.linalg.pinv(seen).T
    if norm is not None:
        keys *= norm * D_MODEL**0.5 / keys.norm(dim=1, keepdim=True)
    unseen = torch.linalg.svd(seen).Vh[2 * K : 2 * K + VALUES]
    embedding = Embedding(keys, unseen)
    return embedding, pass_values(layer, embedding)(sequences(embedding).x)


@torch.no_grad()
def least_error(layer: MultiheadAttention, data: Sequences) -> float:
    """The smallest error on these sequences that any W_V and W_O can give the layer, with its W_Q and W_K as they are.

    The output is the sum over heads of A_h X M_h with M_h = W_V^h W_O^h. Allowing any matrices M_h makes this linear
    least squares; where a head is at least as wide as the values, the optimum is a product of that form.
    """
    x, target = data
    seen = x[..., x.flatten(0, 1).any(0)]  # (n, p, r), without the axes that no token uses
    q, k = layer.projection(x)
    mixed = MECHANISMS["softmax"].reference(q, k, seen[:, None].expand(-1, q.shape[1], -1, -1))  # (n, H, p, rank)
    features = mixed.transpose(1, 2).flatten(2).flatten(0, 1)
    wanted = target.flatten(0, 1)
    inverse = torch.linalg.pinv(features.T @ features, rtol=1e-12, hermitian=True)
    return error(features @ (inverse @ (features.T @ wanted)), wanted)


@cache
def _data(entries: int, scale: float) -> Sequences:
    x, target = sequences(apart(entries), TOKENS // entries)
    return Sequences(scale * x, target)


@cache
def _frozen_error(entries: int, heads: int, draw: int, scale: float) -> float:
    return least_error(attention_layer("frozen", heads=heads, draw=draw), _data(entries, scale))


def frozen_errors(entries: int = ENTRIES, *, heads: int = HEADS, draws: int = DRAWS, scale: float = 1.0) -> list[float]:
    """`least_error` for each of `draws` draws of a frozen layer, for tokens `scale` times as long, in rising order."""
    return sorted(_frozen_error(entries, heads, draw, scale) for draw in range(draws))


def fixed_weights_error(entries: int) -> float:
    """The smallest mean error of weights that do not depend on the input: (p - 2) / (p - 1)."""
    return (entries - 2) / (entries - 1)


def low_rank_error(entries: int, width: int) -> float:
    r"""The smallest $|A - \Pi|^2 / p$ for a permutation $\Pi$ of p entries and any A of rank at most `width`.

    Eckart and Young: the sum of the squares of all singular values beyond the `width` largest; they are all 1.
    """
    values = torch.linalg.svdvals(torch.eye(entries, dtype=torch.float64).roll(1, 0))
    return float(values[width:].square().sum() / entries)
