"""Evidence of S1 on recomputation."""

import pytest

from paper.claims.evidence import hardware as s1


def test_the_figures():
    """A third, less the last product of a segment; memory between none and most of it."""
    assert all(20 < s1.more(segments) < 100 / 3 for segments in s1.WAYS.values())
    assert sorted(s1.WAYS.values(), reverse=True) == list(s1.WAYS.values())
    savings = [s1.less(segments) for segments in s1.WAYS.values()]
    assert savings == sorted(savings, reverse=True) and savings[0] < 100
    assert savings[-1] == 0  # one segment: inside out at once
    assert s1.more(1) < s1.all_again() < s1.all_again("reference") == pytest.approx(100 / 3)
