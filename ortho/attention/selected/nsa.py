r"""Three views of the past, weighted by gates: compressed, selected and near (Native Sparse Attention: Yuan et al.
2025, arXiv:2502.11089, section 3).

- compressed: every `stride` tokens, the mean key and value of the last `length`, once these are all in the past;
- selected: `count` blocks of `block` keys: the first, the query's own up to itself, the one before it, and of the
  others those to which the compressed weights give most (equations 8 and 9);
- window: the last `window` keys.

Each is a separate softmax attention, $o = \sum_b g_b o_b$. The paper compresses by a small network, with
positions for the tokens of a block, where this takes means. It also has separate keys and values for each branch, and
lets the heads of a group select together, where here each head selects for itself. Blocks are selected from the past,
and compressed tokens end in it: nothing leaks. Among blocks with equal weight the first are taken.
"""

from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch

from ortho._checks import checked
from ortho._cost import Cost
from ortho._typing import Bool, Float, Int, Size, Tensor
from ortho.attention.mechanism import CostedCall, Mechanism, closed_form
from ortho.attention.scores import masked_softmax
from ortho.attention.selected.call import Call, mask_form, selecting_form
from ortho.attention.selected.moba import block_tilings, block_work, blocks_mask, past_blocks, select_blocks
from ortho.attention.selected.selection import attend_to_mask, attend_to_tilings
from ortho.attention.softmax.softmax_attention import materialised_cost
from ortho.attention.sparse.tiled_attention import tiled_cost
from ortho.attention.sparse.tiling import ABSENT, TILE, Section, Tiling, Work, consecutive, window_band
from ortho.gates import Gate

ALWAYS = 3  # blocks that each query reads: the first, its own, and the one before


@checked
@dataclass(frozen=True)
class Sizes:
    """Sizes in tokens, except `count`, which is in blocks; the defaults are the paper's.

    `length` and `block` must be multiples of `stride`, and `count` at least 3, the blocks that every query reads.
    Raises TypeError or ValueError otherwise, and for sizes below 1.
    """

    length: int = 32
    stride: int = 16
    block: int = 64
    count: int = 16
    window: int = 512

    def __post_init__(self) -> None:
        for name in ("length", "block"):
            if getattr(self, name) % self.stride:
                raise ValueError(f"{name}: expected a multiple of stride = {self.stride}, got {getattr(self, name)}")
        if self.count < ALWAYS:
            raise ValueError(f"count: expected at least {ALWAYS}, got {self.count}")

    def compressed(self, t: int) -> int:
        """The number of compressed tokens of t tokens."""
        return max(0, (t - self.length) // self.stride + 1)

    def keys(self, t: int) -> int:
        """Keys that a query after t - 1 others reads, as the paper counts them: with whole blocks and windows."""
        return self.compressed(t) + self.count * self.block + self.window

    def kept(self, t: int) -> int:
        """Pairs of the t-th query: of its own block only up to itself, and no more of the past than there is."""
        past = min(self.count - 1, (t - 1) // self.block)
        return self.compressed(t) + past * self.block + (t - 1) % self.block + 1 + min(self.window, t)


SIZES = Sizes()


class Masks(NamedTuple):
    """The pairs that are kept by each branch; there are (M - length) // stride + 1 compressed tokens, or none."""

    compressed: Bool[Tensor, "*batch N compressed"]
    selected: Bool[Tensor, "*batch N M"]
    window: Bool[Tensor, "*batch N M"]


@mask_form(only_causal=True)
def nsa_masks(call: Call, *, sizes: Sizes = SIZES) -> Masks:
    """The pairs that are kept. The last query is at the last key's position."""
    return _masks(call, _compressed(call, sizes), sizes)


@selecting_form(only_causal=True)
def nsa_attention_reference(
    call: Call, *, gates: Float[Tensor, "*batch N 3"] | None = None, sizes: Sizes = SIZES
) -> Float[Tensor, "G N V"]:
    """Softmax attention under each of `nsa_masks`, weighted; `is_causal` must be True.

    `gates` weight the compressed, the selected and the window branch: by default a third each or, before the first
    compressed token, a half for each of the other two. A branch in which all keys of a query are masked adds nothing.
    Means are over the keys that are not masked. The state is (keys, values).

    Raises ValueError for a mask that is not the same for all queries.
    """
    pooled = _compressed(call, sizes)
    few, selected, window = _masks(call, pooled, sizes)
    branches = [attend_to_mask(pooled, few)] if pooled.k.shape[1] else []
    branches += [attend_to_mask(call, selected), attend_to_mask(call, window)]
    return _weighed(branches, gates, call, sizes)


@selecting_form(only_causal=True)
def nsa_attention(
    call: Call, *, gates: Float[Tensor, "*batch N 3"] | None = None, sizes: Sizes = SIZES
) -> Float[Tensor, "G N V"]:
    """`nsa_attention_reference` from the keys that each branch keeps, in float32 at least; not differentiable twice.

    The compressed branch reads one token in `stride`, so its cost, and that of selecting by it, grows with N^2.
    """
    pooled, stop, M = _compressed(call, sizes), call.first + call.q.shape[1], call.k.shape[1]
    selected = block_tilings(call, _selected(call, pooled, sizes), sizes.block)
    window = window_band(Section(call.first, stop, M, True, call.q.device), sizes.window)
    branches = [attend_to_tilings(pooled, [_compressed_tiling(pooled, sizes)])] if pooled.k.shape[1] else []
    branches += [attend_to_tilings(call, selected), attend_to_tilings(call, [window])]
    return _weighed(branches, gates, call, sizes)


def _weighed(
    branches: list[Float[Tensor, "G N V"]], gates: Tensor | None, call: Call, sizes: Sizes
) -> Float[Tensor, "G N V"]:
    """The sum of the branches times their gates; two branches are those without the compressed one."""
    if gates is None:
        reached = 2 + (call.places >= sizes.length - 1).to(branches[0])  # branches that the query reads, without a mask
        return sum(branches[1:], branches[0]) / reached[:, None]
    weights = call.flat("gates", gates, 3)[..., -len(branches) :].unbind(-1)
    weighed = [branch * weight[..., None] for branch, weight in zip(branches, weights, strict=True)]
    return sum(weighed[1:], weighed[0])


# --------------------------------------------------------------------------------- compressed tokens, selected blocks


def _units(x: Float[Tensor, "G M n"], sizes: Sizes) -> Float[Tensor, "G compressed n"]:
    """The sums of the rows that make up each compressed token."""
    count = sizes.compressed(x.shape[1])
    if not count:
        return x[:, :0]
    steps = sizes.length // sizes.stride
    sums = x[:, : (count + steps - 1) * sizes.stride].unflatten(1, (-1, sizes.stride)).sum(2)
    total = sums[:, :count]
    for step in range(1, steps):
        total = total + sums[:, step : step + count]
    return total


def _compressed(call: Call, sizes: Sizes) -> Call:
    """The call on compressed tokens: means of visible keys and values, 0 where there are none."""
    if call.visible is None:
        k, v = (_units(x, sizes) / sizes.length for x in (call.k, call.v))
        return call._replace(k=k, v=v)
    there = call.visible[..., None].to(call.k)
    found = _units(there, sizes)
    k, v = (_units(x * there, sizes) / found.clamp(min=1) for x in (call.k, call.v))
    return call._replace(k=k, v=v, visible=found[..., 0] > 0)


def _compressed_mask(pooled: Call, i: Int[Tensor, "n"], sizes: Sizes) -> Bool[Tensor, "G n compressed"]:
    """The compressed tokens that end in the past of queries at these positions."""
    number = torch.arange(pooled.k.shape[1], device=i.device)
    past = (number * sizes.stride + sizes.length - 1 <= i[:, None])[None]
    return (past if pooled.visible is None else past & pooled.visible[:, None]).expand(len(pooled.k), -1, -1)


def _masks(call: Call, pooled: Call, sizes: Sizes) -> Masks:
    distance = call.places[:, None] - torch.arange(call.k.shape[1], device=call.q.device)
    return Masks(
        _compressed_mask(pooled, call.places, sizes),
        blocks_mask(call, _selected(call, pooled, sizes), sizes.block),
        (distance < sizes.window) & call.reachable(),
    )


def _selected(call: Call, pooled: Call, sizes: Sizes) -> Int[Tensor, "G N selected"]:
    """Past blocks: the first, the one before the query's own, and those with the highest compressed weights."""
    P = past_blocks(call.k.shape[1], sizes.block)
    number = torch.arange(P, device=call.q.device)

    def weights(tile: slice) -> Float[Tensor, "G n P"]:
        i = call.places[tile]
        always = (number == 0) | (number == i[:, None] // sizes.block - 1)
        if not pooled.k.shape[1]:
            return always.to(call.q).expand(len(call.q), -1, -1)
        scores = call.products(tile, pooled.k) * abs(call.scale)
        given = masked_softmax(scores, ~_compressed_mask(pooled, i, sizes), empty_rows=True)
        # A compressed token's weight goes to each of its strides, and a block's weight is the sum over its strides.
        strides = given.new_zeros(*given.shape[:2], (P + 1) * sizes.block // sizes.stride)
        for step in range(sizes.length // sizes.stride):
            strides[..., step : step + given.shape[-1]] += given
        of_blocks = strides[..., : P * sizes.block // sizes.stride].unflatten(-1, (P, -1)).sum(-1)
        return of_blocks.masked_fill(always, torch.inf)

    return select_blocks(call, sizes.block, sizes.count - 1, weights, width=max(1, pooled.k.shape[1]))


def _compressed_tiling(pooled: Call, sizes: Sizes) -> Tiling:
    """The tiling of queries with all compressed tokens that end in their past, in tiles of as many."""
    N, count, first, device = pooled.q.shape[1], pooled.k.shape[1], pooled.first, pooled.q.device
    tile = TILE if N > 1 else 1
    start = torch.arange(first // tile, -(-(first + N) // tile), device=device)[:, None] * tile
    last = (start + tile - 1).clamp(max=first + N - 1)
    high = (last + 1 - sizes.length).div(sizes.stride, rounding_mode="floor").clamp(max=count - 1) // TILE
    table = torch.arange(max(1, int(high.max()) + 1), device=device).expand(len(start), -1)
    table = table.masked_fill((table > high) | (last < sizes.length - 1), ABSENT)
    queries, keys = consecutive(first, first + N, tile, device), consecutive(0, count, TILE, device)
    return Tiling(queries, keys, table, lambda i, j: j * sizes.stride + sizes.length - 1 <= i)


# ----------------------------------------------------------------------------------------------------- gates and cost


class BranchGates(Gate):
    r"""$\sigma(x W^T)$, three numbers in (0, 1) per head and token: x (B, N, d) -> (B, H, N, 3).

    They are independent, and need not add up to 1 (Yuan et al. 2025, arXiv:2502.11089, section 3.2, where a
    two-layer network makes them).
    """

    branches: ClassVar[int] = 3

    @classmethod
    def rows(cls, d: Size, H: Size) -> Size:
        return cls.branches * H

    def forward(self, x: Float[Tensor, "B N d"]) -> Float[Tensor, "B H N 3"]:
        return self._vectors(x).contiguous().sigmoid()


def _branches(N: int, sizes: Sizes, last: bool = False) -> list[list[Work]]:
    """The work of each branch's tilings, without the compressed branch if it has nothing to read."""
    window = window_band(Section(N - 1 if last else 0, N, N, True), sizes.window).work
    branches = [block_work(N, block=sizes.block, count=sizes.count - 1, last=last), [window]]
    if not sizes.compressed(N):
        return branches
    tile = 1 if last or N == 1 else TILE
    ends = [N] if last else [min(N, start + tile) for start in range(0, N, tile)]
    blocks = [-(-sizes.compressed(end) // TILE) for end in ends]
    return [[Work(sum(map(bool, blocks)), sum(blocks), tile, TILE)], *branches]


@closed_form
def nsa_cost(call: CostedCall, *, sizes: Sizes = SIZES) -> Cost:
    """Closed form of one self-attention call with `gates`, in either form; sizes must be numbers, not symbols."""
    G, N, K, V = call.sizes
    few, work = sizes.compressed(N), _branches(N, sizes)
    if call.form == "reference":
        each = [materialised_cost(call, keys) for keys in ([few] if few else []) + [N, N]]
    else:
        each = [tiled_cost(call, w, last) for w, last in zip(work, _branches(N, sizes, last=True), strict=True)]
    choosing = 2 * few * G * K if past_blocks(N, sizes.block) else 0  # FLOPs for a query
    total = sum(each[1:], each[0]) + Cost(forward=choosing * N, decode=choosing)
    return replace(total, state_bytes=call.itemsize * G * N * (K + V))


MECHANISM = Mechanism(
    name="nsa",
    family="selected",
    source="Yuan et al. 2025, arXiv:2502.11089",
    reference=nsa_attention_reference,
    fast=nsa_attention,
    bidirectional=False,
    positional=True,
    cost=nsa_cost,
    gates={"gates": BranchGates},
    query_gates=frozenset({"gates"}),
)
