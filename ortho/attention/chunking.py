"""Shared by kernels that work in chunks: how a sequence is cut, and which chunks are processed together."""

from collections.abc import Iterator

from torch import Tensor
from torch.nn.functional import pad

from ortho._typing import Size

# Within chunks of C tokens the weights are materialised, N C numbers; from chunk to chunk a state is carried, N m V / C
# numbers. The two are equal at C = sqrt(m V), which is 64 for heads of width 64; at m = 256, 64 was also the fastest.
CHUNK = 64
# Chunks processed together on a CPU: their operands, some MB, stay in its cache from one product to the next.
TILE = 32


def default_chunk(q: Tensor) -> int:
    """`CHUNK`; on a GPU, where passing on each state takes a launch, larger if there were over 128 chunks."""
    return max(CHUNK, -(-q.shape[-2] // 128)) if q.is_cuda else CHUNK


def chunks(length: int, chunk: int) -> tuple[int, int]:
    """(the width of the fewest equal chunks of at most `chunk` tokens, the tokens by which they exceed `length`)."""
    number = -(-length // chunk)
    width = -(-length // number)
    return width, number * width - length


def equal_chunks(length: Size, chunk: Size) -> tuple[Size, Size]:
    """(the width of these chunks, their number); a symbol stands for a multiple of `chunk`."""
    if not isinstance(length, int):
        return chunk, length / chunk
    width, behind = chunks(length, chunk)
    return width, (length + behind) // width


def pad_tokens(x: Tensor, behind: int) -> Tensor:
    """x (..., N, K) with `behind` zero tokens appended."""
    return pad(x, (0, 0, 0, behind)) if behind else x


def cut(x: Tensor, width: int) -> Tensor:
    """Chunks (G, n, width, K) of x (..., N, K), with G sequences in all; the last chunk is padded with zeros."""
    return pad_tokens(x, -x.shape[-2] % width).reshape(-1, -(-x.shape[-2] // width), width, x.shape[-1])


def tiles(G: int, n: int, whole: bool) -> Iterator[tuple[slice, slice]]:
    """Tiles (sequences, chunks) of about `TILE` chunks, contiguous in (G, n, ...); a single tile if `whole`."""
    if whole or G * n <= TILE:
        yield slice(0, G), slice(0, n)
    elif n <= TILE:
        for start in range(0, G, TILE // n):
            yield slice(start, min(G, start + TILE // n)), slice(0, n)
    else:
        for sequence in range(G):
            for start in range(0, n, TILE):
                yield slice(sequence, sequence + 1), slice(start, min(n, start + TILE))


def sequences(q: Tensor, k: Tensor) -> Iterator[slice]:
    """Slices of at least one sequence, about `TILE` chunks in all; on a GPU one slice of all sequences."""
    (G, N, _), M = q.shape, k.shape[1]
    step = G if q.is_cuda else max(1, TILE * CHUNK // max(N, M))
    for start in range(0, G, step):
        yield slice(start, min(G, start + step))


def flat(tile: tuple[slice, slice], *tensors: Tensor) -> list[Tensor]:
    """The tile of each tensor, as a view with sequences and chunks in one axis."""
    return [x[tile].flatten(0, 1) for x in tensors]
