r"""How many layers of sparse attention one token needs to reach another: products of masks, in truth values.

A layer's mask says which tokens each token reads. With residual connections a token also keeps what it has. So the
tokens that have reached i through layers $A_1, \dots, A_L$, in this order, are row i of
$(A_L \lor I) \cdots (A_1 \lor I)$, where sums and products are "or" and "and". Let a causal model have n tokens,
$j \le i$, and a stride l.

* A window of w keys goes w - 1 back in a layer: $\lceil (n-1)/(w-1) \rceil$ layers reach all, and fewer do not.
* Strided: one of the l positions from j on is i, or lies a multiple of l before i. The window takes j there, the column
  from there to i; or the column takes j to the last of its multiples before i, and the window from there to i.
* Fixed: if i is in a later block than j, the last token of j's block has read j; it is a summary, and i reads it. If
  both are in one block, i reads j directly, and keeps it through the layer of summaries if that is the second. If that
  layer is the first, a token that is not a summary has not left its block, and a later block never sees it.

In all of these patterns nothing comes from later tokens: each product of lower triangular masks is lower triangular.
"""

from itertools import count

import torch

from ortho._typing import Bool, Int, Tensor
from ortho.checks import expect


def reached(*masks: Bool[Tensor, "N N"], residual: bool = True) -> Bool[Tensor, "N N"]:
    """True at (i, j) where token j reaches i through layers with these masks, in this order.

    Without a residual connection a token keeps nothing that it does not read.
    """
    expect(masks, "masks", "one or more", "none")
    found = _itself(masks[0])
    for mask in masks:
        found = _after(mask, found, residual)
    return found


def layers_between(mask: Bool[Tensor, "N N"]) -> Int[Tensor, "N N"]:
    """The fewest layers with this mask, and residual connections, through which j reaches i; -1 where none suffice."""
    found = _itself(mask)
    layers = found.long() - 1
    for number in count(1):
        more = _after(mask, found, residual=True)
        if torch.equal(more, found):
            break
        layers[more & ~found] = number
        found = more
    return layers


def layers_to_reach(mask: Bool[Tensor, "N N"], *, is_causal: bool = True) -> int | None:
    """The fewest layers with this mask that connect all pairs, in a causal model those with j <= i; None if none do."""
    layers = layers_between(mask)
    if is_causal:
        layers = layers[torch.ones_like(mask).tril()]
    return None if bool((layers < 0).any()) else int(layers.max())


def _after(mask: Tensor, found: Tensor, residual: bool) -> Tensor:
    """What is reached through one more layer. float32 counts exactly up to 2^24."""
    through = (mask.float() @ found.float()) > 0
    return through | found if residual else through


def _itself(mask: Tensor) -> Tensor:
    """What a token has before the first layer, itself: (N, N)."""
    return torch.eye(len(mask), dtype=torch.bool, device=mask.device)
