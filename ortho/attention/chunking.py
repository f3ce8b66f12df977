"""What kernels that go through a sequence in chunks share: how it is cut, and which chunks are worked on together."""

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ortho._autocast import no_autocast

# Within a chunk of C the weights are materialised, N C numbers; from chunk to chunk a memory is carried, N m V / C
# numbers. The two are equal at C = sqrt(m V), which is 64 for heads of width 64; at m = 256, 64 was the fastest too.
CHUNK = 64
# Chunks that are worked on together, on a CPU: their operands, some MB, stay in its cache from one product to the next.
TILE = 32


def default_chunk(q: Tensor) -> int:
    """`CHUNK`; on a GPU, where memories are passed on by a launch each, more for more than 128 chunks."""
    return max(CHUNK, -(-q.shape[-2] // 128)) if q.is_cuda else CHUNK


def chunks(length: int, chunk: int) -> tuple[int, int]:
    """The width of the fewest, equally wide chunks of at most `chunk`, and how much longer than `length` they are."""
    number = -(-length // chunk)
    width = -(-length // number)
    return width, number * width - length


def pad_tokens(x: Tensor, behind: int) -> Tensor:
    """x (..., N, K) with so many more tokens of zeros."""
    return pad(x, (0, 0, 0, behind)) if behind else x


def tiles(G: int, n: int, whole: bool) -> Iterator[tuple[slice, slice]]:
    """(sequences, chunks) of about `TILE` chunks each, contiguous in (G, n, ...); or all of them in one."""
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
    """Sequences of about `TILE` chunks in all, at least one; or all of them."""
    (G, N, _), M = q.shape, k.shape[1]
    step = G if q.is_cuda else max(1, TILE * CHUNK // max(N, M))
    for start in range(0, G, step):
        yield slice(start, min(G, start + step))


def flat(tile: tuple[slice, slice], *tensors: Tensor) -> list[Tensor]:
    """Views of the tile with sequences and chunks in one axis."""
    return [x[tile].flatten(0, 1) for x in tensors]


def _refuse_twice(asked: bool) -> None:
    if asked:
        raise RuntimeError(
            "create_graph: expected False: the fast form cannot be differentiated twice; its reference form can"
        )


@torch.library.custom_op("ortho::once", mutates_args=())
def _once(gradient: torch.Tensor) -> None:
    _refuse_twice(torch.is_grad_enabled() or gradient.requires_grad)  # an operator of numbers that need one has it off


@_once.register_fake
def _(gradient: torch.Tensor) -> None: ...


def once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """A backward pass that refuses to be differentiated. (`once_differentiable` marks its results, and a second pass
    that reaches the operands by another way as well never meets the mark, and leaves a part out.)"""

    @wraps(backward)
    def guarded(ctx: Any, *gradients: Tensor) -> Any:
        if torch.compiler.is_compiling():
            torch.ops.ortho.once(gradients[0])  # looks when the graph runs
        else:
            _refuse_twice(torch.is_grad_enabled())
        with no_autocast(gradients[0]):  # the caller's may be on
            return backward(ctx, *gradients)

    return guarded
