"""FAVOR+: features of the right law, an unbiased kernel, an error like 1/sqrt(m), and stabilisers that cancel."""

import math

import pytest
import torch
from scipy import special, stats

from ortho.attention import favor
from ortho.attention.favor import favor_attention, favor_attention_reference
from ortho.attention.feature_draws import orthogonal_features
from ortho.attention.random_features import positive_features
from ortho.attention.softmax import softmax_attention_reference
from ortho.cost.counting import count_forward
from ortho.orthogonal import haar

FORMS = [favor_attention_reference, favor_attention]
# A two-sided normal deviate is larger with probability 1e-5: the error rate of each statistical test below.
SIGMAS = 4.42


def draw(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def generator(seed):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize(("m", "K"), [(4, 4), (3, 4), (10, 4), (5, 1), (256, 64)])
def test_blocks_are_orthogonal(m, K):
    omega = orthogonal_features(m, K, generator=generator(0), dtype=torch.float64)
    assert omega.shape == (m, K)
    for block in omega.split(K):
        direction = block / block.norm(dim=-1, keepdim=True)
        torch.testing.assert_close(direction @ direction.mT, torch.eye(len(block)).double(), atol=1e-13, rtol=0)
    assert torch.equal(omega, orthogonal_features(m, K, generator=generator(0), dtype=torch.float64))
    assert not torch.equal(omega, orthogonal_features(m, K, generator=generator(1), dtype=torch.float64))


def test_lengths_are_independent_and_chi():
    """Squared lengths against chi^2(K) (Kolmogorov-Smirnov, error rate 1e-5); neighbours in a block uncorrelated."""
    K, blocks = 6, 1000
    omega = orthogonal_features(blocks * K, K, generator=generator(0), dtype=torch.float64)
    squares = omega.square().sum(-1)
    assert stats.kstest(squares.numpy(), stats.chi2(K).cdf).pvalue > 1e-5
    pairs = squares.reshape(blocks, K)[:, :2]
    assert abs(torch.corrcoef(pairs.mT)[0, 1]) < SIGMAS / math.sqrt(blocks)


def unit_norm(m, K, g):
    return haar(K, generator=g, dtype=torch.float64)[:m]


def root_norm(m, K, g):
    return math.sqrt(K) * haar(K, generator=g, dtype=torch.float64)[:m]


def raw_signs(m, K, g):
    q, _ = torch.linalg.qr(torch.randn(K, K, generator=g, dtype=torch.float64))
    return q.mT[:m] * torch.randn(m, K, generator=g, dtype=torch.float64).norm(dim=-1, keepdim=True)


def deviation(features, x, y, m=16, draws=6000):
    """The mean over draws of the estimate of exp(x.y), relative to it, and its distance from 1 in standard errors."""
    g = generator(0)
    omega = torch.stack([features(m, len(x), g) for _ in range(draws)])
    phi_x, phi_y = (positive_features(a[None], omega) for a in (x, y))
    estimates = (phi_x * phi_y).sum(-1) / torch.exp(x @ y)
    return float(estimates.mean()), float((estimates.mean() - 1) / estimates.std() * math.sqrt(draws))


def correct(m, K, g):
    return orthogonal_features(m, K, generator=g, dtype=torch.float64)


@pytest.mark.parametrize("x_part", [0.5, 1.5, -0.5])
def test_kernel_is_unbiased(x_part):
    """Along the diagonal, where a QR with raw signs is not Haar; x + y the same, shared out differently."""
    z = torch.full((16,), 1.5 / 4, dtype=torch.float64)  # |x + y|^2 = 2.25
    assert abs(deviation(correct, x_part * z, (1 - x_part) * z)[1]) < SIGMAS


@pytest.mark.parametrize("wrong", [unit_norm, root_norm, raw_signs])
def test_wrong_features_are_caught(wrong):
    """The same test rejects them. Fixed lengths r have the mean 0F1(; K/2; r^2 |z|^2 / 4) e^-|z|^2/2."""
    z = torch.full((16,), 1.5 / 4, dtype=torch.float64)
    mean, sigmas = deviation(wrong, z / 2, z / 2)
    assert abs(sigmas) > 2 * SIGMAS
    if wrong is not raw_signs:
        square = 1 if wrong is unit_norm else 16
        bias = special.hyp0f1(8, square * 2.25 / 4) * math.exp(-2.25 / 2)
        assert abs(mean - bias) < SIGMAS * abs((mean - 1) / sigmas)  # (mean - 1) / sigmas is the standard error


def test_weights_are_the_kernel_estimates():
    """The stabilisers cancel: the output is that of the plain features' products, row by row."""
    q, k, v = draw(5, 4), draw(7, 4, seed=1), draw(7, 3, seed=2)
    omega = orthogonal_features(20, 4, generator=generator(3), dtype=torch.float64)
    for scale in (None, 0.2):
        root = math.sqrt(4**-0.5 if scale is None else scale)
        weights = positive_features(q * root, omega) @ positive_features(k * root, omega).mT
        for attention in FORMS:
            o = attention(q, k, v, features=omega, scale=scale)
            torch.testing.assert_close(o, weights @ v / weights.sum(-1, keepdim=True), atol=1e-13, rtol=1e-13)


def relative_error(o, exact):
    return float((o - exact).norm() / exact.norm())


@pytest.mark.parametrize("causal", [False, True])
def test_error_falls_with_features(causal):
    """As m^-1/2, for norms small enough that m = 32 is already in that regime.

    Over a factor 64 in m, with 8 draws each, the fitted exponent has standard deviation 0.02 (from 12 repetitions).
    """
    q, k, v = (draw(4, 64, 16, seed=s) / 4 for s in range(3))
    exact = softmax_attention_reference(q, k, v, is_causal=causal)
    sizes, errors = (32, 128, 512, 2048), []
    for m in sizes:
        draws = [orthogonal_features(m, 16, generator=generator(s), dtype=torch.float64) for s in range(8)]
        outputs = [favor_attention(q, k, v, is_causal=causal, features=omega) for omega in draws]
        errors.append(sum(relative_error(o, exact) for o in outputs) / len(draws))
    slope = stats.linregress([math.log(m) for m in sizes], [math.log(e) for e in errors]).slope
    assert abs(slope + 0.5) < SIGMAS * 0.02


@pytest.mark.parametrize(("width", "better"), [(4, True), (16, False), (64, False)])
def test_error_beside_plain_averaging(width, better):
    """Scores of variance 1, the default features: of use for narrow heads, worse than the mean value for wide ones."""
    q, k, v = (draw(4, 128, width, seed=s) for s in range(3))
    exact = softmax_attention_reference(q, k, v)
    ours, averaging = (relative_error(o, exact) for o in (favor_attention(q, k, v), v.mean(-2, keepdim=True)))
    assert (ours < averaging) is better


@pytest.mark.parametrize("attention", FORMS)
@pytest.mark.parametrize("causal", [False, True])
def test_large_norms(attention, causal):
    """Finite where exp(|x|^2/2) is far out of range; an error beyond, not NaN and not a result of nothing."""
    q, k, v = (draw(2, 20, 16, seed=s, dtype=torch.float32) for s in range(3))
    leaves = [(7 * q).requires_grad_(), (20 * k).requires_grad_(), v.requires_grad_()]
    o = attention(*leaves, is_causal=causal)  # |y|^2 / 2 is 800
    assert all(x.isfinite().all() for x in (o, *torch.autograd.grad(o.sum(), leaves)))
    with pytest.raises(ValueError, match="q, k: expected row sums of the torch.float32 weights within .* got 0 to"):
        attention(1e3 * q, 1e3 * k, v, is_causal=causal)
    with pytest.raises(ValueError, match="q, k: expected row sums of the torch.float32 weights within .* got nan"):
        attention(1e20 * q, 1e20 * k, v, is_causal=causal)


def test_default_features():
    """The same in every call, whatever mode the first one was made in."""
    q, k, v = (draw(2, 5, 4, seed=s).requires_grad_() for s in range(3))
    favor._drawn.clear()
    with torch.inference_mode():
        first = favor_attention(q.detach(), k.detach(), v.detach())
    o = favor_attention(q, k, v)
    o.sum().backward()  # an inference tensor could not be saved for it
    assert torch.equal(o, first)
    favor._drawn.clear()
    cold = count_forward(favor_attention, q, k, v)
    assert cold == count_forward(favor_attention, q, k, v)
    omega = orthogonal_features(256, 4, generator=generator(favor.SEED), dtype=torch.float64)
    assert torch.equal(favor_attention(q, k, v, features=omega), o)


@pytest.mark.bad_input
@pytest.mark.parametrize("attention", FORMS)
def test_errors(attention):
    q, k, v = (draw(2, 5, 4, seed=s) for s in range(3))
    with pytest.raises(ValueError, match=r"features: expected shape \(m, 4\), as wide as q, got \(8, 5\)"):
        attention(q, k, v, features=draw(8, 5))
    with pytest.raises(TypeError, match="features: expected a floating-point tensor, got list"):
        attention(q, k, v, features=[1.0])
    with pytest.raises(ValueError, match="m: expected an integer of at least 1, got 0"):
        orthogonal_features(0, 4)
    with pytest.raises(TypeError, match="K: expected an integer of at least 1, got float 2.0"):
        orthogonal_features(4, 2.0)
