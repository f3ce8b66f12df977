r"""Softmax attention to what is near and linear attention to what is far, in one normalisation.

$$o_i = \frac{\sum_{|i-j|<w} e^{s_{ij}}\, v_j + e^{b_i} \sum_{|i-j| \ge w} \phi(q_i)^T \phi(k_j)\, v_j}
{\sum_{|i-j|<w} e^{s_{ij}} + e^{b_i} \sum_{|i-j| \ge w} \phi(q_i)^T \phi(k_j)}, \qquad s_{ij} = q_i^T k_j / \sqrt{K}$$

Every pair has a positive weight, of which a far one below the range of the dtype counts as 0, and a row's weights sum
to 1. (A sum of two attentions, each with its own normalisation, gives both sides fixed shares instead.) What a far key
weighs beside a near one is set by $b_i$ alone: a number a query, made by a gate, or the same for all. As b falls, only
the window is left. With `Taylor` features, which expand the exponential, b = 0 approximates softmax attention; others
have scales of their own, and by default $b = -\log m$, which takes the mean of the m features' products, as large as
the weight of an average score.

Local exact attention beside a kernel for the rest is that of Scatterbrain (Chen et al. 2021, arXiv:2110.15343), where
the kernel estimates the softmax, and of Based (Arora et al. 2024, arXiv:2402.18668), in layers of their own.
"""

from math import log
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from ortho import _checks
from ortho._autocast import no_autocast
from ortho._checks import checked
from ortho._typing import Bool, Float, State, Tensor
from ortho.attention.chunking import CHUNK
from ortho.attention.indexing import indexing
from ortho.attention.linear.feature_maps import EluPlusOne, FeatureMap
from ortho.attention.linear.linear_attention import divisors
from ortho.attention.mechanism import Mechanism
from ortho.attention.operands import carried, with_past
from ortho.attention.recurrent.memory import gate
from ortho.attention.selected.selection import Call, begin, choice_call, flat
from ortho.attention.selected.sparse_linear_band import WINDOW, Band
from ortho.attention.selected.sparse_linear_cost import sparse_linear_cost
from ortho.attention.selected.sparse_linear_gates import FarWeight
from ortho.attention.transforms import uncompiled

FEATURES = EluPlusOne()


@indexing()
def sparse_linear_weights(
    q: Float[Tensor, "*batch N K"],
    k: Float[Tensor, "*batch M K"],
    *,
    window: int = WINDOW,
    log_far: Float[Tensor, "*batch N"] | None = None,
    feature_map: FeatureMap = FEATURES,
    is_causal: bool = False,
    attn_mask: Bool[Tensor, "..."] | None = None,
    scale: float | None = None,
) -> Float[Tensor, "*batch N M"]:
    """The weights of all pairs; rows sum to 1, or to 0 where nothing is visible. The last query of a causal call stands
    at the last key."""
    with_past(q, k, k, False, attn_mask, None)
    call = choice_call(q, k, is_causal=is_causal, attn_mask=attn_mask, scale=scale)
    given = _log_far(log_far, q, feature_map)
    with no_autocast(q):
        weights = _weights(flat(q), flat(k), call, given, window, feature_map, scale)
        return weights.reshape(*q.shape[:-1], k.shape[-2])


@checked(shapes=False)
@uncompiled
@indexing()
def sparse_linear_attention_reference(
    q: Float[Tensor, "*batch N K"],
    k: Float[Tensor, "*batch M K"],
    v: Float[Tensor, "*batch M V"],
    *,
    window: int = WINDOW,
    log_far: Float[Tensor, "*batch N"] | None = None,
    feature_map: FeatureMap = FEATURES,
    is_causal: bool = False,
    attn_mask: Bool[Tensor, "..."] | None = None,
    scale: float | None = None,
    initial_state: State | None = None,
    return_state: bool = False,
) -> Float[Tensor, "*batch N V"] | tuple[Float[Tensor, "*batch N V"], State]:
    r"""The N x M weights, materialised, times v; `sparse_linear_weights` has them.

    Near are the `window` - 1 keys on either side and the query's own, in a causal call only those before it. `log_far`
    is b. The `feature_map` must map one token at a time to features that are not negative, and neither scale keys nor
    know positions: `EluPlusOne`, `Relu`, `Taylor`. The state is (keys, values).

    Raises ValueError for another map, for a mask that is not the same for all queries, and for a negative scale, which
    features cannot be given.
    """
    keys, values, call = begin(q, k, v, is_causal, attn_mask, scale, initial_state)
    given = _log_far(log_far, q, feature_map)
    with no_autocast(q):
        weights = _weights(flat(q), flat(keys), call, given, window, feature_map, scale)
        o = (weights @ flat(values)).reshape(*q.shape[:-1], -1).to(q.dtype)
    return (o, (keys, values)) if return_state else o


@checked(shapes=False)
@uncompiled
@indexing()
def sparse_linear_attention(
    q: Float[Tensor, "*batch N K"],
    k: Float[Tensor, "*batch M K"],
    v: Float[Tensor, "*batch M V"],
    *,
    window: int = WINDOW,
    log_far: Float[Tensor, "*batch N"] | None = None,
    feature_map: FeatureMap = FEATURES,
    is_causal: bool = False,
    attn_mask: Bool[Tensor, "..."] | None = None,
    scale: float | None = None,
    initial_state: State | None = None,
    return_state: bool = False,
    chunk: int = CHUNK,
) -> Float[Tensor, "*batch N V"] | tuple[Float[Tensor, "*batch N V"], State]:
    """`sparse_linear_attention_reference` in time and memory linear in N, in float32 at least.

    Chunks of queries read the chunks of keys that may be near by their weights, and the others by their sums. The state
    is (the last `window` - 1 keys, their values, S (..., m, V) and z (..., m) of those before); a mask beside a state,
    given or wanted, raises ValueError.
    """
    _checks.positive_int("window", window), _checks.positive_int("chunk", chunk)
    stated = initial_state is not None or return_state
    if stated and attn_mask is not None:
        raise ValueError("attn_mask: expected None beside a state, in which keys are summed and cannot be masked")
    state = None if initial_state is None else _checks.state(initial_state, "keys", "values", "S", "z")
    keys, values, call = begin(q, k, v, is_causal, attn_mask, scale, None if state is None else state[:2])
    given = _log_far(log_far, q, feature_map)
    with no_autocast(q):
        x, y, z = flat(q), flat(keys), flat(values)
        f = feature_map(x, y, scale=scale)
        features = f.k if call.visible is None else f.k * call.visible[..., None]
        memory = _memory(state, q, features, z)
        near = _Near(x * call.scale, f.q, y, features, z)
        o = (_lone if q.shape[-2] == 1 else _chunked)(near, call, given, window, memory, chunk)
        o = o.reshape(*q.shape[:-1], -1).to(q.dtype)
        if not return_state:
            return o
        gone = max(0, keys.shape[-2] - window + 1)
        S = memory.S + features[:, :gone].mT @ z[:, :gone]
        total = memory.z + features[:, :gone].sum(1)[..., None]
        lead = q.shape[:-2]
        return o, (keys[..., gone:, :], values[..., gone:, :], S.reshape(*lead, *S.shape[1:]), total.reshape(*lead, -1))


class _Memory(NamedTuple):
    """The sums of far keys."""

    S: Float[Tensor, "G m V"]
    z: Float[Tensor, "G m 1"]


class _Near(NamedTuple):
    """Operands and features, those of hidden keys 0."""

    q: Float[Tensor, "G N K"]  # scaled
    q_features: Float[Tensor, "G N m"]
    k: Float[Tensor, "G M K"]
    k_features: Float[Tensor, "G M m"]
    v: Float[Tensor, "G M V"]


def _log_far(log_far: Tensor | None, q: Tensor, feature_map: FeatureMap) -> Tensor:
    """b as (G, N, 1) or (1, 1, 1), for a map that can be used."""
    usable = isinstance(feature_map, FeatureMap) and feature_map.weights != "signed" and feature_map.causal
    if not usable or feature_map.scales_keys or feature_map.positional:
        raise ValueError(
            "feature_map: expected one of single tokens whose features are not negative, without positions or scaled "
            f"keys, got {feature_map!r}"
        )
    dtype = torch.promote_types(q.dtype, torch.float32)
    if log_far is None:
        return torch.full((1, 1, 1), -log(feature_map.width(q.shape[-1])), dtype=dtype, device=q.device)
    gate("log_far", log_far, q, q.shape[:-1])
    _checks.finite("log_far", log_far)
    return log_far.to(dtype).reshape(-1, q.shape[-2], 1)


def _weights(
    q: Tensor, k: Tensor, call: Call, log_far: Tensor, window: int, feature_map: FeatureMap, scale: float | None
) -> Float[Tensor, "G N M"]:
    distance = (call.places[:, None] - torch.arange(k.shape[1], device=k.device)).abs()
    reach, near = call.reachable(call.places), distance < _checks.positive_int("window", window)
    f = feature_map(q, k, scale=scale)
    scores = (q @ k.mT * call.scale).masked_fill(~(near & reach), -torch.inf)
    far = (f.q @ f.k.mT).masked_fill(~reach | near, 0)
    peak, factor = _relative(scores, log_far, far.detach().sum(-1, keepdim=True))
    weights = (scores - peak).exp() + factor * far
    return weights / divisors(weights.sum(-1, keepdim=True))


def _relative(scores: Tensor, log_far: Tensor, far: Tensor) -> tuple[Tensor, Tensor]:
    r"""What near exponents of a row are taken relative to, (..., 1), the greater of the near and the far part; and the
    factor $e^b$ of its far weights, of which `far` is the sum, relative to the same; 0 where nothing is far.

    The former cancels, and is a constant to autograd.
    """
    far, limits = far.detach(), torch.finfo(far.dtype)
    log_far = log_far.masked_fill(far == 0, -torch.inf)
    level = log_far.detach() + far.log().clamp(min=log(limits.tiny / limits.eps))  # gradients take the factor
    peak = torch.maximum(scores.detach().amax(-1, keepdim=True), level).clamp(min=limits.min)
    return peak, (log_far - peak).exp()


def _memory(state: State | None, q: Tensor, features: Tensor, v: Tensor) -> _Memory:
    G, m, V = len(features), features.shape[-1], v.shape[-1]
    if state is None:
        return _Memory(v.new_zeros(G, m, V), v.new_zeros(G, m, 1))
    S = carried("S", state[2], (*q.shape[:-2], m, V), v.dtype)
    z = carried("z", state[3], (*q.shape[:-2], m), v.dtype)
    return _Memory(S.reshape(G, m, V), z.reshape(G, m, 1))


def _lone(x: _Near, call: Call, log_far: Tensor, window: int, memory: _Memory, _: int) -> Float[Tensor, "G 1 V"]:
    """The output of one query, with the keys in the window as they are and the sums of the others."""
    low = max(0, call.first - window + 1)
    high = x.k.shape[1] if call.is_causal else min(x.k.shape[1], call.first + window)
    S, z = memory
    for outside in (slice(0, low), slice(high, None)):
        if len(range(x.k.shape[1])[outside]):
            S, z = S + x.k_features[:, outside].mT @ x.v[:, outside], z + x.k_features[:, outside].sum(1)[..., None]
    scores = x.q @ x.k[:, low:high].mT
    if call.visible is not None:
        scores = scores.masked_fill(~call.visible[:, None, low:high], -torch.inf)
    far = x.q_features @ z
    peak, factor = _relative(scores, log_far, far)
    weights = (scores - peak).exp()
    total = weights.sum(-1, keepdim=True) + factor * far
    return (weights @ x.v[:, low:high] + factor * (x.q_features @ S)) / divisors(total)


def _chunked(x: _Near, call: Call, log_far: Tensor, window: int, memory: _Memory, C: int) -> Float[Tensor, "G N V"]:
    N, M, device = x.q.shape[1], x.k.shape[1], x.q.device
    shift = -call.first % C  # rows before the first key, so that queries begin with a chunk
    T, S = -(-N // C), -(-(M + shift) // C)
    first = (call.first + shift) // C  # chunk of the first query
    band = Band(window, C, call.is_causal, max(first + T, S))

    def chunked(rows: Tensor, before: int, number: int) -> Tensor:
        behind = number * C - before - rows.shape[1]
        return (pad(rows, (0, 0, before, behind)) if before or behind else rows).unflatten(1, (number, C))

    def beside(chunks: Tensor, offsets: list[int]) -> Tensor:
        """The chunks that lie at these offsets from each query's, side by side; zeros where there is none."""
        low = max(0, -first - offsets[0])
        chunks = pad(chunks, (0, 0, 0, 0, low, max(0, first + T + offsets[-1] - S)))
        return torch.cat([chunks[:, first + o + low : first + o + low + T] for o in offsets], 2)

    q, q_features = (chunked(rows, 0, T) for rows in (x.q, x.q_features))
    k, k_features, v = (chunked(rows, shift, S) for rows in (x.k, x.k_features, x.v))
    b = log_far[..., None] if log_far.shape[1] == 1 else chunked(log_far, 0, T)  # (G, T, C, 1) or (1, 1, 1, 1)
    there = torch.ones(1, M, dtype=torch.bool, device=device) if call.visible is None else call.visible
    there = beside(chunked(there[..., None], shift, S), band.offsets).mT  # (1 or G, T, 1, X)
    scores = q @ beside(k, band.offsets).mT  # (G, T, C, X)
    scores = scores.masked_fill(~(band.near(device) & there), -torch.inf)
    sums, totals = k_features.mT @ v, k_features.sum(2)[..., None]  # (G, S, m, V), (G, S, m, 1)
    sums, totals = (_outside(*pair, first, T, band) for pair in ((sums, memory.S), (totals, memory.z)))
    far_o, far = q_features @ sums, q_features @ totals  # (G, T, C, V), (G, T, C, 1)
    if band.mixed:
        apart = (q_features @ beside(k_features, band.mixed).mT).masked_fill(~band.far(device), 0)
        far_o, far = far_o + apart @ beside(v, band.mixed), far + apart.sum(-1, keepdim=True)
    peak, factor = _relative(scores, b, far)
    weights = (scores - peak).exp()
    o, total = weights @ beside(v, band.offsets) + factor * far_o, weights.sum(-1, keepdim=True) + factor * far
    o = (o / divisors(total)).flatten(1, 2)
    return o if T * C == N else o[:, :N].clone()  # of which nothing else is kept


def _outside(
    chunks: Float[Tensor, "G S m n"], memory: Float[Tensor, "G m n"], first: int, T: int, band: Band
) -> Float[Tensor, "G T m n"]:
    """The sums over the chunks before each query's band, and in a call that is not causal over those behind it."""
    S = chunks.shape[1]
    number = torch.arange(first, first + T, device=chunks.device)
    before = torch.cat([memory[:, None], chunks], 1).cumsum(1)
    total = before.index_select(1, (number + band.offsets[0]).clamp(0, S))
    if band.is_causal:
        return total
    behind = pad(chunks.flip(1), (0, 0, 0, 0, 1, 0)).cumsum(1)
    return total + behind.index_select(1, (S - 1 - number - band.offsets[-1]).clamp(0, S))


MECHANISM = Mechanism(
    name="sparse-linear",
    family="dynamic",
    source="after Chen et al. 2021, arXiv:2110.15343",
    reference=sparse_linear_attention_reference,
    fast=sparse_linear_attention,
    causal=True,
    exact=False,
    positional=True,
    cost=sparse_linear_cost,
    gates={"log_far": FarWeight},
    query_gates=frozenset({"log_far"}),
)
