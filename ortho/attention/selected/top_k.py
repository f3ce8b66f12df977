r"""Top-k attention: each query attends to the `count` keys of its highest scores (Gupta et al. 2021,
arXiv:2106.06899).

To know which, every score is computed, 2 N M K operations as in softmax attention. What is saved is the product with
the values, and the memory: of each query `count` positions are kept instead of N weights. Of keys with equal scores the
first are taken. A key more or less changes a query's choice, but in a causal call only that of later queries.
"""

import torch

from ortho import _checks
from ortho._checks import checked
from ortho._typing import Bool, Float, Int, Size, State, Tensor
from ortho.attention.indexing import indexing
from ortho.attention.mechanism import AttentionCost, Mechanism
from ortho.attention.operands import with_past
from ortho.attention.selected.selection import Call, attend, attend_reference, begin, best_places, choice_call
from ortho.attention.selected.selection_cost import Flops, best_cost, chosen_cost, flops
from ortho.attention.sparse.tiling import Tiling, Work, consecutive
from ortho.attention.transforms import uncompiled

COUNT = 64


@checked(shapes=False)
@indexing()
def top_k_mask(
    q: Float[Tensor, "*batch N K"],
    k: Float[Tensor, "*batch M K"],
    *,
    count: int = COUNT,
    is_causal: bool = False,
    attn_mask: Bool[Tensor, "..."] | None = None,
    scale: float | None = None,
) -> Bool[Tensor, "*batch N M"]:
    """The pairs that are kept. The last query of a causal call stands at the last key."""
    with_past(q, k, k, False, attn_mask, None)
    call = choice_call(q, k, is_causal=is_causal, attn_mask=attn_mask, scale=scale)
    return _mask(call, count).reshape(*q.shape[:-1], k.shape[-2])


@checked(shapes=False)
@uncompiled
@indexing()
def top_k_attention_reference(
    q: Float[Tensor, "*batch N K"],
    k: Float[Tensor, "*batch M K"],
    v: Float[Tensor, "*batch M V"],
    *,
    count: int = COUNT,
    is_causal: bool = False,
    attn_mask: Bool[Tensor, "..."] | None = None,
    scale: float | None = None,
    initial_state: State | None = None,
    return_state: bool = False,
) -> Float[Tensor, "*batch N V"] | tuple[Float[Tensor, "*batch N V"], State]:
    """`softmax_attention_reference` under `top_k_mask`. All keys are kept where there are no more than `count`.

    The state is (keys, values). Raises ValueError for a mask that is not the same for all queries.
    """
    keys, values, call = begin(q, k, v, is_causal, attn_mask, scale, initial_state)
    o = attend_reference(q, keys, values, call, _mask(call, count))
    return (o, (keys, values)) if return_state else o


@checked(shapes=False)
@uncompiled
@indexing()
def top_k_attention(
    q: Float[Tensor, "*batch N K"],
    k: Float[Tensor, "*batch M K"],
    v: Float[Tensor, "*batch M V"],
    *,
    count: int = COUNT,
    is_causal: bool = False,
    attn_mask: Bool[Tensor, "..."] | None = None,
    scale: float | None = None,
    initial_state: State | None = None,
    return_state: bool = False,
) -> Float[Tensor, "*batch N V"] | tuple[Float[Tensor, "*batch N V"], State]:
    """`top_k_attention_reference` from the chosen keys alone, in float32 at least; not differentiable twice.

    The positions of the chosen keys, `count` integers a query, are kept for the backward pass.
    """
    keys, values, call = begin(q, k, v, is_causal, attn_mask, scale, initial_state)
    N, M = q.shape[-2], keys.shape[-2]
    queries, each = consecutive(call.first, call.first + N, 1, q.device), consecutive(0, M, 1, q.device)
    o = attend(q, keys, values, call._replace(visible=None), [Tiling(queries, each, _choose(call, count))])
    return (o, (keys, values)) if return_state else o


def _choose(call: Call, count: int) -> Int[Tensor, "G N count"]:
    """The positions of the keys of each query's highest scores, `ABSENT` where there are fewer keys."""
    count = min(_checks.positive_int("count", count), call.k.shape[1])
    found = []
    for tile in call.steps(call.k.shape[1]):
        scores = call.scores(tile, call.k)  # (G, n, M)
        scores = scores.masked_fill_(~call.reachable(call.places[tile]), -torch.inf)
        found.append(best_places(scores, count))
    return torch.cat(found, 1)


def _mask(call: Call, count: int) -> Bool[Tensor, "G N M"]:
    positions, M = _choose(call, count), call.k.shape[1]
    mask = torch.zeros(*positions.shape[:2], M + 1, dtype=torch.bool, device=positions.device)
    return mask.scatter_(-1, torch.where(positions < 0, M, positions), True)[..., :M]


@checked
def top_k_flops(N: Size, K: Size, V: Size, *, count: Size = COUNT, causal: bool = True) -> Flops:
    """What the fast form spends on choosing and on attending, a sequence; a symbol N stands for more than `count`."""
    return flops(2 * N * N * K, _work(N, N, count), K, V)


def _work(N: Size, M: Size, count: Size) -> list[Work]:
    """Of N queries and M keys."""
    return [Work(N, N * (min(count, M) if isinstance(M, int) else count), 1, 1)]


@checked
def top_k_cost(
    B: Size,
    N: Size,
    H: Size,
    K: Size,
    V: Size,
    *,
    count: Size = COUNT,
    form: str = "fast",
    causal: bool = False,
    qk_grad: bool = True,
    itemsize: int = 4,
) -> AttentionCost:
    """Closed form of one self-attention call, in either form; a symbol N stands for more than `count`."""
    return chosen_cost(
        B,
        N,
        H,
        K,
        V,
        choosing=top_k_flops(N, K, V, count=count).choosing,
        comparing=N * (N + best_cost(N, count)),  # what cannot be attended to is blocked before
        last_choosing=2 * N * K,
        work=_work(N, N, count),
        last=_work(1, N, count),
        form=form,
        qk_grad=qk_grad,
        itemsize=itemsize,
    )


MECHANISM = Mechanism(
    name="top-k",
    family="dynamic",
    source="Gupta et al. 2021, arXiv:2106.06899",
    reference=top_k_attention_reference,
    fast=top_k_attention,
    causal=True,
    exact=False,
    cost=top_k_cost,
)
