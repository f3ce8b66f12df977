r"""DeltaProduct: several steps of the delta rule a token (Siems et al. 2025, arXiv:2502.10297, equation 5).

With $n_h$ keys $k_{t,j}$, values $v_{t,j}$ and write strengths $\beta_{t,j}$ a token,

$$S_{t,j} = (I - \beta_{t,j} k_{t,j} k_{t,j}^T) S_{t,j-1} + \beta_{t,j} k_{t,j} v_{t,j}^T, \qquad S_{t,0} = S_{t-1,n_h},
\qquad o_t = S_{t,n_h}^T q_t .$$

That is the delta rule on a sequence $n_h$ times as long, read after every $n_h$-th key. A token multiplies the memory
by a product of $n_h$ transitions: for $\beta$ up to 2, by any orthogonal matrix that $n_h$ reflections make.
"""

from typing import Any

import torch

from ortho import _checks
from ortho._typing import Bool, Float, State, Tensor
from ortho.attention.chunking import chunks, default_chunk, pad_tokens
from ortho.attention.mechanism import Mechanism
from ortho.attention.operands import attention_form
from ortho.attention.recurrent import memory
from ortho.attention.recurrent.delta_kernels import Write
from ortho.attention.recurrent.delta_product_cost import delta_product_cost
from ortho.attention.recurrent.delta_product_gates import LaterOperands, StepStrengths


def _by_step(
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    more_keys: Tensor | None,
    more_values: Tensor | None,
    attn_mask: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """(keys, values, strengths, mask of keys) with a row a step."""
    steps = 1
    if more_keys is not None and more_values is not None:
        steps += more_keys.shape[-2]
        k, v = (
            torch.cat([first[..., None, :], later.to(first.dtype)], -2).flatten(-3, -2)
            for first, later in ((k, more_keys), (v, more_values))
        )
    beta = beta if beta is None else beta.flatten(-2)
    return k, v, beta, attn_mask if attn_mask is None else attn_mask.repeat_interleave(steps, -1)


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    attn_mask: Tensor | None,
    beta: Tensor | None = None,
    more_keys: Tensor | None = None,
    more_values: Tensor | None = None,
    normalise: bool = True,
    **_: Any,
) -> None:
    """Refuse what has not the same number of steps for each token, and what `memory.check_writes` refuses."""
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
    memory.gate("beta", beta, k, (*k.shape[:-1], steps))
    k, v, beta, attn_mask = _by_step(k, v, beta, more_keys, more_values, attn_mask)
    memory.check_writes(q, k, v, attn_mask=attn_mask, beta=beta, normalise=normalise)


def _later(name: str, value: Tensor, first: Tensor) -> int:
    """How many operands a token has behind its first; TypeError or ValueError unless they are like that."""
    _checks.float_tensor(name, value)
    more = value.shape[-2] if value.dim() > 1 else 0
    if not more:
        raise ValueError(f"{name}: expected shape (..., M, more, width), more >= 1, got {tuple(value.shape)}")
    memory.gate(name, value, first, (*first.shape[:-1], more, first.shape[-1]))
    _checks.finite(name, value)
    return more


@attention_form(fixed_state=True, check=_check)
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
    keys, values, beta, attn_mask = _by_step(k, v, beta, more_keys, more_values, attn_mask)
    steps = keys.shape[-2] // k.shape[-2]
    x = memory.prepared(
        q,
        keys,
        values,
        beta,
        None,
        normalise=normalise,
        attn_mask=attn_mask,
        scale=scale,
        initial_state=initial_state,
    )
    o, S = _by_token(*x, steps=steps) if is_causal else memory.recurrence(*x, is_causal=False)
    return o, (S,)


def _by_token(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, _: Tensor | None, S: Tensor, *, steps: int
) -> tuple[Tensor, Tensor]:
    """(o, the memory after the last step): each token writes its keys, and is answered."""
    tokens = [operand.unflatten(-2, (-1, steps)).unbind(-3) for operand in (k, v)]
    betas = (None,) * q.shape[-2] if beta is None else beta.unflatten(-1, (-1, steps)).unbind(-2)
    rows = []
    for query, keys, values, strengths in zip(q[..., None, :].unbind(-3), *tokens, betas, strict=True):
        o, S = memory.recurrence(query, keys, values, strengths, None, S, is_causal=False)
        rows.append(o)
    return torch.cat(rows, -2), S


@attention_form(fixed_state=True, check=_check)
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
    keys, values, beta, attn_mask = _by_step(k, v, beta, more_keys, more_values, attn_mask)
    steps = keys.shape[-2] // k.shape[-2]
    x = memory.prepared(
        q,
        keys,
        values,
        beta,
        None,
        normalise=normalise,
        attn_mask=attn_mask,
        scale=scale,
        initial_state=initial_state,
    )
    o, S = _in_chunks(*x, steps=steps, is_causal=is_causal, chunk=default_chunk(k) if chunk is None else chunk)
    return o, (S,)


def _in_chunks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    _: Tensor | None,
    S: Tensor,
    *,
    steps: int,
    is_causal: bool,
    chunk: int,
) -> tuple[Tensor, Tensor]:
    """(o, the memory after the last step)."""
    *lead, tokens, _ = k.shape
    tokens //= steps
    width, behind = chunks(tokens, max(1, chunk // steps))  # of a chunk, in tokens
    beta = torch.ones_like(k[..., 0]) if beta is None else beta

    def cut(tensor: Tensor, rows: int = steps) -> Tensor:  # (..., rows a token, width) -> (G, n, C, width)
        n = (tokens + behind) // width
        return pad_tokens(tensor, rows * behind).reshape(-1, n, rows * width, tensor.shape[-1])

    shape, k = S.shape, cut(k)
    written, before, S = Write.apply(k, cut(v), cut(beta[..., None]), S.reshape(-1, *shape[-2:]), None)
    S = S.view(shape)
    if not is_causal:
        return q @ S, S
    q = cut(q, 1)
    future = torch.ones(width, width, dtype=torch.bool, device=q.device).triu(1).repeat_interleave(steps, 1)
    weights = (q @ k.mT).masked_fill(future, 0)  # (G, n, tokens, steps) of a chunk
    o = q @ before + weights @ written
    return o.reshape(*lead, tokens + behind, -1)[..., :tokens, :], S


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
