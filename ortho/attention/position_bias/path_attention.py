r"""PaTH: a key is reflected by every token after it, up to the query, before it is scored,
$q_i^T H_i \cdots H_{j+1} k_j / \sqrt K$ with $H_t = I - \beta_t w_t w_t^T$ (Yang et al. 2025, arXiv:2505.16381).

A delta rule carries its state from token to token by the same products; here they carry the keys. $H_t$ shrinks,
removes ($\beta_t = 1$) or reverses ($\beta_t = 2$) the component along the unit vector $w_t$, for every pair that has
token t between them. In the paper w comes from a low-rank map and a convolution over three tokens. Here the convolution
is left out, so that a token's gates depend on that token alone.

Over a block of C tokens the product is $H_1 \cdots H_C = I - W^T L^T W$, where W has the rows $w_t$ and L is the lower
triangular

$$L = (I + \mathrm{diag}(\beta)\, \mathrm{stril}(W W^T))^{-1}\, \mathrm{diag}(\beta),$$

whose leading parts belong to products that begin at the first token, trailing parts to ones that end at the last.
So four small matrices describe a block: the scores within it, its queries moved to its start, its keys moved to its
end, and its whole product, which moves the queries of later blocks across it.
"""

from typing import ClassVar, NamedTuple

import torch
from torch.nn.functional import pad

from ortho import checks
from ortho._typing import Float, Tensor
from ortho.attention.call import Call, blocked_pairs
from ortho.attention.forms import two_forms
from ortho.attention.mechanism import Mechanism
from ortho.attention.position_bias.tiles import Span, attend_in_tiles
from ortho.attention.scores import masked_softmax, unit
from ortho.gates import Gate, ReflectingWriteStrength

# On a CPU with heads of width 64, blocks of 128 were fastest from N = 2048 on, and blocks of 64 at N = 512.
BLOCK = 128


def _path_attention(
    call: Call, *, directions: Float[Tensor, "*batch N K"] | None = None, beta: Float[Tensor, "*batch N"] | None = None
) -> "tuple[Tensor, Tensor, Reflections, Tensor]":
    r"""Softmax attention with keys that every later token reflects, computed token by token in $O(N^2 K)$.

    Arguments are as in `softmax_attention_reference`, except `is_causal`, which must be True. `directions` are divided
    by their lengths; without them nothing is reflected. `beta`, in [0, 2], is 1 by default, and 0 for a token that no
    query may attend to: a mask must be one row for all queries. The state is (keys after the last reflection, in
    float32 at least; values).

    Raises TypeError or ValueError, naming the argument, for operands that do not fit together; on the CPU also for a
    `beta` out of its range.
    """
    past = call.state[0] if call.state else call.k[..., :0, :]
    return call.q * call.factor, call.k, reflections(call, directions, beta, call.k.shape[-1]), past


class Reflections(NamedTuple):
    """One reflection a token: unit directions w (..., M, K) and strengths b (..., M)."""

    w: Float[Tensor, "*batch M K"]
    b: Float[Tensor, "*batch M"]


def reflections(call: Call, directions: Tensor | None, beta: Tensor | None, width: int) -> Reflections:
    """The reflections of the new tokens by vectors of this width. Without `directions`, and for tokens that no query
    may attend to, nothing is reflected.

    Raises ValueError for a call that is not causal, and for gates that do not fit.
    """
    checks.expect(call.is_causal, "is_causal", "True, since tokens reflect the keys before them", False)
    new = call.v[..., call.past :, :].shape[:-1]
    checks.gate("directions", directions, (*new, width))
    checks.gate("beta", beta, new)
    checks.within("beta", "strengths of reflections", beta, 0.0, 2.0)
    key_mask = call.key_mask  # raises for a mask of pairs
    if directions is None:
        checks.expect(beta is None, "beta", "None without directions", "a tensor")
        return Reflections(call.q.new_zeros(*new, width), call.q.new_zeros(new))
    beta = call.q.new_ones(new) if beta is None else beta
    if key_mask is not None:
        beta = beta.masked_fill(~key_mask[..., call.past :], 0)
    return Reflections(unit(directions, "directions"), beta)


def reflected_scores(
    q: Float[Tensor, "*batch N K"],
    k: Float[Tensor, "*batch N K"],
    r: Reflections,
    past: Float[Tensor, "*batch P K"],
) -> tuple[Float[Tensor, "*batch N M"], Float[Tensor, "*batch M K"]]:
    """(scores, all keys after the last reflection) as the formula reads: token t reflects each key before it, the
    `past` ones included, and then scores these keys and its own. The scores of later keys are 0."""
    length, keys, rows = past.shape[-2] + k.shape[-2], past, []
    steps = (x[..., None, :].unbind(-3) for x in (q, k, r.w, r.b[..., None] * r.w))  # of (..., 1, K)
    for query, key, w, bw in zip(*steps, strict=True):
        keys = torch.cat([keys - (keys @ w.mT) @ bw, key], -2)
        rows.append(pad(query @ keys.mT, (0, length - keys.shape[-2])))
    return torch.cat(rows, -2), keys


def reflected_attention_reference(
    call: Call,
    q: Float[Tensor, "*batch N K"],
    k: Float[Tensor, "*batch N K"],
    r: Reflections,
    past: Float[Tensor, "*batch P K"],
    content: tuple[Tensor, Tensor] | None = None,
) -> tuple[Float[Tensor, "*batch N V"], tuple[Float[Tensor, "*batch M K"]]]:
    """(o, (all keys after the last reflection,)) of causal softmax attention with the `reflected_scores`, plus the
    scores of `content`, queries (..., N, ·) and keys (..., M, ·), if given. Computed token by token, in O(N^2 K)."""
    scores, keys = reflected_scores(q, k, r, past)
    if content is not None:
        scores = scores + content[0] @ content[1].mT
    blocked = blocked_pairs(q.shape[-2], call.v.shape[-2], True, call.attn_mask, q.device)
    return masked_softmax(scores, blocked, empty_rows=call.attn_mask is not None) @ call.v, (keys,)


class Blocks(NamedTuple):
    """What n blocks of C tokens do to queries q and keys k of width K."""

    scores: Float[Tensor, "*batch n C C"]  # within the block; arbitrary above the diagonal
    q: Float[Tensor, "*batch n C K"]  # the queries, moved to the start of their block
    k: Float[Tensor, "*batch n C K"]  # the keys, moved to its end
    across: Float[Tensor, "*batch n K K"]  # moves queries, as rows times it, from the block's end to its start


def blocks(q: Tensor, k: Tensor, r: Reflections, width: int) -> Blocks:
    """The `Blocks` in closed form, for blocks of `width` tokens; `width` divides the number of tokens."""
    q, k, w = (x.unflatten(-2, (-1, width)) for x in (q, k, r.w))  # (..., n, C, K)
    b = r.b.unflatten(-1, (-1, width))  # (..., n, C)
    # L itself can be formed safely: off the diagonal it is -b_s b_r w_s^T H_{s-1} ... H_{r+1} w_r, at most 4 in size.
    lower = torch.linalg.solve_triangular(
        b[..., None] * (w @ w.mT), torch.diag_embed(b), upper=False, unitriangular=True
    )
    across_keys = (k @ w.mT).triu(1)  # k_j w_r for the reflections r after j
    to_start = (q @ w.mT).tril() @ lower
    lower_w = lower @ w
    return Blocks(
        scores=q @ k.mT - to_start @ across_keys.mT,
        q=q - to_start @ w,
        k=k - across_keys @ (lower.mT @ w),
        across=torch.eye(w.shape[-1], dtype=w.dtype, device=w.device) - w.mT @ lower_w,
    )


def reflected_attention(
    call: Call,
    q: Float[Tensor, "*batch N K"],
    k: Float[Tensor, "*batch N K"],
    r: Reflections,
    past: Float[Tensor, "*batch P K"],
    content: tuple[Tensor, Tensor] | None = None,
    *,
    block: int = BLOCK,
) -> tuple[Float[Tensor, "*batch N V"], tuple[Tensor, ...]]:
    """`reflected_attention_reference` in blocks of at most `block` tokens, in memory linear in N.

    Queries are moved from block to block by the product of a block's reflections, as in section 3.3 of Yang et al.
    2025. A single token takes a step of the definition. Without `return_state` no keys are returned.
    """
    length, keys, key_mask = q.shape[-2], call.v.shape[-2], call.key_mask
    if length == 1:
        return reflected_attention_reference(call, q, k, r, past, content)
    checks.untraced("reflected attention in blocks")
    number = -(-length // checks.positive_int("block", block))
    width = -(-length // number)  # of equal blocks
    behind = width * number - length
    rows = (0, 0, 0, behind)  # hidden tokens, which fill the last block
    of = blocks(pad(q, rows), pad(k, rows), Reflections(pad(r.w, rows), pad(r.b, (0, behind))), width)
    moved_q, moved_k, across = (x.unbind(-3) for x in (of.q, of.k, of.across))
    if content is not None:
        content = pad(content[0], rows), pad(content[1], rows)

    def scores(s: Span) -> Tensor:
        """The scores of block `s.number` with all keys up to its end, the `past` keys first."""
        # Not unbound: each gradient would be a view that keeps its tile's whole row of gradients in memory.
        moved, found = moved_q[s.number], [of.scores[..., s.number, :, :]]
        for i in reversed(range(s.number)):
            found.append(moved @ moved_k[i].mT)
            if i or past.shape[-2]:
                moved = moved @ across[i]
        if past.shape[-2]:
            found.append(moved @ past.mT)
        reflected = torch.cat(found[::-1], -1)
        if content is None:
            return reflected
        return reflected + content[0][..., s.start : s.stop, :] @ content[1][..., : s.end, :].mT

    mask = None if key_mask is None else pad(key_mask, (0, behind))[..., None, :]
    v, padded = pad(call.v, rows), length + behind
    o = attend_in_tiles(scores, v, queries=padded, tile=width, is_causal=True, attn_mask=mask)[..., :length, :]
    if not call.return_state:
        return o, ()
    moved = past
    for one, onwards in zip(moved_k, across, strict=True):
        moved = torch.cat([moved @ onwards.mT, one], -2)  # all keys so far, at the end of this block
    return o, (moved[..., :keys, :],)


path_attention_reference, path_attention = two_forms(
    _path_attention, reflected_attention_reference, reflected_attention, keeps="changed keys"
)


class Directions(Gate):
    r"""$w = x W_1^T W_2^T$, one vector per head and token, as wide as the keys, through a bottleneck of 32 numbers
    (Yang et al. 2025, arXiv:2505.16381, without the convolution that follows)."""

    rank: ClassVar[int | None] = 32
    per_channel = True

    def forward(self, x: Float[Tensor, "B N d"]) -> Float[Tensor, "B H N K"]:
        return self._vectors(x)


MECHANISM = Mechanism(
    name="path",
    family="position_bias",
    source="Yang et al. 2025, arXiv:2505.16381",
    reference=path_attention_reference,
    fast=path_attention,
    bidirectional=False,
    positional=True,
    self_attention_only=True,
    gates={"directions": Directions, "beta": ReflectingWriteStrength},
)
