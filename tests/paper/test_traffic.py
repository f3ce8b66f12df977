"""Memory traffic of attention, compared with explicit loops."""

import pytest

from paper.theory import traffic as costs
from paper.theory.traffic import Traffic, columns_first, rows_first


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
