"""Structured projections: orthogonal for any width, their law, what they stand for, what they cost, errors."""

from itertools import product

import pytest
import torch
from extent import some
from gradients import trained

from ortho import MultiheadAttention, to_standard
from ortho.cost import of
from ortho.cost.layers import projection_cost
from ortho.projections import StructuredProjection
from ortho.projections.structured import factors

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


@pytest.mark.parametrize(
    ("d", "heads", "shared"), [(1, 1, 1), (7, 1, 1), (12, 1, 1), (64, 4, 4), (64, 4, 2), (30, 5, 5)]
)
def test_counted(d, heads, shared):
    """Declared = counted, with and without a gradient into x; of x nothing is kept."""

    class Both(torch.nn.Module):
        def __init__(self, stop):
            super().__init__()
            self.projection = draw(d, heads, stop_gradient=stop, num_kv_heads=shared).float()

        def forward(self, x):
            q, k = self.projection(x)
            return torch.cat([q, k], 1) if not self.projection.stop_gradient else torch.cat([q, k], 1) + 0 * x.sum()

    x = torch.randn(2, 5, d, requires_grad=True)
    counts = of(Both(False), x)
    declared = projection_cost("structured", 2, 5, d, heads, d // heads, shared)
    assert (counts.forward, counts.backward) == (declared.forward, declared.backward)
    assert counts.frozen == declared.frozen
    stopped = projection_cost("structured-stopped", 2, 5, d, heads, d // heads, shared)
    assert of(Both(True), x).backward == stopped.backward == 0
    assert stopped.forward == declared.forward


def test_fewer_products_than_a_matrix():
    dense = 2 * 2 * 768**2
    cost = projection_cost("structured", 1, 1, 768, 12, 64, 12)
    assert cost.forward == 2 * 2 * 768 * (12 + 64) < dense / 10
    assert factors(768, 64) == (12, 64)
    assert factors(768) == factors(768, 384) == (24, 32)  # two heads: their own table would cost seven times as much
