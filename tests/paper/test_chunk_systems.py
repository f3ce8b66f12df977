"""The system of a chunk: its inverse, its condition, what narrow formats cost."""

import pytest
import torch
from seeded import filled, generator

from paper.theory import chunk_systems

EPS = torch.finfo(torch.float64).eps


def norm(P):
    return float(torch.linalg.matrix_norm(P, 2))


@pytest.mark.parametrize("kind", chunk_systems.KEYS)
@pytest.mark.parametrize("beta", [0.5, 1.0, 1.5, 2.0])
def test_inverse_and_condition(kind, beta):
    """The inverse's formula, its bound, and the condition number's; errors of both inverses grow with the latter."""
    C = 64
    k, b = chunk_systems.chunk_keys(kind, C, 32, generator=generator()), filled(C, beta)
    inverse = torch.linalg.inv(chunk_systems.chunk_system(k, b))
    number = chunk_systems.condition(k, b)
    torch.testing.assert_close(inverse, chunk_systems.inverse_by_products(k, b), rtol=0, atol=C * EPS * number)
    assert inverse.tril(-1).abs().max() <= beta * (1 + C * EPS * number)
    assert number <= chunk_systems.condition_bound(C, beta)


def test_identical_keys_by_hand():
    """The inverse is -b (1 - b)^(i - j - 1) below the diagonal; at b = 2 the bound is met up to a factor of 1.3."""
    k, b = chunk_systems.chunk_keys("identical", 6, 4, generator=generator()), filled(6, 1.5)
    inverse = torch.linalg.inv(chunk_systems.chunk_system(k, b))
    i, j = torch.tril_indices(6, 6, -1)
    torch.testing.assert_close(inverse[i, j], -1.5 * (-0.5) ** (i - j - 1).double())
    k, b = chunk_systems.chunk_keys("identical", 64, 4, generator=generator()), filled(64, 2.0)
    assert chunk_systems.condition(k, b) > chunk_systems.condition_bound(64, 2) / 1.3


def test_keys_are_what_their_name_says():
    for kind, least, most in (("random", -1, 0.9), ("near-parallel", 0.95, 1), ("identical", 1, 1)):
        k = chunk_systems.chunk_keys(kind, 10, 16, generator=generator())
        cosines = (k @ k.T)[~torch.eye(10, dtype=torch.bool)]
        assert cosines.min() >= least - 10 * EPS and cosines.max() <= most + 10 * EPS
        assert cosines.std() > 0 or kind == "identical"


def test_a_narrow_inverse_costs_digits():
    """bfloat16 keeps 8 bits: errors are above 2^-10. float32's errors are below its eps times the condition number."""
    k, b = chunk_systems.chunk_keys("near-parallel", 64, 32, generator=generator()), filled(64, 1.0)
    eps = torch.finfo(torch.float32).eps
    assert chunk_systems.solve_error(k, b, torch.float32) < eps * chunk_systems.condition(k, b)
    assert chunk_systems.solve_error(k, b, torch.bfloat16) > 2**-10


def test_a_strength_without_a_bound():
    with pytest.raises(ValueError, match=r"beta: expected a number in \[0, 2\], got 3"):
        chunk_systems.condition_bound(4, 3)
