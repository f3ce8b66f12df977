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

from math import sqrt
from typing import Any, ClassVar, NamedTuple

import torch
from torch.nn.functional import pad

from ortho import _checks
from ortho._checks import absent_keys, attention_form, gate
from ortho._cost import Cost, product
from ortho._typing import Bool, Float, Size, State, Tensor
from ortho.attention.mechanism import (
    CostedCall,
    Mechanism,
    causal_pairs,
    closed_form,
)
from ortho.attention.recurrence import chunks, equal_chunks
from ortho.attention.scores import blocked_pairs, masked_softmax, unit
from ortho.attention.softmax.tiling import Span, tile_pairs, tiled_attention
from ortho.gates import Gate, ReflectingWriteStrength

# On a CPU with heads of width 64, blocks of 128 were fastest from N = 2048 on, and blocks of 64 at N = 512.
BLOCK = 128


def _check(
    q: Tensor, k: Tensor, v: Tensor, *, directions: Tensor | None = None, beta: Tensor | None = None, **rest: Any
) -> None:
    check_reflections(k, k.shape[-1], directions, beta, rest["is_causal"])


@attention_form(moves_keys=True, check=_check)
def path_attention_reference(
    q: Float[Tensor, "*batch N K"],
    k: Float[Tensor, "*batch N K"],
    v: Float[Tensor, "*batch M V"],
    *,
    directions: Float[Tensor, "*batch N K"] | None = None,
    beta: Float[Tensor, "*batch N"] | None = None,
    is_causal: bool = False,
    attn_mask: Bool[Tensor, "..."] | None = None,
    scale: float | None = None,
    initial_state: State | None = None,
    return_state: bool = False,
) -> Float[Tensor, "*batch N V"] | tuple[Float[Tensor, "*batch N V"], State]:
    r"""Softmax attention with keys that every later token reflects, computed token by token in $O(N^2 K)$.

    Arguments are as in `softmax_attention_reference`, except `is_causal`, which must be True. `directions` are divided
    by their lengths; without them nothing is reflected. `beta`, in [0, 2], is 1 by default, and 0 for a token that no
    query may attend to: a mask must be one row for all queries. The state is (keys after the last reflection, in
    float32 at least; values).

    Raises TypeError or ValueError, naming the argument, for operands that do not fit together or leave their range.
    """
    past = k.new_zeros(*k.shape[:-2], 0, k.shape[-1]) if initial_state is None else initial_state[0]
    r = reflections(directions, beta, k, k.shape[-1], attn_mask, past.shape[-2])
    q = q * (1 / sqrt(q.shape[-1]) if scale is None else scale)
    o, keys = reflected_attention_reference(q, k, v, r, past, attn_mask)
    return o, (keys,)


@attention_form(moves_keys=True, check=_check)
def path_attention(
    q: Float[Tensor, "*batch N K"],
    k: Float[Tensor, "*batch N K"],
    v: Float[Tensor, "*batch M V"],
    *,
    directions: Float[Tensor, "*batch N K"] | None = None,
    beta: Float[Tensor, "*batch N"] | None = None,
    is_causal: bool = False,
    attn_mask: Bool[Tensor, "..."] | None = None,
    scale: float | None = None,
    initial_state: State | None = None,
    return_state: bool = False,
    block: int = BLOCK,
) -> Any:
    """`path_attention_reference` in blocks of at most `block` tokens, in memory linear in N. Not differentiable twice.

    Queries are moved from block to block by the product of a block's reflections, as in section 3.3 of the paper.
    """
    past = k.new_zeros(*k.shape[:-2], 0, k.shape[-1]) if initial_state is None else initial_state[0]
    r = reflections(directions, beta, k, k.shape[-1], attn_mask, past.shape[-2])
    q = q * (1 / sqrt(q.shape[-1]) if scale is None else scale)
    o, keys = reflected_attention(q, k, v, r, past, attn_mask, block=block, return_keys=return_state)
    return o, (keys,)


class Reflections(NamedTuple):
    """One reflection a token: unit directions w (..., M, K) and strengths b (..., M)."""

    w: Float[Tensor, "*batch M K"]
    b: Float[Tensor, "*batch M"]


def check_reflections(k: Tensor, width: int, directions: Tensor | None, beta: Tensor | None, is_causal: bool) -> None:
    """Raise TypeError or ValueError for a call that is not causal; for gates of other shapes than (..., M, width) and
    (..., M), where k is (..., M, K); for a `beta` without `directions`; and, on the CPU, for directions whose squared
    lengths are beyond the dtype's range or a `beta` outside [0, 2]."""
    if not is_causal:
        raise ValueError("is_causal: expected True, since tokens reflect the keys before them, got False")
    gate("directions", directions, k, (*k.shape[:-1], width))
    gate("beta", beta, k, k.shape[:-1])
    if directions is not None:
        most = (torch.finfo(torch.promote_types(k.dtype, torch.float32)).max / width) ** 0.5
        _checks.within("directions", "numbers", directions, -most, most)
    elif beta is not None:
        raise ValueError(f"beta: expected None without directions, got {_checks.describe(beta)}")
    if beta is not None:
        _checks.within("beta", "strengths of reflections", beta, 0.0, 2.0)


def reflections(
    directions: Tensor | None, beta: Tensor | None, k: Tensor, width: int, attn_mask: Tensor | None, past: int
) -> Reflections:
    """The reflections given by checked gates, for keys k (..., M, K) after `past` others. Without `directions`, and for
    tokens that no query may attend to, nothing is reflected."""
    absent = absent_keys(attn_mask, k, past, is_causal=True)
    if directions is None:
        return Reflections(k.new_zeros(*k.shape[:-1], width), k.new_zeros(k.shape[:-1]))
    beta = k.new_ones(k.shape[:-1]) if beta is None else beta
    return Reflections(unit(directions, "directions"), beta if absent is None else beta.masked_fill(absent, 0))


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
    q: Float[Tensor, "*batch N K"],
    k: Float[Tensor, "*batch N K"],
    v: Float[Tensor, "*batch M V"],
    r: Reflections,
    past: Float[Tensor, "*batch P K"],
    attn_mask: Tensor | None,
    content: tuple[Tensor, Tensor] | None = None,
) -> tuple[Float[Tensor, "*batch N V"], Float[Tensor, "*batch M K"]]:
    """(o, all keys after the last reflection) of causal softmax attention with the `reflected_scores`, plus the scores
    of `content`, queries (..., N, ·) and keys (..., M, ·), if given. Computed token by token, in O(N^2 K)."""
    scores, keys = reflected_scores(q, k, r, past)
    if content is not None:
        scores = scores + content[0] @ content[1].mT
    blocked = blocked_pairs(q.shape[-2], v.shape[-2], True, attn_mask, q.device)
    return masked_softmax(scores, blocked, empty_rows=attn_mask is not None) @ v, keys


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


def tile_scores(s: Span, of: Blocks, past: Float[Tensor, "*batch P K"]) -> Float[Tensor, "*batch C end"]:
    """The scores of block `s.number` with all keys up to its end, the `past` keys first."""
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
    """All keys, moved to the end of the last block."""
    keys = past
    for block, across in zip(of.k.unbind(-3), of.across.unbind(-3), strict=True):
        keys = torch.cat([keys @ across.mT, block], -2)
    return keys


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
    """`reflected_attention_reference` in blocks of at most `block` tokens, in memory linear in N. Queries move from
    block to block. The keys are None unless `return_keys`. A single token takes one step of the reference, which always
    returns the keys."""
    length, keys = q.shape[-2], v.shape[-2]
    if length == 1:
        return reflected_attention_reference(q, k, v, r, past, attn_mask, content)
    width, behind = chunks(length, block)
    q, k, v = (pad(x, (0, 0, 0, behind)) for x in (q, k, v))
    r = Reflections(pad(r.w, (0, 0, 0, behind)), pad(r.b, (0, behind)))
    if content is not None:
        content = tuple(pad(x, (0, 0, 0, behind)) for x in content)
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
    """The mask of `keys` keys, extended by the `behind` hidden keys and queries that pad the last block."""
    if attn_mask is None or not behind:
        return attn_mask
    attn_mask = attn_mask.expand(torch.broadcast_shapes(attn_mask.shape, (1, keys)))
    return pad(attn_mask, (0, behind, 0, 0 if attn_mask.shape[-2] == 1 else behind))


class Directions(Gate):
    r"""$w = x W_1^T W_2^T$, one vector per head and token, as wide as the keys, through a bottleneck of 32 numbers
    (Yang et al. 2025, arXiv:2505.16381, without the convolution that follows)."""

    rank: ClassVar[int | None] = 32

    @classmethod
    def rows(cls, d: Size, H: Size) -> Size:
        return d

    def forward(self, x: Float[Tensor, "B N d"]) -> Float[Tensor, "B H N K"]:
        return self._vectors(x)


@closed_form
def reflections_cost(call: CostedCall, *, bias_width: int | None = None, block: int = BLOCK) -> Cost:
    """Closed-form cost of one self-attention call, in either form; it is causal, whatever `call.causal` says.

    With a `bias_width`, vectors of that width give the reflected scores, which are added to q^T k; without one, q and k
    give them. A symbolic N stands for a multiple of `block` greater than `block`.
    """
    (G, N, K, V), item, bias = call.sizes, call.item, int(bias_width is not None)
    D = K if bias_width is None else bias_width
    rows = G * N
    rest = _blocks(call, D, bias, block) if call.form == "fast" and N != 1 else _steps(call, D, bias)
    return rest + Cost(
        # earlier keys are reflected, then all keys are scored; the content; the values
        decode=4 * G * (N - 1) * D + 2 * rows * (D + K * bias + V),
        state_bytes=item * rows * D + call.itemsize * rows * (V + K * bias),
    )


# Below, D is the width of the reflected vectors, bias says that content is added, and flags are 0 or 1.


def _steps(call: CostedCall, D: Size, bias: int) -> Cost:
    (G, N, K, V), reach = call.sizes, call.reach
    pairs, upto = G * N * N, G * causal_pairs(N)
    before, grad = upto - G * N, max(bias, reach)  # (token, earlier key) pairs; whether the vectors need a gradient
    # A key's component along each later w, and that times w; scores; values; the content
    products = product(2 * before * D) + product(upto * D, 1 + grad)
    products += product(pairs * V) + product(bias * pairs * K, 2 * reach)
    return products


def _blocks(call: CostedCall, D: Size, bias: int, block: int) -> Cost:
    """The cost of T blocks of C tokens, and of the tiles of one block's queries and another's keys."""
    C, T = equal_chunks(call.N, block)
    n, grad = call.sizes[0] * T, max(bias, call.reach)
    products = n * (16 * C * C * D + 5 * C**3 + 2 * C * D * D)  # C^3 of them for the triangular system
    blocks = Cost(
        forward=products,
        # Twice each product, except the system, which takes another system and a product
        backward=2 * products + n * C**3 - (1 - grad) * 8 * n * C * C * D,
    )
    return blocks + _tiles(call, D, bias, C, T)


def _tiles(call: CostedCall, D: Size, bias: int, C: Size, T: Size) -> Cost:
    (G, _, K, V), reach = call.sizes, call.reach
    pairs = G * tile_pairs(T * C, C, True)
    apart = (causal_pairs(T) - T) * G  # pairs of a tile and an earlier block; blocks crossed in between:
    crossed = (causal_pairs(T - 1) - (T - 1)) * G
    scores = 2 * C * D * (C * apart + D * crossed) + 2 * pairs * K * bias
    return Cost(
        forward=scores + 2 * pairs * V,
        backward=3 * scores - 4 * pairs * K * bias * (1 - reach) + 4 * pairs * V,  # scores again; dV and dP
    )


MECHANISM = Mechanism(
    name="path",
    family="positions",
    source="Yang et al. 2025, arXiv:2505.16381",
    reference=path_attention_reference,
    fast=path_attention,
    bidirectional=False,
    positional=True,
    self_attention_only=True,
    cost=reflections_cost,
    gates={"directions": Directions, "beta": ReflectingWriteStrength},
)
