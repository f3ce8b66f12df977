"""Closed forms of Synthesizers."""

from collections.abc import Sequence
from dataclasses import replace

from ortho._cost import Cost, head_width, linear_map, product, quotient
from ortho._typing import Size
from ortho.checks import expect, one_of
from ortho.cost.layers import NOT_DERIVED, added, around
from ortho.layers.synthesizer import SOURCES, block_count, by_position


def synthesizer(
    B: Size,
    N: Size,
    d: Size,
    H: Size,
    *,
    source: str | Sequence[str] = "random",
    max_length: Size = None,
    rank: Size = 8,
    k1: Size = None,
    head_dim: Size = None,
    causal: bool = False,  # noqa: ARG001
    input_grad: bool = True,
    itemsize: int = 4,
) -> Cost:
    """Cost of `SynthesizerAttention(d, H, max_length, source=source)` on x (B, N, d); `max_length` is N by default.

    `rank` belongs to "factored-random". `k1` belongs to "factored-dense", with its default there; it must be given if
    `max_length` is a symbol. With `head_dim`, heads have that width, and weights must depend on position alone. A
    causal call computes the same products; nothing is decoded token by token.
    """
    names = [source] if isinstance(source, str) else source
    expect(names, "source", "at least one", "none")
    L = N if max_length is None else max_length
    expect(not isinstance(N, int) or not isinstance(L, int) or N <= L, "N", f"at most max_length = {L}", N)
    sources = [SOURCES[one_of("source", name, SOURCES)] for name in names]
    if head_dim is not None:
        by_position(sources)
    width = H * head_width(d, H, head_dim)  # of all heads together
    maps = around(B, N, d, width, input_grad=input_grad, itemsize=itemsize)
    parts = [_logits(one.name, B, N, d, H, L, rank, k1, input_grad) for one in sources]
    logits = added(*parts, Cost(trained=len(names) if len(names) > 1 else 0))
    read = product(B * N * N * width, 1 + (logits.trained != 0))
    return replace(added(maps, logits, read), **NOT_DERIVED)


def _logits(name: str, B: Size, N: Size, d: Size, H: Size, L: Size, rank: Size, k1: Size, input_grad: bool) -> Cost:
    """The cost of one source's logits of N tokens, in a layer of L positions."""
    if name in ("random", "fixed-random"):
        matrix = H * L**2
        return Cost(trained=matrix) if name == "random" else Cost(frozen=matrix)
    if name == "factored-random":
        return product(H * N * N * rank) + Cost(trained=2 * H * L * rank)
    made = linear_map(B, N, d, d, input_grad=input_grad)  # hidden units, queries, or keys
    if name == "dot-product":
        return added(made, made, product(B * N * d * N))
    columns, in_all = N, L  # numbers made of the hidden units: those of a call, and of all positions
    if name == "factored-dense":
        k1 = block_count(L, k1)
        k2 = quotient(L, k1)
        columns = in_all = k1 + k2
        if L != N:
            columns = -(-N // k2) + (min(k2, N) if isinstance(N, int) else k2)
    return added(made, product(B * N * d * columns), Cost(trained=d * in_all))
