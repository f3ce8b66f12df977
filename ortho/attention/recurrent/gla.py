r"""Memories in which each channel of the keys fades at a rate of its own.

Gated Linear Attention (Yang et al. 2023, arXiv:2312.06635, section 4) adds to what is left,
$S_t = \mathrm{Diag}(a_t)\, S_{t-1} + k_t v_t^T$. Kimi Delta Attention (arXiv:2510.26692, section 3) corrects it,
$S_t = (I - \beta_t k_t k_t^T)\, \mathrm{Diag}(a_t)\, S_{t-1} + \beta_t k_t v_t^T$. Answers are $o_t = S_t^T q_t$.
"""

from functools import partial

import torch

from ortho._typing import Bool, Float, State, Tensor
from ortho.attention.chunking import default_chunk, pad_tokens
from ortho.attention.mechanism import Mechanism
from ortho.attention.operands import attention_form
from ortho.attention.recurrent import memory
from ortho.attention.recurrent.gla_cost import gla_cost, kda_cost
from ortho.attention.recurrent.gla_kernels import chunk_width, in_chunks
from ortho.gates import ChannelDecay, WriteStrength

_ADDING = partial(memory.check_writes, channels=True, erase=False)
_CORRECTING = partial(memory.check_writes, channels=True)


@attention_form(fixed_state=True, check=_ADDING)
def gated_linear_attention_reference(
    q: Float[Tensor, "*batch N K"],
    k: Float[Tensor, "*batch M K"],
    v: Float[Tensor, "*batch M V"],
    *,
    log_decay: Float[Tensor, "*batch M K"] | None = None,
    is_causal: bool = False,
    attn_mask: Bool[Tensor, "..."] | None = None,
    scale: float | None = None,
    initial_state: State | None = None,
    return_state: bool = False,
) -> Float[Tensor, "*batch N V"] | tuple[Float[Tensor, "*batch N V"], State]:
    r"""The recurrence without erasing, one token after the other.

    `log_decay`, $\log a_t \le 0$, is 0 by default. Queries and keys are taken as they are; `scale`, by default
    1/sqrt(K), multiplies the queries. A call that is not causal reads the memory after the last key, for every query. A
    masked key leaves the memory as it is; a mask must be one row for all queries, and stand beside no state. The state
    is (S (..., K, V),), in float32 at least, as is all that is computed.

    Raises TypeError or ValueError, naming the argument, for operands that do not fit together; on the CPU also for a
    `log_decay` above 0 or not finite.
    """
    x = memory.prepared(
        q,
        k,
        v,
        None,
        log_decay,
        normalise=False,
        erase=False,
        attn_mask=attn_mask,
        scale=scale,
        initial_state=initial_state,
    )
    o, S = memory.recurrence(*x, is_causal=is_causal, erase=False)
    return o, (S,)


@attention_form(fixed_state=True, check=_ADDING)
def gated_linear_attention(
    q: Float[Tensor, "*batch N K"],
    k: Float[Tensor, "*batch M K"],
    v: Float[Tensor, "*batch M V"],
    *,
    log_decay: Float[Tensor, "*batch M K"] | None = None,
    is_causal: bool = False,
    attn_mask: Bool[Tensor, "..."] | None = None,
    scale: float | None = None,
    initial_state: State | None = None,
    return_state: bool = False,
    chunk: int | None = None,
) -> Float[Tensor, "*batch N V"] | tuple[Float[Tensor, "*batch N V"], State]:
    """`gated_linear_attention_reference` by matrix products over chunks, as `kimi_delta_attention` goes over them."""
    x = memory.prepared(
        q,
        k,
        v,
        None,
        log_decay,
        normalise=False,
        erase=False,
        attn_mask=attn_mask,
        scale=scale,
        initial_state=initial_state,
    )
    o, S = _by_chunks(*x, is_causal=is_causal, chunk=default_chunk(k) if chunk is None else chunk, erase=False)
    return o, (S,)


@attention_form(fixed_state=True, check=_CORRECTING)
def kimi_delta_attention_reference(
    q: Float[Tensor, "*batch N K"],
    k: Float[Tensor, "*batch M K"],
    v: Float[Tensor, "*batch M V"],
    *,
    beta: Float[Tensor, "*batch M"] | None = None,
    log_decay: Float[Tensor, "*batch M K"] | None = None,
    normalise: bool = True,
    is_causal: bool = False,
    attn_mask: Bool[Tensor, "..."] | None = None,
    scale: float | None = None,
    initial_state: State | None = None,
    return_state: bool = False,
) -> Float[Tensor, "*batch N V"] | tuple[Float[Tensor, "*batch N V"], State]:
    """The recurrence, one token after the other.

    Arguments, state and errors are those of `delta_rule_reference`, but for one decay a channel of the keys.
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


@attention_form(fixed_state=True, check=_CORRECTING)
def kimi_delta_attention(
    q: Float[Tensor, "*batch N K"],
    k: Float[Tensor, "*batch M K"],
    v: Float[Tensor, "*batch M V"],
    *,
    beta: Float[Tensor, "*batch M"] | None = None,
    log_decay: Float[Tensor, "*batch M K"] | None = None,
    normalise: bool = True,
    is_causal: bool = False,
    attn_mask: Bool[Tensor, "..."] | None = None,
    scale: float | None = None,
    initial_state: State | None = None,
    return_state: bool = False,
    chunk: int | None = None,
) -> Float[Tensor, "*batch N V"] | tuple[Float[Tensor, "*batch N V"], State]:
    """`kimi_delta_attention_reference` by matrix products over chunks, in time and memory linear in N.

    A chunk has the largest power of two tokens that is at most `chunk`: by default 64, on a GPU more beyond 8192
    tokens. Kept for the backward pass are one memory a chunk and, for each token, a few vectors for each time that a
    chunk can be halved.
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
    o, S = _by_chunks(*x, is_causal=is_causal, chunk=default_chunk(k) if chunk is None else chunk, erase=True)
    return o, (S,)


def _by_chunks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    log_decay: Tensor | None,
    S: Tensor,
    *,
    is_causal: bool,
    chunk: int,
    erase: bool,
) -> tuple[Tensor, Tensor]:
    """(o, the memory after the last key)."""
    width = chunk_width(k.shape[-2], chunk)
    behind = -k.shape[-2] % width
    if erase and beta is None:
        beta = torch.ones_like(k[..., 0])

    def cut(tensor: Tensor) -> Tensor:  # (..., N, ·) -> (..., n, C, ·)
        return pad_tokens(tensor, behind).unflatten(-2, (-1, width))

    decay = cut(torch.zeros_like(k) if log_decay is None else log_decay).exp()
    strengths = None if beta is None else cut(beta[..., None])
    answers, S = in_chunks(cut(q) if is_causal else None, cut(k), cut(v), strengths, decay, S)
    if not is_causal:
        return q @ S, S
    answers[-1] = answers[-1][..., : width - behind, :]
    return torch.cat(answers, -2), S


GLA = Mechanism(
    name="gla",
    family="memory",
    source="Yang et al. 2023, arXiv:2312.06635",
    reference=gated_linear_attention_reference,
    fast=gated_linear_attention,
    causal=True,
    exact=False,
    cost=gla_cost,
    positional=True,
    signed=True,
    gates={"log_decay": ChannelDecay},
)
KDA = Mechanism(
    name="kda",
    family="memory",
    source="Kimi Team 2025, arXiv:2510.26692",
    reference=kimi_delta_attention_reference,
    fast=kimi_delta_attention,
    causal=True,
    exact=False,
    cost=kda_cost,
    positional=True,
    signed=True,
    gates={"beta": WriteStrength, "log_decay": ChannelDecay},
)
MECHANISMS = (GLA, KDA)
