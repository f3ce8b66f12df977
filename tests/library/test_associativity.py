"""The two orders of a product of three matrices: equal over the rationals, within the derived bound in floats."""

from fractions import Fraction

import pytest
import torch
from seeded import generator

from ortho.cost.counting import flops_of
from ortho.theory import associativity


def fractions(*shapes, seed=0):
    g = generator(seed)
    return [associativity.rational(*shape, generator=g) for shape in shapes]


def dense(matrix):
    return torch.tensor([[float(entry) for entry in row] for row in matrix], dtype=torch.float64)


def normal(*shapes, seed=0, dtype=torch.float64):
    g = generator(seed)
    return [torch.randn(shape, generator=g, dtype=torch.float64).to(dtype) for shape in shapes]


# -------------------------------------------------------------------------------------------------------------- exactly


@pytest.mark.parametrize(("N", "K", "M", "V"), [(1, 1, 1, 1), (7, 3, 7, 3), (5, 2, 9, 4), (3, 8, 2, 6)])
def test_the_orders_are_equal_over_the_rationals(N, K, M, V):
    a, b, c = fractions((N, K), (K, M), (M, V))
    one, other = associativity.left_first(a, b, c), associativity.right_first(a, b, c)
    assert one == other
    assert all(isinstance(entry, Fraction) for row in one for entry in row)
    a, b, c, one = map(dense, (a, b, c, one))
    # One order errs by half the bound. Four fractions became floats, u each: at most as much again, as K + M >= 2.
    assert ((a @ (b @ c) - one).abs() <= 1.5 * associativity.rounding_bound(a, b, c)).all()


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 10])
def test_causal_forms_are_equal_over_the_rationals(chunk):
    q, k, v = fractions((7, 3), (7, 3), (7, 2))
    expected = associativity.by_sums(q, k, v)
    assert associativity.by_chunks(q, k, v, chunk) == associativity.by_states(q, k, v) == expected
    weights = associativity.product(q, associativity.transpose(k))
    masked = tuple(tuple(w if j <= t else 0 for j, w in enumerate(row)) for t, row in enumerate(weights))
    assert associativity.product(masked, v) == expected


# ------------------------------------------------------------------------------------------------------------ in floats


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("N", "K", "M", "V"), [(64, 16, 64, 16), (33, 4, 200, 7), (5, 300, 6, 3)])
def test_rounding_is_within_the_bound(dtype, N, K, M, V):
    a, b, c = normal((N, K), (K, M), (M, V), dtype=dtype)
    found = associativity.reorder(a, b, c)
    assert 0 < found.difference <= found.bound
    assert found.changed > 0.5  # not associative bit for bit
    one, other, most = (a @ b) @ c, a @ (b @ c), associativity.rounding_bound(a, b, c)
    assert ((one.double() - other.double()).abs() <= most).all()
    # Each order is within half of the bound of the exact result, for which float64 stands in.
    if dtype == torch.float32:
        exact = a.double() @ b.double() @ c.double()
        assert all(((x.double() - exact).abs() <= most / 2 * (1 + 1e-6)).all() for x in (one, other))


def test_the_bound_is_of_the_order_of_rounding():
    """A product that is off by one part in a thousand is far outside the bound."""
    a, b, c = normal((32, 8), (8, 32), (32, 8))
    wrong = 1.001 * a @ (b @ c)
    assert ((wrong - (a @ b) @ c).abs() > associativity.rounding_bound(a, b, c)).double().mean() > 0.99


# -------------------------------------------------------------------------------------------------------- what it costs


@pytest.mark.parametrize(("N", "K", "M", "V"), [(48, 8, 48, 8), (10, 8, 40, 12), (6, 16, 9, 3)])
def test_flops_are_counted(N, K, M, V):
    a, b, c = (torch.zeros(shape) for shape in ((N, K), (K, M), (M, V)))
    left, right = associativity.flops(N, K, M, V)
    assert flops_of(lambda: (a @ b) @ c) == left
    assert flops_of(lambda: a @ (b @ c)) == right
    assert (right < left) == (Fraction(1, N) + Fraction(1, M) < Fraction(1, K) + Fraction(1, V))
