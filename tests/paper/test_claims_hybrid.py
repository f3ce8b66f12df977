"""The evidence on layers with heads of several kinds fails where a cost is off."""

import pytest

from paper.claims.evidence import cheaper_heads as hybrid
from paper.claims.verdicts import Verdict


def test_the_shares_by_hand():
    """In units of N d^2 and with a fused kernel: 24 + 14 r learned, of which freezing takes 4 from the others."""
    r = 512 / 768
    for learned in hybrid.LEARNED:
        expected = 1 - 4 * (1 - learned / 12) / (24 + 14 * r)
        assert hybrid.over_learned("step", 512, learned) == pytest.approx(expected, rel=1e-12)
        assert hybrid.over_learned("trained", 512, learned) == pytest.approx(0.5 + learned / 24)


def test_the_verdict_follows_the_costs(monkeypatch):
    assert hybrid.some_heads_learned().verdict == Verdict.CONFIRMED
    right = hybrid.over_learned
    monkeypatch.setattr(hybrid, "over_learned", lambda quantity, *a: 0.05 + right(quantity, *a))
    assert hybrid.some_heads_learned().verdict == Verdict.CONDITIONAL
    monkeypatch.setattr(hybrid, "over_learned", lambda quantity, *a: 1.2 + right(quantity, *a))
    assert hybrid.some_heads_learned().verdict == Verdict.REFUTED
