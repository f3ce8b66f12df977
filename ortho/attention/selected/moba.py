r"""Attention to chosen blocks of keys: a query reads its own block up to itself, and the past blocks that suit it best.

MoBA (Lu et al. 2025, arXiv:2502.13189): keys are cut into blocks of `block`, and a query attends to `count` of them,
its own among them; the others are those whose mean key has the highest score. Past blocks are whole, so that nothing
leaks: which are chosen depends on the past alone. Published for causal attention, and for nothing else. Of blocks with
equal scores the first are taken.

In the fast form the queries that chose the same block as their r-th make up tiles, for each r. How many tiles that
takes has a bound that does not depend on the choice, and so many are computed.
"""

from collections.abc import Callable

import torch

from ortho import _checks
from ortho._checks import checked
from ortho._typing import Bool, Float, Int, State, Tensor
from ortho.attention.indexing import indexing
from ortho.attention.mechanism import AttentionCost, Mechanism
from ortho.attention.operands import with_past
from ortho.attention.selected.groups import tile_count, tiles_by_label
from ortho.attention.selected.selection import Call, attend, attend_reference, begin, best_places, choice_call
from ortho.attention.selected.selection_cost import Flops, best_cost, chosen_cost, flops
from ortho.attention.sparse.tiling import ABSENT, TILE, Tiling, TokenBlocks, Work, consecutive
from ortho.attention.transforms import uncompiled

BLOCK, COUNT = 64, 3


@checked(shapes=False)
@indexing()
def moba_mask(
    q: Float[Tensor, "*batch N K"],
    k: Float[Tensor, "*batch M K"],
    *,
    block: int = BLOCK,
    count: int = COUNT,
    is_causal: bool = True,
    attn_mask: Bool[Tensor, "..."] | None = None,
    scale: float | None = None,
) -> Bool[Tensor, "*batch N M"]:
    """The pairs that are kept. The last query stands at the last key."""
    with_past(q, k, k, False, attn_mask, None)
    check(block, count, is_causal)
    call = choice_call(q, k, is_causal=True, attn_mask=attn_mask, scale=scale)
    return blocks_mask(call, _choose(call, block, count), block).reshape(*q.shape[:-1], k.shape[-2])


@checked(shapes=False)
@uncompiled
@indexing()
def moba_attention_reference(
    q: Float[Tensor, "*batch N K"],
    k: Float[Tensor, "*batch N K"],
    v: Float[Tensor, "*batch N V"],
    *,
    block: int = BLOCK,
    count: int = COUNT,
    is_causal: bool = False,
    attn_mask: Bool[Tensor, "..."] | None = None,
    scale: float | None = None,
    initial_state: State | None = None,
    return_state: bool = False,
) -> Float[Tensor, "*batch N V"] | tuple[Float[Tensor, "*batch N V"], State]:
    """`softmax_attention_reference` under `moba_mask`; `is_causal` must be True.

    `count` blocks of `block` keys are read by each query, its own included, or all that there are. (The paper has
    blocks of 512 to 4096, and 3 to 12 of them.) A block's mean is taken over the keys that a mask leaves. The state is
    (keys, values).

    Raises ValueError for a mask that is not the same for all queries.
    """
    check(block, count, is_causal)
    keys, values, call = begin(q, k, v, is_causal, attn_mask, scale, initial_state)
    o = attend_reference(q, keys, values, call, blocks_mask(call, _choose(call, block, count), block))
    return (o, (keys, values)) if return_state else o


@checked(shapes=False)
@uncompiled
@indexing()
def moba_attention(
    q: Float[Tensor, "*batch N K"],
    k: Float[Tensor, "*batch N K"],
    v: Float[Tensor, "*batch N V"],
    *,
    block: int = BLOCK,
    count: int = COUNT,
    is_causal: bool = False,
    attn_mask: Bool[Tensor, "..."] | None = None,
    scale: float | None = None,
    initial_state: State | None = None,
    return_state: bool = False,
) -> Float[Tensor, "*batch N V"] | tuple[Float[Tensor, "*batch N V"], State]:
    """`moba_attention_reference` from the chosen blocks alone, in float32 at least; not differentiable twice."""
    check(block, count, is_causal)
    keys, values, call = begin(q, k, v, is_causal, attn_mask, scale, initial_state)
    o = attend(q, keys, values, call, block_parts(call, _choose(call, block, count), block))
    return (o, (keys, values)) if return_state else o


def check(block: int, count: int, is_causal: bool) -> None:
    """TypeError or ValueError for sizes that are none, and for a call that is not causal."""
    _checks.positive_int("block", block)
    _checks.positive_int("count", count)
    if is_causal is not True:
        raise ValueError(f"is_causal: expected True, since a query's past blocks are chosen from, got {is_causal}")


def past_blocks(keys: int, block: int) -> int:
    """How many blocks of so many keys are before the last one."""
    return (keys - 1) // block


def _choose(call: Call, block: int, count: int) -> Int[Tensor, "G N chosen"]:
    P = past_blocks(call.k.shape[1], block)
    if not min(count - 1, P):
        return _none_chosen(call)
    keys = call.k[:, : P * block].unflatten(1, (P, block))  # (G, P, block, K)
    if call.visible is None:
        means = keys.mean(2)
    else:
        there = call.visible[:, : P * block].reshape(len(keys), P, block, 1)
        means = (keys * there).sum(2) / there.sum(2).clamp(min=1)
    return choose_blocks(call, block, count - 1, lambda tile: call.scores(tile, means))


def choose_blocks(
    call: Call, block: int, count: int, scores_of: Callable[[slice], Tensor], width: int = 1
) -> Int[Tensor, "G N chosen"]:
    """The numbers of at most `count` past blocks of each query, those of the highest scores; `ABSENT` for no more.

    `scores_of` gives those of a tile of queries, (G, n, past blocks), and holds `width` numbers a query meanwhile.
    """
    G, P = len(call.q), past_blocks(call.k.shape[1], block)
    count = min(count, P)
    if not count:
        return _none_chosen(call)
    number = torch.arange(P, device=call.q.device)
    some = None if call.visible is None else call.visible[:, : P * block].reshape(G, 1, P, block).any(-1)
    found = []
    for tile in call.steps(max(P, width)):
        past = number < call.places[tile, None] // block  # (n, P)
        there = past if some is None else past & some
        found.append(best_places(scores_of(tile).masked_fill(~there, -torch.inf), count))
    return torch.cat(found, 1)


def _none_chosen(call: Call) -> Int[Tensor, "G N 0"]:
    return torch.zeros(*call.q.shape[:2], 0, dtype=torch.long, device=call.q.device)


def blocks_mask(call: Call, chosen: Int[Tensor, "G N chosen"], block: int) -> Bool[Tensor, "G N M"]:
    """The pairs of each query with its own block, up to itself, and with the chosen ones."""
    i, j = call.places[:, None], torch.arange(call.k.shape[1], device=chosen.device)
    read = (i // block == j // block).expand(len(chosen), -1, -1)
    for each in chosen.unbind(-1):
        read = read | (each[..., None] == j // block)
    return read & call.reachable(call.places)


def block_parts(call: Call, chosen: Int[Tensor, "G N chosen"], block: int) -> list[Tiling]:
    """The parts of `blocks_mask`: own blocks, and each query's first chosen block, its second, and so on."""
    N, M, first, device = call.q.shape[1], call.k.shape[1], call.first, chosen.device
    width = _own_tile(block)
    tile = width if N > 1 else 1
    start = torch.arange(first // tile, -(-(first + N) // tile), device=device)[:, None] * tile
    low, high = start // block * block // width, (start + tile - 1).clamp(max=M - 1) // width
    table = low + torch.arange(block // width, device=device)
    table = table.masked_fill(table > high, ABSENT)
    queries, own = consecutive(first, first + N, tile, device), consecutive(0, M, width, device)
    parts = [Tiling(queries, own, table, lambda i, j: j <= i)]
    P, blocks = past_blocks(M, block), consecutive(0, M, block, device)
    for each in chosen.unbind(-1):
        tiles = tiles_by_label(each, P, min(_chosen_tile(block), N))
        positions = torch.where(tiles.positions < 0, ABSENT, tiles.positions + first)
        parts.append(Tiling(TokenBlocks(positions), blocks, tiles.labels[..., None]))
    return parts


def _own_tile(block: int) -> int:
    """Of a query's own block so much is computed together: less than all, of which nearly half is behind a query."""
    return block if block % TILE else TILE


def _chosen_tile(block: int) -> int:
    """Queries of one chosen block that are computed together: fewer than keys, since a tile of each is not full."""
    return max(1, min(TILE, block // 4))


def block_work(N: int, *, block: int, count: int, last: bool = False) -> list[Work]:
    """What the parts compute of N tokens, with `count` past blocks a query; or of the `last` query alone."""
    P, width = past_blocks(N, block), _own_tile(block)
    chosen, queries = min(count, P), 1 if last else N
    if last:
        own = Work(1, (N - 1) % block // width + 1, 1, width)
    else:
        tiles, each = -(-N // width), block // width
        whole, rest = divmod(tiles, each)
        blocks = whole * each * (each + 1) // 2 + rest * (rest + 1) // 2
        own = Work(tiles, blocks, width if N > 1 else 1, width)
    size = min(_chosen_tile(block), queries)
    T = tile_count(queries, P, size)
    return [own, *[Work(T, T, size, block)] * chosen]


@checked
def moba_pairs(n: int, *, block: int = BLOCK, count: int = COUNT) -> int:
    """How many pairs of n tokens are kept, in closed form: sums over blocks of their own triangle and of what each of
    their queries reads of the past."""
    check(block, count, True)
    whole, rest = divmod(n, block)
    own = whole * block * (block + 1) // 2 + rest * (rest + 1) // 2
    full = min(count - 1, whole)  # blocks with fewer blocks before them than a query could choose
    past = block * (full * (full - 1) // 2 + (whole - full) * (count - 1)) + rest * min(count - 1, whole)
    return own + block * past


@checked
def moba_flops(N: int, K: int, V: int, *, block: int = BLOCK, count: int = COUNT, causal: bool = True) -> Flops:
    """What the fast form spends on choosing and on attending, a sequence: products of each query with the mean of each
    past block, where there is a choice; own blocks, and chosen ones with tiles that are full in the worst case."""
    P = past_blocks(N, block) if count > 1 else 0
    return flops(2 * N * P * K, block_work(N, block=block, count=count - 1), K, V)


@checked
def moba_cost(
    B: int,
    N: int,
    H: int,
    K: int,
    V: int,
    *,
    block: int = BLOCK,
    count: int = COUNT,
    form: str = "fast",
    causal: bool = True,
    qk_grad: bool = True,
    itemsize: int = 4,
) -> AttentionCost:
    """Closed form of one self-attention call, in either form, for a number of tokens."""
    P, choosing = past_blocks(N, block), moba_flops(N, K, V, block=block, count=count).choosing
    chosen = min(count - 1, P)
    return chosen_cost(
        B,
        N,
        H,
        K,
        V,
        choosing=choosing,
        # Means; blocked, and the highest
        comparing=P * block * K + N * (P + best_cost(P, chosen)) if chosen else 0,
        last_choosing=choosing // N,
        work=block_work(N, block=block, count=count - 1),
        last=block_work(N, block=block, count=count - 1, last=True),
        form=form,
        qk_grad=qk_grad,
        itemsize=itemsize,
    )


MECHANISM = Mechanism(
    name="moba",
    family="dynamic",
    source="Lu et al. 2025, arXiv:2502.13189",
    reference=moba_attention_reference,
    fast=moba_attention,
    causal=True,
    bidirectional=False,
    exact=False,
    positional=True,
    cost=moba_cost,
)
