"""Numbers that attention moves between a large, slow memory and a small, fast one of M numbers: one head of width d, no
mask, forward (Dao et al. 2022, arXiv:2205.14135, section 3.2).

Arithmetic in the fast memory costs nothing here. What counts is each number that is read from the slow memory or
written to it.
"""

from typing import NamedTuple

from ortho.checks import expect


class Traffic(NamedTuple):
    """Numbers read from and written to the slow memory."""

    reads: int
    writes: int

    @property
    def total(self) -> int:
        return self.reads + self.writes


class Tile(NamedTuple):
    """Queries and keys that are in the fast memory together."""

    rows: int
    columns: int


def materialised(N: int, d: int) -> Traffic:
    """The traffic if scores, their softmax and its product with the values go through the slow memory, one after the
    other (algorithm 0): 4 N^2 + 4 N d."""
    return Traffic(reads=2 * N * d + N * N + (N * N + N * d), writes=2 * N * N + N * d)


def columns_first_tile(d: int, M: int) -> Tile:
    """The tile of algorithm 1: four blocks of M / 4d keys or queries fill the fast memory. ValueError for M < 4 d."""
    expect(4 * d <= M, "M", f"room for four rows of {d} numbers", M)
    columns = M // (4 * d)
    return Tile(min(columns, d), columns)


def columns_first(N: int, d: int, M: int) -> Traffic:
    """The traffic of algorithm 1: for each block of keys and values, all queries pass by, with their outputs, maxima
    and sums, which are read and written each time. About 12 N^2 d^2 / M."""
    passes = -(-N // columns_first_tile(d, M).columns)
    state = N * (d + 2)
    return Traffic(reads=2 * N * d + passes * (N * d + state), writes=(1 + passes) * state)


def rows_first_tile(d: int, M: int) -> Tile:
    """The tile with the most queries when keys come one by one. The fast memory holds a query's row, output, maximum,
    sum and score, and a key's row and value. ValueError if M has no room for one query and one key."""
    rows = (M - 2 * d) // (2 * d + 3)
    expect(rows >= 1, "M", f"room for a query and a key of {d} numbers, at least {4 * d + 3}", M)
    return Tile(rows, 1)


def rows_first(N: int, d: int, M: int) -> Traffic:
    """The traffic in the order of Dao 2023 (arXiv:2307.08691, algorithm 1): for each block of queries all keys and
    values pass by, and its output and logarithms of sums are written once. About 4 N^2 d^2 / M."""
    passes = -(-N // rows_first_tile(d, M).rows)
    return Traffic(reads=N * d + passes * 2 * N * d, writes=N * (d + 1))
