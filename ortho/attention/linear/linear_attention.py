r"""Linear attention: a kernel that factorises, $\kappa(q, k) = \phi(q)^T \phi(k)$, in place of the softmax kernel.

$o_i = \sum_j \kappa(q_i, k_j)\, v_j / \sum_j \kappa(q_i, k_j)$. The sums over keys, $S = \sum_j \phi(k_j) v_j^T$ and
$z = \sum_j \phi(k_j)$, are the same for every query, so no N x M matrix is needed (Katharopoulos et al. 2020,
arXiv:2006.16236, section 3.2; causal: section 3.3, here in chunks). The kernel is an argument, a `FeatureMap`, and each
mechanism is these functions with one such map. `feature_maps` has maps that are functions of one query or key; `favor`
and `dense_features` have maps on random rows.
"""

from abc import ABC, abstractmethod
from functools import partial
from math import inf, nan
from typing import Literal, NamedTuple

import torch
from torch.nn.functional import pad

from ortho import _checks
from ortho._checks import attention_form, carried, checked, known_tokens, past_length
from ortho._cost import Cost, product
from ortho._typing import Bool, Float, Int, Size, State, Tensor
from ortho.attention.chunking import CHUNK, chunks, default_chunk, equal_chunks, pad_tokens
from ortho.attention.linear.linear_kernels import AllAtOnce, Chunked, divisors
from ortho.attention.mechanism import CostedCall, Mechanism, closed_form
from ortho.attention.scores import blocked_pairs


class Features(NamedTuple):
    r"""A factorised kernel, $\kappa(q_i, k_j) = e^{s_j}\, \phi(q_i)^T \phi(k_j)$.

    `log_k`, the $s_j$, keeps the features of both large and small keys in range; it must carry no gradient. A factor
    that depends on the query alone cancels in the attention, so a map may scale each query's features freely.
    """

    q: Float[Tensor, "*batch N m"]
    k: Float[Tensor, "*batch M m"]
    log_k: Float[Tensor, "*batch M"] | None = None


class FeatureMap(ABC):
    r"""`map(q, k)` gives the `Features` of q (..., N, K) and k (..., M, K), which may be mapped differently.

    Both are float32 at least. `scale` multiplies their products; None stands for the published scale. `q_start` and
    `k_start` are the positions of the first query and key. `hidden` is True for keys that no query sees, `hidden_q` for
    padding among the queries; None if nothing is hidden. A map of the whole sequence leaves hidden tokens out.
    """

    # Weights are 'positive', 'non-negative' (if all of a row's are 0, the row is 0) or 'signed': then a row's total may
    # be any number, and the row is still divided by it.
    weights: Literal["positive", "non-negative", "signed"] = "positive"
    positional = False  # whether positions matter; the state then ends with the number of tokens seen, int64 ()
    scales_keys = False  # whether there is a `log_k`
    causal = True  # False if the features of a token depend on the others

    @abstractmethod
    def __call__(
        self,
        q: Float[Tensor, "*batch N K"],
        k: Float[Tensor, "*batch M K"],
        *,
        scale: float | None = None,
        q_start: int | Int[Tensor, ""] = 0,
        k_start: int | Int[Tensor, ""] = 0,
        hidden: Bool[Tensor, "*batch M"] | None = None,
        hidden_q: Bool[Tensor, "*batch N"] | None = None,
    ) -> Features: ...

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    @abstractmethod
    def width(self, K: Size) -> Size:
        """The number m of features of a K-wide query or key."""

    def cost(self, G: Size, N: Size, M: Size, K: Size, m: Size) -> Cost:
        """The products of mapping the N queries and M keys, K wide, of each of G sequences to m features; none if the
        map works number by number."""
        return Cost()


@checked(values=False)
def kernel_weights(
    feature_map: FeatureMap,
    q: Float[Tensor, "*batch N K"],
    k: Float[Tensor, "*batch M K"],
    *,
    is_causal: bool = False,
    attn_mask: Bool[Tensor, "..."] | None = None,
    scale: float | None = None,
    q_start: int = 0,
    same_tokens: bool = False,
) -> Float[Tensor, "*batch N M"]:
    r"""The weights $\kappa(q_i, k_j)$ of all pairs, not yet divided by their row sums; 0 where attention is blocked.

    If the map has a `log_k`, each row is scaled by some factor. `q_start` is the number of keys before the first
    query's own; `same_tokens` is as in `linear_attention_reference`.
    """
    blocked = blocked_pairs(q.shape[-2], k.shape[-2], is_causal, attn_mask, q.device)
    hidden = None if attn_mask is None else ~attn_mask.expand(*q.shape[:-1], k.shape[-2]).any(-2)
    f = feature_map(q, k, scale=scale, q_start=q_start, hidden=hidden, hidden_q=hidden if same_tokens else None)
    weights = f.q @ f.k.mT  # (..., N, M)
    if f.log_k is not None:
        s = f.log_k[..., None, :]
        if blocked is not None:
            s = s.masked_fill(blocked, torch.finfo(s.dtype).min)
        weights = weights * (s - s.amax(-1, keepdim=True)).exp()
    return weights if blocked is None else weights.masked_fill(blocked, 0)


def _same_tokens(q: Tensor, k: Tensor, _: Tensor, *, same_tokens: bool = False, **__: object) -> None:
    known_tokens(same_tokens, q, k)


@attention_form(check=_same_tokens)
def linear_attention_reference(
    q: Float[Tensor, "*batch N K"],
    k: Float[Tensor, "*batch M K"],
    v: Float[Tensor, "*batch M V"],
    *,
    feature_map: FeatureMap,
    is_causal: bool = False,
    attn_mask: Bool[Tensor, "..."] | None = None,
    scale: float | None = None,
    initial_state: State | None = None,
    return_state: bool = False,
    same_tokens: bool = False,
) -> Float[Tensor, "*batch N V"] | tuple[Float[Tensor, "*batch N V"], State]:
    """Materialise the kernel's N x M weights, multiply them by v and divide the rows by their sums.

    Arguments, errors and state (earlier keys and values) are as in `softmax_attention_reference`, except for `scale`,
    which is at least 0 and by default the map's own. `same_tokens` says that query i and key i are the same token: a
    map that looks at the whole sequence then also leaves out the queries at the positions of hidden keys. A row whose
    weights are all 0 gives 0. On the CPU, rows whose weights leave the range of the dtype raise ValueError.
    """
    _refuse_parts(feature_map, is_causal, initial_state, return_state)
    weights = kernel_weights(
        feature_map,
        q,
        k,
        is_causal=is_causal,
        attn_mask=attn_mask,
        scale=scale,
        q_start=past_length(initial_state),
        same_tokens=same_tokens,
    )
    total = weights.sum(-1, keepdim=True)
    # A quotient rather than a product with 1 / total: the gradient of 1 / total squares it and may overflow.
    o = weights @ v / divisors(total)
    blocked = None
    if attn_mask is not None:
        blocked = blocked_pairs(q.shape[-2], k.shape[-2], is_causal, attn_mask, q.device)
    return _in_range(o, total, feature_map, blocked)


@attention_form(fixed_state=True, check=_same_tokens)
def linear_attention(
    q: Float[Tensor, "*batch N K"],
    k: Float[Tensor, "*batch M K"],
    v: Float[Tensor, "*batch M V"],
    *,
    feature_map: FeatureMap,
    is_causal: bool = False,
    attn_mask: Bool[Tensor, "..."] | None = None,
    scale: float | None = None,
    initial_state: State | None = None,
    return_state: bool = False,
    same_tokens: bool = False,
    chunk: int | None = None,
) -> Float[Tensor, "*batch N V"] | tuple[Float[Tensor, "*batch N V"], State]:
    """`linear_attention_reference` in time and memory linear in N; a causal call works in chunks of at most `chunk`.

    The default is 64 tokens; on a GPU it is larger for long sequences, so that there are at most 128 chunks. Everything
    is computed in float32 at least, even half precision, so a GPU's fast half-precision products are not used.

    The state is (S (..., m, V), z (..., m)). A map that scales keys adds the logarithm (...) of the largest scale, by
    which S and z are divided; a positional map then adds the number of tokens seen (). Half precision is computed, and
    its state kept, in float32: sums over a long sequence overflow float16. The result cannot be differentiated twice;
    the reference's can.

    Raises ValueError for an `attn_mask` that is not one row for all queries, or that is given with an initial state,
    whose keys are already summed; and, on the CPU, for features so small or large that a row's weights leave the range
    of the dtype (elsewhere such a row is NaN, since checking would stall the device).
    """
    _refuse_parts(feature_map, is_causal, initial_state, return_state)
    length = q.shape[-2]
    S, z, peak, start = _memory(initial_state, feature_map, k, v)
    hidden = None if attn_mask is None else ~attn_mask  # (..., M)
    hidden_q = hidden if same_tokens else None
    f = feature_map(q, k, scale=scale, q_start=start, k_start=start, hidden=hidden, hidden_q=hidden_q)
    if (f.log_k is not None) != feature_map.scales_keys:
        raise TypeError(f"feature_map: expected a log_k if and only if it scales keys, got {feature_map!r}")
    phi_k, s = f.k, f.log_k
    if hidden is not None:
        phi_k = phi_k.masked_fill(hidden[..., None], 0)
        # Below all others; not -inf, since -inf minus itself is NaN.
        s = None if s is None else s.masked_fill(hidden, torch.finfo(s.dtype).min)
    before, peak = peak, None if peak is None or s is None else torch.maximum(peak, s.amax(-1))
    if is_causal and length > 1:  # a lone query is the last: it has no future
        width, behind = chunks(length, default_chunk(q) if chunk is None else chunk)
        s = s if s is None or not behind else pad(s, (0, behind), value=-inf)
        o, total, S, z = Chunked.apply(*(pad_tokens(x, behind) for x in (f.q, phi_k, v)), S, z, s, before, width)
        o, total = o[..., :length, :], total[..., :length, :]
    else:
        scales = None
        if before is not None and peak is not None and s is not None:
            fade = (before - peak).exp()[..., None]
            S, z = S * fade[..., None], z * fade
            scales = (s - peak[..., None]).exp()[..., None]  # (..., M, 1)
        o, total, S, z = AllAtOnce.apply(f.q, phi_k, v, S, z, scales)
    blocked = None
    if hidden is not None:
        blocked = hidden.cummin(-1).values[..., None] if is_causal else hidden[..., None, :]
    o = _in_range(o, total, feature_map, blocked)
    seen = (torch.as_tensor(start + k.shape[-2], device=k.device),) if feature_map.positional else ()
    return o, (S, z, *(() if peak is None else (peak,)), *seen)


def _refuse_parts(feature_map: FeatureMap, is_causal: bool, initial_state: State | None, return_state: bool) -> None:
    """Raise ValueError if a map that looks at the whole sequence would see it in parts."""
    if not feature_map.causal and (is_causal or return_state or initial_state is not None):
        name = "is_causal" if is_causal else "return_state" if return_state else "initial_state"
        raise ValueError(
            f"{name}: expected a feature map that looks at one token at a time, got {type(feature_map).__name__}, "
            "which looks at the whole sequence unless it is given what it would find there"
        )


def _memory(
    state: State | None, feature_map: FeatureMap, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, Tensor | None, int | Tensor]:
    """(S, z, peak, start) from the state; without a state, sums of no keys, the lowest peak and position 0."""
    lead, m, V = tuple(k.shape[:-2]), feature_map.width(k.shape[-1]), v.shape[-1]
    parts = {"S": ((*lead, m, V), v.dtype), "z": ((*lead, m), v.dtype)}
    if state is None:
        peak = v.new_full(lead, torch.finfo(v.dtype).min) if feature_map.scales_keys else None
        return v.new_zeros(parts["S"][0]), v.new_zeros(parts["z"][0]), peak, 0
    parts |= {"peak": (lead, v.dtype)} if feature_map.scales_keys else {}
    parts |= {"seen": ((), torch.int64)} if feature_map.positional else {}
    given = zip(parts, _checks.state(state, *parts), strict=True)
    named = {name: carried(name, value, *parts[name]) for name, value in given}
    return named["S"], named["z"], named.get("peak"), named.get("seen", 0)


def _in_range(o: Tensor, total: Tensor, feature_map: FeatureMap, blocked: Tensor | None) -> Tensor:
    """The rows o (..., N, V), if their totals (..., N, 1) are within the range of the dtype and not so small that few
    digits are left. Other rows raise ValueError on the CPU and are NaN elsewhere, unless they are wholly `blocked`.
    """
    shown = _checks.shows_values(total)
    if not (shown or _checks.reads_values(total)):
        return o
    limits = torch.finfo(total.dtype)
    least = {"signed": -limits.max, "non-negative": 0.0, "positive": limits.tiny / limits.eps}[feature_map.weights]
    total = total.detach() if blocked is None else total.detach().masked_fill(blocked.all(-1, keepdim=True), 1)
    if shown:
        return o.masked_fill(~((total >= least) & (total <= limits.max)), nan)
    _checks.within("q, k", f"row sums of the {total.dtype} weights", total, least, limits.max)
    return o


@closed_form
def linear_attention_cost(call: CostedCall, *, feature_map: FeatureMap, chunk: int = CHUNK, m: Size = None) -> Cost:
    """Closed-form cost of one self-attention call, in either form; `m` is the number of features, by default the map's.

    Half precision costs as much as float32. Drawing random features is left out: it is done once. A symbolic N stands
    for a multiple of `chunk` greater than `chunk`.
    """
    if call.causal and not feature_map.causal:
        raise ValueError("causal: expected False with a feature map that looks at the whole sequence, got True")
    (G, N, K, V), item, fast = call.sizes, call.item, call.form == "fast"
    scaled, reach = int(feature_map.scales_keys), call.reach
    m = feature_map.width(K) if m is None else m
    mapped = feature_map.cost(G, N, N, K, m)
    recurrent = fast and feature_map.causal  # else the keys are kept, and mapped anew for each query
    decoded = feature_map.cost(G, 1, 1 if recurrent else N, K, m).forward
    gathered = 2 * G * m * (V + scaled) * (1 if recurrent else N)
    state = item * G * (m * (V + 1) + scaled) + 8 * int(feature_map.positional)
    return _products(call, m, chunk, scaled) + Cost(
        forward=mapped.forward,
        backward=reach * mapped.backward,
        decode=decoded + (gathered + 2 * G * m * (V + 1) if fast else 2 * G * N * (m + V)),
        state_bytes=state if recurrent else call.itemsize * G * N * (K + V),
    )


def _products(call: CostedCall, m: Size, chunk: int, scaled: int) -> Cost:
    """The products with m features; `scaled`, 0 or 1, says whether z is gathered by a product, too."""
    (G, N, _, V), reach = call.sizes, call.reach
    if call.form == "reference":
        return call.attending(G * N * N, m)
    in_chunks = call.causal and N != 1
    width, number = equal_chunks(N, chunk) if in_chunks else (N, 1)
    rows = G * number * width  # with the padding past the end
    # The memory: gather and read S, read z; with scales, gather z. In a chunk: weights, outputs.
    memory = product(2 * rows * m * V, 1 + reach) + product(rows * m, 1) + Cost(forward=2 * rows * m * scaled)
    return memory + call.attending(rows * width, m) if in_chunks else memory


def kernel_mechanism(name: str, feature_map: FeatureMap, source: str) -> Mechanism:
    """The `Mechanism` of linear attention with this feature map."""
    return Mechanism(
        name=name,
        family="linear",
        source=source,
        reference=partial(linear_attention_reference, feature_map=feature_map),
        fast=partial(linear_attention, feature_map=feature_map),
        causal=feature_map.causal,
        cost=partial(linear_attention_cost, feature_map=feature_map),
        positional=feature_map.positional,
        fitted=not feature_map.causal,
        same_tokens=not feature_map.causal,
        signed=feature_map.weights == "signed",
    )
