r"""A state to which each token adds several outer products, $S_t = S_{t-1} + U_t V_t^T$, $o_t = S_t^T q_t$.

The columns of $U_t$ (K, n) are a token's keys and those of $V_t$ (V, n) its values, all made of its input alone:
nothing is erased, and nothing fades. With one column this is linear attention without feature map or divisor.
DeltaProduct (`delta_product.py`) writes the errors of its state in place of the values. The state of Mamba-3 with
several inputs (Lahoti et al. 2026, arXiv:2603.15569) also fades, and is read by several queries.
"""

from functools import partial

import torch

from ortho._checks import attention_form
from ortho._cost import Cost, product
from ortho._typing import Bool, Float, Size, State, Tensor
from ortho.attention.chunking import CHUNK, chunks, cut, default_chunk, equal_chunks
from ortho.attention.mechanism import CostedCall, Mechanism, closed_form
from ortho.attention.recurrent.delta_product import LaterOperands, by_step, check_steps, read_steps, read_steps_cost
from ortho.attention.recurrent.recurrence import memory_cost, prepared, read_at_end_cost, recurrence


@attention_form(fixed_state=True, check=check_steps)
def low_rank_reference(
    q: Float[Tensor, "*batch N K"],
    k: Float[Tensor, "*batch M K"],
    v: Float[Tensor, "*batch M V"],
    *,
    more_keys: Float[Tensor, "*batch M more K"] | None = None,
    more_values: Float[Tensor, "*batch M more V"] | None = None,
    is_causal: bool = False,
    attn_mask: Bool[Tensor, "..."] | None = None,
    scale: float | None = None,
    initial_state: State | None = None,
    return_state: bool = False,
) -> Float[Tensor, "*batch N V"] | tuple[Float[Tensor, "*batch N V"], State]:
    """Low-rank writes by their sum, column by column.

    A token's first column is (k, v). `more_keys` and `more_values`, given together, are further ones, if any. Queries
    and keys are not normalised; `scale`, if given, multiplies the queries. In a call that is not causal every query
    reads the state after the last key. A masked key leaves the state unchanged; the mask must be the same for all
    queries, and cannot be combined with an `initial_state`. The state is (S (..., K, V),); it and all computation are
    in float32 at least.

    Raises TypeError or ValueError, naming the argument, for operands that do not fit together.
    """
    keys, values, _, attn_mask = by_step(k, v, None, more_keys, more_values, attn_mask)
    x = prepared(q, keys, values, None, None, attn_mask, scale, initial_state, normalise=False, erase=False)
    o, S = recurrence(*x, is_causal=is_causal, erase=False, steps=keys.shape[-2] // k.shape[-2])
    return o, (S,)


@attention_form(fixed_state=True, check=check_steps)
def low_rank(
    q: Float[Tensor, "*batch N K"],
    k: Float[Tensor, "*batch M K"],
    v: Float[Tensor, "*batch M V"],
    *,
    more_keys: Float[Tensor, "*batch M more K"] | None = None,
    more_values: Float[Tensor, "*batch M more V"] | None = None,
    is_causal: bool = False,
    attn_mask: Bool[Tensor, "..."] | None = None,
    scale: float | None = None,
    initial_state: State | None = None,
    return_state: bool = False,
    chunk: int | None = None,
) -> Float[Tensor, "*batch N V"] | tuple[Float[Tensor, "*batch N V"], State]:
    """`low_rank_reference` by matrix products over chunks of whole tokens, at most `chunk` columns or one token."""
    keys, values, _, attn_mask = by_step(k, v, None, more_keys, more_values, attn_mask)
    steps = keys.shape[-2] // k.shape[-2]
    q, keys, values, _, _, S = prepared(
        q, keys, values, None, None, attn_mask, scale, initial_state, normalise=False, erase=False
    )
    width, _ = chunks(k.shape[-2], max(1, (chunk or default_chunk(k)) // steps))  # of a chunk, in tokens
    keys, values = cut(keys, width * steps), cut(values, width * steps)  # (G, n, C, ·)
    added = keys.mT @ values  # (G, n, K, V)
    if not is_causal:
        S = S + added.sum(1).view(S.shape)
        return q @ S, (S,)
    before = torch.cat([S.reshape(-1, 1, *S.shape[-2:]), added[:, :-1]], 1).cumsum(1)
    S = (before[:, -1] + added[:, -1]).view(S.shape)
    return read_steps(q, keys, values, before, width), (S,)


@closed_form
def low_rank_cost(call: CostedCall, *, steps: Size = 2, chunk: int = CHUNK) -> Cost:
    """Closed form of one self-attention call with keys and values for `steps` steps per token, in either form.

    Those after the first come from gates and need a gradient, whether or not the projected queries and keys do
    (`call.qk_grad`). With symbols, N is a multiple of the tokens in a chunk.
    """
    in_chunks = partial(_chunks_cost, steps=steps, chunk=chunk)
    return memory_cost(call, in_chunks, erase=0, steps=steps, k_grad=1)


def _chunks_cost(call: CostedCall, *, steps: Size, chunk: int) -> Cost:
    G, N, K, V = call.sizes
    width, number = equal_chunks(N, max(1, chunk // steps))  # in tokens
    written = product(G * number * width * steps * K * V)
    return written + (read_steps_cost(call, steps, width, number) if call.causal else read_at_end_cost(call))


MECHANISM = Mechanism(
    name="low-rank",
    family="recurrent",
    source="Lahoti et al. 2026, arXiv:2603.15569, without decay, and with one query",
    reference=low_rank_reference,
    fast=low_rank,
    cost=low_rank_cost,
    positional=True,
    signed=True,
    gives_weights=False,  # it has further values of its own
    gates={"more_keys": LaterOperands, "more_values": LaterOperands},
)
