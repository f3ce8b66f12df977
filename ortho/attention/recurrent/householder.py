r"""Scores through products of reflections, $s_{ij} = k_j^T H_{j+1} \cdots H_i\, q_i$, $H_t = I - \beta_t w_t w_t^T$.

$H_t$ shrinks, removes ($\beta_t = 1$) or reverses ($\beta_t = 2$) what lies along the unit vector $w_t$, for every pair
that has token t between them (Yang et al. 2025, arXiv:2505.16381, section 3). Over a block of C tokens the product is
$H_1 \cdots H_C = I - W^T L^T W$ with the rows $w_t$ of W and the lower triangular

$$L = (I + \mathrm{diag}(\beta)\, \mathrm{stril}(W W^T))^{-1}\, \mathrm{diag}(\beta),$$

whose leading and trailing parts belong to the products from the first token on and up to the last one. So four small
matrices say all of a block: the scores within it, its queries moved to its start, its keys moved to its end, and its
whole product, by which the queries of later blocks move across it.
"""

from typing import NamedTuple

import torch
from torch.nn.functional import pad

from ortho import _checks
from ortho._typing import Float, Tensor
from ortho.attention.chunking import chunks, pad_tokens
from ortho.attention.operands import blocked_pairs, masked_softmax, working
from ortho.attention.recurrent.memory import gate, unit
from ortho.attention.softmax.tiling import Span, tiled_attention

# With heads of width 64 on a CPU blocks of 128 were the fastest from N = 2048 on, and of 64 at N = 512.
BLOCK = 128


class Reflections(NamedTuple):
    """One reflection a token: unit directions w (..., M, K) and strengths b (..., M)."""

    w: Float[Tensor, "*batch M K"]
    b: Float[Tensor, "*batch M"]


class Blocks(NamedTuple):
    """What n blocks of C tokens do to queries q and keys k of width K."""

    scores: Float[Tensor, "*batch n C C"]  # within the block; above the diagonal anything
    q: Float[Tensor, "*batch n C K"]  # the queries, moved to the start of their block
    k: Float[Tensor, "*batch n C K"]  # the keys, moved to its end
    across: Float[Tensor, "*batch n K K"]  # rows of queries times it are moved from its end to its start


def reflections(
    directions: Tensor | None, beta: Tensor | None, k: Tensor, width: int, absent: Tensor | None
) -> Reflections:
    """The reflections of the gates, by default none, and of absent tokens none; computed in float32 at least.

    Raises TypeError or ValueError for gates of other shapes than (..., M, width) and (..., M) with k (..., M, K), for a
    `beta` without `directions`, and, on the CPU, for directions whose squared lengths are beyond the dtype's range or a
    `beta` outside [0, 2].
    """
    gate("directions", directions, k, (*k.shape[:-1], width))
    gate("beta", beta, k, k.shape[:-1])
    wide = torch.promote_types(k.dtype, torch.float32)
    if directions is None:
        if beta is not None:
            raise ValueError(f"beta: expected None without directions, got {_checks.describe(beta)}")
        return Reflections(k.new_zeros((*k.shape[:-1], width), dtype=wide), k.new_zeros(k.shape[:-1], dtype=wide))
    most = (torch.finfo(wide).max / width) ** 0.5
    _checks.within("directions", "numbers", directions, -most, most)
    if beta is None:
        beta = k.new_ones(k.shape[:-1], dtype=wide)
    _checks.within("beta", "strengths of reflections", beta, 0.0, 2.0)
    beta = working(beta.to(wide))
    w = unit(working(directions.to(wide)), "directions")
    return Reflections(w, beta if absent is None else beta.masked_fill(absent, 0))


def reflected_scores(
    q: Float[Tensor, "*batch N K"],
    k: Float[Tensor, "*batch N K"],
    r: Reflections,
    past: Float[Tensor, "*batch P K"],
) -> tuple[Float[Tensor, "*batch N M"], Float[Tensor, "*batch M K"]]:
    """(scores, all keys behind the last reflection) as the formula reads: token t reflects each key before it, `past`
    ones first, and then scores them and its own. The scores of keys to come are 0."""
    length, keys, rows = past.shape[-2] + k.shape[-2], past, []
    steps = (x[..., None, :].unbind(-3) for x in (q, k, r.w, r.b[..., None] * r.w))  # of (..., 1, K)
    for query, key, w, bw in zip(*steps, strict=True):
        keys = torch.cat([keys - (keys @ w.mT) @ bw, key], -2)
        rows.append(pad(query @ keys.mT, (0, length - keys.shape[-2])))
    return torch.cat(rows, -2), keys


def blocks(q: Tensor, k: Tensor, r: Reflections, width: int) -> Blocks:
    """The closed forms for blocks of `width` tokens, which divides their number."""
    q, k, w = (x.unflatten(-2, (-1, width)) for x in (q, k, r.w))  # (..., n, C, K)
    b = r.b.unflatten(-1, (-1, width))  # (..., n, C)
    # L itself is safe to have: off the diagonal it is -b_s b_r w_s^T H_{s-1} ... H_{r+1} w_r, at most 4 in size.
    lower = torch.linalg.solve_triangular(
        b[..., None] * (w @ w.mT), torch.diag_embed(b), upper=False, unitriangular=True
    )
    across_keys = (k @ w.mT).triu(1)  # k_j w_r for the reflections r behind j
    to_start = (q @ w.mT).tril() @ lower
    lower_w = lower @ w
    return Blocks(
        scores=q @ k.mT - to_start @ across_keys.mT,
        q=q - to_start @ w,
        k=k - across_keys @ (lower.mT @ w),
        across=torch.eye(w.shape[-1], dtype=w.dtype, device=w.device) - w.mT @ lower_w,
    )


def tile_scores(s: Span, of: Blocks, past: Float[Tensor, "*batch P K"]) -> Float[Tensor, "*batch C end"]:
    """The scores of block `s.number` with all keys up to its end, `past` ones first."""
    moved, scores = of.q.unbind(-3)[s.number], [of.scores.unbind(-3)[s.number]]
    keys, across = of.k.unbind(-3), of.across.unbind(-3)
    for i in reversed(range(s.number)):
        scores.append(moved @ keys[i].mT)
        if i or past.shape[-2]:
            moved = moved @ across[i]
    if past.shape[-2]:
        scores.append(moved @ past.mT)
    return torch.cat(scores[::-1], -1)


def moved_keys(of: Blocks, past: Float[Tensor, "*batch P K"]) -> Float[Tensor, "*batch M K"]:
    """All keys, moved behind the last block."""
    keys = past
    for block, across in zip(of.k.unbind(-3), of.across.unbind(-3), strict=True):
        keys = torch.cat([keys @ across.mT, block], -2)
    return keys


def reflected_attention_reference(
    q: Float[Tensor, "*batch N K"],
    k: Float[Tensor, "*batch N K"],
    v: Float[Tensor, "*batch M V"],
    r: Reflections,
    past: Float[Tensor, "*batch P K"],
    attn_mask: Tensor | None,
    content: tuple[Tensor, Tensor] | None = None,
) -> tuple[Float[Tensor, "*batch N V"], Float[Tensor, "*batch M K"]]:
    """(o, all keys behind the last reflection) of causal softmax attention with these scores, to which those of
    `content`, queries (..., N, ·) and keys (..., M, ·), are added. One token after the other, in O(N^2 K)."""
    scores, keys = reflected_scores(q, k, r, past)
    if content is not None:
        scores = scores + content[0] @ content[1].mT
    blocked = blocked_pairs(q.shape[-2], v.shape[-2], True, attn_mask, q.device)
    return masked_softmax(scores, blocked, empty_rows=attn_mask is not None) @ v, keys


def reflected_attention(
    q: Float[Tensor, "*batch N K"],
    k: Float[Tensor, "*batch N K"],
    v: Float[Tensor, "*batch M V"],
    r: Reflections,
    past: Float[Tensor, "*batch P K"],
    attn_mask: Tensor | None,
    content: tuple[Tensor, Tensor] | None = None,
    *,
    block: int = BLOCK,
    return_keys: bool,
) -> tuple[Float[Tensor, "*batch N V"], Float[Tensor, "*batch M K"] | None]:
    """`reflected_attention_reference` in blocks of at most `block` tokens, whose queries move from block to block, in
    memory linear in N; the keys are None unless they are asked for. A lone token is the reference's one step."""
    _checks.positive_int("block", block)
    length, keys = q.shape[-2], v.shape[-2]
    if length == 1:
        return reflected_attention_reference(q, k, v, r, past, attn_mask, content)
    width, behind = chunks(length, block)
    q, k, v = (pad_tokens(x, behind) for x in (q, k, v))
    r = Reflections(pad_tokens(r.w, behind), pad(r.b, (0, behind)) if behind else r.b)
    if content is not None:
        content = (pad_tokens(content[0], behind), pad_tokens(content[1], behind))
    of = blocks(q, k, r, width)

    def scores(s: Span, *operands: Tensor) -> Tensor:
        reflected = tile_scores(s, Blocks(*operands[:4]), operands[4])
        if content is None:
            return reflected
        return reflected + operands[5][..., s.start : s.stop, :] @ operands[6][..., : s.end, :].mT

    o = tiled_attention(
        scores,
        (*of, past, *(content or ())),
        v,
        queries=length + behind,
        tile=width,
        is_causal=True,
        attn_mask=_padded_mask(attn_mask, keys, behind),
    )
    return o[..., :length, :], moved_keys(of, past)[..., :keys, :] if return_keys else None


def _padded_mask(attn_mask: Tensor | None, keys: int, behind: int) -> Tensor | None:
    """The mask of so many keys with the keys and queries, hidden, that the last block is filled up with."""
    if attn_mask is None or not behind:
        return attn_mask
    attn_mask = attn_mask.expand(torch.broadcast_shapes(attn_mask.shape, (1, keys)))
    return pad(attn_mask, (0, behind, 0, 0 if attn_mask.shape[-2] == 1 else behind))
