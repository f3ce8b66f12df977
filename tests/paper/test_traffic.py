"""Memory traffic of attention, compared with explicit loops."""

import pytest
from refusals import refusals

from paper.theory import traffic as costs
from paper.theory.traffic import Traffic, columns_first, materialised, rows_first


class Memory:
    """A fast memory of M numbers that counts what it loads and stores, and refuses what it cannot hold."""

    def __init__(self, M):
        self.M, self.held, self.reads, self.writes = M, {}, 0, 0

    def load(self, name, numbers):
        self.keep(name, numbers)
        self.reads += numbers

    def keep(self, name, numbers):
        self.held[name] = numbers
        assert sum(self.held.values()) <= self.M, self.held

    def store(self, numbers):
        self.writes += numbers


def blocks(N, size):
    return [min(size, N - start) for start in range(0, N, size)]


def by_columns(N, d, M):
    """Four blocks of M / 4d rows of d numbers fill the memory. Algorithm 1 also holds the scores of a tile and two
    numbers a row; these are left out here, as its authors leave them out."""
    memory, tile = Memory(M), costs.columns_first_tile(d, M)
    memory.store(N * (d + 2))  # outputs 0, maxima -inf, sums 0
    for columns in blocks(N, tile.columns):
        memory.load("K", columns * d), memory.load("V", columns * d)
        for rows in blocks(N, tile.rows):
            memory.load("Q", rows * d), memory.load("O", rows * d)
            memory.reads += 2 * rows
            memory.store(rows * (d + 2))
    return Traffic(memory.reads, memory.writes)


def by_rows(N, d, M):
    memory, tile = Memory(M), costs.rows_first_tile(d, M)
    for rows in blocks(N, tile.rows):
        memory.load("Q", rows * d), memory.keep("O", rows * d)
        memory.keep("maxima and sums", 2 * rows), memory.keep("scores", rows)
        for columns in blocks(N, tile.columns):
            memory.load("K", columns * d), memory.load("V", columns * d)
        memory.store(rows * (d + 1))
    return Traffic(memory.reads, memory.writes)


@pytest.mark.parametrize(("N", "d", "M"), [(1, 1, 7), (10, 2, 11), (100, 4, 64), (130, 8, 300), (64, 16, 2000)])
def test_closed_forms(N, d, M):
    assert rows_first(N, d, M) == by_rows(N, d, M)
    if 4 * d <= M:
        assert columns_first(N, d, M) == by_columns(N, d, M)


def test_three_passes():
    """Two matrices of N^2 numbers are each written once and read once; queries, keys, values and outputs move once."""
    assert materialised(7, 3).total == 4 * 7 * 7 + 4 * 7 * 3


@pytest.mark.parametrize(("traffic", "constant"), [(columns_first, 12), (rows_first, 4)])
def test_leading_orders(traffic, constant):
    """A constant times N^2 d^2 / M. Left out are two numbers a row beside d (.006 of it) and 2 d beside M (.0005)."""
    N, d, M = 2**22, 256, 2**20
    assert traffic(N, d, M).total == pytest.approx(constant * N * N * d * d / M, rel=0.01)


def test_a_memory_for_all():
    """If M is of the order of N d or more, everything is read once."""
    N, d = 128, 8
    assert rows_first(N, d, 3 * N * d) == Traffic(3 * N * d, N * (d + 1))


@refusals(
    [
        (lambda: columns_first(4, 8, 31), "M: expected room for four rows of 8 numbers, got 31"),
        (lambda: rows_first(4, 8, 34), "M: expected room for a query and a key of 8 numbers, at least 35, got 34"),
    ],
)
def test_memories_that_are_too_small(refused):
    refused()
