"""The raw feature maps, and the fits of them to data, are unbiased whatever the data."""

from math import exp, sqrt

import pytest
import torch
from seeded import draw as normal

from ortho.attention.linear import dense_features as dense
from ortho.attention.linear import random_features as rf
from ortho.theory.variance import mean_log_moment, unfitted

F32, F64 = torch.float32, torch.float64
FITS = {name: getattr(dense, name) for name in ("gerf", "saderf", "aderf", "sderf")}


def queries_and_keys(N=30, M=40, K=6, dtype=F64, seed=0, batch=()):
    """Queries and keys with means and correlations, and scores of about 1."""
    mix = torch.eye(K, dtype=F64) + normal(2, K, K, seed=seed) / K
    x, y = normal(*batch, N, K, seed=seed + 1) @ mix[0] + 0.3, normal(*batch, M, K, seed=seed + 2) @ mix[1] - 0.2
    return (x * K**-0.25).to(dtype), (y * K**-0.25).to(dtype)


# ----------------------------------------------------------------------------------------------------------- the maps


def test_maps_by_hand():
    x, omega = torch.tensor([[0.6, 0.8]], dtype=F64), torch.tensor([[1.0, 0.0], [0.0, -2.0], [1.0, 1.0]], dtype=F64)
    u, scale = torch.tensor([0.6, -1.6, 1.4], dtype=F64), sqrt(3)
    torch.testing.assert_close(rf.positive_features(x, omega)[0], (u - 0.5).exp() / scale)
    waves = torch.cat([u.sin(), u.cos()]) * exp(0.5) / scale
    torch.testing.assert_close(rf.rff_features(x, omega)[0], waves)


def test_dense_features_by_hand():
    r"""$D \exp(w^T A w + w^T B x + x^T C x) / \sqrt m$ with the matrices written out."""
    x, omega, a = normal(4, 3), normal(5, 3, seed=1), torch.tensor([-0.5, 0.0, 0.1], dtype=F64)
    B, A, inverse = normal(3, 3, seed=2), torch.diag(a), torch.diag(1 / (1 - 4 * a))
    C, D = -B.mT @ inverse @ B / 2, torch.diag(1 - 4 * a).det() ** 0.25
    expected = [[D * (w @ A @ w + w @ B @ each + each @ C @ each).exp() / sqrt(5) for w in omega] for each in x]
    torch.testing.assert_close(dense.dense_features(x, omega, a, B), torch.tensor(expected, dtype=F64))


# ---------------------------------------------------------------------------------------------------- what fits them


def tensors(parameters):
    return [each for each in parameters if each is not None]


def constraint(parameters):
    r"""$B_q^T (I - 4A)^{-1} B_k$, which should be I."""
    a, B_q, B_k = (each.double() for each in parameters[:3])
    return B_q.mT @ (B_k / (1 - 4 * a)[..., None])


@pytest.mark.parametrize("name", FITS)
@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize("batch", [(), (2, 3)])
def test_fits_are_unbiased(name, dtype, batch):
    """The constraint holds to about K = 6 roundings of matrices with condition numbers of about 10."""
    x, y = queries_and_keys(dtype=dtype, batch=batch)
    fitted = FITS[name](x, y)
    assert fitted.a.shape == (*batch, 6) and fitted.B_q.shape == fitted.B_k.shape == (*batch, 6, 6)
    assert all(each.dtype == dtype for each in tensors(fitted))
    assert bool((fitted.a < 0).all())
    eye = torch.eye(6, dtype=F64).expand(*batch, 6, 6)
    torch.testing.assert_close(constraint(fitted), eye, rtol=0, atol=500 * torch.finfo(dtype).eps)
    if batch:
        for ours, alone in zip(tensors(fitted), tensors(FITS[name](x[1, 2], y[1, 2])), strict=True):
            # about a hundred roundings; axes have no sign
            torch.testing.assert_close(ours[1, 2].abs(), alone.abs(), rtol=1e-3, atol=500 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("name", FITS)
def test_tokens_that_are_left_out(name):
    """The fit is as if they were not there, whatever they hold; with no token left it is still finite and unbiased."""
    x, y = queries_and_keys(batch=(2,))
    keep_x, keep_y = torch.arange(30) < torch.tensor([[30], [20]]), torch.arange(40) >= torch.tensor([[5], [0]])
    found = FITS[name](x, y, keep_x=keep_x, keep_y=keep_y)
    for b, (rows, columns) in enumerate(((slice(0, 30), slice(5, 40)), (slice(0, 20), slice(0, 40)))):
        for ours, alone in zip(tensors(found), tensors(FITS[name](x[b, rows], y[b, columns])), strict=True):
            torch.testing.assert_close(ours[b].abs(), alone.abs(), rtol=1e-9, atol=1e-9)  # axes have no sign
    nothing = FITS[name](x, y, keep_x=keep_x & False, keep_y=keep_y & False)
    assert all(each.isfinite().all() for each in tensors(nothing))
    torch.testing.assert_close(constraint(nothing), torch.eye(6, dtype=F64).expand(2, 6, 6))


POOR = {
    "fewer tokens than dimensions": lambda dtype: queries_and_keys(N=3, M=4, K=8, dtype=dtype),
    "one token": lambda dtype: queries_and_keys(N=1, M=1, K=8, dtype=dtype),
    "zeros": lambda dtype: (torch.zeros(4, 8, dtype=dtype), torch.zeros(5, 8, dtype=dtype)),
    "no queries but zeros": lambda dtype: (torch.zeros(4, 8, dtype=dtype), queries_and_keys(K=8, dtype=dtype)[1]),
    "a coordinate of zeros": lambda dtype: tuple(
        each * torch.tensor([0, *[1] * 7], dtype=dtype) for each in queries_and_keys(K=8, dtype=dtype)
    ),
    "a coordinate next to nothing": lambda dtype: tuple(
        each * torch.tensor([size, *[1] * 7], dtype=dtype)
        for each, size in zip(queries_and_keys(K=8, dtype=dtype), (1e-21, 1), strict=True)
    ),
    "equal tokens": lambda dtype: tuple(each[:1].expand(9, 8) for each in queries_and_keys(K=8, dtype=dtype)),
    "tiny": lambda dtype: tuple(1e-6 * each for each in queries_and_keys(K=8, dtype=dtype)),
    "large": lambda dtype: tuple(30 * each for each in queries_and_keys(K=8, dtype=dtype)),
    "opposites": lambda dtype: (queries_and_keys(K=8, dtype=dtype)[0], -queries_and_keys(K=8, dtype=dtype)[0]),
    "of very different sizes": lambda dtype: tuple(
        each * factor for each, factor in zip(queries_and_keys(K=8, dtype=dtype), (1e3, 1e-3), strict=True)
    ),
}


@pytest.mark.parametrize("name", FITS)
@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize("poor", POOR)
def test_poor_data(name, dtype, poor):
    """Finite parameters that keep the estimate unbiased on these data, and no worse than FAVOR+ on them."""
    x, y = POOR[poor](dtype)
    fitted = FITS[name](x, y)
    assert all(each.isfinite().all() for each in tensors(fitted))
    assert bool((fitted.a <= 0).all())
    # The ridge leaves factors with condition numbers of up to (K / RIDGE)^1/2 = 3e3: that many roundings, relative to
    # the products of the rows' lengths.
    scores = (x.double() @ constraint(fitted)) @ y.double().mT
    lengths = x.double().norm(dim=-1, keepdim=True) * y.double().norm(dim=-1)
    off = (scores - x.double() @ y.double().mT).abs()
    assert bool((off <= 3e3 * torch.finfo(dtype).eps * lengths).all())
    x, y, fitted = x.double(), y.double(), dense.DenseParameters(*(each.double() for each in fitted[:3]))
    plain = mean_log_moment(x, y, unfitted(8))
    assert float(mean_log_moment(x, y, fitted)) <= float(plain) * (1 + 1e-5) + 1e-5  # the ridge, and float32
