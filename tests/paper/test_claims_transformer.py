"""Evidence of S1 on the whole Transformer: orders, constants, and which part is the most."""

import pytest
import torch

from ortho.cost import block
from paper.claims import Verdict, judge
from paper.claims.s1 import transformer as s1
from paper.claims.s2 import standard

CONFIRMED, CONDITIONAL = Verdict.CONFIRMED, Verdict.CONDITIONAL


@pytest.mark.parametrize(
    ("claim", "verdict"),
    [
        ("S1.1.1a", CONFIRMED),
        ("S1.1.1b", CONFIRMED),
        ("S1.1.1c", CONDITIONAL),
        ("S1.1.2a", CONFIRMED),
        ("S1.1.3a", CONFIRMED),
        ("S1.1.3b", CONFIRMED),
    ],
)
def test_verdicts(claim, verdict):
    assert judge(claim).verdict == verdict


def test_the_share_of_the_scores():
    """4 N^2 d of 24 N d^2 + 4 N^2 d: a half at N = 6 d, whatever the heads."""
    assert s1.share(s1.BLOCK.forward, 6 * 768, 768) == 50
    assert s1.share(s1.BLOCK.forward, 768, 768) == round(100 / 7, 1)
    numbers = block(1, 512, 768, 12, form="reference")
    assert numbers.forward == s1.BLOCK.forward.subs({s1.N: 512, s1.d: 768, s1.H: 12})


def test_longer_models_would_be_noticed(monkeypatch):
    longer = {name: at.__class__(**{**vars(at), "length": 10**5}) for name, at in s1.SCENARIOS.items()}
    monkeypatch.setattr(s1, "SCENARIOS", longer)
    assert s1.bottleneck().verdict == CONFIRMED


def test_the_table_of_steps_is_right_but_for_its_totals():
    found = standard.step_by_step()
    assert found.verdict == Verdict.REFUTED
    assert found.ours.count("(confirmed)") == 8
    assert "total, time: $4 N^2 d + 6 N^2 + 8 N d^2$: the claim drops $N d^2$ (refuted)" in found.ours
    assert "total, space: $N^2 + 5 N d$: the claim drops $N d$ (refuted)" in found.ours


def test_a_step_gives_out_as_many_numbers_as_the_table_says():
    n, width = 7, 3
    x = torch.randn(n, width, generator=torch.Generator().manual_seed(0))
    scores = x @ x.T
    sizes = {"projection": 3 * x.numel(), "similarity": scores.numel(), "softmax": scores.softmax(-1).numel()}
    sizes["aggregation"] = (scores @ x).numel()
    assert {step: size.subs({s1.N: n, s1.d: width}) for step, size in standard.RESULTS.items()} == sizes


def test_right_totals_would_be_confirmed(monkeypatch):
    right = {**standard.SOURCE, "total": ("N^2*d + N*d^2", "N^2 + N*d")}
    monkeypatch.setattr(standard, "SOURCE", right)
    assert standard.step_by_step().verdict == CONFIRMED
