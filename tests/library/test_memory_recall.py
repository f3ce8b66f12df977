"""Recall from linear memories: closed forms against draws, by hand, and in their limits."""

import pytest
import torch

from ortho.theory.estimates import SIGMAS, estimate
from ortho.theory.memory_recall import answers, capacity, expected_answer, mean_error, sampled_errors
from ortho.theory.stability import unit_keys


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def expected_error(*args, **gates):
    return expected_answer(*args, **gates).error


@pytest.mark.parametrize("memory", ["linear", "delta"])
@pytest.mark.parametrize(
    ("K", "pairs", "beta", "decay"),
    [(1, 3, 1.0, 1.0), (2, 5, 1.0, 1.0), (4, 12, 1.0, 1.0), (4, 12, 0.6, 1.0), (4, 6, 2.0, 1.0), (6, 14, 1.5, 0.9)],
)
def test_drawn_errors_have_the_expected_mean(memory, K, pairs, beta, decay):
    """100 means in all, each beyond SIGMAS with probability 1e-5: 1 false alarm in 1,000 seeds."""
    gates = {"beta": beta, "decay": decay}
    found = sampled_errors(memory, K, pairs, draws=4000, generator=generator(), **gates)
    for age, error in enumerate(found):
        expected = expected_error(memory, K, pairs, age, **gates)
        if age == 0 and beta == 1 and memory == "delta":
            assert expected == 0
            assert error.value < 1e-28  # the square of rounding
        else:
            assert abs(error.deviation(expected)) < SIGMAS
            assert error.standard_error < 0.1 * (1 + expected)


@pytest.mark.parametrize("memory", ["linear", "delta"])
def test_the_product_with_the_own_value_has_the_expected_mean(memory):
    """8 means: 1 false alarm in 12,500 seeds."""
    gates = {"beta": 0.8, "decay": 0.95}
    k = unit_keys(4000, 8, 4, generator=generator())
    v = torch.randn(4000, 8, 16, generator=generator(1), dtype=torch.float64)
    products = (answers(memory, k, v, **gates) * v).mean(-1)
    for age, column in enumerate(products.flip(-1).mT):
        assert abs(estimate(column).deviation(expected_answer(memory, 4, 8, age, **gates).own)) < SIGMAS


@pytest.mark.parametrize("memory", ["linear", "delta"])
def test_the_best_multiple_of_the_answers(memory):
    """No other has a smaller error, and the linear memory's is that of a Wiener filter."""
    K, pairs = 8, 12
    found = [expected_answer(memory, K, pairs, age) for age in range(5)]
    own, square = (sum(values) / 5 for values in zip(*found, strict=True))
    least = mean_error(memory, K, pairs, last=5, scaled=True)
    errors = [1 - 2 * c * own + c**2 * square for c in torch.linspace(0, 2, 1001).tolist()]
    assert least <= min(errors) < least + 1e-5
    assert mean_error(memory, K, pairs, last=5) == pytest.approx(1 - 2 * own + square)
    assert mean_error("linear", K, pairs, scaled=True) == pytest.approx((pairs - 1) / (K + pairs - 1))


def test_by_hand():
    """One dimension, keys of +1 or -1: the delta rule knows the last value, and takes it, or its negative, for all."""
    assert expected_error("delta", 1, 3, 0) == 0
    for age in (1, 2):
        assert expected_error("delta", 1, 3, age) == pytest.approx(2)
        assert expected_error("linear", 1, 3, age) == 2
    # Two pairs in two dimensions, the first asked for: (1 - w_1)^2 + w_2^2 with w_1 = sin^2 and w_2 = cos of the angle.
    assert expected_error("delta", 2, 2, 1) == pytest.approx(3 / 8 + 1 / 2)


@pytest.mark.parametrize("K", [4, 16, 64])
def test_the_printed_forms(K):
    rho, sigma = 1 - 1 / K, 1 - 2 * (K + 1) / (K * (K + 2))
    for pairs in (1, 2, K, 4 * K):
        for age in {0, pairs // 2, pairs - 1}:
            assert expected_error("linear", K, pairs, age) == pytest.approx((pairs - 1) / K)
            printed = 2 * (1 - rho**age) - rho**pairs * (1 - (sigma / rho) ** age)
            assert expected_error("delta", K, pairs, age) == pytest.approx(printed, abs=1e-12)


def test_a_decay_bounds_the_error_of_the_oldest():
    """1 for what is lost, and what the last pairs leave: their weights' squares sum to 1 / K / (1 - decay^2 rho)."""
    K, decay = 16, 0.9
    rest = 1 / K / (1 - decay**2 * (1 - 1 / K))
    assert expected_error("delta", K, 2000, 1500, decay=decay) == pytest.approx(1 + rest)
    assert expected_error("delta", K, 2000, 1500) == pytest.approx(2)


def test_orthonormal_keys_are_recalled_by_both():
    """But for rounding: K = 16 terms."""
    k = torch.linalg.qr(torch.randn(16, 16, generator=generator(), dtype=torch.float64))[0]
    v = torch.randn(16, 3, generator=generator(1), dtype=torch.float64)
    for memory in ("linear", "delta"):
        assert (answers(memory, k, v) - v).abs().max() < 1e-13
    twice, later = torch.cat([k, k]), torch.cat([v, 2 * v])
    assert (answers("linear", twice, later)[:16] - 3 * v).abs().max() < 1e-13
    assert (answers("delta", twice, later)[:16] - 2 * v).abs().max() < 1e-13


def test_decays_weigh_the_last_pair_with_beta_alone():
    k, v = unit_keys(1, 4, generator=generator()), torch.ones(1, 2, dtype=torch.float64)
    for memory in ("linear", "delta"):
        torch.testing.assert_close(answers(memory, k, v, beta=0.5, decay=0.1), 0.5 * v)


@pytest.mark.parametrize("memory", ["linear", "delta"])
def test_capacity_is_the_last_number_below_the_error(memory):
    for K, error in ((8, 0.1), (16, 0.5)):
        pairs = capacity(memory, K, error)
        assert mean_error(memory, K, pairs) <= error < mean_error(memory, K, pairs + 1)
    assert capacity("linear", 64, 0.5) == 33
    assert capacity("linear", 64, 0.1, beta=0.5) == 0  # even one pair is answered with half of its value


@pytest.mark.bad_input
def test_errors():
    with pytest.raises(ValueError, match="memory: expected one of 'linear', 'delta', got 'softmax'"):
        expected_error("softmax", 4, 4, 0)
    with pytest.raises(ValueError, match="age: expected 0 to 3 with 4 pairs, got 4"):
        expected_error("delta", 4, 4, 4)
    with pytest.raises(ValueError, match="last: expected at most the 4 pairs, got 5"):
        mean_error("delta", 4, 4, last=5)
    with pytest.raises(ValueError, match="pairs: expected an integer of at least 1, got 0"):
        mean_error("delta", 4, 0)
    for name, value in (("beta", 2.1), ("decay", 0.0)):
        with pytest.raises(ValueError, match=f"{name}: expected a number in"):
            sampled_errors("delta", 4, 4, draws=2, **{name: value})
    with pytest.raises(ValueError, match="error: expected a number between 0 and 1, got 1"):
        capacity("linear", 4, 1)
