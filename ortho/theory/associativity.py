r"""$(A B)\, C = A\, (B C)$, the identity that linear attention rests on: exact over a field, to rounding in floats.

With $A = \phi(Q)$, $B = \phi(K)^T$ and $C = V$ the left order makes the N x N weights first, the right one the m x V
memory. Exact matrices are tuples of rows of numbers that Python adds and multiplies without error: integers, fractions,
sympy's symbols.
"""

from fractions import Fraction
from typing import Any, NamedTuple

import torch

from ortho._typing import Float, Size, Tensor
from ortho.checks import expect

Matrix = tuple[tuple[Any, ...], ...]


# -------------------------------------------------------------------------------------------------------------- exactly


def rational(rows: int, columns: int, *, generator: torch.Generator | None = None) -> Matrix:
    """Random fractions (rows, columns) with numerators -9..9 and denominators 1..9."""
    sizes = (rows, columns)
    above = torch.randint(-9, 10, sizes, generator=generator).tolist()
    below = torch.randint(1, 10, sizes, generator=generator).tolist()
    return tuple(tuple(Fraction(*entry) for entry in zip(*row, strict=True)) for row in zip(above, below, strict=True))


def transpose(a: Matrix) -> Matrix:
    """(n, k) -> (k, n)."""
    return tuple(zip(*a, strict=True))


def product(a: Matrix, b: Matrix) -> Matrix:
    """(n, k) and (k, m) -> (n, m)."""
    if not a or not b or len(a[0]) != len(b):
        sizes = [(len(x), len(x[0]) if x else 0) for x in (a, b)]
        raise ValueError(f"a, b: expected shapes (n, k) and (k, m), got {sizes[0]} and {sizes[1]}")
    columns = transpose(b)
    return tuple(tuple(sum(x * y for x, y in zip(row, column, strict=True)) for column in columns) for row in a)


def left_first(a: Matrix, b: Matrix, c: Matrix) -> Matrix:
    """(a b) c."""
    return product(product(a, b), c)


def right_first(a: Matrix, b: Matrix, c: Matrix) -> Matrix:
    """a (b c)."""
    return product(a, product(b, c))


def by_sums(q: Matrix, k: Matrix, v: Matrix) -> Matrix:
    r"""$o_t = \sum_{j \le t} (q_t \cdot k_j)\, v_j$ for each t: rows q (N, K), k (N, K), v (N, V) -> (N, V)."""
    return tuple(left_first((row,), transpose(k[: t + 1]), v[: t + 1])[0] for t, row in enumerate(q))


def by_states(q: Matrix, k: Matrix, v: Matrix) -> Matrix:
    r"""$S_t = S_{t-1} + k_t v_t^T$, $o_t = q_t S_t$: the same outputs as `by_sums`, from a state of K x V numbers."""
    return by_chunks(q, k, v, 1)


def by_chunks(q: Matrix, k: Matrix, v: Matrix, chunk: int) -> Matrix:
    """The same outputs: earlier chunks through their state, a token's own chunk by sums. chunk = 1 is a recurrence."""
    if not (q and len(q) == len(k) == len(v)):
        raise ValueError(f"q, k, v: expected as many rows, at least one, got {len(q)}, {len(k)} and {len(v)}")
    state: Matrix = tuple((0,) * len(v[0]) for _ in k[0])  # (K, V)
    out: list[tuple[Any, ...]] = []
    for start in range(0, len(q), chunk):
        part = slice(start, start + chunk)
        out += _added(product(q[part], state), by_sums(q[part], k[part], v[part]))
        state = _added(state, product(transpose(k[part]), v[part]))
    return tuple(out)


def _added(a: Matrix, b: Matrix) -> Matrix:
    return tuple(tuple(x + y for x, y in zip(*rows, strict=True)) for rows in zip(a, b, strict=True))


# ------------------------------------------------------------------------------------------------------------ in floats


class Reordering(NamedTuple):
    """How far apart the two orders are in floats, relative to the left one (Frobenius norms); `changed`: the share of
    entries that differ."""

    difference: float
    bound: float
    changed: float


def rounding_bound(a: Float[Tensor, "N K"], b: Float[Tensor, "K M"], c: Float[Tensor, "M V"]) -> Float[Tensor, "N V"]:
    r"""An upper bound on $|(ab)c - a(bc)|$, entry by entry, in the arithmetic of the operands; a float64 tensor.

    A product of length n, summed in any order, is off by at most $\gamma_n |a| |b|$ with $\gamma_n = n u / (1 - n u)$,
    where u is half the spacing of floats at 1 (Higham 2002, section 3.5). Two in a row, of lengths K and M, are off by
    at most $\gamma_{K+M} |a| |b| |c|$ (his lemma 3.3), whichever comes first, so the two orders differ by at most twice
    that. Underflow is left out.
    """
    n, u = sum(b.shape), torch.finfo(a.dtype).eps / 2
    expect(n * u < 1, "a, b, c", f"lengths that sum to less than {1 / u:g} in {a.dtype}", n)
    a, b, c = (x.double().abs() for x in (a, b, c))
    # |a| |b| |c| is itself computed in floats; as all its terms are positive, its relative error is the same gamma.
    here = _gamma(n, torch.finfo(torch.float64).eps / 2)
    return 2 * _gamma(n, u) / (1 - here) * (a @ b @ c)


def _gamma(n: int, u: float) -> float:
    return n * u / (1 - n * u)


def reorder(a: Float[Tensor, "N K"], b: Float[Tensor, "K M"], c: Float[Tensor, "M V"]) -> Reordering:
    """(ab)c beside a(bc) in the operands' dtype. Raises ValueError where `rounding_bound` does."""
    one, other, most = (a @ b) @ c, a @ (b @ c), rounding_bound(a, b, c)
    size = one.double().norm()
    difference = (one.double() - other.double()).norm() / size
    return Reordering(float(difference), float(most.norm() / size), float((one != other).double().mean()))


# -------------------------------------------------------------------------------------------------------- what it costs


class Flops(NamedTuple):
    left: Size
    right: Size


def product_flops(rows: Size, inner: Size, columns: Size) -> Size:
    """FLOPs of a (rows, inner) times an (inner, columns) matrix, 2 a multiply-add."""
    return 2 * rows * inner * columns


def flops(N: Size, K: Size, M: Size, V: Size) -> Flops:
    """FLOPs of (ab)c and of a(bc) for a (N, K), b (K, M), c (M, V).

    2NM(K + V) and 2KV(N + M): the right order takes fewer exactly if 1/N + 1/M < 1/K + 1/V.
    """
    return Flops(product_flops(N, K, M) + product_flops(N, M, V), product_flops(K, M, V) + product_flops(N, K, V))
