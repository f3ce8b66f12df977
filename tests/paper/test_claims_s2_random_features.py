"""The algorithm as printed does what is said of it, and so do the quantities that it is judged by."""

from math import sqrt

import pytest
import torch
from scipy import stats

from ortho.attention.linear.favor import orthogonal_features
from ortho.attention.linear.random_features import iid_features, positive_features
from ortho.theory.estimates import SIGMAS
from ortho.theory.unbiasedness import omegas, raw_qr_rows, root_norm_rows, unit_norm_rows
from paper.claims.evidence import random_features as evidence
from paper.claims.evidence.methods import misplaced


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def test_every_line_of_the_proof_is_looked_at():
    assert list(evidence.proof_lines().values()) == [True] * 5


def test_the_expectation_is_computed(monkeypatch):
    """A kernel that is off by one part in a million is not taken for the right one."""
    assert evidence.quadrature_error() < 1e-12
    hermegauss = evidence.np.polynomial.hermite_e.hermegauss

    def wider(count):
        nodes, weights = hermegauss(count)
        return nodes * (1 + 1e-6), weights

    monkeypatch.setattr(evidence.np.polynomial.hermite_e, "hermegauss", wider)
    assert evidence.quadrature_error() > 1e-8


@pytest.mark.parametrize(
    ("draw", "right"),
    [(iid_features, True), (orthogonal_features, True), (unit_norm_rows, False), (root_norm_rows, False),
     (raw_qr_rows, False)],
)  # fmt: skip
def test_wrong_rows_would_not_pass(draw, right):
    """At the tolerance of the evidence; the error rate is that of SIGMAS."""
    found = evidence.estimated(draw)
    assert (abs(found.value - 1) <= SIGMAS * found.standard_error) is right


def test_scaled_scores():
    x, y, weights = evidence.scaled(0.5)
    assert float((x @ y.mT).std()) == pytest.approx(0.5, rel=0.05)
    torch.testing.assert_close(weights, (x @ y.mT).softmax(-1))


def test_the_algorithm_tends_to_softmax_with_the_right_rows():
    """A fourth of the error with sixteen times the features, or less; the missing root of m cancels."""
    x, y, exact = evidence.scaled(0.25, 32, 16)
    values = torch.eye(32, dtype=torch.float64)

    def off(m):
        omega = orthogonal_features(m, 16, generator=generator(1), dtype=torch.float64)
        weights = evidence.printed_algorithm(x, y, values, omega)
        ours = positive_features(x, omega) @ positive_features(y, omega).mT
        torch.testing.assert_close(weights, ours / ours.sum(-1, keepdim=True), rtol=1e-12, atol=0)
        return misplaced(weights, exact)

    assert off(16 * 1024) < 1 < 0.35 * off(1024)


def test_the_algorithm_tends_to_its_limit_with_orthonormal_rows():
    x, y, _ = evidence.scaled(1)
    values = torch.eye(len(y), dtype=torch.float64)
    omega = unit_norm_rows(64 * evidence.WIDTH, evidence.WIDTH, generator=generator(1), dtype=torch.float64)
    limit = evidence.printed_limit(x, y)
    assert misplaced(evidence.printed_algorithm(x, y, values, omega), limit) < 0.5  # of 100 per cent
    # Nothing but the keys' lengths is left, up to the seven parts in a thousand that depend on the query.
    by_length = (-y.square().sum(-1) / 2).softmax(-1).expand_as(limit)
    assert misplaced(limit, by_length) < 1 and evidence.query_share(limit) < 1


def test_query_share():
    two_alike = torch.tensor([[1, 0], [1, 0], [0, 1]]).double()  # a third, a third, two thirds off their mean
    assert evidence.query_share(two_alike) == pytest.approx(100 * 4 / 9)
    assert evidence.query_share(torch.full((4, 4), 0.25).double()) == 0


def test_where_the_algorithm_leaves_the_range():
    """Products of features are about e^(2 r - r^2) at length r; float32 ends at e^-103, which is passed at r = 11.2.

    Single features, e^(r - r^2/2), would last until r = 15.4: it is the product that is lost.
    """
    assert evidence.finite_rows(9.5) == 100
    assert evidence.finite_rows(sqrt(128)) == evidence.finite_rows(14) == 0


def test_spread_of_the_weights():
    """Against the spread of one weight at a time."""
    x, y, _ = evidence.scaled(0.125, 32, 16)
    assert float((x[:, None] + y).square().sum(-1).mean()) == pytest.approx(1, rel=0.1)
    omega = omegas(iid_features, 16, 16, 50, generator=generator(1))
    values = torch.eye(32, dtype=torch.float64)
    weights = torch.stack([evidence.printed_algorithm(x, y, values, rows) for rows in omega])
    by_hand = sqrt(float((weights - weights.mean(0)).square().sum() / 49 / 32**2))
    assert evidence.weights_spread(omega, 1) == pytest.approx(by_hand, rel=1e-10)


def test_steadied_intervals():
    """The control's hold 0, in which they fail once in a hundred times; the gain at small norms is above them."""
    for square in (1, 16):
        (low, high), (least, most) = evidence.steadied(square)
        assert least < 0 < most and low < high
        assert (low > most) is (square == 1)
    assert 2 * stats.t(evidence.REPETITIONS - 1).sf(evidence.T) == pytest.approx(0.01, rel=0.02)
