r"""Three views of the past, weighed by gates: compressed, chosen and near (Native Sparse Attention: Yuan et al. 2025,
arXiv:2502.11089, section 3).

- compressed: every `stride` tokens the mean key and value of the last `length`, once these are all in the past;
- selected: `count` blocks of `block` keys, the first, the query's own up to itself and the one before it among them; of
  the others those to which the compressed weights give most (equations 8 and 9);
- window: the last `window` keys.

Each is a softmax attention of its own, $o = \sum_b g_b o_b$. The paper compresses by a small network with positions of
their own for the tokens of a block, where this takes means; has keys and values of their own for each branch; and lets
the heads of a group choose together, where here each head chooses for itself. Blocks are chosen from the past, and
compressed tokens end in it: nothing leaks. Of blocks with equal weight the first are taken.
"""

from typing import NamedTuple

import torch

from ortho import _checks
from ortho._autocast import no_autocast
from ortho._checks import checked
from ortho._typing import Bool, Float, Int, State, Tensor
from ortho.attention.indexing import indexing
from ortho.attention.mechanism import Mechanism
from ortho.attention.operands import masked_softmax, with_past
from ortho.attention.recurrent.memory import gate
from ortho.attention.selected.moba import block_parts, blocks_mask, choose_blocks, past_blocks
from ortho.attention.selected.nsa_cost import nsa_cost
from ortho.attention.selected.nsa_gates import BranchGates
from ortho.attention.selected.nsa_sizes import SIZES, Sizes, known_sizes
from ortho.attention.selected.selection import Call, attend, attend_reference, begin, choice_call, flat
from ortho.attention.sparse.tiling import ABSENT, TILE, Tiling, consecutive
from ortho.attention.sparse.window import Window
from ortho.attention.transforms import uncompiled


class Masks(NamedTuple):
    """The pairs that are kept by each branch; the compressed tokens are (M - length) // stride + 1, or none."""

    compressed: Bool[Tensor, "*batch N compressed"]
    selected: Bool[Tensor, "*batch N M"]
    window: Bool[Tensor, "*batch N M"]


@checked(shapes=False)
@indexing()
def nsa_masks(
    q: Float[Tensor, "*batch N K"],
    k: Float[Tensor, "*batch M K"],
    *,
    sizes: Sizes = SIZES,
    attn_mask: Bool[Tensor, "..."] | None = None,
    scale: float | None = None,
) -> Masks:
    """The pairs that are kept. The last query stands at the last key."""
    with_past(q, k, k, False, attn_mask, None)
    known_sizes(sizes)
    call = choice_call(q, k, is_causal=True, attn_mask=attn_mask, scale=scale)
    compressed = _compress(call.k, call, sizes)
    masks = _masks(call, compressed, sizes)
    return Masks(*(mask.reshape(*q.shape[:-1], mask.shape[-1]) for mask in masks))


@checked(shapes=False)
@uncompiled
@indexing()
def nsa_attention_reference(
    q: Float[Tensor, "*batch N K"],
    k: Float[Tensor, "*batch N K"],
    v: Float[Tensor, "*batch N V"],
    *,
    gates: Float[Tensor, "*batch N 3"] | None = None,
    sizes: Sizes = SIZES,
    is_causal: bool = False,
    attn_mask: Bool[Tensor, "..."] | None = None,
    scale: float | None = None,
    initial_state: State | None = None,
    return_state: bool = False,
) -> Float[Tensor, "*batch N V"] | tuple[Float[Tensor, "*batch N V"], State]:
    """`softmax_attention_reference` under each of `nsa_masks`, weighed; `is_causal` must be True.

    `gates` are those of the compressed, the selected and the window's branch, by default a third each, and before the
    first compressed token a half for the other two. A branch in which a mask leaves a query nothing adds nothing. Means
    are over the keys that a mask leaves. The state is (keys, values).

    Raises ValueError for a mask that is not the same for all queries.
    """
    keys, values, call = _begin(q, k, v, gates, sizes, is_causal, attn_mask, scale, initial_state)
    with no_autocast(q):
        x, y, z = flat(q), flat(keys), flat(values)
        pooled = _compress(y, call, sizes)
        masks = _masks(call, pooled, sizes)
        branches = [attend_reference(x, y, z, call, mask) for mask in masks[1:]]
        if masks.compressed.shape[-1]:
            few = attend_reference(x, pooled, _compress(z, call, sizes), call, masks.compressed)
            branches.insert(0, few)
        o = _weighed(branches, gates, call, sizes).reshape(*q.shape[:-1], -1).to(q.dtype)
    return (o, (keys, values)) if return_state else o


@checked(shapes=False)
@uncompiled
@indexing()
def nsa_attention(
    q: Float[Tensor, "*batch N K"],
    k: Float[Tensor, "*batch N K"],
    v: Float[Tensor, "*batch N V"],
    *,
    gates: Float[Tensor, "*batch N 3"] | None = None,
    sizes: Sizes = SIZES,
    is_causal: bool = False,
    attn_mask: Bool[Tensor, "..."] | None = None,
    scale: float | None = None,
    initial_state: State | None = None,
    return_state: bool = False,
) -> Float[Tensor, "*batch N V"] | tuple[Float[Tensor, "*batch N V"], State]:
    """`nsa_attention_reference` from what each branch keeps, in float32 at least; not differentiable twice.

    The compressed branch reads one token in `stride`, and so grows with N^2, as does what it chooses by.
    """
    keys, values, call = _begin(q, k, v, gates, sizes, is_causal, attn_mask, scale, initial_state)
    with no_autocast(q):
        x, y, z = flat(q), flat(keys), flat(values)
        pooled, few = _compress(y, call, sizes), _compress(z, call, sizes)
        first, stop = call.first, call.first + q.shape[-2]
        window = Window(sizes.window).tilings(first, stop, keys.shape[-2], is_causal=True, device=q.device)
        selected = block_parts(call, _choose(call, pooled, sizes), sizes.block)
        branches = [attend(x, y, z, call, selected), attend(x, y, z, call, list(window))]
        if pooled.shape[1]:
            seen = call._replace(visible=_some_visible(call, sizes))
            branches.insert(0, attend(x, pooled, few, seen, [_compressed_part(call, pooled.shape[1], sizes)]))
        o = _weighed(branches, gates, call, sizes).reshape(*q.shape[:-1], -1).to(q.dtype)
    return (o, (keys, values)) if return_state else o


def _weighed(
    branches: list[Float[Tensor, "G N V"]], gates: Tensor | None, call: Call, sizes: Sizes
) -> Float[Tensor, "G N V"]:
    """The sum of the branches, of which the first is left out where there are two, times their gates."""
    if gates is None:
        reached = 2 + (call.places >= sizes.length - 1).to(branches[0])  # branches, without a mask
        return sum(branches[1:], branches[0]) / reached[:, None]
    weights = flat(gates)[..., -len(branches) :].unbind(-1)
    weighed = [branch * weight[..., None] for branch, weight in zip(branches, weights, strict=True)]
    return sum(weighed[1:], weighed[0])


def _begin(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Tensor | None,
    sizes: Sizes,
    is_causal: bool,
    attn_mask: Tensor | None,
    scale: float | None,
    initial_state: State | None,
) -> tuple[Tensor, Tensor, Call]:
    if is_causal is not True:
        raise ValueError(f"is_causal: expected True, since what a query sees is chosen from its past, got {is_causal}")
    known_sizes(sizes)
    keys, values, call = begin(q, k, v, is_causal, attn_mask, scale, initial_state)
    gate("gates", gates, k, (*k.shape[:-1], 3))
    if gates is not None:
        _checks.finite("gates", gates)
    return keys, values, call


def _units(x: Float[Tensor, "G M n"], sizes: Sizes) -> Float[Tensor, "G compressed n"]:
    """The sums of the rows of each compressed token."""
    count = sizes.compressed(x.shape[1])
    if not count:
        return x[:, :0]
    steps = sizes.length // sizes.stride
    sums = x[:, : (count + steps - 1) * sizes.stride].unflatten(1, (-1, sizes.stride)).sum(2)
    total = sums[:, :count]
    for step in range(1, steps):
        total = total + sums[:, step : step + count]
    return total


def _compress(x: Float[Tensor, "G M n"], call: Call, sizes: Sizes) -> Float[Tensor, "G compressed n"]:
    """The mean of the visible rows of each compressed token; 0 where there is none."""
    if call.visible is None:
        return _units(x, sizes) / sizes.length
    there = call.visible[..., None].to(x)
    return _units(x * there, sizes) / _units(there, sizes).clamp(min=1)


def _some_visible(call: Call, sizes: Sizes) -> Bool[Tensor, "G compressed"] | None:
    return None if call.visible is None else _units(call.visible[..., None].to(call.k), sizes)[..., 0] > 0


def _compressed_mask(call: Call, i: Int[Tensor, "n"], sizes: Sizes) -> Bool[Tensor, "G n compressed"]:
    """The compressed tokens that end in the past of queries at these positions."""
    number = torch.arange(sizes.compressed(call.k.shape[1]), device=i.device)
    past = (number * sizes.stride + sizes.length - 1 <= i[:, None])[None]
    some = _some_visible(call, sizes)
    return (past if some is None else past & some[:, None]).expand(len(call.k), -1, -1)


def _masks(call: Call, pooled: Float[Tensor, "G compressed K"], sizes: Sizes) -> Masks:
    stop = call.first + call.q.shape[1]
    window = Window(sizes.window).mask(stop, call.k.shape[1], first=call.first, is_causal=True, device=call.q.device)
    return Masks(
        _compressed_mask(call, call.places, sizes),
        blocks_mask(call, _choose(call, pooled, sizes), sizes.block),
        window & call.reachable(call.places),
    )


def _choose(call: Call, pooled: Float[Tensor, "G compressed K"], sizes: Sizes) -> Int[Tensor, "G N chosen"]:
    """Past blocks: the first, the one before the own, and those with the highest weight of compressed tokens."""
    pooled, P = pooled.detach(), past_blocks(call.k.shape[1], sizes.block)
    number = torch.arange(P, device=pooled.device)

    def weights(tile: slice) -> Float[Tensor, "G n P"]:
        i = call.places[tile]
        scores = call.scores(tile, pooled) * abs(call.scale)
        given = masked_softmax(scores, ~_compressed_mask(call, i, sizes), empty_rows=True)
        # A compressed token's weight goes to each of its strides, and a block's is that of its strides.
        strides = given.new_zeros(*given.shape[:2], (P + 1) * sizes.block // sizes.stride)
        for step in range(sizes.length // sizes.stride):
            strides[..., step : step + given.shape[-1]] += given
        of_blocks = strides[..., : P * sizes.block // sizes.stride].unflatten(-1, (P, -1)).sum(-1)
        always = (number == 0) | (number == i[:, None] // sizes.block - 1)
        return of_blocks.masked_fill(always, torch.inf)

    if not pooled.shape[1]:
        return choose_blocks(call, sizes.block, sizes.count - 1, lambda tile: call.q[:, tile, :1].expand(-1, -1, P))
    return choose_blocks(call, sizes.block, sizes.count - 1, weights, width=pooled.shape[1])


def _compressed_part(call: Call, count: int, sizes: Sizes) -> Tiling:
    """All compressed tokens that end in the past, for tiles of queries, in tiles of as many."""
    N, first, device = call.q.shape[1], call.first, call.q.device
    tile = TILE if N > 1 else 1
    start = torch.arange(first // tile, -(-(first + N) // tile), device=device)[:, None] * tile
    last = (start + tile - 1).clamp(max=first + N - 1)
    high = (last + 1 - sizes.length).div(sizes.stride, rounding_mode="floor").clamp(max=count - 1) // TILE
    table = torch.arange(max(1, int(high.max()) + 1), device=device).expand(len(start), -1)
    table = table.masked_fill((table > high) | (last < sizes.length - 1), ABSENT)
    queries, keys = consecutive(first, first + N, tile, device), consecutive(0, count, TILE, device)
    return Tiling(queries, keys, table, lambda i, j: j * sizes.stride + sizes.length - 1 <= i)


MECHANISM = Mechanism(
    name="nsa",
    family="dynamic",
    source="Yuan et al. 2025, arXiv:2502.11089",
    reference=nsa_attention_reference,
    fast=nsa_attention,
    causal=True,
    bidirectional=False,
    exact=False,
    positional=True,
    cost=nsa_cost,
    gates={"gates": BranchGates},
    query_gates=frozenset({"gates"}),
)
