"""Evidence on linear attention and random features: its figures against others found independently."""

import math
from fractions import Fraction
from math import cosh, exp, log, sqrt

import pytest
import torch
from scipy import stats

from ortho.attention import MECHANISMS, softmax_attention_reference
from ortho.attention.linear.efficient import efficient_attention_reference
from ortho.attention.linear.favor import orthogonal_features
from ortho.attention.linear.feature_maps import Powers, Taylor
from ortho.attention.linear.random_features import iid_features, positive_features
from ortho.theory.estimates import SIGMAS
from ortho.theory.johnson_lindenstrauss import dimension, failure_bound
from ortho.theory.kernels import tokens
from ortho.theory.unbiasedness import omegas, raw_qr_rows, root_norm_rows, unit_norm_rows
from paper.claims.evidence import linear_attention as linear
from paper.claims.evidence import random_features as features
from paper.claims.evidence.methods import EXACT, misplaced
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


# ---------------------- The algorithm as printed does what is said of it, and so do the quantities that it is judged by


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize(
    ("draw", "right"),
    [(iid_features, True), (orthogonal_features, True), (unit_norm_rows, False), (root_norm_rows, False),
     (raw_qr_rows, False)],
)  # fmt: skip
def test_wrong_rows_would_not_pass(draw, right):
    """At the tolerance of the evidence; the error rate is that of SIGMAS."""
    found = features.estimated(draw)
    assert (abs(found.value - 1) <= SIGMAS * found.standard_error) is right


def test_scaled_scores():
    x, y, weights = features.scaled(0.5)
    assert float((x @ y.mT).std()) == pytest.approx(0.5, rel=0.05)
    torch.testing.assert_close(weights, (x @ y.mT).softmax(-1))


def test_the_algorithm_tends_to_softmax_with_the_right_rows():
    """A fourth of the error with sixteen times the features, or less; the missing root of m cancels."""
    x, y, exact = features.scaled(0.25, 32, 16)
    values = torch.eye(32, dtype=torch.float64)

    def off(m):
        omega = orthogonal_features(m, 16, generator=generator(1), dtype=torch.float64)
        weights = features.printed_algorithm(x, y, values, omega)
        ours = positive_features(x, omega) @ positive_features(y, omega).mT
        torch.testing.assert_close(weights, ours / ours.sum(-1, keepdim=True), rtol=1e-12, atol=0)
        return misplaced(weights, exact)

    assert off(16 * 1024) < 1 < 0.35 * off(1024)


def test_the_algorithm_tends_to_its_limit_with_orthonormal_rows():
    x, y, _ = features.scaled(1)
    values = torch.eye(len(y), dtype=torch.float64)
    omega = unit_norm_rows(64 * features.WIDTH, features.WIDTH, generator=generator(1), dtype=torch.float64)
    limit = features.printed_limit(x, y)
    assert misplaced(features.printed_algorithm(x, y, values, omega), limit) < 0.5  # of 100 per cent
    # Only the keys' lengths matter, up to the seven parts in a thousand that depend on the query.
    by_length = (-y.square().sum(-1) / 2).softmax(-1).expand_as(limit)
    assert misplaced(limit, by_length) < 1 and features.query_share(limit) < 1


def test_query_share():
    two_alike = torch.tensor([[1, 0], [1, 0], [0, 1]]).double()  # off their mean by a third, a third and two thirds
    assert features.query_share(two_alike) == pytest.approx(100 * 4 / 9)
    assert features.query_share(torch.full((4, 4), 0.25).double()) == 0


def test_spread_of_the_weights():
    """The spread equals the one computed weight by weight."""
    x, y, _ = features.scaled(0.125, 32, 16)
    assert float((x[:, None] + y).square().sum(-1).mean()) == pytest.approx(1, rel=0.1)
    omega = omegas(iid_features, 16, 16, 50, generator=generator(1))
    values = torch.eye(32, dtype=torch.float64)
    weights = torch.stack([features.printed_algorithm(x, y, values, rows) for rows in omega])
    by_hand = sqrt(float((weights - weights.mean(0)).square().sum() / 49 / 32**2))
    assert features.weights_spread(omega, 1) == pytest.approx(by_hand, rel=1e-10)


def test_steadied_intervals():
    """The control's intervals contain 0, failing once in a hundred times; the gain at small norms lies above them."""
    for square in (1, 16):
        (low, high), (least, most) = features.steadied(square)
        assert least < 0 < most and 0 < low < high
        assert (low > most) is (square == 1)
    assert 2 * stats.t(features.REPETITIONS - 1).sf(features.T) == pytest.approx(0.01, rel=0.02)


# -------------------------------------------------------------------------------------------------------------- S2.2.2d


def test_trigonometric_over_positive():
    """By hand at score 1, and its sign at the chapter's scores."""
    by_hand = log(2 * (cosh(2) - 1) / (exp(6) - 1))
    assert features.trigonometric_over_positive(1.0) == pytest.approx(by_hand)
    signs = [features.trigonometric_over_positive(score) > 0 for score in features.SCORES]
    assert signs == [True, True, False, False, False]


# --------------------------------------------------------------------------------------------- S2, sections 4.2 and 4.3


@pytest.mark.parametrize("width", features.SPACES)
def test_distortions_differ_by_the_factor(width):
    """The least of the changed distances is below k/d, but not by more than the rescaled ones allow."""
    k = dimension(features.POINTS, features.EPS)
    raw, rescaled = features.distortions(width)
    assert k == features.SPACES[0]
    if width == k:  # W is orthogonal to k times an entry's 4 k eps
        assert raw == rescaled < 8 * k**2 * torch.finfo(torch.float64).eps
    else:
        assert (
            1 - k / width < raw <= 1 - (1 - rescaled) * k / width + 1e-12
        )  # equal up to rounding if one pair attains both
        assert rescaled < features.EPS


def test_the_limit_is_the_hardest_case():
    """In none of these spaces is an orthogonal draw more likely to fail."""
    for n, eps in features.SIZES:
        k = dimension(n, eps)
        assert all(failure_bound(n, width, k, eps) < features.unlikely(n, eps) for width in (k, k + 1, 4 * k, 64 * k))


def test_no_figure_up_to_089_would_decide_otherwise():
    """The greatest failure bound, over numbers of points and eps, is at five points and small eps."""
    least = {
        (n, eps): 1 - features.unlikely(n, eps)
        for n in (*range(2, 40), 100, 1000, 10**4, 10**6)
        for eps in (0.01, 0.02, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99)
    }
    assert min(least.values()) > 0.89 > features.LIKELY[0]
    assert min(least, key=least.get) == (5, 0.01)
