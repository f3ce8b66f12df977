r"""The delta rule, plain and gated: a linear memory that corrects what it holds instead of adding to it.

$S_t = a_t S_{t-1} + \beta_t k_t (v_t - a_t S_{t-1}^T k_t)^T$, $o_t = S_t^T q_t$: one step of gradient descent with the
rate $\beta_t$ on $\tfrac12 |S^T k_t - v_t|^2$, behind a decay $a_t$. With $a_t = 1$ it is DeltaNet (Schlag et al. 2021,
arXiv:2102.11174; in chunks: Yang et al. 2024, arXiv:2406.06484), else Gated DeltaNet (arXiv:2412.06464).
"""

from functools import partial

import torch

from ortho import _checks
from ortho._autocast import no_autocast
from ortho._checks import checked
from ortho._typing import Bool, Float, State, Tensor
from ortho.attention.chunking import chunks, default_chunk, pad_tokens
from ortho.attention.mechanism import Mechanism
from ortho.attention.recurrent import memory
from ortho.attention.recurrent.delta_cost import delta_cost
from ortho.attention.recurrent.delta_kernels import Read, Write, decays
from ortho.gates import Decay, WriteStrength


@checked(shapes=False)
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
    x = memory.operands(
        q,
        k,
        v,
        beta=beta,
        log_decay=log_decay,
        normalise=normalise,
        is_causal=is_causal,
        attn_mask=attn_mask,
        scale=scale,
        initial_state=initial_state,
    )
    with no_autocast(q):
        o, S = memory.recurrence(x.q, x.k, x.v, x.beta, x.log_decay, x.S, is_causal=is_causal)
    o = o.to(x.dtype)
    return (o, (S,)) if return_state else o


@checked(shapes=False)
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
    chunk = default_chunk(k) if chunk is None else _checks.positive_int("chunk", chunk)
    x = memory.operands(
        q,
        k,
        v,
        beta=beta,
        log_decay=log_decay,
        normalise=normalise,
        is_causal=is_causal,
        attn_mask=attn_mask,
        scale=scale,
        initial_state=initial_state,
    )
    with no_autocast(q):
        o, S = _in_chunks(x, is_causal, chunk)
    o = o.to(x.dtype)
    return (o, (S,)) if return_state else o


def _in_chunks(x: memory.MemoryOperands, is_causal: bool, chunk: int) -> tuple[Tensor, Tensor]:
    """(o, the memory after the last key)."""
    *lead, N, _ = x.k.shape
    width, behind = chunks(N, chunk)
    beta = torch.ones_like(x.k[..., 0]) if x.beta is None else x.beta

    def cut(tensor: Tensor) -> Tensor:  # (..., N, width) -> (G, n, C, width)
        return pad_tokens(tensor, behind).reshape(-1, (N + behind) // width, width, tensor.shape[-1])

    k = cut(x.k)
    log_decay = None if x.log_decay is None else cut(x.log_decay[..., None])[..., 0]
    fading = () if log_decay is None else decays(log_decay)
    S = x.S.reshape(-1, *x.S.shape[-2:])
    written, before, S = Write.apply(k, cut(x.v), cut(beta[..., None]), S, log_decay, *fading)
    S = S.view(x.S.shape)
    if not is_causal:
        return x.q @ S, S
    o = Read.apply(cut(x.q), k, written, before, log_decay, *fading)
    return o.reshape(*lead, N + behind, -1)[..., :N, :], S


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
