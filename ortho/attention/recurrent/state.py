"""Shared by all states that are written to, erased from and read: their operands, and what they cost.

`ortho.attention.recurrence` has the recurrence itself, token by token and in chunks.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from ortho import checks
from ortho._cost import Cost, product
from ortho._typing import Size, Tensor
from ortho.attention.call import Call
from ortho.attention.mechanism import CostedCall
from ortho.attention.scores import unit


def operands(
    call: Call,
    beta: Tensor | None = None,
    log_decay: Tensor | None = None,
    *,
    qk_l2norm: bool = True,
    erase: bool = True,
    channels: bool = False,
    most: float = 2,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor]:
    """(q, k, v, beta, log_decay, S) as the recurrence takes them.

    Keys that the mask hides neither write to the state nor let it fade. With `channels` decays are (..., M, K). Without
    `erase` keys may have any length.

    Raises ValueError for gates and a state that do not fit the keys; on the CPU also for a `beta` outside [0, most],
    for a `log_decay` above 0 or not finite and, with `erase` but without `qk_l2norm`, for keys with beta |k|^2 > 2:
    every write would enlarge the state along them.
    """
    q, k, v, hidden = call.q, call.k, call.v, None if call.key_mask is None else ~call.key_mask
    checks.gate("beta", beta, k.shape[:-1])
    checks.gate("log_decay", log_decay, k.shape if channels else k.shape[:-1])
    checks.within("beta", "write strengths", beta, 0, most)
    checks.within("log_decay", "logarithms of decays", log_decay, torch.finfo(k.dtype).min, 0)
    if erase and not qk_l2norm:
        check_growth("beta", beta, k, hidden)
    if hidden is not None:
        if erase:
            v = v.masked_fill(hidden[..., None], 0)
            beta = (torch.ones_like(k[..., 0]) if beta is None else beta).masked_fill(hidden, 0)
        else:
            k = k.masked_fill(hidden[..., None], 0)
        if log_decay is not None:
            log_decay = log_decay.masked_fill(hidden[..., None] if channels else hidden, 0)
    if qk_l2norm:
        q, k = unit(q, "q"), unit(k, "k")
    if call.scale is not None:
        q = q * call.scale
    S = call.carried("S", k.shape[-1], v.shape[-1])
    return q, k, v, beta, log_decay, v.new_zeros(*k.shape[:-2], k.shape[-1], v.shape[-1]) if S is None else S


def check_growth(name: str, strengths: Tensor | float | None, k: Tensor, hidden: Tensor | None) -> None:
    """ValueError, on the CPU, for a key along which writing would enlarge the state, strength |k|^2 > 2, unless it is
    hidden. Strengths (..., M) are 1 by default."""
    corrected = k.detach().square().sum(-1)
    corrected = corrected if strengths is None else corrected * strengths
    # Rounding, of half-precision keys and of this sum, may leave a unit key a little longer.
    most = 2 + 8 * torch.finfo(torch.bfloat16).eps
    checks.within("k", f"{name} |k|^2", corrected if hidden is None else corrected.masked_fill(hidden, 0), 0, most)


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
    """The cost of `token_by_token`; flags are 0 or 1. `fades`: whether what a key erases has faded before. `k_grad`:
    whether keys need a gradient, by default as queries do."""
    (G, N, K, V), q_grad = call.sizes, call.reach
    k_grad = q_grad if k_grad is None else k_grad
    reads, rows = G * N, G * N * steps
    # What the state holds at a key, what is written; what is read
    products = product((1 + erase) * rows * K * V, 1 + k_grad) + product(reads * K * V, 1 + q_grad)
    # The first state needs no gradient, but its decay does.
    return products - Cost(backward=2 * erase * (1 - fades) * G * K * V)


def chunks_cost(
    call: CostedCall,
    width: Size,
    number: Size,
    *,
    erase: int = 1,
    gated: int = 0,
    steps: Size = 1,
    k_grad: int | None = None,
) -> Cost:
    """The cost of `in_chunks` on `number` chunks of `width` tokens, empty ones included; flags are 0 or 1. `gated`:
    whether there are decays that need a gradient."""
    (G, N, K, V), q_grad = call.sizes, call.reach
    k_grad = q_grad if k_grad is None else k_grad
    tokens, rows = G * number * width, G * number * width * steps
    seen = tokens * steps * width  # pairs of a token and a key of its chunk
    if not erase and not call.causal:
        return product(G * N * steps * K * V, 1 + max(k_grad, gated)) + product(G * N * K * V, 1 + q_grad)
    written = product(rows * K * V, 1 + max(k_grad, gated))
    if erase:
        # Erasing; products of keys, the inverse of their system, two products with it
        pairs = rows * steps * width
        written += product(rows * K * V, 1 + max(k_grad, gated)) + product(pairs * V)
        written += Cost(forward=pairs * (4 * K + width * steps), backward=k_grad * 2 * pairs * K)
    if not call.causal:
        return written + product(G * N * K * V, 1 + q_grad)
    further = max(q_grad, k_grad, gated)  # whether weights and readers need a gradient
    read = Cost(forward=2 * seen * K, backward=2 * seen * K * (q_grad + k_grad)) + product(seen * V, 1 + further)
    return written + read + product(tokens * K * V, 1 + max(q_grad, gated))
