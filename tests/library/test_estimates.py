"""An estimate is the mean and its standard error, and its deviation is normal at the rate that SIGMAS states."""

from math import inf

import pytest
import torch
from scipy import stats

from ortho.theory.estimates import SIGMAS, Estimate, estimate


def test_by_hand():
    """1, 2, 3, 6: mean 3, squared deviations 4 + 1 + 0 + 9 = 14, so that the error is sqrt(14 / 3 / 4)."""
    found = estimate(torch.tensor([1.0, 2.0, 3.0, 6.0]).double())
    assert found == pytest.approx((3.0, (14 / 12) ** 0.5))
    assert found.deviation(3.0) == 0
    assert found.deviation(0.0) == pytest.approx(3 / (14 / 12) ** 0.5)


def test_error_rate():
    assert 2 * stats.norm.sf(SIGMAS) == pytest.approx(1e-5, rel=0.02)
    samples = torch.randn(300, 400, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    deviations = [estimate(row).deviation(0.0) for row in samples]
    assert stats.kstest(deviations, "norm").pvalue > 1e-5  # the chance that a right law fails


def test_no_spread():
    assert Estimate(2.0, 0.0).deviation(2.0) == 0
    assert Estimate(2.0, 0.0).deviation(3.0) == -inf


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("samples", "message"),
    [
        (torch.ones(1), r"count of at least 2, got \(1,\)"),
        (torch.ones(2, 2), r"shape \(count,\).*got \(2, 2\)"),
        (torch.tensor([1.0, torch.nan]), "got 1 NaN or infinite of 2"),
    ],
)
def test_errors(samples, message):
    with pytest.raises(ValueError, match=f"samples: .*{message}"):
        estimate(samples)


@pytest.mark.bad_input
def test_not_floats():
    with pytest.raises(TypeError, match="samples: expected a floating-point tensor, got .*int64"):
        estimate(torch.ones(3).long())
