r"""Memories that are written to, erased from and read, one token after the other: what all of them share.

A memory is a matrix S (K, V) that answers a query with $o = S^T q$. Token t fades it, by one factor $a_t$ or by one for
each channel of the keys, replaces a share $\beta_t$ of what it holds at the key $k_t$, and then answers $q_t$:

$$S_t = (I - \beta_t k_t k_t^T)\, \mathrm{Diag}(a_t)\, S_{t-1} + \beta_t k_t v_t^T, \qquad o_t = S_t^T q_t .$$

In a call that is not causal every query reads the memory after the last key. A masked key leaves the memory as it is.
"""

from typing import Any

import torch

from ortho import _checks
from ortho._typing import Float, State, Tensor
from ortho.attention.operands import upcast

TINY = 1e-6  # beside the squared length by which a key is divided


def unit(x: Float[Tensor, "*batch N K"], name: str = "x") -> Float[Tensor, "*batch N K"]:
    """Vectors of length 1, but for very short ones, which become at most `TINY` ** -0.5 times as long: zero stays zero.

    Raises ValueError that names the argument, on the CPU, where a squared length is beyond the dtype's range: such a
    vector would become 0.
    """
    squares = (x * x).sum(-1, keepdim=True)
    _checks.within(name, "squared lengths", squares, 0, torch.finfo(x.dtype).max)
    return x * squares.add(TINY).rsqrt()


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
    **_: Any,
) -> None:
    """Refuse gates that do not fit the keys, or are out of range; `channels` says that decays are (..., M, K).

    Raises TypeError or ValueError, naming the argument; on the CPU also for a `beta` outside [0, 2], a `log_decay`
    above 0 or not finite, and, in a memory that erases, where keys are not normalised, for one along which writing
    would enlarge the memory, beta |k|^2 > 2, unless the mask (..., M) hides it.
    """
    gate("beta", beta, k, k.shape[:-1])
    gate("log_decay", log_decay, k, k.shape if channels else k.shape[:-1])
    if beta is not None:
        _checks.within("beta", "write strengths", beta, 0, 2)
    if log_decay is not None:
        _checks.within("log_decay", "logarithms of decays", log_decay, torch.finfo(log_decay.dtype).min, 0)
    if erase and not normalise:
        keys = upcast(k.detach())
        corrected = (keys**2).sum(-1)
        corrected = corrected if beta is None else beta.detach().to(keys.dtype) * corrected
        # Rounding, of the caller's keys and of this sum, may leave a unit key a little longer.
        most = 2 + 8 * max(torch.finfo(k.dtype).eps, torch.finfo(keys.dtype).eps * k.shape[-1])
        shown = corrected if attn_mask is None else corrected.masked_fill(~attn_mask, 0)
        _checks.within("k", "beta |k|^2", shown, 0, most)


def prepared(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    log_decay: Tensor | None,
    *,
    normalise: bool,
    erase: bool = True,
    attn_mask: Tensor | None,
    scale: float | None,
    initial_state: State | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor]:
    """(q, k, v, beta, log_decay, S) as the recurrence takes them; keys that the mask (..., M) hides neither write nor
    fade.

    A memory that does not `erase` takes keys of any length and no `beta`, and scales its queries by 1/sqrt(K)
    by default. Raises ValueError for a state that does not fit; on the CPU also for values whose sum may leave the
    range of the dtype.
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
        # No write enlarges what is held, so that a memory holds 2 |v| of each token at most, and is corrected by as
        # much. Were this infinite, products with weights of 0 would make it NaN in the rows of earlier tokens.
        most = torch.finfo(v.dtype).max / (4 * v.shape[-2])
        _checks.within("v", f"values of {v.shape[-2]} tokens", v, -most, most)
    if normalise:
        q, k = unit(q, "q"), unit(k, "k")
    if scale is None and not erase:
        scale = q.shape[-1] ** -0.5
    if scale is not None:
        q = q * scale
    return q, k, v, beta, log_decay, memory(initial_state, k, v)


def memory(state: State | None, k: Tensor, v: Tensor) -> Float[Tensor, "*batch K V"]:
    """The memory that a state (S,) holds; without one an empty memory."""
    shape = (*k.shape[:-2], k.shape[-1], v.shape[-1])
    if state is None:
        return v.new_zeros(shape)
    (S,) = _checks.state(state, "S")
    if S.shape != shape or S.dtype != v.dtype:
        dtype = str(v.dtype).removeprefix("torch.")
        raise ValueError(f"initial_state: expected S {dtype} {shape}, got {_checks.describe(S)}")
    return S


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
) -> tuple[Float[Tensor, "*batch N V"], Float[Tensor, "*batch K V"]]:
    """(o, the memory after the last key) as the recurrence reads; without `erase`, a key adds to what it holds."""
    # Unbound at once: to take each token by its index would make the backward pass quadratic.
    rows = []
    queries = q[..., None, :].unbind(-3) if is_causal else ()
    strengths = None if beta is None else beta[..., None, None].unbind(-3)
    decays = None
    if log_decay is not None:
        a = log_decay.exp()
        decays = (a[..., None] if a.dim() == k.dim() else a[..., None, None]).unbind(-3)  # (..., K or 1, 1)
    for t, (key, value) in enumerate(zip(k[..., None, :].unbind(-3), v[..., None, :].unbind(-3), strict=True)):
        if decays is not None:
            S = decays[t] * S
        new = value - key @ S if erase else value  # (..., 1, V)
        if strengths is not None:
            new = strengths[t] * new
        S = S + key.mT @ new
        if is_causal:
            rows.append(queries[t] @ S)
    return torch.cat(rows, -2) if is_causal else q @ S, S


def gate(name: str, value: Tensor | None, k: Tensor, shape: tuple[int, ...]) -> None:
    """TypeError or ValueError unless a gate is None or a tensor of that shape, on the device of k.

    Its dtype is its own: autocast makes gates in float32 beside keys in half precision.
    """
    if value is None:
        return
    _checks.float_tensor(name, value)
    if value.shape != shape:
        raise ValueError(f"{name}: expected shape {tuple(shape)} like the keys, got {tuple(value.shape)}")
    if value.device != k.device:
        raise TypeError(f"{name}: expected a tensor on {k.device} like the keys, got one on {value.device}")
