r"""Attention whose kernel factorises, $\kappa(q, k) = \phi(q)^T \phi(k)$: its definition, and its form linear in N.

$o_i = \sum_j \kappa(q_i, k_j)\, v_j / \sum_j \kappa(q_i, k_j)$. The sums over keys, $S = \sum_j \phi(k_j) v_j^T$ and
$z = \sum_j \phi(k_j)$, are the same for every query, so that nothing need be N x M (Katharopoulos et al. 2020,
arXiv:2006.16236, section 3.2; causal: section 3.3, here in chunks). The attention does not know its kernel: a mechanism
is a feature map, handed to the functions of this file.
"""

from collections.abc import Callable
from math import inf
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from ortho import _checks
from ortho._typing import Bool, Float, State, Tensor
from ortho.attention.operands import blocked_pairs, with_past

# Within a chunk of C the weights are materialised, N C numbers; from chunk to chunk S is carried, N m V / C numbers.
# The two are equal at C = sqrt(m V), which is 64 for heads of width 64; at m = 256, 64 was the fastest as well.
CHUNK = 64


class Features(NamedTuple):
    r"""A kernel in factors, $\kappa(q_i, k_j) = e^{s_j}\, \phi(q_i)^T \phi(k_j)$ with non-negative $\phi$.

    `log_k`, the $s_j$, keeps the features of large and small keys in range together; it must carry no gradient. Any
    factor of the query alone cancels in the attention, so a map may scale each query's features as it likes.
    """

    q: Float[Tensor, "*batch N m"]
    k: Float[Tensor, "*batch M m"]
    log_k: Float[Tensor, "*batch M"] | None = None


FeatureMap = Callable[[Tensor, Tensor], Features]


def feature_attention_reference(
    feature_map: FeatureMap,
    q: Float[Tensor, "*batch N K"],
    k: Float[Tensor, "*batch M K"],
    v: Float[Tensor, "*batch M V"],
    *,
    is_causal: bool = False,
    attn_mask: Bool[Tensor, "..."] | None = None,
    initial_state: State | None = None,
    return_state: bool = False,
) -> Float[Tensor, "*batch N V"] | tuple[Float[Tensor, "*batch N V"], State]:
    """The N x M weights of the kernel, materialised: their product with v, divided by their row sums.

    The arguments and errors are those of `softmax_attention_reference`, and so is the state: earlier keys and values.
    """
    k, v = with_past(q, k, v, is_causal, attn_mask, initial_state)
    blocked = blocked_pairs(q.shape[-2], k.shape[-2], is_causal, attn_mask, q.device)
    with torch.autocast(q.device.type, enabled=False):
        f = feature_map(_working(q), _working(k))
        weights = f.q @ f.k.mT  # (..., N, M)
        if f.log_k is not None:
            s = f.log_k[..., None, :]
            if blocked is not None:
                s = s.masked_fill(blocked, torch.finfo(s.dtype).min)
            weights = weights * (s - s.amax(-1, keepdim=True)).exp()
        if blocked is not None:
            weights = weights.masked_fill(blocked, 0)
        o = _divide(weights @ _working(v), weights.sum(-1, keepdim=True), attn_mask is None).to(q.dtype)
    return (o, (k, v)) if return_state else o


def feature_attention(
    feature_map: FeatureMap,
    q: Float[Tensor, "*batch N K"],
    k: Float[Tensor, "*batch M K"],
    v: Float[Tensor, "*batch M V"],
    *,
    is_causal: bool = False,
    attn_mask: Bool[Tensor, "..."] | None = None,
    initial_state: State | None = None,
    return_state: bool = False,
    chunk: int = CHUNK,
) -> Float[Tensor, "*batch N V"] | tuple[Float[Tensor, "*batch N V"], State]:
    """`feature_attention_reference` in time and memory linear in N.

    The state is (S (..., m, V), z (..., m)), with a `log_k` also its maximum (...), by whose exponential S and z are
    divided. Half precision is computed, and its state kept, in float32: sums over a long sequence overflow float16.

    Raises ValueError for an `attn_mask` that is not one row for all queries, or that stands beside an initial state, in
    which keys are no longer apart; and, on the CPU, for features so small or large that a row's weights leave the range
    of the dtype (elsewhere, where to look would stall, such a row is 0 or NaN).
    """
    _checks.qkv(q, k, v, attn_mask, is_causal)
    _checks.positive_int("chunk", chunk)
    hidden = _hidden_keys(attn_mask, k, initial_state)  # (..., M)
    length, dtype = q.shape[-2], q.dtype
    in_chunks = is_causal and length > 1  # a lone query is the last: it has no future
    width, behind = chunks(length, chunk) if in_chunks else (length, 0)
    with torch.autocast(q.device.type, enabled=False):
        q, k, v = (_working(x) for x in (q, k, v))
        v = torch.cat([v, torch.ones_like(v[..., :1])], -1)  # z is S for the value 1: (..., M, V + 1)
        if hidden is not None:
            v = v.masked_fill(hidden[..., None], 0)
        if behind:
            q, k, v = (pad(x, (0, 0, 0, behind)) for x in (q, k, v))
        f = feature_map(q, k)
        if f.log_k is not None:
            f = f._replace(log_k=_log_k(f.log_k, hidden, behind))
        memory, peak = _memory(initial_state, f, v)
        o, memory, peak = _in_chunks(f, v, memory, peak, width) if in_chunks else _at_once(f, v, memory, peak)
        o, total = (o[..., :length, :] if behind else o).split([v.shape[-1] - 1, 1], -1)
        o = _divide(o, total, attn_mask is None).to(dtype)
    state = (memory[..., :-1], memory[..., -1]) if peak is None else (memory[..., :-1], memory[..., -1], peak)
    return (o, state) if return_state else o


def _at_once(f: Features, v: Tensor, memory: Tensor, peak: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Every query reads the memory that holds all keys: (numerators and totals, memory, peak)."""
    if f.log_k is not None and peak is not None:
        before, peak = peak, torch.maximum(peak, f.log_k.amax(-1))
        memory = memory * (before - peak).exp()[..., None, None]
        v = v * (f.log_k - peak[..., None]).exp()[..., None]
    memory = memory + f.k.mT @ v  # (..., m, V + 1)
    return f.q @ memory, memory, peak


def _in_chunks(
    f: Features, v: Tensor, memory: Tensor, peak: Tensor | None, width: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Query i reads keys 0..i: in its own chunk by weights, in those before by their memory.

    Every exponent below is relative to the largest s up to the row (or up to the end of the chunk, for what later
    chunks read), so that it is at most 0 and nothing that a row reads depends on keys after it.
    """
    q, k, v = (x.unflatten(-2, (-1, width)) for x in (f.q, f.k, v))  # (..., n, C, ·)
    weights = q @ k.mT  # (..., n, C, C)
    if f.log_k is None or peak is None:
        gathered, weights = k.mT @ v, weights.tril()
    else:
        peaks = torch.cat([peak[..., None], f.log_k], -1).cummax(-1).values  # (..., 1 + N)
        start, end, peak = peaks[..., :-1:width], peaks[..., width::width], peaks[..., -1]  # (..., n)
        s, row = (x.unflatten(-1, (-1, width)) for x in (f.log_k, peaks[..., 1:]))  # (..., n, C)
        fades = (start - end).exp()[..., None, None].unbind(-3)
        future = torch.ones(width, width, dtype=torch.bool, device=v.device).triu(1)
        weights = weights * (s[..., None, :] - row[..., None]).masked_fill(future, -inf).exp()
        gathered = k.mT @ (v * (s - end[..., None]).exp()[..., None])  # (..., n, m, V + 1)
    memories = [memory]
    for i, new in enumerate(gathered.unbind(-3)):
        memories.append(new + (memories[i] if f.log_k is None else memories[i] * fades[i]))
    past = q @ torch.stack(memories[:-1], -3)  # (..., n, C, V + 1)
    if f.log_k is not None:
        past = past * (start[..., None] - row).exp()[..., None]
    return (weights @ v + past).flatten(-3, -2), memories[-1], peak


def _working(x: Tensor) -> Tensor:
    """float32 at least; and contiguous, which a layer's heads are not: else each product would copy its operands."""
    return x.to(torch.promote_types(x.dtype, torch.float32)).contiguous()


def chunks(length: int, chunk: int) -> tuple[int, int]:
    """The width of the fewest, equally wide chunks of at most `chunk`, and how much longer than `length` they are."""
    number = -(-length // chunk)
    width = -(-length // number)
    return width, number * width - length


def _hidden_keys(attn_mask: Tensor | None, k: Tensor, initial_state: State | None) -> Tensor | None:
    """True where no query may attend to a key, (..., M)."""
    if attn_mask is None:
        return None
    if initial_state is not None:
        raise ValueError("attn_mask: expected None beside an initial_state, whose keys are summed and cannot be masked")
    if attn_mask.dim() > 1 and attn_mask.shape[-2] != 1:
        shape = tuple(attn_mask.shape)
        raise ValueError(f"attn_mask: expected a mask of keys, of shape (..., 1, {k.shape[-2]}), got {shape}")
    return ~attn_mask.expand(*k.shape[:-2], 1, k.shape[-2])[..., 0, :]


def _log_k(log_k: Tensor, hidden: Tensor | None, behind: int) -> Tensor:
    """The keys' logarithms with those of hidden keys, and of the padding behind the end, below all others."""
    lowest = torch.finfo(log_k.dtype).min  # not -inf, of which the difference to itself is NaN
    log_k = log_k[..., : log_k.shape[-1] - behind]
    if hidden is not None:
        log_k = log_k.masked_fill(hidden, lowest)
    return pad(log_k, (0, behind), value=lowest) if behind else log_k


def _memory(state: State | None, f: Features, v: Tensor) -> tuple[Tensor, Tensor | None]:
    """What the state holds, S and z side by side (..., m, V + 1), and its peak (...)."""
    lead, m, width = f.k.shape[:-2], f.k.shape[-1], v.shape[-1] - 1
    if state is None:
        peak = None if f.log_k is None else torch.full(lead, torch.finfo(v.dtype).min, dtype=v.dtype, device=v.device)
        return v.new_zeros(*lead, m, width + 1), peak
    shapes = [(*lead, m, width), (*lead, m), *([] if f.log_k is None else [tuple(lead)])]
    state = _checks.state(state, *("S", "z", "peak")[: len(shapes)])
    if [tuple(x.shape) for x in state] != shapes or any(x.dtype != v.dtype for x in state):
        got = ", ".join(_checks.describe(x) for x in state)
        raise ValueError(f"initial_state: expected {v.dtype} tensors of shapes {shapes}, got {got}")
    return torch.cat([state[0], state[1][..., None]], -1), state[2] if len(state) == 3 else None


def _divide(o: Tensor, total: Tensor, every_row: bool) -> Tensor:
    """o / total, or 0 for a row without weight; ValueError if `every_row` should have some but has left the range."""
    limits = torch.finfo(total.dtype)
    if every_row:
        what = f"row sums of the {total.dtype} weights"
        _checks.within("q, k", what, total, limits.tiny / limits.eps, limits.max)
    # A quotient, and not the product with 1 / total, whose gradient squares it and may overflow.
    return o / total.masked_fill(total < limits.tiny, inf)
