"""The evidence on linear attention, in four documents: its figures against others that are found independently."""

import math
from fractions import Fraction

import pytest
import sympy
import torch

from ortho import MultiheadAttention
from ortho.attention import MECHANISMS, softmax_attention_reference
from ortho.attention.linear.efficient import efficient_attention_reference
from ortho.attention.linear.feature_maps import CosFormer, Cosine, Powers, Taylor
from ortho.attention.linear.linear_attention import kernel_weights
from ortho.cost.big_o import H, N, d
from ortho.cost.counting import count_forward, count_step
from ortho.theory.associativity import by_states, by_sums
from ortho.theory.kernels import tokens
from paper.claims import judge
from paper.claims.evidence import linear_attention as s1
from paper.claims.evidence import linear_attention as s2
from paper.claims.evidence import linear_attention as s3
from paper.claims.evidence import linear_attention as s4
from paper.claims.evidence import lookup
from paper.claims.evidence.methods import EXACT

# --------------------------------------------------------------------------------------------------------- document S1


def test_each_reading_of_the_printed_sum():
    """In loops; and what is divided as it should be is linear attention."""
    q, k, v = s1.operands(5, 3).exp()
    everything = sum(float(x) for x in k.flatten())
    by_reading = {name: torch.zeros(5, 3, dtype=q.dtype) for name in s1.READINGS}
    for i in range(5):
        for a in range(3):
            for f in range(3):
                memory = sum(k[j, f] * v[j, a] for j in range(5))
                each = k[:, f].sum(), k[:, a].sum()
                for total, divisor in zip(by_reading.values(), (everything, each[1], each[0]), strict=True):
                    total[i, a] += q[i, f] * memory / divisor
    for name, expected in by_reading.items():
        torch.testing.assert_close(s1.READINGS[name](q, k, v), expected)
    right = q @ (k.T @ v) / (q @ k.sum(0))[:, None]
    exact = MECHANISMS["linear-exp"].reference(*(x.log() for x in (q, k)), v)
    torch.testing.assert_close(right, exact)


def test_a_formula_that_divides_rightly_would_pass(monkeypatch):
    assert all(s1.away(name) > 0.5 for name in s1.READINGS)
    monkeypatch.setitem(s1.READINGS, "rightly", lambda q, k, v: q @ (k.mT @ v) / (q @ k.sum(-2))[:, None])
    assert s1.away("rightly") < EXACT
    assert s1.ones_become("rightly") == pytest.approx((1, 1))


def test_every_query_shares_the_printed_divisor():
    """A query twice as large gives outputs twice as large, where an average stays."""
    q, k, v = s1.operands().relu()
    for reading in s1.READINGS.values():
        torch.testing.assert_close(reading(2 * q, k, v), 2 * reading(q, k, v))


def test_copies_near_and_far():
    assert s1.near_error() < lookup.SOLVED
    assert "need not miss" in judge("S1.2.2b").ours
    assert min(s1.FAR) == 2 * s1.FEATURES - 1  # so that at least half is lost


def test_softmax_attention_copies_from_any_distance():
    """In two dimensions: positions on a circle, and scores large enough to tell neighbours apart."""
    for r in s1.FAR:
        n = tokens(r, 2)
        angles = 2 * math.pi * torch.arange(n, dtype=torch.float64) / n
        codes = torch.stack([angles.cos(), angles.sin()], -1)
        gap = 1 - math.cos(2 * math.pi / n)
        weights = softmax_attention_reference(
            codes.roll(r, 0), codes, torch.eye(n, dtype=torch.float64), is_causal=True, scale=20 / gap
        )
        error = (weights[r:] - torch.eye(n)[:-r]).square().sum(-1).mean()
        assert error < lookup.SOLVED


# --------------------------------------------------------------------------------------------------------- document S2


def test_single_head_forms_are_counted():
    """The closed forms in N and d that the evidence compares, on a running call of one head."""
    n, width = 24, 8
    x = torch.ones(3, 1, 1, n, width)
    forms = MECHANISMS["linear"].cost(1, N, 1, d, d)
    assert count_forward(MECHANISMS["linear"].fast, *x)[0] == forms.forward.subs({N: n, d: width})
    _, state = MECHANISMS["linear"].fast(*x, return_state=True)
    assert sum(part.numel() for part in state) == (forms.state_bytes / 4).subs(d, width)


def test_cosine_weights_may_be_negative():
    q, k = torch.zeros(1, 3).double(), math.pi * torch.ones(1, 3).double()
    assert kernel_weights(Cosine(), q, k).item() == pytest.approx(-3)
    assert s2.negative(Cosine(), 2) > 10 > 0 == s2.negative(CosFormer(s2.TOKENS), 2)
    assert s2.cosine_away() > 0.1


def test_two_pairs_of_the_same_score():
    q, k = s2.SAME_SCORE
    assert (q * k).sum(-1).tolist() == [1, 1]
    by_hand = [sum(1 + t + t**2 for t in products) for products in ((1, 0), (Fraction(1, 2),) * 2)]
    assert s2.of_same_score(Powers(2)) == tuple(map(float, by_hand)) == (4, 3.5)
    score = 1 / math.sqrt(2)  # Taylor's is divided by the root of the width
    expected = 1 + score + score**2 / 2
    assert s2.of_same_score(Taylor(2)) == pytest.approx((expected, expected))


def test_features_for_kernels():
    assert s2.mercer_error() < 1e-11
    assert "needs 40 on these 40 points" in judge("S2.3.2a").ours


# --------------------------------------------------------------------------------------------------------- document S3


@pytest.mark.parametrize(("n", "d_model", "heads"), [(16, 32, 4), (64, 8, 2)])
def test_doubling_is_counted(n, d_model, heads):
    """Layers and cores, run at N and at 2N."""
    for attention, form in (("softmax", "reference"), ("linear", "fast")):
        module = MultiheadAttention(d_model, heads, attention=attention, form=form)
        steps = [count_step(module, torch.zeros(1, m, d_model)).forward for m in (n, 2 * n)]
        forward = 8 * N * d**2 + H * MECHANISMS[attention].cost(1, N, 1, d / H, d / H, form=form).forward
        expected = s3.doubling(forward).subs({N: n, d: d_model, H: heads})
        assert Fraction(steps[1], steps[0]) == Fraction(int(expected.p), int(expected.q))
        function = MECHANISMS[attention].form(form)
        counts = [count_forward(function, *torch.zeros(3, 1, 1, m, d_model))[0] for m in (n, 2 * n)]
        assert counts[1] == (4 if attention == "softmax" else 2) * counts[0]


def test_limits_of_the_ratio():
    whole = s3.doubling(8 * N * d**2 + 4 * N**2 * d)
    assert (sympy.limit(whole, N, 0), sympy.limit(whole, N, sympy.oo)) == (2, 4)
    assert whole.subs(N, d) == sympy.Rational(8, 3)
    assert sympy.solve(sympy.Eq(whole, sympy.Rational(7, 2)), N) == [6 * d]


def test_the_worked_example_with_numbers():
    found = s3.worked_example(2, 3, 5, 7, 11, 13)
    assert found == {
        "$k^\\top q$": (146,),
        "$v\\, (k^\\top q)$": (292, 438),
        "$v k^\\top$": (10, 14, 15, 21),
        "$(v k^\\top)\\, q$": (292, 438),
    }
    assert found.keys() == s3.EXAMPLE.keys()


def test_a_wrong_recurrence_is_noticed():
    """One that forgets the present, and one that mixes up keys and values."""

    def late(q, k, v):
        rows = by_sums(q, k, v)
        return ((0,) * len(v[0]), *rows[:-1])

    assert s3.differing(by_sums, late) > 0
    assert s3.differing(by_sums, lambda q, k, v: by_states(q, v, k)) > 0
    assert s3.differing(by_sums, by_states) == 0


# --------------------------------------------------------------------------------------------------------- document S4


def test_printed_code():
    found = s4.run_printed_code()
    assert not found.runs
    assert found.negative > 0
    assert found.sums_off > 1
    assert found.masked > 1e300
    assert found.with_softmax < EXACT


def test_with_the_missing_softmax_it_is_efficient_attention():
    """The printed function after a softmax of the keys over positions; its weights are averages."""
    q, k, v = s4.heads_of_8()
    expected = efficient_attention_reference(q, k, v)
    torch.testing.assert_close(s4.printed_code(q, k.softmax(-2), v), expected, atol=1e-13, rtol=1e-13)
    weights = s4.printed_code(q, k.softmax(-2), torch.eye(q.shape[1]).double()[None])
    assert (weights > 0).all()
    assert (weights.sum(-1) - 1).abs().max() < EXACT


def test_a_mask_that_hides_nothing():
    q, k, v = (x[:, None] for x in s4.heads_of_8())
    mask = torch.ones(1, k.shape[-2])
    assert torch.equal(s4.printed_code(q, k, v, mask, axes="bh"), s4.printed_code(q, k, v, axes="bh"))
