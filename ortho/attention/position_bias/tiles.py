r"""Softmax attention whose scores are any function of pairs, a tile of queries at a time.

PyTorch's fused kernels support only scores $q^T k$ and a bias that no gradient reaches. Here a function gives the
scores instead. Only one tile's weights exist at a time, and they are computed again for the gradient, so that no N x M
matrix is kept, as in Dao et al. 2022 (arXiv:2205.14135). A causal call leaves out the keys after a tile.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ortho import checks
from ortho.attention.call import blocked_pairs
from ortho.attention.scores import masked_softmax
from ortho.attention.uncompiled import uncompiled

# On a CPU with heads of width 64, tiles of 128 were fastest at N = 1024 and N = 4096; those of 64 to 256 within 10 %.
TILE = 128


class Span(NamedTuple):
    """Tile `number`: queries `start` to `stop` and keys 0 to `end`, `stop` and `end` excluded."""

    number: int
    start: int
    stop: int
    end: int


def spans(queries: int, keys: int, tile: int, is_causal: bool) -> Iterator[Span]:
    """The tiles of `queries` queries; in a causal call a tile's keys end at its last query's own key."""
    for number, start in enumerate(range(0, queries, tile)):
        stop = min(start + tile, queries)
        yield Span(number, start, stop, keys - queries + stop if is_causal else keys)


@uncompiled
def attend_in_tiles(
    scores: Callable[[Span], Tensor], v: Tensor, *, queries: int, tile: int, is_causal: bool, attn_mask: Tensor | None
) -> Tensor:
    """softmax(scores) v, (..., N, V), for N `queries` and values v (..., M, V); in a causal call the last N values are
    the queries' own. `scores(span)` gives a tile's scores (..., stop - start, end).
    """
    if attn_mask is not None:
        attn_mask = attn_mask.expand(torch.broadcast_shapes(attn_mask.shape, (queries, v.shape[-2])))

    def rows(s: Span) -> Tensor:
        visible = None if attn_mask is None else attn_mask[..., s.start : s.stop, : s.end]
        blocked = blocked_pairs(s.stop - s.start, s.end, is_causal and queries > 1, visible, v.device)
        return masked_softmax(scores(s), blocked, empty_rows=attn_mask is not None) @ v[..., : s.end, :]

    tiles = spans(queries, v.shape[-2], checks.positive_int("tile", tile), is_causal)
    return torch.cat([checkpoint(rows, s, use_reentrant=False, preserve_rng_state=False) for s in tiles], -2)
