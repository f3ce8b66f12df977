"""What all states that are written to, erased from and read share: their operands, and their two forms.

`ortho.attention.recurrence` has the recurrence itself, token by token, `chunked_recurrence` in chunks.
"""

from collections.abc import Callable
from typing import Any

import torch

from ortho import checks
from ortho._typing import State, Tensor
from ortho.attention.call import AttentionFunction, Call
from ortho.attention.forms import two_forms
from ortho.attention.recurrence import token_by_token
from ortho.attention.scores import unit

Operands = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor]  # q, k, v, beta, log_decay, S


def in_two_forms(
    prepare: Callable[..., tuple[Operands, dict[str, Any]]], by_chunks: Callable[..., Any]
) -> tuple[AttentionFunction, AttentionFunction]:
    """The two forms of a recurrence: token by token, and by products over chunks. `prepare` makes of a call its
    operands, and the options that `token_by_token` and `by_chunks` share."""

    def one_by_one(call: Call, x: Operands, kind: dict[str, Any]) -> tuple[Tensor, State]:
        o, S = token_by_token(*x, is_causal=call.is_causal, **kind)
        return o, (S,)

    def chunked(call: Call, x: Operands, kind: dict[str, Any], *, chunk: int | None = None) -> tuple[Tensor, State]:
        o, S = by_chunks(*x, is_causal=call.is_causal, chunk=chunk, **kind)
        return o, (S,)

    one_by_one.__name__, chunked.__doc__ = "token_by_token", by_chunks.__doc__
    return two_forms(prepare, one_by_one, chunked, keeps="sums")


def operands(
    call: Call,
    beta: Tensor | None = None,
    log_decay: Tensor | None = None,
    *,
    qk_l2norm: bool = True,
    erase: bool = True,
    channels: bool = False,
    most: float = 2,
) -> Operands:
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
