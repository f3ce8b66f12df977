"""Counts in a text, compared with counts by hand and by dictionaries: tables of the last bytes, repeats."""

from collections import Counter
from math import log2

import pytest
import torch

from paper.tasks import text
from paper.tasks.counting import repeats, table_bits, task_bits


def windows(*rows):
    return torch.tensor([list(row) for row in rows])


def test_by_hand():
    """'aba' has two pairs, 'ab' and 'ba'; singles are a, b, a. Tested on 'ab': 'b' after 'a'."""
    single = (1 + 2 / 256) / (3 + 2)  # seen once of three, and two different bytes leave 2 / 5 to equal shares
    pair = (1 + 1 * single) / (1 + 1)  # after 'a' there was one byte, 'b'
    assert table_bits(windows(b"aba"), windows(b"ab"), 1) == pytest.approx((-log2(pair),), rel=1e-12)


def by_dictionaries(seen, tested, longest):
    followers, found = {}, []
    for row in seen.tolist():
        for t in range(len(row)):
            for n in range(min(t, longest) + 1):
                followers.setdefault(tuple(row[t - n : t]), Counter())[row[t]] += 1

    def share(context, byte):
        lower = share(context[1:], byte) if context else 1 / 256
        after = followers.get(tuple(context), Counter())
        if not after:
            return lower
        return (after[byte] + len(after) * lower) / (after.total() + len(after))

    for n in range(1, longest + 1):
        asked = [(row[max(t - n, 0) : t], row[t]) for row in tested.tolist() for t in range(1, len(row))]
        found.append(sum(-log2(share(*one)) for one in asked) / len(asked))
    return tuple(found)


def test_equals_dictionaries():
    """On bytes that repeat and bytes never seen, at every length. The tolerance 1e-12 is for sums of 300 float64."""
    made = torch.Generator().manual_seed(0)
    seen = torch.randint(4, (40, 12), generator=made) + 252
    tested = torch.randint(5, (30, 11), generator=made) + 251
    assert table_bits(seen, tested, 6) == pytest.approx(by_dictionaries(seen, tested, 6), rel=1e-12)


@pytest.mark.parametrize("longest", [0, 3, 7])
def test_refuses_lengths_without_a_run(longest):
    with pytest.raises(ValueError, match="longest: expected"):
        table_bits(windows(b"abcd"), windows(b"abc"), longest)


def test_the_tables_of_a_task_are_of_what_it_draws():
    task = text.language_modelling("numbers", "counting", text.Parts(*(bytes(range(200)) * 9 for _ in range(3))), 16)
    windows = [text.whole_windows(draw(count, torch.Generator().manual_seed(0))) for draw, count in (
        (task.train, 30), (task.tests["test"], 7)
    )]  # fmt: skip
    assert [tuple(one.shape) for one in windows] == [(30, 17), (7, 17)]
    assert task_bits(task, 30, 7, 2) == table_bits(*windows, 2)


def test_repeats():
    """Compared with counting by hand, on three symbols, so that matches are many."""
    windows = torch.randint(3, (3, 31), generator=torch.Generator().manual_seed(0))
    found = repeats(windows, 5)
    for row, x in enumerate(windows.tolist()):
        for t in range(30):
            best, place = 0, None
            for s in range(t):
                length = 0
                while length < 5 and s >= length and x[s - length] == x[t - length]:
                    length += 1
                if length and length >= best:
                    best, place = length, s
            assert found.length[row, t] == best
            assert bool(found.right[row, t]) == (place is not None and x[place + 1] == x[t + 1])
