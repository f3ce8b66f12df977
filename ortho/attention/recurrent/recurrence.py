r"""Shared by all states that are written to, erased from and read, token by token.

A state is a matrix S (K, V) that answers a query with $o = S^T q$. Token t lets it fade, by one factor $a_t$ or by one
for each channel of the keys, replaces a share $\beta_t$ of what it holds at the key $k_t$, and then reads it by $q_t$:

$$S_t = (I - \beta_t k_t k_t^T)\, \mathrm{Diag}(a_t)\, S_{t-1} + \beta_t k_t v_t^T, \qquad o_t = S_t^T q_t .$$

In a call that is not causal every query reads the state after the last key. A masked key leaves the state unchanged.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from ortho import _checks
from ortho._checks import carried, check_growth, gate
from ortho._cost import Cost, product
from ortho._typing import Float, Size, State, Tensor
from ortho.attention.mechanism import CostedCall
from ortho.attention.scores import unit


def recurrence(
    q: Float[Tensor, "*batch N K"],
    k: Float[Tensor, "*batch M K"],
    v: Float[Tensor, "*batch M V"],
    beta: Float[Tensor, "*batch M"] | None,
    log_decay: Float[Tensor, "..."] | None,
    S: Float[Tensor, "*batch K V"],
    *,
    is_causal: bool,
    erase: bool = True,
    before_fading: bool = False,
    steps: int = 1,
) -> tuple[Float[Tensor, "*batch N V"], Float[Tensor, "*batch K V"]]:
    """(o, the state after the last key) by the formula, with one query after every `steps` keys. Without `erase` a key
    only adds to the state. With `before_fading` it replaces what the state held before it faded."""
    # Unbound at once: indexing each token would make the backward pass quadratic.
    rows = []
    queries = q[..., None, :].unbind(-3) if is_causal else ()
    strengths = None if beta is None else beta[..., None, None].unbind(-3)
    decays = None
    if log_decay is not None:
        a = log_decay.exp()
        decays = (a[..., None] if a.dim() == k.dim() else a[..., None, None]).unbind(-3)  # (..., K or 1, 1)
    for t, (key, value) in enumerate(zip(k[..., None, :].unbind(-3), v[..., None, :].unbind(-3), strict=True)):
        old = S
        if decays is not None:
            S = decays[t] * S
        new = value - key @ (old if before_fading else S) if erase else value  # (..., 1, V)
        if strengths is not None:
            new = strengths[t] * new
        S = S + key.mT @ new
        if is_causal and (t + 1) % steps == 0:
            rows.append(queries[t // steps] @ S)
    return torch.cat(rows, -2) if is_causal else q @ S, S


def memory_cost(call: CostedCall, in_chunks: Callable[[CostedCall], Cost], **recurring: Any) -> Cost:
    """The fast form's cost by `in_chunks`, the reference's by `recurrence_cost` with these arguments. Includes the
    state (K, V), and decoding one more token, which is a call on that token."""

    def of(call: CostedCall) -> Cost:
        return in_chunks(call) if call.form == "fast" else recurrence_cost(call, **recurring)

    G, _, K, V = call.sizes
    token = of(call._replace(N=1, causal=True))
    return replace(of(call), decode=token.forward, state_bytes=call.item * G * K * V)


def recurrence_cost(
    call: CostedCall,
    *,
    erase: int = 1,
    fades: int = 0,
    steps: Size = 1,
    k_grad: int | None = None,
) -> Cost:
    """The cost of `recurrence`; flags are 0 or 1. `fades`: whether what a key erases has faded before. `k_grad`:
    whether keys need a gradient, by default as queries do."""
    (G, N, K, V), q_grad = call.sizes, call.reach
    k_grad = q_grad if k_grad is None else k_grad
    reads, rows = G * N, G * N * steps
    # What the state holds at a key, what is written; what is read
    products = product((1 + erase) * rows * K * V, 1 + k_grad) + product(reads * K * V, 1 + q_grad)
    # The first state needs no gradient, but its decay does.
    return products - Cost(backward=2 * erase * (1 - fades) * G * K * V)


def read_at_end_cost(call: CostedCall) -> Cost:
    """The cost of N queries that all read the last state."""
    G, N, K, V = call.sizes
    return product(G * N * K * V, 1 + call.reach)


def check_writes(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    attn_mask: Tensor | None = None,
    beta: Tensor | None = None,
    log_decay: Tensor | None = None,
    normalise: bool = True,
    channels: bool = False,
    erase: bool = True,
    most: float = 2,
    **_: Any,
) -> None:
    """Refuse gates that do not fit the keys, or are out of range; `channels` says that decays are (..., M, K).

    Raises TypeError or ValueError, naming the argument; on the CPU also for a `beta` outside [0, most], for a
    `log_decay` above 0 or not finite, and, with `erase` but without `normalise`, for keys that `check_growth` refuses.
    """
    gate("beta", beta, k, k.shape[:-1])
    gate("log_decay", log_decay, k, k.shape if channels else k.shape[:-1])
    if beta is not None:
        _checks.within("beta", "write strengths", beta, 0, most)
    if log_decay is not None:
        _checks.within("log_decay", "logarithms of decays", log_decay, torch.finfo(log_decay.dtype).min, 0)
    if erase and not normalise:
        check_growth("beta", beta, k, attn_mask)


def prepared(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    log_decay: Tensor | None,
    attn_mask: Tensor | None,
    scale: float | None,
    initial_state: State | None,
    *,
    normalise: bool,
    erase: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor]:
    """(q, k, v, beta, log_decay, S) as the recurrence takes them. Keys that the mask (..., M) hides neither write to
    the state nor let it fade.

    Without `erase` keys may have any length. Raises ValueError for an `initial_state` that does not fit; on the CPU,
    with `erase`, also for values whose sum may leave the range of the dtype.
    """
    if attn_mask is not None:
        hidden = ~attn_mask
        if erase:
            v = v.masked_fill(hidden[..., None], 0)
            beta = (torch.ones_like(k[..., 0]) if beta is None else beta).masked_fill(hidden, 0)
        else:
            k = k.masked_fill(hidden[..., None], 0)
        if log_decay is not None:
            log_decay = log_decay.masked_fill(hidden[..., None] if log_decay.dim() == k.dim() else hidden, 0)
    if erase:
        # No write enlarges what is held, so a state holds at most 2 |v| of each token, and is corrected by at most as
        # much. If that were infinite, products with weights of 0 would put NaN into the rows of earlier tokens.
        most = torch.finfo(v.dtype).max / (4 * v.shape[-2])
        _checks.within("v", f"values of {v.shape[-2]} tokens", v, -most, most)
    if normalise:
        q, k = unit(q, "q"), unit(k, "k")
    if scale is not None:
        q = q * scale
    shape = (*k.shape[:-2], k.shape[-1], v.shape[-1])
    if initial_state is None:
        return q, k, v, beta, log_decay, v.new_zeros(shape)
    (S,) = _checks.state(initial_state, "S")
    return q, k, v, beta, log_decay, carried("S", S, shape, v.dtype)
