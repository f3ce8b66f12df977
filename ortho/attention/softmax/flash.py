r"""FlashAttention as its papers print it: softmax attention in tiles, which keeps no weights (Dao et al. 2022,
arXiv:2205.14135, algorithms 1 and 4, with the loop order of Dao 2023, arXiv:2307.08691).

Each tile of queries reads the tiles of keys one after the other. S are the scores of a tile, m is the largest score so
far, l the sum of the exponentials relative to m, and a the sum of the values with these exponentials as weights:

$$\begin{aligned} m' &= \max(m, \max_j S_j), \\ l' &= e^{m - m'} l + \sum_j e^{S_j - m'}, \\
a' &= e^{m - m'} a + e^{S - m'} V, \end{aligned}$$

and at the end $o = a / l$ and $L = m + \ln l$. The backward pass recomputes the weights as $P = e^{S - L}$; with
$D = \sum_v do_v\, o_v$ the gradient of the scores is $dS = P (do\, V^T - D)$.

This form is for reading the algorithm and counting its cost. `softmax_attention` is the fastest form on a device.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from ortho import checks
from ortho._typing import Float
from ortho.attention.backward import once
from ortho.attention.call import Call, attention_function
from ortho.attention.mechanism import Mechanism
from ortho.attention.scores import flat_mask
from ortho.attention.softmax.softmax_attention import softmax_attention_reference

ROWS, COLUMNS = 128, 512  # of a tile: a few such tiles of float32 fit in a CPU's cache


@attention_function()
def flash_attention(call: Call, *, rows: int = ROWS, columns: int = COLUMNS) -> Float[Tensor, "*batch N V"]:
    """`softmax_attention_reference` in tiles of `rows` queries and `columns` keys, in float32 at least.

    A causal call skips the tiles of keys after its queries. The backward pass needs q, k, v, the output and one number
    per query, which are kept. The result cannot be differentiated twice.
    """
    q, k, v, mask = call.q, call.k, call.v, None
    size = checks.positive_int("rows", rows), checks.positive_int("columns", columns)
    if call.attn_mask is not None:  # a mask that sequences share is not copied for each
        mask = flat_mask(call.attn_mask, q.shape[:-2]).expand(-1, q.shape[-2], k.shape[-2])
    operands = (x.reshape(-1, *x.shape[-2:]) for x in (q, k, v))
    o, _ = _Flash.apply(*operands, mask, call.factor, call.is_causal, size)
    return o.reshape(*q.shape[:-1], v.shape[-1])


Keys = list[tuple[slice, bool]]  # tiles of keys, and whether the diagonal runs through them


def tiles(N: int, M: int, is_causal: bool, size: tuple[int, int]) -> Iterator[tuple[slice, Keys]]:
    """Each tile of queries with the tiles of keys that it reads.

    In a causal call the last query stands at the last key, and the queries' own keys are a tile of their own.
    """
    rows, columns = size
    for start in range(0, N, rows):
        stop = min(N, start + rows)
        own = M - N + start if is_causal else M  # all queries of the tile may see the keys before this one
        keys = [(slice(j, min(own, j + columns)), False) for j in range(0, own, columns)]
        yield slice(start, stop), [*keys, (slice(own, M - N + stop), True)] if is_causal else keys


def _scores(q: Tensor, k: Tensor, mask: Tensor | None, queries: slice, keys: slice, diagonal: bool) -> Tensor:
    """The scores of one tile, (G, n, m); -inf where a query may not attend."""
    scores = torch.bmm(q[:, queries], k[:, keys].mT)
    if diagonal:
        future = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu(1)
        scores.masked_fill_(future, -torch.inf)
    return scores if mask is None else scores.masked_fill_(~mask[:, queries, keys], -torch.inf)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, size: tuple[int, int]
) -> tuple[Float[Tensor, "G N V"], Float[Tensor, "G N 1"]]:
    """(o, L) for scaled queries; o is 0 for a query that may attend to nothing."""
    (G, N, _), M = q.shape, k.shape[1]
    lowest, tiny = torch.finfo(q.dtype).min, torch.finfo(q.dtype).tiny
    o, L = q.new_zeros(G, N, v.shape[-1]), q.new_full((G, N, 1), lowest)
    for queries, read in tiles(N, M, is_causal, size):
        peak, total, gathered = L[:, queries], torch.zeros_like(L[:, queries]), o[:, queries]
        for keys, diagonal in read:
            scores = _scores(q, k, mask, queries, keys, diagonal)
            higher = torch.maximum(peak, scores.amax(-1, keepdim=True))
            weights, share = scores.sub_(higher).exp_(), (peak - higher).exp_()
            total = total * share + weights.sum(-1, keepdim=True)
            gathered = torch.baddbmm(gathered * share, weights, v[:, keys])
            peak = higher
        total = total.clamp_(min=tiny)
        o[:, queries], L[:, queries] = gathered / total, peak + total.log()
    return o, L


class _Flash(Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        scale: float,
        is_causal: bool,
        size: tuple[int, int],
    ) -> tuple[Tensor, Tensor]:
        q = q * scale
        o, L = _forward(q, k, v, mask, is_causal, size)
        ctx.scale, ctx.is_causal, ctx.size = scale, is_causal, size
        ctx.save_for_backward(q, k, v, mask, o, L)
        ctx.mark_non_differentiable(L)
        return o, L

    @staticmethod
    @once
    def backward(ctx: Any, d_o: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, mask, o, L = ctx.saved_tensors
        reach_qk = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        D = (d_o * o).sum(-1, keepdim=True) if reach_qk else None
        d_q, d_k, d_v = (torch.zeros_like(x) for x in (q, k, v))
        for queries, read in tiles(q.shape[1], k.shape[1], ctx.is_causal, ctx.size):
            for keys, diagonal in read:
                weights = _scores(q, k, mask, queries, keys, diagonal).sub_(L[:, queries]).exp_()
                d_v[:, keys].baddbmm_(weights.mT, d_o[:, queries])
                if D is None:
                    continue
                d_scores = torch.bmm(d_o[:, queries], v[:, keys].mT).sub_(D[:, queries]).mul_(weights)
                d_q[:, queries].baddbmm_(d_scores, k[:, keys])
                d_k[:, keys].baddbmm_(d_scores.mT, q[:, queries])
        gradients = (d_q.mul_(ctx.scale), d_k) if reach_qk else (None, None)
        return (*gradients, d_v, None, None, None, None)


MECHANISM = Mechanism(
    name="flash",
    family="softmax",
    source="Dao et al. 2022, arXiv:2205.14135; Dao 2023, arXiv:2307.08691",
    reference=softmax_attention_reference,
    fast=flash_attention,
    exact=True,
)
