"""Evidence of S1 on mixtures of experts."""

from paper.claims import Verdict, judge
from paper.claims.evidence import hardware as s1


def test_the_routing(monkeypatch):
    assert judge("S1.4.1b").verdict == Verdict.CONFIRMED
    right = s1.mixture

    def other_gates(form):
        layer = right(form)
        if form == "fast":
            layer.weight_router.data.mul_(2)  # the same experts, other weights
        return layer

    monkeypatch.setattr(s1, "mixture", other_gates)
    assert s1.routing().verdict == Verdict.REFUTED
    monkeypatch.setattr(s1, "mixture", lambda _: right("reference"))  # all experts compute
    assert s1.routing().verdict == Verdict.REFUTED
