r"""Linear attention: a kernel that factorises, $\kappa(q, k) = \phi(q)^T \phi(k)$, in place of the softmax kernel.

$o_i = \sum_j \kappa(q_i, k_j)\, v_j / \sum_j \kappa(q_i, k_j)$. The sums over keys, $S = \sum_j \phi(k_j) v_j^T$ and
$z = \sum_j \phi(k_j)$, are the same for every query, so no N x M matrix is needed (Katharopoulos et al. 2020,
arXiv:2006.16236, section 3.2; causal: section 3.3, here in chunks). The kernel is an argument, a `FeatureMap`, and each
mechanism is these functions with one class of maps. `feature_map` has the map of linear attention itself,
`feature_maps` others that are functions of one query or key; `favor` and `dense_features` have maps on random rows.
"""

from collections.abc import Callable
from math import inf, nan
from typing import Any

import torch
from torch.autograd import Function

from ortho import checks
from ortho._typing import Bool, Float, State, Tensor
from ortho.attention.backward import once
from ortho.attention.call import Call, attention_function
from ortho.attention.chunked_recurrence import in_chunks
from ortho.attention.linear.feature_map import EluPlusOne, FeatureMap
from ortho.attention.mechanism import Mechanism, with_made
from ortho.attention.scores import divisors

ELU = EluPlusOne()


def kernel_weights(
    feature_map: FeatureMap,
    q: Float[Tensor, "*batch N K"],
    k: Float[Tensor, "*batch M K"],
    *,
    is_causal: bool = False,
    attn_mask: Bool[Tensor, "..."] | None = None,
    scale: float | None = None,
) -> Float[Tensor, "*batch N M"]:
    r"""The weights $\kappa(q_i, k_j)$ of all pairs, not yet divided by their row sums; 0 where attention is blocked.

    If the map has a `log_k`, each row is scaled by some factor.
    """
    return _weights(Call(q, k, k, is_causal, attn_mask, scale), feature_map, same_tokens=False)


def _weights(call: Call, feature_map: FeatureMap, same_tokens: bool) -> Float[Tensor, "*batch N M"]:
    blocked, hidden = call.blocked, None
    if call.attn_mask is not None:
        hidden = ~call.attn_mask.expand(*call.q.shape[:-1], call.k.shape[-2]).any(-2)
    positions: dict[str, Any] = {"scale": call.scale, "q_start": call.past}
    f = feature_map(call.q, call.k, **positions, hidden=hidden, hidden_q=hidden if same_tokens else None)
    weights = f.q @ f.k.mT  # (..., N, M)
    if f.log_k is not None:
        s = f.log_k[..., None, :]
        if blocked is not None:
            s = s.masked_fill(blocked, torch.finfo(s.dtype).min)
        weights = weights * (s - s.amax(-1, keepdim=True)).exp()
    return weights if blocked is None else weights.masked_fill(blocked, 0)


@attention_function()
def linear_attention_reference(
    call: Call, *, feature_map: FeatureMap = ELU, same_tokens: bool = False
) -> Float[Tensor, "*batch N V"]:
    """Materialise the kernel's N x M weights, multiply them by v and divide the rows by their sums.

    Arguments, errors and state (earlier keys and values) are as in `softmax_attention_reference`, except for `scale`,
    which is at least 0 and by default the map's own. `same_tokens` says that query i and key i are the same token: a
    map that looks at the whole sequence then also leaves out the queries at the positions of hidden keys. A row whose
    weights are all 0 gives 0, and one whose weights leave the range of the dtype gives NaN.
    """
    _refuse_parts(call, feature_map, same_tokens)
    weights = _weights(call, feature_map, same_tokens)
    total = weights.sum(-1, keepdim=True)
    # A quotient rather than a product with 1 / total: the gradient of 1 / total squares it and may overflow.
    return (weights @ call.v / divisors(total)).masked_fill(_unusable(total, feature_map, call.blocked), nan)


@attention_function(keeps="sums")
def linear_attention(
    call: Call, *, feature_map: FeatureMap = ELU, same_tokens: bool = False, chunk: int | None = None
) -> tuple[Float[Tensor, "*batch N V"], State]:
    """`linear_attention_reference` in time and memory linear in N; a causal call works in chunks of at most `chunk`.

    The default is 64 tokens; on a GPU it is larger for long sequences, so that there are at most 128 chunks. Everything
    is computed in float32 at least, even half precision, so a GPU's fast half-precision products are not used.

    The state is (S (..., m, V), z (..., m)). A map that scales keys adds the logarithm (...) of the largest scale, by
    which S and z are divided; a positional map then adds the number of tokens seen (). Half precision is computed, and
    its state kept, in float32: sums over a long sequence overflow float16. The result cannot be differentiated twice;
    the reference's can.

    Raises ValueError for an `attn_mask` that is not one row for all queries.
    """
    _refuse_parts(call, feature_map, same_tokens)
    q, k, v = call.q, call.k, call.v
    S, peak, start = _memory(call, feature_map)
    hidden = None if call.key_mask is None else ~call.key_mask  # (..., M)
    places: dict[str, Any] = {"scale": call.scale, "q_start": start, "k_start": start}
    f = feature_map(q, k, **places, hidden=hidden, hidden_q=hidden if same_tokens else None)
    phi_k = f.k if hidden is None else f.k.masked_fill(hidden[..., None], 0)
    strengths = fades = None
    causal = call.is_causal and q.shape[-2] > 1  # a lone query is the last: it has no future
    if f.log_k is not None and peak is not None:
        strengths, fades, peak = _scales(f.log_k, peak, hidden, causal)
        if not causal:  # only what was there before fades
            S, fades = S * fades[..., :1, None].exp(), None
    sums, S = in_chunks(f.q, phi_k, _with_ones(v), strengths, fades, S, is_causal=causal, erase=False, chunk=chunk)
    blocked = None
    if hidden is not None:
        blocked = hidden.cummin(-1).values[..., None] if causal else hidden[..., None, :]
    o = _Quotient.apply(sums, _unusable(sums[..., -1:], feature_map, blocked))
    seen = (torch.as_tensor(start + k.shape[-2], device=k.device),) if feature_map.positional else ()
    return o, (S[..., :-1], S[..., -1], *(() if peak is None else (peak,)), *seen)


def _with_ones(v: Float[Tensor, "*batch N V"]) -> Float[Tensor, "*batch N V+1"]:
    """Values beside a column of ones: its sums with the weights are the rows' totals."""
    return torch.cat([v, torch.ones_like(v[..., :1])], -1)


class _Quotient(Function):
    """Sums (..., N, V + 1), the last column of which are the rows' totals -> o (..., N, V). A row without weight gives
    0, and an unusable one (..., N, 1) NaN and no gradient. What is kept is the result itself and a number per row."""

    @staticmethod
    def forward(ctx: Any, sums: Tensor, unusable: Tensor) -> Tensor:
        divisor = divisors(sums[..., -1:]).masked_fill(unusable, nan)
        o = sums[..., :-1] / divisor
        ctx.save_for_backward(o, divisor)
        return o

    @staticmethod
    @once
    def backward(ctx: Any, d_o: Tensor) -> tuple[Tensor, None]:
        o, divisor = ctx.saved_tensors
        unusable = divisor.isnan()
        d_v = d_o / divisor.masked_fill(unusable, inf)
        d_total = (d_v * o).sum(-1, keepdim=True).neg_().masked_fill_(unusable, 0)
        return torch.cat([d_v, d_total], -1), None


def _scales(
    s: Float[Tensor, "*batch M"], peak: Float[Tensor, "*batch"], hidden: Bool[Tensor, "*batch M"] | None, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The keys' scales as strengths and decays of the state, and the new peak: the state is divided by the largest
    scale so far. So every exponent is at most 0, and nothing that a row reads depends on later keys."""
    lowest = torch.finfo(s.dtype).min
    s = s if hidden is None else s.masked_fill(hidden, lowest)
    peaks = torch.cat([peak[..., None], s], -1).cummax(-1).values  # (..., 1 + M)
    after = peaks[..., 1:]
    if not causal:  # one scale for all keys
        after = peaks[..., -1:].expand_as(s)
    fades = torch.cat([peaks[..., :1], after[..., :-1]], -1) - after
    # `lowest` less a positive number is -inf: a state of no keys, whose decay is 0
    return (s - after).exp(), fades.clamp(min=lowest), peaks[..., -1]


def _refuse_parts(call: Call, feature_map: FeatureMap, same_tokens: bool) -> None:
    """Raise ValueError if a map that looks at the whole sequence would see it in parts, and for `same_tokens` of
    sequences that differ in length."""
    past = call.past or bool(call.state)
    if not feature_map.causal and (call.is_causal or call.return_state or past):
        name = "is_causal" if call.is_causal else "return_state" if call.return_state else "initial_state"
        raise ValueError(
            f"{name}: expected a feature map that looks at one token at a time, got {type(feature_map).__name__}, "
            "which looks at the whole sequence unless it is given what it would find there"
        )
    N, M = call.q.shape[-2], call.k.shape[-2] - call.past
    checks.expect(not same_tokens or N == M, "same_tokens", f"False for {N} queries and {M} keys", same_tokens)


def _memory(call: Call, feature_map: FeatureMap) -> tuple[Tensor, Tensor | None, int | Tensor]:
    """(S beside z (..., m, V + 1), the peak, the number of tokens seen) of the state; without one, sums of no keys."""
    v, lead, m = call.v, call.k.shape[:-2], feature_map.width(call.k.shape[-1])
    if not call.state:
        peak = v.new_full(lead, torch.finfo(v.dtype).min) if feature_map.scales_keys else None
        return v.new_zeros(*lead, m, v.shape[-1] + 1), peak, 0
    names = ["S", "z", *["peak"] * feature_map.scales_keys, *["seen"] * feature_map.positional]
    parts = dict(zip(names, checks.state(call.state, *names), strict=True))
    S = checks.carried("S", parts["S"], (*lead, m, v.shape[-1]), v)
    z = checks.carried("z", parts["z"], (*lead, m), v)
    peak = parts.get("peak")
    if peak is not None:
        checks.carried("peak", peak, lead, v)
    return torch.cat([S, z[..., None]], -1), peak, parts.get("seen", 0)


def _unusable(total: Tensor, feature_map: FeatureMap, blocked: Tensor | None) -> Bool[Tensor, "*batch N 1"]:
    """Whether the totals (..., N, 1) of rows leave the range of the dtype, or are so small that few digits are left; no
    for rows that are wholly `blocked`."""
    limits = torch.finfo(total.dtype)
    least = {"signed": -limits.max, "non-negative": 0.0, "positive": limits.tiny / limits.eps}[feature_map.weights]
    total = total.detach() if blocked is None else total.detach().masked_fill(blocked.all(-1, keepdim=True), 1)
    return ~((total >= least) & (total <= limits.max))


def kernel_mechanism(name: str, make: Callable[..., FeatureMap], source: str) -> Mechanism:
    """The `Mechanism` of linear attention with the feature map that `make` makes, whose options its functions take."""
    reference, fast = (
        with_made(form, "feature_map", make, name) for form in (linear_attention_reference, linear_attention)
    )
    feature_map = fast.feature_map
    return Mechanism(
        name=name,
        family="linear",
        source=source,
        reference=reference,
        fast=fast,
        causal=feature_map.causal,
        positional=feature_map.positional,
        data_dependent=not feature_map.causal,
        same_tokens=not feature_map.causal,
        signed=feature_map.weights == "signed",
        make=make,
    )


MECHANISM = kernel_mechanism("linear", EluPlusOne, "Katharopoulos et al. 2020, arXiv:2006.16236")
