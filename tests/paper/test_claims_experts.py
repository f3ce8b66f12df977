"""Evidence of S1 on mixtures of experts."""

from paper.claims import Verdict, judge
from paper.claims.s1 import experts as s1


def test_the_orders():
    """What is printed has k below the line; the parameters are as claimed."""
    assert judge("S1.4.1a").verdict == Verdict.REFUTED


def test_the_routing(monkeypatch):
    assert judge("S1.4.1b").verdict == Verdict.CONFIRMED
    right = s1.both

    def other_gates(form):
        layer = right(form)
        if form == "fast":
            layer.weight_router.data.mul_(2)  # the same experts, other weights
        return layer

    monkeypatch.setattr(s1, "both", other_gates)
    assert s1.routing().verdict == Verdict.REFUTED
    monkeypatch.setattr(s1, "both", lambda _: right("reference"))  # all experts compute
    assert s1.routing().verdict == Verdict.REFUTED
