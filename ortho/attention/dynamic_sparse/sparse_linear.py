r"""Softmax attention to near keys and linear attention to far ones, in one normalisation.

$$o_i = \frac{\sum_{|i-j|<w} e^{s_{ij}}\, v_j + e^{b_i} \sum_{|i-j| \ge w} \phi(q_i)^T \phi(k_j)\, v_j}
{\sum_{|i-j|<w} e^{s_{ij}} + e^{b_i} \sum_{|i-j| \ge w} \phi(q_i)^T \phi(k_j)}, \qquad s_{ij} = q_i^T k_j / \sqrt{K}$$

In a causal call the sums end at j = i; masked keys are left out. Every pair in the sums has a positive weight, and a
row's weights sum to 1. (A far weight below the range of the dtype counts as 0. A sum of two attentions, each with its
own normalisation, gives both sides fixed shares instead.) Only $b_i$ sets the weight of a far key relative to a near
one: one number per query, made by a gate, or the same for all. As b falls, only the window is left. With `Taylor`
features, which expand the exponential, b = 0 approximates softmax attention. Other features have other scales. The
default, $b = -\log m$, takes the mean of the m features' products, which is as large as the weight of an average score.

Local exact attention with a kernel for the rest is also found in Scatterbrain (Chen et al. 2021, arXiv:2110.15343),
where the kernel estimates the softmax, and in Based (Arora et al. 2024, arXiv:2402.18668), in separate layers.
"""

from math import log
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.functional import pad

from ortho import checks
from ortho._typing import Float, Tensor
from ortho.attention.call import Call, attention_function
from ortho.attention.dynamic_sparse.selection import first_position, flat, positions, reachable
from ortho.attention.linear.feature_map import EluPlusOne, FeatureMap
from ortho.attention.mechanism import Mechanism
from ortho.attention.scores import divisors
from ortho.attention.uncompiled import uncompiled
from ortho.gates import Gate

WINDOW = 256
CHUNK = 64  # queries that read the same chunks of keys
FEATURES = EluPlusOne()


@uncompiled
@attention_function()
def sparse_linear_attention_reference(
    call: Call,
    *,
    window: int = WINDOW,
    log_linear_weight: Float[Tensor, "*batch N"] | None = None,
    feature_map: FeatureMap = FEATURES,
) -> Float[Tensor, "*batch N V"]:
    r"""The N x M weights, materialised, times v. Those of a row are taken relative to a common factor, which cancels.

    The query's own key and the `window` - 1 keys on either side are near, in a causal call only those before it.
    `log_linear_weight` is b. The `feature_map` must map one token at a time to features that are not negative, and must
    not scale keys or use positions: `EluPlusOne`, `Relu`, `Taylor`. The state is (keys, values).

    Raises ValueError for another map, for a mask that is not the same for all queries, and for a negative scale, which
    feature maps cannot apply.
    """
    b = _log_linear_weight(call, log_linear_weight, feature_map)
    distance = (positions(call)[:, None] - torch.arange(call.k.shape[-2], device=call.k.device)).abs()
    reach, near = reachable(call), distance < checks.positive_int("window", window)
    f = feature_map(call.q, call.k, scale=call.scale)
    scores = (call.q @ call.k.mT * call.factor).masked_fill(~(near & reach), -torch.inf)
    far = (f.q @ f.k.mT).masked_fill(~reach | near, 0)
    peak, factor = _relative(scores, b, far.detach().sum(-1, keepdim=True))
    weights = (scores - peak).exp() + factor * far
    return weights / divisors(weights.sum(-1, keepdim=True)) @ call.v


@uncompiled
@attention_function(keeps="fewer keys", beside=("S", "z"))
def sparse_linear_attention(
    call: Call,
    *,
    window: int = WINDOW,
    log_linear_weight: Float[Tensor, "*batch N"] | None = None,
    feature_map: FeatureMap = FEATURES,
    chunk: int = CHUNK,
) -> tuple[Float[Tensor, "*batch N V"], tuple[Tensor, ...]]:
    """`sparse_linear_attention_reference` in time and memory linear in N, in float32 at least.

    A chunk of queries reads chunks of keys that may be near by their weights, and all others by their sums. The state
    is (the last `window` - 1 keys, their values, S (..., m, V) and z (..., m) of the keys before). A mask together with
    a state, given or asked for, raises ValueError.
    """
    if call.attn_mask is not None and (call.state or call.return_state):
        raise ValueError("attn_mask: expected None beside a state, in which keys are summed and cannot be masked")
    checks.positive_int("window", window)
    checks.positive_int("chunk", chunk)
    b, lead = _log_linear_weight(call, log_linear_weight, feature_map), call.q.shape[:-2]
    b = b.reshape(-1, *b.shape[-2:])
    sums, call = _linear_sums(call, feature_map.width(call.k.shape[-1])), flat(call)
    f = feature_map(call.q, call.k, scale=call.scale)
    features = f.k if call.key_mask is None else f.k * call.key_mask[..., None]
    near = _Near(call.q * call.factor, f.q, call.k, features, call.v)
    o = (_lone if call.q.shape[1] == 1 else _chunked)(near, call, b, window, sums, chunk)
    o = o.reshape(*lead, *o.shape[-2:])
    if not call.return_state:
        return o, ()
    gone = max(0, call.k.shape[1] - window + 1)
    S = sums.S + features[:, :gone].mT @ call.v[:, :gone]
    z = (sums.z + features[:, :gone].sum(1)[..., None])[..., 0]
    parts = call.k[:, gone:], call.v[:, gone:], S, z
    return o, tuple(part.reshape(*lead, *part.shape[1:]) for part in parts)


def _log_linear_weight(call: Call, log_linear_weight: Tensor | None, feature_map: FeatureMap) -> Tensor:
    """b as (..., N, 1) or (..., 1, 1); ValueError for a map that cannot be used."""
    usable = feature_map.weights != "signed" and feature_map.causal
    if not usable or feature_map.scales_keys or feature_map.positional:
        raise ValueError(
            "feature_map: expected one of single tokens whose features are not negative, without positions or scaled "
            f"keys, got {feature_map!r}"
        )
    if log_linear_weight is None:
        return call.q.new_full((1,) * call.q.dim(), -log(feature_map.width(call.q.shape[-1])))
    checks.gate("log_linear_weight", log_linear_weight, call.q.shape[:-1], "queries")
    return log_linear_weight.to(call.q.dtype)[..., None]


def _relative(scores: Tensor, b: Tensor, far: Tensor) -> tuple[Tensor, Tensor]:
    r"""(peak, factor) of each row. The peak (..., 1), the greater of the near and the far part, is subtracted from near
    exponents. The factor of far weights is $e^b$ relative to the peak, 0 where nothing is far; `far` is their sum.

    The peak cancels, and is a constant to autograd.
    """
    far, limits = far.detach(), torch.finfo(far.dtype)
    b = b.masked_fill(far == 0, -torch.inf)
    level = b.detach() + far.log().clamp(min=log(limits.tiny / limits.eps))  # gradients go through the factor
    peak = torch.maximum(scores.detach().amax(-1, keepdim=True), level).clamp(min=limits.min)
    return peak, (b - peak).exp()


class _LinearSums(NamedTuple):
    """The sums over far keys."""

    S: Float[Tensor, "G m V"]
    z: Float[Tensor, "G m 1"]


class _Near(NamedTuple):
    """Operands and features; the features of hidden keys are 0."""

    q: Float[Tensor, "G N K"]  # scaled
    q_features: Float[Tensor, "G N m"]
    k: Float[Tensor, "G M K"]
    k_features: Float[Tensor, "G M m"]
    v: Float[Tensor, "G M V"]


def _linear_sums(call: Call, m: int) -> _LinearSums:
    """The sums of the state; zeros without one."""
    lead, V = call.k.shape[:-2], call.v.shape[-1]
    S, z = call.state or (call.v.new_zeros(*lead, m, V), call.v.new_zeros(*lead, m))
    S, z = checks.carried("S", S, (*lead, m, V), call.v), checks.carried("z", z, (*lead, m), call.v)
    return _LinearSums(S.reshape(-1, m, V), z.reshape(-1, m, 1))


class Band:
    """The chunks of keys that may be near a chunk of C queries, by their offset from the queries' chunk.

    `chunks` is the number of chunks, of queries and of keys: no offset is larger than from the first to the last. In
    chunks at the `mixed` offsets, some keys are far from some queries.
    """

    def __init__(self, window: int, chunk: int, is_causal: bool, chunks: int) -> None:
        self.window, self.chunk, self.is_causal, self.chunks = window, chunk, is_causal, chunks
        reach = min(-(-(window - 1) // chunk), chunks - 1)
        self.offsets = list(range(-reach, 1 if is_causal else reach + 1))
        self.mixed = [o for o in self.offsets if (abs(o) + 1) * chunk > window]

    def distance(self, offsets: list[int], device: torch.device) -> Tensor:
        """i - j, (C, C times the number of offsets); at least 0 for pairs that are allowed in a causal call."""
        place = torch.arange(self.chunk, device=device)
        return torch.cat([place[:, None] - place - o * self.chunk for o in offsets], 1)

    def near(self, device: torch.device) -> Tensor:
        distance = self.distance(self.offsets, device)
        near = distance.abs() < self.window
        return near & (distance >= 0) if self.is_causal else near

    def far(self, device: torch.device) -> Tensor:
        distance = self.distance(self.mixed, device)
        return (distance if self.is_causal else distance.abs()) >= self.window


def _lone(x: _Near, call: Call, b: Tensor, window: int, earlier: _LinearSums, _: int) -> Float[Tensor, "G 1 V"]:
    """The output of a single query, from the keys in its window and from the sums of the others."""
    low = max(0, first_position(call) - window + 1)
    high = x.k.shape[1] if call.is_causal else min(x.k.shape[1], first_position(call) + window)
    S, z = earlier
    for outside in (slice(0, low), slice(high, None)):
        if len(range(x.k.shape[1])[outside]):
            S, z = S + x.k_features[:, outside].mT @ x.v[:, outside], z + x.k_features[:, outside].sum(1)[..., None]
    scores = x.q @ x.k[:, low:high].mT
    if call.key_mask is not None:
        scores = scores.masked_fill(~call.key_mask[:, None, low:high], -torch.inf)
    far = x.q_features @ z
    peak, factor = _relative(scores, b, far)
    weights = (scores - peak).exp()
    total = weights.sum(-1, keepdim=True) + factor * far
    return (weights @ x.v[:, low:high] + factor * (x.q_features @ S)) / divisors(total)


def _chunked(x: _Near, call: Call, b: Tensor, window: int, earlier: _LinearSums, C: int) -> Float[Tensor, "G N V"]:
    N, M, device = x.q.shape[1], x.k.shape[1], x.q.device
    shift = -first_position(call) % C  # rows added before the first key, so that queries start at a chunk
    T, S = -(-N // C), -(-(M + shift) // C)
    first = (first_position(call) + shift) // C  # chunk of the first query
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
    b = b[..., None] if b.shape[1] == 1 else chunked(b, 0, T)  # (G, T, C, 1) or (1, 1, 1, 1)
    there = torch.ones(1, M, dtype=torch.bool, device=device) if call.key_mask is None else call.key_mask
    there = beside(chunked(there[..., None], shift, S), band.offsets).mT  # (1 or G, T, 1, X)
    scores = q @ beside(k, band.offsets).mT  # (G, T, C, X)
    scores = scores.masked_fill(~(band.near(device) & there), -torch.inf)
    sums, totals = k_features.mT @ v, k_features.sum(2)[..., None]  # (G, S, m, V), (G, S, m, 1)
    sums, totals = (_outside(*pair, first, T, band) for pair in ((sums, earlier.S), (totals, earlier.z)))
    far_o, far = q_features @ sums, q_features @ totals  # (G, T, C, V), (G, T, C, 1)
    if band.mixed:
        apart = (q_features @ beside(k_features, band.mixed).mT).masked_fill(~band.far(device), 0)
        far_o, far = far_o + apart @ beside(v, band.mixed), far + apart.sum(-1, keepdim=True)
    peak, factor = _relative(scores, b, far)
    weights = (scores - peak).exp()
    o, total = weights @ beside(v, band.offsets) + factor * far_o, weights.sum(-1, keepdim=True) + factor * far
    o = (o / divisors(total)).flatten(1, 2)
    return o if T * C == N else o[:, :N].clone()  # a copy, so that the padding is not kept


def _outside(
    chunks: Float[Tensor, "G S m n"], earlier: Float[Tensor, "G m n"], first: int, T: int, band: Band
) -> Float[Tensor, "G T m n"]:
    """The sums over the chunks before each query's band, and in a call that is not causal also over those after it."""
    S = chunks.shape[1]
    number = torch.arange(first, first + T, device=chunks.device)
    before = torch.cat([earlier[:, None], chunks], 1).cumsum(1)
    total = before.index_select(1, (number + band.offsets[0]).clamp(0, S))
    if band.is_causal:
        return total
    behind = pad(chunks.flip(1), (0, 0, 0, 0, 1, 0)).cumsum(1)
    return total + behind.index_select(1, (S - 1 - number - band.offsets[-1]).clamp(0, S))


# --------------------------------------------------------------------------------------------------------------- gate


class LinearWeight(Gate):
    """x W^T + b, the logarithm of a far key's weight: x (B, N, d) -> (B, H, N); b starts at -log(d/H)."""

    trained = 1

    def _make(self, generator: torch.Generator | None, kind: dict[str, Any]) -> None:
        super()._make(generator, kind)
        self.bias = nn.Parameter(torch.full((self.num_heads,), -log(self.d_model / self.num_heads), **kind))

    def forward(self, x: Float[Tensor, "B N d"]) -> Float[Tensor, "B H N"]:
        return self._numbers(x) + self.bias[:, None]


MECHANISM = Mechanism(
    name="sparse-linear",
    family="dynamic_sparse",
    source="after Chen et al. 2021, arXiv:2110.15343",
    reference=sparse_linear_attention_reference,
    fast=sparse_linear_attention,
    positional=True,
    gates={"log_linear_weight": LinearWeight},
    query_gates=frozenset({"log_linear_weight"}),
)
