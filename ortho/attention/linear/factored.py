r"""Attention whose kernel factorises, $\kappa(q, k) = \phi(q)^T \phi(k)$: its definition, and its form linear in N.

$o_i = \sum_j \kappa(q_i, k_j)\, v_j / \sum_j \kappa(q_i, k_j)$. The sums over keys, $S = \sum_j \phi(k_j) v_j^T$ and
$z = \sum_j \phi(k_j)$, are the same for every query, so that nothing need be N x M (Katharopoulos et al. 2020,
arXiv:2006.16236, section 3.2; causal: section 3.3, here in chunks). The attention does not know its kernel: that is a
`FeatureMap`, and a mechanism is these functions with a map of its own.
"""

from collections.abc import Callable
from functools import partial
from math import inf, nan

import torch
from torch.nn.functional import pad

from ortho import _checks
from ortho._autocast import no_autocast
from ortho._checks import checked
from ortho._typing import Bool, Float, State, Tensor
from ortho.attention.chunking import chunks, default_chunk, pad_tokens
from ortho.attention.linear.factored_cost import feature_cost
from ortho.attention.linear.factored_kernels import AllAtOnce, Chunked, divisors
from ortho.attention.linear.feature_maps import FeatureMap, Features
from ortho.attention.mechanism import Mechanism
from ortho.attention.operands import blocked_pairs, hidden_keys, known_tokens, with_past, working


def kernel_mechanism(name: str, feature_map: FeatureMap, source: str) -> Mechanism:
    """The entry of the attention with that map."""
    return Mechanism(
        name=name,
        family="kernel",
        source=source,
        reference=partial(feature_attention_reference, feature_map=feature_map),
        fast=partial(feature_attention, feature_map=feature_map),
        causal=feature_map.causal,
        exact=False,
        cost=partial(feature_cost, feature_map=feature_map),
        positional=feature_map.positional,
        fitted=not feature_map.causal,
        same_tokens=not feature_map.causal,
        signed=feature_map.weights == "signed",
    )


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
    r"""The weights $\kappa(q_i, k_j)$ of all pairs, not yet divided by their row sums; 0 where one may not attend.

    With a `log_k`, up to a factor of each row. `q_start` is the number of keys before the first query's own, and
    `same_tokens` as in `feature_attention_reference`.
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


@checked(shapes=False)
def feature_attention_reference(
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
    """The N x M weights of the kernel, materialised: their product with v, divided by their row sums.

    The arguments and errors are those of `softmax_attention_reference`, and so is the state: earlier keys and values.
    `same_tokens` says that query i and key i are the same token: a map that looks at the whole sequence then leaves out
    the queries at hidden keys' positions too. A row whose weights are all 0 gives 0. On the CPU, rows whose weights
    leave the range of the dtype raise ValueError.
    """
    _checks.scale_factor(scale)
    _in_parts(feature_map, is_causal, initial_state, return_state)
    known_tokens(same_tokens, q, k)
    k, v = with_past(q, k, v, is_causal, attn_mask, initial_state)
    past = 0 if initial_state is None else initial_state[0].shape[-2]
    with no_autocast(q):
        weights = kernel_weights(
            feature_map,
            working(q),
            working(k),
            is_causal=is_causal,
            attn_mask=attn_mask,
            scale=scale,
            q_start=past,
            same_tokens=same_tokens,
        )
        total = weights.sum(-1, keepdim=True)
        # A quotient, and not the product with 1 / total, whose gradient squares it and may overflow.
        o = weights @ working(v) / divisors(total)

        def empty() -> Tensor | None:
            blocked = blocked_pairs(q.shape[-2], k.shape[-2], is_causal, attn_mask, q.device)
            return None if attn_mask is None or blocked is None else blocked.all(-1, keepdim=True)

        o = _in_range(o, total, feature_map, empty).to(q.dtype)
    return (o, (k, v)) if return_state else o


@checked(shapes=False)
def feature_attention(
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
    """`feature_attention_reference` in time and memory linear in N; a causal call goes in chunks of at most `chunk`.

    By default these are of 64 tokens, on a GPU of so many that there are 128 of them at most. Nothing is computed in
    less than float32, half precision included, which on a GPU leaves its fast products of half precision unused.

    The state is (S (..., m, V), z (..., m)); of a map that scales keys then the largest scale's logarithm (...), by
    whose exponential S and z are divided; of a positional one then the number of tokens seen (). Half precision is
    computed, and its state kept, in float32: sums over a long sequence overflow float16. It cannot be differentiated
    twice; the reference can.

    Raises ValueError for an `attn_mask` that is not one row for all queries, or that stands beside an initial state, in
    which keys are no longer apart; and, on the CPU, for features so small or large that a row's weights leave the range
    of the dtype (elsewhere, where to look would stall, such a row is NaN).
    """
    _checks.qkv(q, k, v, attn_mask, is_causal)
    _checks.scale_factor(scale)
    chunk = default_chunk(q) if chunk is None else _checks.positive_int("chunk", chunk)
    _in_parts(feature_map, is_causal, initial_state, return_state)
    known_tokens(same_tokens, q, k)
    hidden = hidden_keys(attn_mask, k, initial_state)  # (..., M)
    length, dtype = q.shape[-2], q.dtype
    with no_autocast(q):
        q, k, v = (working(x) for x in (q, k, v))
        S, z, peak, start = _memory(initial_state, feature_map, k, v)
        hidden_q = hidden if same_tokens else None
        f = feature_map(q, k, scale=scale, q_start=start, k_start=start, hidden=hidden, hidden_q=hidden_q)
        if (f.log_k is not None) != feature_map.scales_keys:
            raise TypeError(f"feature_map: expected a log_k if and only if it scales keys, got {feature_map!r}")
        if hidden is not None:
            f = Features(f.q, f.k.masked_fill(hidden[..., None], 0), _lowest(f.log_k, hidden))
        if is_causal and length > 1:  # a lone query is the last: it has no future
            width, behind = chunks(length, chunk)
            s = f.log_k if f.log_k is None or not behind else pad(f.log_k, (0, behind), value=-inf)
            o, total, S, z = Chunked.apply(*(pad_tokens(x, behind) for x in (f.q, f.k, v)), S, z, s, peak, width)
            o, total = o[..., :length, :], total[..., :length, :]
            peak = None if peak is None or f.log_k is None else torch.maximum(peak, f.log_k.amax(-1))
        else:
            scales = None
            if peak is not None and f.log_k is not None:
                before, peak = peak, torch.maximum(peak, f.log_k.amax(-1))
                fade = (before - peak).exp()[..., None]
                S, z = S * fade[..., None], z * fade
                scales = (f.log_k - peak[..., None]).exp()[..., None]  # (..., M, 1)
            o, total, S, z = AllAtOnce.apply(f.q, f.k, v, S, z, scales)

        def empty() -> Tensor | None:
            if hidden is None:
                return None
            return (hidden.cummin(-1).values if is_causal else hidden.all(-1, keepdim=True))[..., None]

        o = _in_range(o, total, feature_map, empty).to(dtype)
    if not return_state:
        return o
    seen = (torch.as_tensor(start + k.shape[-2], device=k.device),) if feature_map.positional else ()
    return o, (S, z, *(() if peak is None else (peak,)), *seen)


def _in_parts(feature_map: FeatureMap, is_causal: bool, initial_state: State | None, return_state: bool) -> None:
    """ValueError if a sequence is to be seen in parts by a map that looks at all of it."""
    if not feature_map.causal and (is_causal or return_state or initial_state is not None):
        name = "is_causal" if is_causal else "return_state" if return_state else "initial_state"
        raise ValueError(
            f"{name}: expected a feature map that looks at one token at a time, got {type(feature_map).__name__}, "
            "which looks at the whole sequence unless it is given what it would find there"
        )


def _lowest(log_k: Tensor | None, hidden: Tensor) -> Tensor | None:
    """The keys' logarithms with those of hidden keys below all others; not -inf, whose difference to itself is NaN."""
    return None if log_k is None else log_k.masked_fill(hidden, torch.finfo(log_k.dtype).min)


def _memory(
    state: State | None, feature_map: FeatureMap, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, Tensor | None, int | Tensor]:
    """(S, z, peak, start) that the state holds; without one, no key and no scale yet, at position 0."""
    lead, m, V = k.shape[:-2], feature_map.width(k.shape[-1]), v.shape[-1]
    shapes = {"S": (*lead, m, V), "z": (*lead, m)} | ({"peak": tuple(lead)} if feature_map.scales_keys else {})
    if state is None:
        peak = v.new_full(lead, torch.finfo(v.dtype).min) if feature_map.scales_keys else None
        return v.new_zeros(shapes["S"]), v.new_zeros(shapes["z"]), peak, 0
    seen = {"seen": ()} if feature_map.positional else {}
    state = _checks.state(state, *shapes, *seen)
    expected = [(v.dtype, shape) for shape in shapes.values()] + [(torch.int64, shape) for shape in seen.values()]
    if [(x.dtype, tuple(x.shape)) for x in state] != expected:
        wanted = ", ".join(f"{dtype} {shape}".removeprefix("torch.") for dtype, shape in expected)
        raise ValueError(f"initial_state: expected {wanted}, got {_checks.describe(state)}")
    named = dict(zip((*shapes, *seen), state, strict=True))
    return named["S"], named["z"], named.get("peak"), named.get("seen", 0)


def _in_range(o: Tensor, total: Tensor, feature_map: FeatureMap, empty: Callable[[], Tensor | None]) -> Tensor:
    """The rows o (..., N, V) of totals (..., N, 1) within the range of the dtype, and not so small that it holds few
    digits of them but where rows are `empty`, without a key. For others ValueError on the CPU, and elsewhere NaN.
    """
    shown = _checks.shows_values(total)
    if not (shown or _checks.reads_values(total)):
        return o
    limits = torch.finfo(total.dtype)
    least = {"signed": -limits.max, "non-negative": 0.0, "positive": limits.tiny / limits.eps}[feature_map.weights]
    rows = empty()
    total = total.detach() if rows is None else total.detach().masked_fill(rows, 1)
    if shown:
        return o.masked_fill(~((total >= least) & (total <= limits.max)), nan)
    _checks.within("q, k", f"row sums of the {total.dtype} weights", total, least, limits.max)
    return o
