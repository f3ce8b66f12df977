"""Tables of the last bytes, held to counts by hand and by dictionaries."""

from collections import Counter
from math import log2

import pytest
import torch

from paper.experiments.learning import language
from paper.tasks.ngrams import table_bits


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
    """On bytes that repeat and on some that were never seen; at every length. Sums of 300 float64: 1e-12."""
    made = torch.Generator().manual_seed(0)
    seen = torch.randint(4, (40, 12), generator=made) + 252
    tested = torch.randint(5, (30, 11), generator=made) + 251
    assert table_bits(seen, tested, 6) == pytest.approx(by_dictionaries(seen, tested, 6), rel=1e-12)


@pytest.mark.parametrize("longest", [0, 3, 7])
def test_refuses_lengths_without_a_run(longest):
    with pytest.raises(ValueError, match="longest: expected"):
        table_bits(windows(b"abcd"), windows(b"abc"), longest)


def test_tables_see_as_much_as_the_models(monkeypatch):
    """As many windows as a model gets in the steps, and the models' own tests."""
    counted = []
    monkeypatch.setattr(language.ngrams, "table_bits", lambda seen, *_: counted.append(seen.shape) or (2.0, 1.0))
    language.table_bits.cache_clear()
    assert language.best(3) == (2, 1.0)
    size = language.SIZES["cpu"]
    assert counted == [(3 * size["B"], size["N"] + 1)]
    assert language.held_out().shape == (size["tested"], size["N"] + 1)
    language.table_bits.cache_clear()


def test_least_bits_of_pairs(monkeypatch):
    """After 'a' there is 'b' two times of three, else 'c'; after 'b' always 'a'. Some ten float64 operations."""
    monkeypatch.setattr(language_tables, "held_out", lambda _: windows(b"abab", b"acac", b"abac")[:, :3])
    share = (-2 * log2(2 / 3) - log2(1 / 3)) / 6
    assert language.least_bits_of_pairs() == pytest.approx(share, rel=1e-14)
