"""Orthogonality to rounding, isotropy and the Haar law by tests with a stated error rate, clear errors."""

import pytest
import torch
from refusals import refuses
from scipy import stats
from seeded import generator

from ortho.orthogonal import DRAWS, orthonormalise

ORTHOGONAL = [name for name in DRAWS if name != "gaussian"]
FALSE_ALARM = 1e-4  # chance that a right draw fails one statistical test below; seeds are fixed, so it never flickers


@pytest.mark.parametrize("name", ORTHOGONAL)
@pytest.mark.parametrize("shape", [(1, 1), (7, 7), (64, 64), (33, 5), (5, 33)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_orthonormal(name, shape, dtype):
    w = DRAWS[name](*shape, generator=generator(), dtype=dtype)
    assert w.shape == shape and w.dtype == dtype and w.is_contiguous()
    gram = w.mT @ w if shape[0] >= shape[1] else w @ w.mT
    # An entry of the Gram matrix sums n products of rounded unit vectors: n eps bounds it; 4 covers the factorisation.
    tolerance = 4 * max(shape) * torch.finfo(dtype).eps
    torch.testing.assert_close(gram, torch.eye(min(shape), dtype=dtype), atol=tolerance, rtol=0)


@pytest.mark.parametrize("name", list(DRAWS))
def test_low_precision_and_reproducible(name):
    w = DRAWS[name](16, generator=generator(3), dtype=torch.bfloat16)
    assert w.dtype == torch.bfloat16
    assert torch.equal(w, DRAWS[name](16, generator=generator(3), dtype=torch.bfloat16))
    assert not torch.equal(w, DRAWS[name](16, generator=generator(4), dtype=torch.bfloat16))


def haar_alarms(draw, n: int = 4, draws: int = 2000) -> list[str]:
    """The properties of the Haar law on O(n) that a draw visibly lacks, each by a test at level FALSE_ALARM.

    For W Haar: u^T W u has the law of a coordinate on the sphere, (1 + coordinate)/2 ~ Beta((n-1)/2, (n-1)/2), for
    every fixed unit u; the angle law is invariant, so tr W has mean 0 and variance 1; det W is +1 or -1 evenly.
    """
    g = generator(1)
    w = torch.stack([draw(n, generator=g, dtype=torch.float64) for _ in range(draws)])
    directions = {"e1": torch.eye(n, dtype=torch.float64)[0], "diagonal": torch.ones(n, dtype=torch.float64) / n**0.5}
    law = stats.beta((n - 1) / 2, (n - 1) / 2)
    p_values = {
        f"entry along {name}": stats.kstest(((1 + torch.einsum("i,bij,j->b", u, w, u)) / 2).numpy(), law.cdf).pvalue
        for name, u in directions.items()
    }
    trace = w.diagonal(dim1=1, dim2=2).sum(1).numpy()
    p_values["trace"] = 2 * stats.norm.sf(abs(trace.mean()) * draws**0.5)
    p_values["determinant"] = stats.binomtest(int((torch.linalg.det(w) > 0).sum()), draws).pvalue
    return [name for name, p in p_values.items() if p < FALSE_ALARM]


@pytest.mark.parametrize("name", ORTHOGONAL)
def test_haar_law(name):
    assert haar_alarms(DRAWS[name]) == []


def test_haar_law_catches_wrong_draws():
    """The test above can fail: it detects QR without its sign fix, and the left factor of an SVD alone."""

    def raw_qr(n, *, generator, dtype):
        return torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=dtype)).Q

    def left_factor(n, *, generator, dtype):
        return torch.linalg.svd(torch.randn(n, n, generator=generator, dtype=dtype)).U

    assert haar_alarms(raw_qr)
    assert haar_alarms(left_factor)


@pytest.mark.parametrize("name", list(DRAWS))
def test_isotropic_second_moments(name):
    """E[W_ij W_kl] = delta_ik delta_jl / n for every draw, the Gaussian control included."""
    n, draws = 5, 2000
    g = generator(2)
    w = torch.stack([DRAWS[name](n, generator=g, dtype=torch.float64).flatten() for _ in range(draws)])
    products = w.mT @ w / draws
    error = (products - torch.eye(n * n, dtype=torch.float64) / n).abs().max()
    # 625 averages of `draws` products of variance at most 3/n^2: a union bound over normal tails at FALSE_ALARM.
    bound = stats.norm.isf(FALSE_ALARM / 2 / 625) * (3 / n**2 / draws) ** 0.5
    assert error < bound


def test_orthonormalise_ill_conditioned():
    """Nearly parallel columns: one pass of Gram-Schmidt loses them, two do not."""
    hilbert = 1 / (torch.arange(8.0, dtype=torch.float64)[:, None] + torch.arange(8.0, dtype=torch.float64) + 1)
    q = orthonormalise(hilbert)
    assert torch.linalg.cond(hilbert) > 1e9
    torch.testing.assert_close(q.mT @ q, torch.eye(8, dtype=torch.float64), atol=32 * 2.3e-16, rtol=0)


@pytest.mark.bad_input
def test_errors():
    refuses("column 1 depends", orthonormalise, torch.ones(3, 2))
    refuses("at most as many columns as rows", orthonormalise, torch.ones(2, 3))
