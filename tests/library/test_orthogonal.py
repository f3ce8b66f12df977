"""Orthogonality to rounding and the Haar law by tests with a stated error rate; structured projections."""

from itertools import product

import pytest
import torch
from gradients import trained
from sample import some
from scipy import stats
from seeded import generator

from ortho import MultiheadAttention, to_standard
from ortho.orthogonal import DRAWS
from ortho.projections import StructuredProjection

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


def test_gram_schmidt_of_nearly_parallel_columns(monkeypatch):
    """One pass loses them, two do not."""
    hilbert = 1 / (torch.arange(8.0, dtype=torch.float64)[:, None] + torch.arange(8.0, dtype=torch.float64) + 1)
    monkeypatch.setattr("ortho.orthogonal._normal", lambda *_: hilbert)
    q = DRAWS["gram_schmidt"](8, dtype=torch.float64)
    assert torch.linalg.cond(hilbert) > 1e9
    torch.testing.assert_close(q.mT @ q, torch.eye(8, dtype=torch.float64), atol=32 * 2.3e-16, rtol=0)


# ----------------------------------------------------------------------------------------------- structured projections

WIDTHS = [1, 2, 3, 7, 8, 12, 30, 64, 96, 97, 100]
SIGMAS = 4.42  # two-sided, an error rate of 1e-5


def draw(d=12, heads=1, seed=0, **kwargs):
    generator = torch.Generator().manual_seed(seed)
    return StructuredProjection(d, heads, generator=generator, dtype=torch.float64, **kwargs)


@pytest.mark.parametrize("rounds", [1, 2, 3])
@pytest.mark.parametrize("d", WIDTHS)
def test_orthogonal(d, rounds):
    """Exactly, to rounding: products of orthogonal matrices whose entries are sums of at most 100 terms."""
    one = draw(d, rounds=rounds)
    for w in (one.weight_q, one.weight_k):
        torch.testing.assert_close(w @ w.T, torch.eye(d, dtype=torch.float64), atol=1e-13, rtol=0)
    if d > 3:
        assert not torch.equal(one.weight_q, one.weight_k)


def by_matrices(projection):
    sizes = {"num_kv_heads": projection.num_kv_heads, "dtype": torch.float64}
    layer = MultiheadAttention(projection.d_model, projection.num_heads, projection=projection, **sizes)
    return to_standard(layer).projection


@pytest.mark.parametrize("shared", [4, 2, 1])
def test_it_is_the_matrices_that_it_stands_for(shared):
    one = draw(24, 4, num_kv_heads=shared)
    x, context = (torch.randn(2, n, 24, dtype=torch.float64) for n in (5, 9))
    for given in ((x,), (x, context)):
        torch.testing.assert_close(one(*given), by_matrices(one)(*given), atol=1e-13, rtol=0)


def test_signs_are_all_that_is_stored():
    one, other = draw(24, 4, seed=1), draw(24, 4, seed=2)
    assert set(one.state_dict()) == {"signs_q", "signs_k"} and not trained(one)
    assert sum(x.numel() for x in one.state_dict().values()) == 2 * 2 * 24
    x = torch.randn(1, 3, 24, dtype=torch.float64)
    other.load_state_dict(one.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(one(x), other(x), strict=True))
    assert torch.equal(draw(24, 4, seed=1).signs_q, one.signs_q)
    y, _ = one(x)
    assert torch.equal(one.bfloat16().double()(x)[0], y)  # signs are exact in any dtype, and so all is made again


@pytest.mark.parametrize("assign", [False, True])
def test_loading_into_a_module_without_numbers(assign):
    """The transforms are not stored, and are made when the signs are loaded."""
    one = StructuredProjection(24, 4, dtype=torch.float64)
    other = StructuredProjection(24, 4, dtype=torch.float64, device="meta")
    if not assign:
        other.to_empty(device="cpu")
        other.transform_a.fill_(torch.nan)
    other.load_state_dict(one.state_dict(), assign=assign)
    x = torch.randn(2, 5, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert all(map(torch.equal, one(x), other(x)))


SPREAD = product([(64, 4), (48, 4), (30, 5), (64, 1), (128, 2)], ["one", "two", "apart", "all"])


@pytest.mark.parametrize(("sizes", "where"), some(SPREAD, 3))  # each size and each place
def test_products_spread_as_those_of_random_matrices(sizes, where):
    """Of a head's q and k, for an x that lies on one coordinate, on two, near or far, or on all: the mean is 0 and the
    mean square K / d^2 |x|^4, within sampling error of 1000 draws. Without the flip between the transforms it would be
    K times as much on one coordinate; and with a single round, where a head spans rows of the table, several times."""
    d, heads = sizes
    x = torch.zeros(d, dtype=torch.float64)
    x[{"one": [0], "two": [0, 1], "apart": [0, d - 1], "all": list(range(d))}[where]] = 1
    x /= x.norm()
    found = []
    for seed in range(1000):
        q, k = (t[0, :, 0] for t in draw(d, heads, seed=seed)(x[None, None]))  # (heads, K)
        found.append((q * k).sum(-1)[1 % heads])
    scores = torch.stack(found) * d / (d // heads) ** 0.5
    assert abs(float(scores.mean())) < SIGMAS * float(scores.std()) / 1000**0.5
    squares = scores.square()
    bias = 0.6 if d == 30 else 0.01  # Hartley's entries are not of one size
    assert abs(float(squares.mean()) - 1) < SIGMAS * float(squares.std()) / 1000**0.5 + bias
