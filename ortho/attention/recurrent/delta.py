r"""The delta rule, plain and gated: a linear memory that corrects what it holds instead of adding to it.

$S_t = a_t S_{t-1} + \beta_t k_t (v_t - a_t S_{t-1}^T k_t)^T$, $o_t = S_t^T q_t$: one step of gradient descent with the
rate $\beta_t$ on $\tfrac12 |S^T k_t - v_t|^2$, behind a decay $a_t$. With $a_t = 1$ it is DeltaNet (Schlag et al. 2021,
arXiv:2102.11174; in chunks: Yang et al. 2024, arXiv:2406.06484), else Gated DeltaNet (arXiv:2412.06464).
"""

from functools import partial

import torch

from ortho._typing import Bool, Float, State, Tensor
from ortho.attention.chunking import chunks, default_chunk, pad_tokens
from ortho.attention.mechanism import Mechanism
from ortho.attention.operands import attention_form
from ortho.attention.recurrent import memory
from ortho.attention.recurrent.delta_cost import delta_cost
from ortho.attention.recurrent.delta_kernels import Read, Write, decays
from ortho.gates import Decay, WriteStrength


@attention_form(fixed_state=True, check=memory.check_writes)
def delta_rule_reference(
    q: Float[Tensor, "*batch N K"],
    k: Float[Tensor, "*batch M K"],
    v: Float[Tensor, "*batch M V"],
    *,
    beta: Float[Tensor, "*batch M"] | None = None,
    log_decay: Float[Tensor, "*batch M"] | None = None,
    normalise: bool = True,
    is_causal: bool = False,
    attn_mask: Bool[Tensor, "..."] | None = None,
    scale: float | None = None,
    initial_state: State | None = None,
    return_state: bool = False,
) -> Float[Tensor, "*batch N V"] | tuple[Float[Tensor, "*batch N V"], State]:
    r"""The recurrence, one token after the other.

    `beta` in [0, 2] is 1 by default; `log_decay`, $\log a_t \le 0$, is 0. Queries and keys are divided by their lengths
    unless `normalise` is False; `scale` multiplies the queries then, by default not. A call that is not causal reads
    the memory after the last key, for every query. A masked key leaves the memory as it is; a mask must be one row for
    all queries, and stand beside no state. The state is (S (..., K, V),), in float32 at least, as is all that is
    computed.

    Raises TypeError or ValueError, naming the argument, for operands that do not fit together; on the CPU also for
    gates outside their range, and for keys that are not normalised and have $\beta |k|^2 > 2$: the memory along them
    would grow with every write.
    """
    x = memory.prepared(
        q,
        k,
        v,
        beta,
        log_decay,
        normalise=normalise,
        attn_mask=attn_mask,
        scale=scale,
        initial_state=initial_state,
    )
    o, S = memory.recurrence(*x, is_causal=is_causal)
    return o, (S,)


@attention_form(fixed_state=True, check=memory.check_writes)
def delta_rule(
    q: Float[Tensor, "*batch N K"],
    k: Float[Tensor, "*batch M K"],
    v: Float[Tensor, "*batch M V"],
    *,
    beta: Float[Tensor, "*batch M"] | None = None,
    log_decay: Float[Tensor, "*batch M"] | None = None,
    normalise: bool = True,
    is_causal: bool = False,
    attn_mask: Bool[Tensor, "..."] | None = None,
    scale: float | None = None,
    initial_state: State | None = None,
    return_state: bool = False,
    chunk: int | None = None,
) -> Float[Tensor, "*batch N V"] | tuple[Float[Tensor, "*batch N V"], State]:
    """`delta_rule_reference` by matrix products over chunks of at most `chunk` tokens; time and memory linear in N.

    By default chunks are of 64 tokens, on a GPU of so many that there are 128 of them at most. Kept for the backward
    pass are one memory a chunk and some vectors of widths K, V and `chunk` a token. It cannot be differentiated twice;
    the reference can.
    """
    x = memory.prepared(
        q,
        k,
        v,
        beta,
        log_decay,
        normalise=normalise,
        attn_mask=attn_mask,
        scale=scale,
        initial_state=initial_state,
    )
    o, S = _in_chunks(*x, is_causal=is_causal, chunk=default_chunk(k) if chunk is None else chunk)
    return o, (S,)


def _in_chunks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    log_decay: Tensor | None,
    S: Tensor,
    *,
    is_causal: bool,
    chunk: int,
) -> tuple[Tensor, Tensor]:
    """(o, the memory after the last key)."""
    *lead, N, _ = k.shape
    width, behind = chunks(N, chunk)

    def cut(tensor: Tensor) -> Tensor:  # (..., N, width) -> (G, n, C, width)
        return pad_tokens(tensor, behind).reshape(-1, (N + behind) // width, width, tensor.shape[-1])

    strengths = cut((torch.ones_like(k[..., 0]) if beta is None else beta)[..., None])
    keys = cut(k)
    rates = None if log_decay is None else cut(log_decay[..., None])[..., 0]
    fading = () if rates is None else decays(rates)
    written, before, after = Write.apply(keys, cut(v), strengths, S.reshape(-1, *S.shape[-2:]), rates, *fading)
    after = after.view(S.shape)
    if not is_causal:
        return q @ after, after
    o = Read.apply(cut(q), keys, written, before, rates, *fading)
    return o.reshape(*lead, N + behind, -1)[..., :N, :], after


DELTA = Mechanism(
    name="delta",
    family="memory",
    source="Schlag et al. 2021, arXiv:2102.11174; Yang et al. 2024, arXiv:2406.06484",
    reference=delta_rule_reference,
    fast=delta_rule,
    causal=True,
    exact=False,
    cost=delta_cost,
    positional=True,
    signed=True,
    gates={"beta": WriteStrength},
)
GATED_DELTA = Mechanism(
    name="gated-delta",
    family="memory",
    source="Yang et al. 2024, arXiv:2412.06464",
    reference=delta_rule_reference,
    fast=delta_rule,
    causal=True,
    exact=False,
    cost=partial(delta_cost, gated=True),
    positional=True,
    signed=True,
    gates={"beta": WriteStrength, "log_decay": Decay},
)
MECHANISMS = (DELTA, GATED_DELTA)
