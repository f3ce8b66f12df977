r"""Top-k attention: each query attends to the `num_keys` keys with its highest scores (Gupta et al. 2021,
arXiv:2106.06899).

To find these, every score is computed, 2 N M K operations as in softmax attention. Only the product with the values and
the memory become cheaper: `num_keys` positions per query are kept instead of M weights. Among keys with equal scores,
compared in float32, the first are taken. Adding or removing a key can change a query's selection, in a causal call only
that of later queries.
"""

import torch

from ortho import checks
from ortho._typing import Float, Int, Tensor
from ortho.attention.call import Call, attention_function
from ortho.attention.dynamic_sparse.selection import (
    attend_chosen,
    attend_to_mask,
    best_positions,
    flat,
    mask_of,
    products,
    reachable,
    tiles_of_queries,
)
from ortho.attention.mechanism import Mechanism
from ortho.attention.uncompiled import uncompiled

NUM_KEYS = 64


def _selected(call: Call, num_keys: int) -> Int[Tensor, "*batch N k"]:
    """The positions of the keys with each query's highest scores, `ABSENT` where there are fewer keys."""
    M, found = call.k.shape[-2], []
    num_keys = min(checks.positive_int("num_keys", num_keys), M)
    q = call.q.detach() * (
        int(call.factor > 0) - int(call.factor < 0)
    )  # with a negative scale the lowest products score best
    for tile in tiles_of_queries(call, M):
        scores = products(q[..., tile, :], call.k).masked_fill(~reachable(call, tile), -torch.inf)  # (..., n, M)
        found.append(best_positions(scores, num_keys))
    return torch.cat(found, -2)


@uncompiled
@attention_function()
def top_k_attention_reference(call: Call, *, num_keys: int = NUM_KEYS) -> Float[Tensor, "*batch N V"]:
    """Softmax attention to the selected keys alone. All keys are kept if there are no more than `num_keys`.

    The state is (keys, values). Raises ValueError for a mask that is not the same for all queries.
    """
    return attend_to_mask(call, mask_of(_selected(call, num_keys), call.k.shape[-2]))


@uncompiled
@attention_function()
def top_k_attention(call: Call, *, num_keys: int = NUM_KEYS) -> Float[Tensor, "*batch N V"]:
    """`top_k_attention_reference` from the selected keys alone, in float32 at least.

    The positions of the selected keys, `num_keys` integers a query, are kept for the backward pass.
    """
    x = flat(call)
    number = torch.arange(x.q.shape[1], device=x.q.device).expand(len(x.q), -1)[..., None]
    # Hidden keys are not selected.
    return attend_chosen(x, number, _selected(x, num_keys))[:, :, 0].view(*call.q.shape[:-1], -1)


MECHANISM = Mechanism(
    name="top-k",
    family="dynamic_sparse",
    source="Gupta et al. 2021, arXiv:2106.06899",
    reference=top_k_attention_reference,
    fast=top_k_attention,
    option_names={"k": "num_keys"},
)
