"""Evidence on linear attention and random features: its figures against others found independently."""

import math
from fractions import Fraction

import pytest
import torch

from ortho.attention import MECHANISMS, softmax_attention_reference
from ortho.attention.linear.efficient import efficient_attention_reference
from ortho.attention.linear.feature_maps import Powers, Taylor
from ortho.theory.kernels import tokens
from paper.claims.evidence import linear_attention as linear
from paper.claims.evidence.methods import EXACT
from paper.claims.shared import lookup

# ------------------------------------------------------------------ The evidence on linear attention, in four documents


def test_each_reading_of_the_printed_sum():
    """The readings agree with loops, and the sum with the right division is linear attention."""
    q, k, v = linear.operands(5, 3).exp()
    everything = sum(float(x) for x in k.flatten())
    by_reading = {name: torch.zeros(5, 3, dtype=q.dtype) for name in linear.READINGS}
    for i in range(5):
        for a in range(3):
            for f in range(3):
                memory = sum(k[j, f] * v[j, a] for j in range(5))
                each = k[:, f].sum(), k[:, a].sum()
                for total, divisor in zip(by_reading.values(), (everything, each[1], each[0]), strict=True):
                    total[i, a] += q[i, f] * memory / divisor
    for name, expected in by_reading.items():
        torch.testing.assert_close(linear.READINGS[name](q, k, v), expected)
    right = q @ (k.T @ v) / (q @ k.sum(0))[:, None]
    exact = MECHANISMS["linear-exp"].reference(*(x.log() for x in (q, k)), v)
    torch.testing.assert_close(right, exact)


def test_softmax_attention_copies_from_any_distance():
    """In two dimensions: positions on a circle, and scores large enough to tell neighbours apart."""
    for r in linear.FAR:
        n = tokens(r, 2)
        angles = 2 * math.pi * torch.arange(n, dtype=torch.float64) / n
        codes = torch.stack([angles.cos(), angles.sin()], -1)
        gap = 1 - math.cos(2 * math.pi / n)
        weights = softmax_attention_reference(
            codes.roll(r, 0), codes, torch.eye(n, dtype=torch.float64), is_causal=True, scale=20 / gap
        )
        error = (weights[r:] - torch.eye(n)[:-r]).square().sum(-1).mean()
        assert error < lookup.SOLVED


def test_two_pairs_of_the_same_score():
    q, k = linear.SAME_SCORE
    assert (q * k).sum(-1).tolist() == [1, 1]
    by_hand = [sum(1 + t + t**2 for t in products) for products in ((1, 0), (Fraction(1, 2),) * 2)]
    assert linear.of_same_score(Powers(2)) == tuple(map(float, by_hand)) == (4, 3.5)
    score = 1 / math.sqrt(2)  # Taylor's score is divided by the root of the width
    expected = 1 + score + score**2 / 2
    assert linear.of_same_score(Taylor(2)) == pytest.approx((expected, expected))


def test_the_worked_example_with_numbers():
    found = linear.worked_example(2, 3, 5, 7, 11, 13)
    assert found == {
        "$k^\\top q$": (146,),
        "$v\\, (k^\\top q)$": (292, 438),
        "$v k^\\top$": (10, 14, 15, 21),
        "$(v k^\\top)\\, q$": (292, 438),
    }
    assert found.keys() == linear.EXAMPLE.keys()


def test_with_the_missing_softmax_it_is_efficient_attention():
    """The printed function after a softmax of the keys over positions; its weights are averages."""
    q, k, v = linear.heads_of_8()
    expected = efficient_attention_reference(q, k, v)
    torch.testing.assert_close(linear.printed_code(q, k.softmax(-2), v), expected, atol=1e-13, rtol=1e-13)
    weights = linear.printed_code(q, k.softmax(-2), torch.eye(q.shape[1]).double()[None])
    assert (weights > 0).all()
    assert (weights.sum(-1) - 1).abs().max() < EXACT


def test_a_mask_that_hides_nothing():
    q, k, v = (x[:, None] for x in linear.heads_of_8())
    mask = torch.ones(1, k.shape[-2])
    assert torch.equal(linear.printed_code(q, k, v, mask, axes="bh"), linear.printed_code(q, k, v, axes="bh"))
