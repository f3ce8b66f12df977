r"""Attention to selected blocks of keys: a query reads its own block up to itself, and the past blocks with the highest
scores.

MoBA (Lu et al. 2025, arXiv:2502.13189): keys are cut into blocks of `block`, and a query attends to `count` of them:
its own, and those whose mean keys have the highest scores. Past blocks are complete, so the selection depends on the
past alone, and nothing leaks. The method is published for causal attention only. Among blocks with equal scores the
first are taken.

In the fast form, for each r, a tile holds queries whose r-th selected block is the same. The number of tiles has a
bound that does not depend on the selection, and that many are computed.
"""

from collections.abc import Callable

import torch

from ortho._checks import checked
from ortho._typing import Bool, Float, Int, Tensor
from ortho.attention.mechanism import Mechanism
from ortho.attention.selected.call import Call, mask_form, selecting_form
from ortho.attention.selected.selection import (
    Selecting,
    attend_to_mask,
    attend_to_tilings,
    best_positions,
    selection_cost,
    tile_count,
    tiles_by_label,
)
from ortho.attention.sparse.tiling import ABSENT, TILE, Tiling, TokenBlocks, Work, consecutive

BLOCK, COUNT = 64, 3


def _selected(call: Call, block: int, count: int) -> Int[Tensor, "G N selected"]:
    """For each query, the past blocks whose mean keys have the highest products with it."""
    P = past_blocks(call.k.shape[1], block)
    if not min(count - 1, P):
        return none_selected(call)
    keys = call.k.detach()[:, : P * block].unflatten(1, (P, block))  # (G, P, block, K)
    if call.visible is None:
        means = keys.mean(2)
    else:
        there = call.visible[:, : P * block].reshape(*keys.shape[:3], 1)
        means = (keys * there).sum(2) / there.sum(2).clamp(min=1)
    return select_blocks(call, block, count - 1, lambda tile: call.products(tile, means))


@mask_form(only_causal=True)
def moba_mask(call: Call, *, block: int = BLOCK, count: int = COUNT) -> Bool[Tensor, "G N M"]:
    """The pairs that are kept. The last query is at the last key's position."""
    return blocks_mask(call, _selected(call, block, count), block)


@selecting_form(only_causal=True)
def moba_attention_reference(call: Call, *, block: int = BLOCK, count: int = COUNT) -> Float[Tensor, "G N V"]:
    """Softmax attention under `moba_mask`; `is_causal` must be True.

    Each query reads `count` blocks of `block` keys, its own included, or all if there are fewer. (The paper has blocks
    of 512 to 4096 keys, and 3 to 12 of them.) A block's mean is taken over the keys that are not masked. The state is
    (keys, values).

    Raises ValueError for a mask that is not the same for all queries.
    """
    return attend_to_mask(call, blocks_mask(call, _selected(call, block, count), block))


@selecting_form(only_causal=True)
def moba_attention(call: Call, *, block: int = BLOCK, count: int = COUNT) -> Float[Tensor, "G N V"]:
    """`moba_attention_reference` from the selected blocks alone, in float32 at least; not differentiable twice."""
    return attend_to_tilings(call, block_tilings(call, _selected(call, block, count), block))


# --------------------------------------------------------------------------------------------- blocks, however selected


def past_blocks(keys: int, block: int) -> int:
    """The number of blocks of `block` keys before the last one."""
    return (keys - 1) // block


def none_selected(call: Call) -> Int[Tensor, "G N 0"]:
    """No block for any query."""
    return call.places.new_zeros(*call.q.shape[:2], 0)


def select_blocks(
    call: Call, block: int, count: int, scores_of: Callable[[slice], Tensor], width: int = 1
) -> Int[Tensor, "G N selected"]:
    """The numbers of the past blocks with each query's `count` highest scores; `ABSENT` where there are fewer.

    `scores_of` returns the scores of a tile of queries, (G, n, past blocks), and uses `width` numbers per query for it.
    """
    G, P = len(call.q), past_blocks(call.k.shape[1], block)
    if not min(count, P):
        return none_selected(call)
    number = torch.arange(P, device=call.q.device)
    some = None if call.visible is None else call.visible[:, : P * block].reshape(G, 1, P, block).any(-1)
    found = []
    for tile in call.steps(max(P, width)):
        past = number < call.places[tile, None] // block  # (n, P)
        there = past if some is None else past & some
        found.append(best_positions(scores_of(tile).masked_fill(~there, -torch.inf), min(count, P)))
    return torch.cat(found, 1)


def blocks_mask(call: Call, selected: Int[Tensor, "G N selected"], block: int) -> Bool[Tensor, "G N M"]:
    """The pairs of each query with its own block, up to itself, and with the selected ones."""
    i, j = call.places[:, None], torch.arange(call.k.shape[1], device=selected.device)
    read = (i // block == j // block).expand(len(selected), -1, -1)
    for each in selected.unbind(-1):
        read = read | (each[..., None] == j // block)
    return read & call.reachable()


def block_tilings(call: Call, selected: Int[Tensor, "G N selected"], block: int) -> list[Tiling]:
    """The tilings of `blocks_mask`: own blocks, and each query's first selected block, its second, and so on."""
    N, M, first, device = call.q.shape[1], call.k.shape[1], call.first, selected.device
    width = _own_tile(block)
    tile = width if N > 1 else 1
    start = torch.arange(first // tile, -(-(first + N) // tile), device=device)[:, None] * tile
    low, high = start // block * block // width, (start + tile - 1).clamp(max=M - 1) // width
    table = low + torch.arange(block // width, device=device)
    table = table.masked_fill(table > high, ABSENT)
    queries, own = consecutive(first, first + N, tile, device), consecutive(0, M, width, device)
    tilings = [Tiling(queries, own, table, lambda i, j: j <= i)]
    P, blocks = past_blocks(M, block), consecutive(0, M, block, device)
    for each in selected.unbind(-1):
        tiles = tiles_by_label(each, P, min(_selected_tile(block), N))
        positions = torch.where(tiles.positions < 0, ABSENT, tiles.positions + first)
        tilings.append(Tiling(TokenBlocks(positions), blocks, tiles.labels[..., None]))
    return tilings


def _own_tile(block: int) -> int:
    """Tokens of a query's own block in one tile: fewer than all, of which nearly half come after the query."""
    return block if block % TILE else TILE


def _selected_tile(block: int) -> int:
    """Queries of one selected block computed together: fewer than its keys, as one tile of each is not full."""
    return max(1, min(TILE, block // 4))


def block_work(N: int, *, block: int, count: int, last: bool = False) -> list[Work]:
    """The work of the tilings for N tokens, with `count` past blocks per query; or for the `last` query alone."""
    P, width = past_blocks(N, block), _own_tile(block)
    selected, queries = min(count, P), 1 if last else N
    if last:
        own = Work(1, (N - 1) % block // width + 1, 1, width)
    else:
        tiles, each = -(-N // width), block // width
        whole, rest = divmod(tiles, each)
        blocks = whole * each * (each + 1) // 2 + rest * (rest + 1) // 2
        own = Work(tiles, blocks, width if N > 1 else 1, width)
    size = min(_selected_tile(block), queries)
    T = tile_count(queries, P, size)
    return [own, *[Work(T, T, size, block)] * selected]


# ---------------------------------------------------------------------------------------------------------------- cost


@checked
def moba_pairs(n: int, *, block: int = BLOCK, count: int = COUNT) -> int:
    """The number of pairs of n tokens that are kept, in closed form: the sum over blocks of their own triangle and of
    what each of their queries reads of the past."""
    whole, rest = divmod(n, block)
    own = whole * block * (block + 1) // 2 + rest * (rest + 1) // 2
    full = min(count - 1, whole)  # blocks with fewer blocks before them than a query could choose
    past = block * (full * (full - 1) // 2 + (whole - full) * (count - 1)) + rest * min(count - 1, whole)
    return own + block * past


@selection_cost
def moba_cost(
    N: int, K: int, *, block: int = BLOCK, count: int = COUNT, form: str = "fast", causal: bool = True
) -> Selecting:
    """Closed form of one self-attention call, in either form; N must be a number, not a symbol.

    Choosing multiplies each query with the mean of each past block, if there is a choice.
    """
    P = past_blocks(N, block) if count > 1 else 0
    return Selecting(
        choosing=2 * N * P * K,
        last_choosing=2 * P * K,
        work=block_work(N, block=block, count=count - 1),
        last_work=block_work(N, block=block, count=count - 1, last=True),
        keys=N,
    )


MECHANISM = Mechanism(
    name="moba",
    family="selected",
    source="Lu et al. 2025, arXiv:2502.13189",
    reference=moba_attention_reference,
    fast=moba_attention,
    bidirectional=False,
    positional=True,
    cost=moba_cost,
)
