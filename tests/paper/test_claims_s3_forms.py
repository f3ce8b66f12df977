"""S3.3b, S3.3c, S3.3f: each part of the evidence can fail, and the verdict follows the figures."""

import pytest
import torch

from ortho.attention.recurrent.delta import delta_rule_reference
from ortho.theory import transitions
from paper.claims.evidence import delta_rule as stability
from paper.claims.evidence import gates_and_losses as forms
from paper.claims.verdicts import Verdict
from paper.tasks import state_tracking


def test_gates():
    assert forms.gated().verdict == Verdict.CONFIRMED
    assert forms.unlike_gated_delta_net(lambda q, k, v, **_: delta_rule_reference(q, k, v, is_causal=True)) > 0.1
    assert forms.bend(of_memory=True) > 0.01


def test_ranks():
    """One token of two keys has rank 2 and not 1; of three keys, 3."""
    assert forms.surplus_rank(2) < forms.EXACT_STEPS
    assert forms.surplus_rank(3) < forms.EXACT_STEPS


def test_norms_by_hand():
    """Orthogonal keys: 1 - 3/2 on both. Nearly parallel ones at once: 1 - 3/2 (1 + c)."""
    assert list(forms.norms().values()) == [0.5, pytest.approx(1, abs=0.01), 0.5, 2]
    assert transitions.pair_norm(forms.NEAR, forms.STRENGTH) == pytest.approx(2, abs=0.01)


def records(product, one, device="cpu-x"):
    """Shares of right answers by arm, as the experiment stores them, its longest test first."""
    for arm, shares in (("delta-product", product), ("delta, beta to 2", one)):
        for seed, share in enumerate(shares, 1):
            answered = {**dict.fromkeys(reversed(forms.BEYOND), share), "tokens 1 to 16": 1.0}
            tests = {t: {"correct_fraction": [x], "faultless_fraction": [x]} for t, x in answered.items()}
            case = {"arm": arm, "seed": seed, "rate": 1e-2}
            yield {"experiment": "permutations", "device": device, "configuration": case, "repetitions": tests}


HIGH, LOW = (0.9, 0.92, 0.94, 0.96, 0.98), (0.3, 0.31, 0.32, 0.33, 0.34)
ARMS = ("permutations", "delta-product", "delta, beta to 2", forms.BEYOND)


@pytest.mark.parametrize(
    ("product", "one", "verdict"),
    [
        (HIGH, LOW, Verdict.CONDITIONAL),  # the gain shows; the norms still differ
        ([x + 0.001 for x in LOW], [x - 0.1 for x in LOW], Verdict.CONDITIONAL),  # a small one, too
        (LOW, HIGH, Verdict.REFUTED),
        ((*HIGH[:4], 0.1), LOW, Verdict.UNTESTABLE),  # one run in five that fails: by chance in 19 of 252
        (HIGH[:4], LOW, Verdict.UNTESTABLE),  # too few
    ],
)
def test_higher_rank_with_records(monkeypatch, product, one, verdict):
    monkeypatch.setattr(forms.experiments, "load", lambda name: list(records(product, one)))
    finding = forms.higher_rank()
    assert finding.verdict == verdict
    assert ("tokens 17 to 32 on cpu-x: " in finding.ours) == (len(product) == 5)
    assert "tokens 1 to 16" not in finding.ours


def test_the_interval_of_a_gain_by_hand(monkeypatch):
    """Three tests: either end may leave out two of 25 differences, as 4 of 252 choices have less than three of them."""
    monkeypatch.setattr(forms.experiments, "load", lambda name: list(records(HIGH, LOW)))
    gains = forms.gained(*ARMS)
    assert list(gains) == [f"{test} on cpu-x" for test in forms.BEYOND]
    assert set(gains.values()) == {(58.0, 66.0)}  # 56, 57, 58, ... 66, 67, 68
    monkeypatch.setattr(forms.experiments, "load", lambda name: [*records(HIGH, LOW), *records(HIGH, LOW, "cuda-y")])
    assert set(forms.gained(*ARMS).values()) == {(57.0, 67.0)}


def test_the_tests_are_those_beyond_training():
    task = state_tracking.PERMUTATIONS
    assert set(forms.BEYOND) == {test for test, draw in task.tests.items() if draw.keywords["first"] > task.longest}


def test_the_records_are_there():
    """A record that is lost takes a part of the claim's evidence with it."""
    gains = forms.gained(*ARMS)
    for test in forms.BEYOND:
        assert any(label.startswith(f"{test} on ") for label in gains)


def test_higher_rank_without_records(monkeypatch):
    monkeypatch.setattr(forms.experiments, "load", lambda name: [])
    finding = forms.higher_rank()
    assert finding.verdict == Verdict.UNTESTABLE
    assert "'permutations' has no records of 5 runs each of 'delta-product' and" in finding.ours
    assert forms.miscounted() == 0
    monkeypatch.setattr(forms, "delta_product", lambda **x: torch.ones(forms.NUMBERS + 1, 2))
    assert forms.miscounted() > forms.NUMBERS / 2


def test_stability():
    finding = stability.unstable()
    assert finding.verdict == Verdict.CONDITIONAL
    assert stability.left(1.0) < 1e-3 < stability.left(1.4) < 1 < stability.left(1.5)
    factors = [stability.growing(strengths) for strengths in stability.STRENGTHS.values()]
    assert max(factors[:2]) < stability.GROWS / 2 < 2 * stability.GROWS < factors[2]
    assert list(stability.nearer().values()) == [1, 0]
    assert list(stability.smaller().values()) == [0, 0, 0, 0]
    assert 0 < stability.unlike_derived() < 0.4


def test_stability_can_be_helped_or_not(monkeypatch):
    """One remedy that helps makes that part conditional, none refutes it; errors unlike the derived ones refute."""
    monkeypatch.setattr(stability, "nearer", lambda: {"orthogonalised": 0})
    assert stability.unstable().verdict == Verdict.REFUTED
    monkeypatch.setattr(stability, "smaller", lambda: {"started elsewhere": 1})
    assert stability.unstable().verdict == Verdict.CONDITIONAL
    monkeypatch.setattr(stability, "unlike_derived", lambda: 0.7)
    assert stability.unstable().verdict == Verdict.REFUTED
