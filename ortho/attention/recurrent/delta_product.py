r"""DeltaProduct: several steps of the delta rule a token (Siems et al. 2025, arXiv:2502.10297, equation 5).

With $n_h$ keys $k_{t,j}$, values $v_{t,j}$ and write strengths $\beta_{t,j}$ a token,

$$S_{t,j} = (I - \beta_{t,j} k_{t,j} k_{t,j}^T) S_{t,j-1} + \beta_{t,j} k_{t,j} v_{t,j}^T, \qquad S_{t,0} = S_{t-1,n_h},
\qquad o_t = S_{t,n_h}^T q_t .$$

That is the delta rule on a sequence $n_h$ times as long, read after every $n_h$-th key. A token multiplies the memory
by a product of $n_h$ transitions: for $\beta$ up to 2, by any orthogonal matrix that $n_h$ reflections make.
"""

import torch

from ortho import _checks
from ortho._autocast import no_autocast
from ortho._checks import checked
from ortho._typing import Bool, Float, State, Tensor
from ortho.attention.chunking import chunks, default_chunk, pad_tokens
from ortho.attention.mechanism import Mechanism
from ortho.attention.operands import mask_of_keys
from ortho.attention.recurrent import memory
from ortho.attention.recurrent.delta_kernels import Write
from ortho.attention.recurrent.delta_product_cost import delta_product_cost
from ortho.attention.recurrent.delta_product_gates import LaterOperands, StepStrengths


@checked(shapes=False)
def delta_product_reference(
    q: Float[Tensor, "*batch N K"],
    k: Float[Tensor, "*batch M K"],
    v: Float[Tensor, "*batch M V"],
    *,
    beta: Float[Tensor, "*batch M steps"] | None = None,
    more_keys: Float[Tensor, "*batch M more K"] | None = None,
    more_values: Float[Tensor, "*batch M more V"] | None = None,
    normalise: bool = True,
    is_causal: bool = False,
    attn_mask: Bool[Tensor, "..."] | None = None,
    scale: float | None = None,
    initial_state: State | None = None,
    return_state: bool = False,
) -> Float[Tensor, "*batch N V"] | tuple[Float[Tensor, "*batch N V"], State]:
    r"""The recurrence, one step after the other.

    A token's steps are (k, v) and those of `more_keys` and `more_values`, which come together; without them it has one,
    and this is the delta rule. `beta` in [0, 2] has one number a step, and is 1 by default. All else is as in
    `delta_rule_reference`: keys are divided by their lengths unless `normalise` is False, and the state is
    (S (..., K, V),) in float32 at least.

    Raises TypeError or ValueError, naming the argument, for operands that do not fit together; on the CPU also for
    gates outside their range and, without `normalise`, for keys with $\beta |k|^2 > 2$.
    """
    steps, x = _operands(q, k, v, beta, more_keys, more_values, normalise, is_causal, attn_mask, scale, initial_state)
    with no_autocast(q):
        if is_causal:
            o, S = _by_token(x, steps)
        else:
            o, S = memory.recurrence(x.q, x.k, x.v, x.beta, None, x.S, is_causal=False)
    o = o.to(x.dtype)
    return (o, (S,)) if return_state else o


def _by_token(x: memory.MemoryOperands, steps: int) -> tuple[Tensor, Tensor]:
    """(o, the memory after the last step): each token writes its keys, and is answered."""
    k, v = (operand.unflatten(-2, (-1, steps)).unbind(-3) for operand in (x.k, x.v))
    beta = (None,) * len(k) if x.beta is None else x.beta.unflatten(-1, (-1, steps)).unbind(-2)
    rows, S = [], x.S
    for query, keys, values, strengths in zip(x.q[..., None, :].unbind(-3), k, v, beta, strict=True):
        o, S = memory.recurrence(query, keys, values, strengths, None, S, is_causal=False)
        rows.append(o)
    return torch.cat(rows, -2), S


@checked(shapes=False)
def delta_product(
    q: Float[Tensor, "*batch N K"],
    k: Float[Tensor, "*batch M K"],
    v: Float[Tensor, "*batch M V"],
    *,
    beta: Float[Tensor, "*batch M steps"] | None = None,
    more_keys: Float[Tensor, "*batch M more K"] | None = None,
    more_values: Float[Tensor, "*batch M more V"] | None = None,
    normalise: bool = True,
    is_causal: bool = False,
    attn_mask: Bool[Tensor, "..."] | None = None,
    scale: float | None = None,
    initial_state: State | None = None,
    return_state: bool = False,
    chunk: int | None = None,
) -> Float[Tensor, "*batch N V"] | tuple[Float[Tensor, "*batch N V"], State]:
    """`delta_product_reference` by matrix products over chunks of at most `chunk` steps, though of no part of a token.

    What is written is the delta rule's, on the longer sequence; queries are answered for each token alone. It cannot be
    differentiated twice; the reference can.
    """
    chunk = default_chunk(k) if chunk is None else _checks.positive_int("chunk", chunk)
    steps, x = _operands(q, k, v, beta, more_keys, more_values, normalise, is_causal, attn_mask, scale, initial_state)
    with no_autocast(q):
        o, S = _in_chunks(x, steps, is_causal, chunk)
    o = o.to(x.dtype)
    return (o, (S,)) if return_state else o


def _in_chunks(x: memory.MemoryOperands, steps: int, is_causal: bool, chunk: int) -> tuple[Tensor, Tensor]:
    """(o, the memory after the last step)."""
    *lead, tokens, _ = x.k.shape
    tokens //= steps
    width, behind = chunks(tokens, max(1, chunk // steps))  # of a chunk, in tokens
    beta = torch.ones_like(x.k[..., 0]) if x.beta is None else x.beta

    def cut(tensor: Tensor, rows: int = steps) -> Tensor:  # (..., rows a token, width) -> (G, n, C, width)
        n = (tokens + behind) // width
        return pad_tokens(tensor, rows * behind).reshape(-1, n, rows * width, tensor.shape[-1])

    k = cut(x.k)
    written, before, S = Write.apply(k, cut(x.v), cut(beta[..., None]), x.S.reshape(-1, *x.S.shape[-2:]), None)
    S = S.view(x.S.shape)
    if not is_causal:
        return x.q @ S, S
    q = cut(x.q, 1)
    future = torch.ones(width, width, dtype=torch.bool, device=q.device).triu(1).repeat_interleave(steps, 1)
    weights = (q @ k.mT).masked_fill(future, 0)  # (G, n, tokens, steps) of a chunk
    o = q @ before + weights @ written
    return o.reshape(*lead, tokens + behind, -1)[..., :tokens, :], S


def _operands(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    more_keys: Tensor | None,
    more_values: Tensor | None,
    normalise: bool,
    is_causal: bool,
    attn_mask: Tensor | None,
    scale: float | None,
    initial_state: State | None,
) -> tuple[int, memory.MemoryOperands]:
    """(steps a token, the operands with a row a step and a query a token)."""
    _checks.qkv(q, k, v, attn_mask, is_causal)
    M = k.shape[-2]
    if (more_keys is None) != (more_values is None):
        given, missing = ("more_values", "more_keys") if more_keys is None else ("more_keys", "more_values")
        raise ValueError(f"{missing}: expected beside {given}, got None")
    steps = 1
    if more_keys is not None and more_values is not None:
        steps += _later("more_keys", more_keys, k)
        if _later("more_values", more_values, v) != steps - 1:
            raise ValueError(
                f"more_values: expected {steps - 1} a token like more_keys, got shape {tuple(more_values.shape)}"
            )
        k, v = (
            torch.cat([first[..., None, :], later.to(first.dtype)], -2).flatten(-3, -2)
            for first, later in ((k, more_keys), (v, more_values))
        )
    if beta is not None:
        memory.gate("beta", beta, k, (*q.shape[:-2], M, steps))
        beta = beta.flatten(-2)
    if attn_mask is not None:
        if initial_state is None:
            mask_of_keys(attn_mask, M)  # here, in the caller's sizes
        attn_mask = attn_mask.broadcast_to(torch.broadcast_shapes(attn_mask.shape, (M,))).repeat_interleave(steps, -1)
    return steps, memory.operands(
        q,
        k,
        v,
        beta=beta,
        log_decay=None,
        normalise=normalise,
        is_causal=False,  # there are not as many queries as keys
        attn_mask=attn_mask,
        scale=scale,
        initial_state=initial_state,
    )


def _later(name: str, value: Tensor, first: Tensor) -> int:
    """How many operands a token has behind its first; TypeError or ValueError unless they are like that."""
    _checks.float_tensor(name, value)
    more = value.shape[-2] if value.dim() > 1 else 0
    if not more:
        raise ValueError(f"{name}: expected shape (..., M, more, width), more >= 1, got {tuple(value.shape)}")
    memory.gate(name, value, first, (*first.shape[:-1], more, first.shape[-1]))
    _checks.finite(name, value)
    return more


MECHANISM = Mechanism(
    name="delta-product",
    family="memory",
    source="Siems et al. 2025, arXiv:2502.10297",
    reference=delta_product_reference,
    fast=delta_product,
    causal=True,
    exact=False,
    cost=delta_product_cost,
    positional=True,
    signed=True,
    gates={"beta": StepStrengths, "more_keys": LaterOperands, "more_values": LaterOperands},
)
