"""Numbers that attention moves between a large, slow memory and a small, fast one of M numbers: one head of width d, no
mask, forward (Dao et al. 2022, arXiv:2205.14135, section 3.2).

Products of the fast memory's contents cost nothing here; what is counted is each number that is read from the slow
memory or written to it.
"""

from typing import NamedTuple

from ortho import _checks
from ortho._checks import checked


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


@checked
def materialised(N: int, d: int) -> Traffic:
    """Scores, their softmax and its product with the values, one after the other through the slow memory (algorithm 0):
    4 N^2 + 4 N d."""
    _checks.positive_int("N", N), _checks.positive_int("d", d)
    return Traffic(reads=2 * N * d + N * N + (N * N + N * d), writes=2 * N * N + N * d)


@checked
def columns_first_tile(d: int, M: int) -> Tile:
    """The tile of algorithm 1: four blocks of M / 4d keys or queries fill the fast memory. ValueError for M < 4 d."""
    if _checks.positive_int("M", M) < 4 * _checks.positive_int("d", d):
        raise ValueError(f"M: expected room for four rows of {d} numbers, got {M}")
    columns = M // (4 * d)
    return Tile(min(columns, d), columns)


@checked
def columns_first(N: int, d: int, M: int) -> Traffic:
    """Algorithm 1: for each block of keys and values, all queries pass by, with their outputs, maxima and sums, which
    are read and written each time. About 12 N^2 d^2 / M."""
    _checks.positive_int("N", N)
    passes = -(-N // columns_first_tile(d, M).columns)
    state = N * (d + 2)
    return Traffic(reads=2 * N * d + passes * (N * d + state), writes=(1 + passes) * state)


@checked
def rows_first_tile(d: int, M: int) -> Tile:
    """The tile with the most queries when keys come one by one: of a query its row, output, maximum, sum and score are
    in the fast memory, of a key its row and value. ValueError for an M without room for one of each."""
    rows = (_checks.positive_int("M", M) - 2 * _checks.positive_int("d", d)) // (2 * d + 3)
    if rows < 1:
        raise ValueError(f"M: expected room for a query and a key of {d} numbers, at least {4 * d + 3}, got {M}")
    return Tile(rows, 1)


@checked
def rows_first(N: int, d: int, M: int) -> Traffic:
    """The order of Dao 2023 (arXiv:2307.08691, algorithm 1): for each block of queries all keys and values pass by, and
    its output and logarithms of sums are written once. About 4 N^2 d^2 / M."""
    _checks.positive_int("N", N)
    passes = -(-N // rows_first_tile(d, M).rows)
    return Traffic(reads=N * d + passes * 2 * N * d, writes=N * (d + 1))
