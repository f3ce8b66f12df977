r"""Softmax attention whose scores are any function of pairs, a tile of queries at a time.

PyTorch's fused kernels support only scores $q^T k$ and a bias that no gradient reaches. Here a function gives the
scores instead. Only one tile's weights exist at a time, and they are recomputed for the gradient, so that no N x M
matrix is kept, as in Dao et al. 2022 (arXiv:2205.14135). A causal call leaves out the keys after a tile.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ortho._checks import Kernel, no_autocast, once, uncompiled
from ortho._typing import Size
from ortho.attention.scores import blocked_pairs, masked_softmax

# On a CPU with heads of width 64, tiles of 128 were fastest at N = 1024 and N = 4096; those of 64 to 256 within 10 %.
TILE = 128


class Span(NamedTuple):
    """Tile `number`: queries `start` to `stop` and keys 0 to `end`, `stop` and `end` excluded."""

    number: int
    start: int
    stop: int
    end: int


Scores = Callable[..., Tensor]  # scores(span, *operands) -> (..., stop - start, end)


def spans(queries: int, keys: int, tile: int, is_causal: bool) -> Iterator[Span]:
    """The tiles of `queries` queries; in a causal call a tile's keys end at its last query's own key."""
    for number, start in enumerate(range(0, queries, tile)):
        stop = min(start + tile, queries)
        yield Span(number, start, stop, keys - queries + stop if is_causal else keys)


def tile_pairs(N: Size, tile: Size, is_causal: bool) -> Size:
    """The pairs of all tiles of a call with N queries and keys; a symbolic N is a greater multiple of `tile`."""
    if not isinstance(N, int):
        return N * (N + tile) / 2 if is_causal else N * N
    return sum((s.stop - s.start) * s.end for s in spans(N, N, tile, is_causal))


@uncompiled  # its gradient needs the gradient of `scores`
def tiled_attention(
    scores: Scores,
    operands: Sequence[Tensor],
    v: Tensor,
    *,
    queries: int,
    tile: int,
    is_causal: bool,
    attn_mask: Tensor | None,
) -> Tensor:
    """softmax(scores) v, (..., N, V), for N `queries` and values v (..., M, V); in a causal call the last N values are
    the queries' own. `scores(span, *operands)` is differentiated with respect to `operands`; it may use no other tensor
    that needs a gradient. The result cannot be differentiated twice.
    """
    if attn_mask is not None:
        attn_mask = attn_mask.expand(torch.broadcast_shapes(attn_mask.shape, (queries, v.shape[-2])))
    is_causal = is_causal and queries > 1  # a lone query is the last: it has no future
    with no_autocast(v):
        return _Tiles.apply(
            scores, list(spans(queries, v.shape[-2], tile, is_causal)), is_causal, attn_mask, v, *operands
        )


class _Tiles(Kernel):
    @staticmethod
    def forward(
        ctx: Any,
        scores: Scores,
        tiles: list[Span],
        is_causal: bool,
        mask: Tensor | None,
        v: Tensor,
        *operands: Tensor,
    ) -> Tensor:
        ctx.scores, ctx.tiles, ctx.is_causal = scores, tiles, is_causal
        ctx.save_for_backward(mask, v, *operands)
        rows = [_weights(scores, s, is_causal, mask, operands) @ v[..., : s.end, :] for s in tiles]
        return torch.cat(rows, -2)

    @staticmethod
    @once
    def backward(ctx: Any, d_o: Tensor) -> tuple[Tensor | None, ...]:
        mask, v, *operands = ctx.saved_tensors
        needed = ctx.needs_input_grad[5:]
        d_v = torch.zeros_like(v)
        totals = [torch.zeros_like(x) if need else None for x, need in zip(operands, needed, strict=True)]
        for s in ctx.tiles:
            here = d_o[..., s.start : s.stop, :]
            with torch.enable_grad():
                leaves = [x.detach().requires_grad_(need) for x, need in zip(operands, needed, strict=True)]
                weights = _weights(ctx.scores, s, ctx.is_causal, mask, leaves)
            d_v[..., : s.end, :] += weights.detach().mT @ here
            if not any(needed):
                continue
            wanted = [x for x in leaves if x.requires_grad]
            found = torch.autograd.grad(weights, wanted, here @ v[..., : s.end, :].mT, allow_unused=True)
            for total, part in zip((t for t in totals if t is not None), found, strict=True):
                if part is not None:
                    total += part
        return (None, None, None, None, d_v, *totals)


def _weights(scores: Scores, s: Span, is_causal: bool, mask: Tensor | None, operands: Sequence[Tensor]) -> Tensor:
    """The softmax of a tile's scores, (..., stop - start, end); a row that may attend to nothing is 0."""
    visible = None if mask is None else mask[..., s.start : s.stop, : s.end]
    blocked = blocked_pairs(s.stop - s.start, s.end, is_causal, visible, operands[0].device)
    return masked_softmax(scores(s, *operands), blocked, empty_rows=mask is not None)
