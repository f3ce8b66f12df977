"""S3.3b, S3.3c, S3.3f: each part of the evidence can fail, and the verdict follows the figures."""

import pytest
import torch

from ortho.attention.delta import delta_rule_reference
from ortho.claims.s3 import forms, stability
from ortho.claims.verdicts import Verdict
from ortho.theory import one_shot


def test_gates():
    assert forms.gated().verdict == Verdict.CONFIRMED
    assert forms.unlike_gated_delta_net(lambda q, k, v, **_: delta_rule_reference(q, k, v, is_causal=True)) > 0.1
    assert forms.bend(of_memory=True) > 0.01


def test_ranks():
    """One token of two keys has rank 2 and not 1; of three keys, 3."""
    assert forms.surplus_rank(2) < forms.EXACT
    assert forms.surplus_rank(3) < forms.EXACT


def test_norms_by_hand():
    """Orthogonal keys: 1 - 3/2 on both. Nearly parallel ones at once: 1 - 3/2 (1 + c)."""
    assert list(forms.norms().values()) == [0.5, pytest.approx(1, abs=0.01), 0.5, 2]
    assert one_shot.pair_norm(forms.NEAR, forms.STRENGTH) == pytest.approx(2, abs=0.01)


def records(product, one):
    """Shares of right answers by arm, as the experiment stores them."""
    for arm, shares in (("delta-product", product), ("delta, beta to 2", one)):
        for seed, share in enumerate(shares, 1):
            answered = {"tokens 1 to 16": 1.0, "tokens 17 to 32": share}
            tests = {t: {"correct_fraction": [x], "faultless_fraction": [x]} for t, x in answered.items()}
            yield {"device": "cpu-x", "configuration": {"arm": arm, "seed": seed}, "repetitions": tests}


@pytest.mark.parametrize(
    ("product", "one", "verdict"),
    [
        ((0.9, 0.95, 1.0), (0.3, 0.35, 0.4), Verdict.CONDITIONAL),  # the gain shows; the norms still differ
        ((0.3, 0.35, 0.4), (0.9, 0.95, 1.0), Verdict.REFUTED),
    ],
)
def test_higher_rank_with_records(monkeypatch, product, one, verdict):
    monkeypatch.setattr(forms.experiments, "load", lambda name: list(records(product, one)))
    gains, control = forms.gained("permutations", "delta-product", "delta, beta to 2")
    label = "permutations, tokens 17 to 32, cpu-x"
    assert gains == {label: (round(100 * (product[0] - one[2])), round(100 * (product[2] - one[0])))}
    assert control == {label: (-10, 10)}
    assert forms.higher_rank().verdict == verdict


def test_higher_rank_without_records(monkeypatch):
    monkeypatch.setattr(forms.experiments, "load", lambda name: [])
    assert forms.higher_rank().verdict == Verdict.CONDITIONAL
    assert forms.miscounted() == 0
    monkeypatch.setattr(forms, "delta_product", lambda **x: torch.ones(forms.NUMBERS + 1, 2))
    assert forms.miscounted() > forms.NUMBERS / 2


def test_stability():
    finding = stability.unstable()
    assert finding.verdict == Verdict.CONDITIONAL
    assert stability.left(1.0) < 1e-3 < stability.left(1.4) < 1 < stability.left(1.5)
    assert [stability.growing(strengths) > 2 for strengths in stability.STRENGTHS.values()] == [False, False, True]
    assert list(stability.nearer().values()) == [1, 0]
    assert 1 < stability.unlike_derived() < 1.5
