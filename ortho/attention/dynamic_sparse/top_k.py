r"""Top-k attention: each query attends to the `count` keys with its highest scores (Gupta et al. 2021,
arXiv:2106.06899).

To find these, every score is computed, 2 N M K operations as in softmax attention. Only the product with the values and
the memory become cheaper: `count` positions per query are kept instead of M weights. Among keys with equal scores the
first are taken. Adding or removing a key can change a query's selection, in a causal call only that of later queries.
"""

import torch

from ortho._typing import Bool, Float, Int, Size, Tensor
from ortho.attention.dynamic_sparse.call import Call, mask_form, selecting_form
from ortho.attention.dynamic_sparse.selection import (
    Selecting,
    attend_to_mask,
    attend_to_tilings,
    best_positions,
    mask_of,
    selection_cost,
)
from ortho.attention.mechanism import Mechanism
from ortho.attention.sparse.tiling import Tiling, Work, consecutive

COUNT = 64


def _selected(call: Call, count: int) -> Int[Tensor, "G N count"]:
    """The positions of the keys with each query's highest scores, `ABSENT` where there are fewer keys."""
    found = []
    for tile in call.steps(call.k.shape[1]):
        scores = call.products(tile, call.k).masked_fill(~call.reachable(tile), -torch.inf)  # (G, n, M)
        found.append(best_positions(scores, min(count, call.k.shape[1])))
    return torch.cat(found, 1)


@mask_form()
def top_k_mask(call: Call, *, count: int = COUNT) -> Bool[Tensor, "G N M"]:
    """The pairs that are kept. In a causal call the last query is at the last key's position."""
    return mask_of(_selected(call, count), call.k.shape[1])


@selecting_form()
def top_k_attention_reference(call: Call, *, count: int = COUNT) -> Float[Tensor, "G N V"]:
    """Softmax attention under `top_k_mask`. All keys are kept if there are no more than `count`.

    The state is (keys, values). Raises ValueError for a mask that is not the same for all queries.
    """
    return attend_to_mask(call, mask_of(_selected(call, count), call.k.shape[1]))


@selecting_form()
def top_k_attention(call: Call, *, count: int = COUNT) -> Float[Tensor, "G N V"]:
    """`top_k_attention_reference` from the selected keys alone, in float32 at least; not differentiable twice.

    The positions of the selected keys, `count` integers a query, are kept for the backward pass.
    """
    N, M = call.q.shape[1], call.k.shape[1]
    queries, each = consecutive(call.first, call.first + N, 1, call.q.device), consecutive(0, M, 1, call.q.device)
    return attend_to_tilings(call._replace(visible=None), [Tiling(queries, each, _selected(call, count))])


@selection_cost
def top_k_cost(N: Size, K: Size, *, count: Size = COUNT, form: str = "fast", causal: bool = False) -> Selecting:
    """Closed form of one self-attention call, in either form; a symbol N stands for more than `count`."""
    kept = min(count, N) if isinstance(N, int) else count
    return Selecting(
        choosing=2 * N * N * K,
        last_choosing=2 * N * K,
        work=[Work(N, N * kept, 1, 1)],
        last_work=[Work(1, kept, 1, 1)],
        keys=N,
    )


MECHANISM = Mechanism(
    name="top-k",
    family="dynamic_sparse",
    source="Gupta et al. 2021, arXiv:2106.06899",
    reference=top_k_attention_reference,
    fast=top_k_attention,
    cost=top_k_cost,
)
