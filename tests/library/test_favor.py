"""Random-feature attention: maps are the plain formulas except for factors that cancel; fits are unbiased
whatever the data; the draws of rows follow their laws; rows of `RandomFeatureAttention` are redrawn only on request."""

import math
from functools import partial
from math import exp, sqrt

import pytest
import torch
from gradients import trained
from refusals import refuses
from scipy import stats
from seeded import draw, generator
from seeded import draw as normal

from ortho.attention.linear import dense_features as dense
from ortho.attention.linear import favor
from ortho.attention.linear import random_features as rf
from ortho.attention.linear.dense_features import FITS, DenseExponentialFeatures
from ortho.attention.linear.favor import (
    FEATURES,
    PositiveFeatures,
    RandomFourierFeatures,
    default_rows,
    orthogonal_features,
)
from ortho.attention.linear.linear_attention import kernel_weights, linear_attention, linear_attention_reference
from ortho.attention.linear.random_feature_attention import RandomFeatureAttention
from ortho.attention.linear.random_features import FEATURE_DRAWS, structured_features
from ortho.cost.counting import flops_of
from ortho.theory.estimates import SIGMAS, estimate
from ortho.theory.unbiasedness import WRONG_DRAWS
from ortho.theory.variance import mean_log_moment, unfitted

FORMS = [linear_attention_reference, linear_attention]


def rows(m, K, seed=0, kind="orthogonal"):
    return FEATURE_DRAWS[kind](m, K, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


MAPS = {"rff": RandomFourierFeatures, "positive": PositiveFeatures} | {
    fit: partial(DenseExponentialFeatures, fit) for fit in FITS
}


def plain_weights(name, x, y, omega, keep_x=None, keep_y=None):
    """phi(x_i) . phi(y_j) by the plain formulas."""
    if name in FITS:
        a, B_q, B_k, axes = getattr(dense, name)(x, y, keep_x=keep_x, keep_y=keep_y)
        omega = omega if axes is None else omega @ axes
        return dense.dense_features(x, omega, a, B_q) @ dense.dense_features(y, omega, a, B_k).mT
    phi = getattr(rf, f"{name}_features")
    return phi(x, omega) @ phi(y, omega).mT


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize(("scale", "kind"), [(None, "orthogonal"), (0.2, "iid"), (0.0, "structured")])
def test_weights_are_the_plain_formulas(name, scale, kind):
    """Normalised rows are equal, as what the maps divide by cancels. Exponents of about 10 magnify 10 eps to 100 eps,
    2e-14; the bounds leave a factor of 4 or more.

    With operands in float32, outputs have that dtype, although omega is in float64.
    """
    q, k, v = draw(2, 5, 4), draw(2, 7, 4, seed=1), draw(2, 7, 3, seed=2)
    omega = rows(20, 4, seed=3, kind=kind)
    root = math.sqrt(4**-0.5 if scale is None else scale)
    weights = plain_weights(name, q * root, k * root, omega)
    weights = weights / weights.sum(-1, keepdim=True)
    found = kernel_weights(MAPS[name](features=omega), q, k, scale=scale)
    torch.testing.assert_close(found / found.sum(-1, keepdim=True), weights, atol=1e-13, rtol=1e-12)
    for attention in FORMS:
        o = attention(q, k, v, feature_map=MAPS[name](features=omega), scale=scale)
        torch.testing.assert_close(o, weights @ v, atol=1e-13, rtol=1e-12)
        single = attention(q.float(), k.float(), v.float(), feature_map=MAPS[name](features=omega), scale=scale)
        assert single.dtype == torch.float32
        torch.testing.assert_close(single.double(), o, atol=1e-4, rtol=1e-4)  # about 1000 eps of float32


@pytest.mark.parametrize("name", FITS)
@pytest.mark.parametrize("attention", FORMS)
def test_fits_leave_out_hidden_tokens(name, attention):
    """In self-attention fits also leave out the query of a hidden key, whatever both hold. Queries of another sequence
    all count, even if there are as many as keys."""
    v, omega = draw(2, 7, 3, seed=2), rows(20, 4)
    mask = torch.tensor([[True] * 7, [False, True] * 3 + [True]])  # (B, M)
    for queries, same in ((7, True), (7, False), (5, False)):
        q, k = draw(2, queries, 4), draw(2, 7, 4, seed=1)
        x, y = q / math.sqrt(2), k / math.sqrt(2)
        weights = plain_weights(name, x, y, omega, mask if same else None, mask) * mask[:, None]
        expected = weights @ v / weights.sum(-1, keepdim=True)
        k, v = (each.masked_fill(~mask[..., None], 50.0) for each in (k, v))
        if same:
            expected, q = expected * mask[..., None], q.masked_fill(~mask[..., None], -50.0)
        o = attention(q, k, v, feature_map=MAPS[name](features=omega), attn_mask=mask[:, None], same_tokens=same)
        o = o * mask[..., None] if same else o  # a left-out query still has an output
        # ADERF inverts moments of as many tokens as dimensions: condition numbers up to K / RIDGE, 4e4, in both roots.
        torch.testing.assert_close(o, expected, atol=1e-9, rtol=1e-9)


# ------------------------------------------------------------------------------------------------------------ the rows


@pytest.mark.parametrize("name", MAPS)
def test_default_rows_are_what_maps_have(name):
    """Default rows are the same in every call, whatever mode the first one was made in: 256 features, or `count`."""
    q, k, v = (draw(2, 5, 4, seed=s).requires_grad_() for s in range(3))
    attend = partial(linear_attention, feature_map=MAPS[name]())
    default_rows.kept.clear()
    with torch.inference_mode():
        first = attend(q.detach(), k.detach(), v.detach())
    o = attend(q, k, v)
    o.sum().backward()  # an inference tensor could not be saved for it
    assert torch.equal(o, first)
    default_rows.kept.clear()
    cold = flops_of(attend, q, k, v)
    assert cold == flops_of(attend, q, k, v)
    drawn = FEATURES // (2 if name == "rff" else 1)
    given = MAPS[name](features=rows(drawn, 4, seed=favor.SEED))
    assert torch.equal(linear_attention(q, k, v, feature_map=given), o)
    assert MAPS[name]().width(4) == given.width(4) == FEATURES
    counted, given = MAPS[name](m=10), MAPS[name](features=rows(5 if name == "rff" else 10, 4, seed=favor.SEED))
    assert torch.equal(*(linear_attention(q, k, v, feature_map=each) for each in (counted, given)))
    assert counted(q, k).q.shape[-1] == counted.width(4) == given.width(4)


@pytest.mark.bad_input
@pytest.mark.parametrize("name", MAPS)
def test_bad_rows(name):
    make, operands = MAPS[name], [draw(2, 5, 4, seed=s) for s in range(3)]
    for attention in FORMS:
        with pytest.raises(ValueError, match=r"^features: expected shape \(rows, 4\), as wide as q, got \(8, 5\)"):
            attention(*operands, feature_map=make(features=draw(8, 5)))
    refuses("^m: expected None beside features, got 8", make, features=draw(8, 4), m=8)
    refuses("^m: expected an integer of at least 1, got 0", make, m=0)
    if name == "rff":
        refuses("^m: expected a multiple of the 2 features of a row, got 5", make, m=5)


@pytest.mark.bad_input
def test_bad_parameters():
    def parameters(width):
        return dense.saderf(draw(9, width), draw(9, width, seed=1))

    refuses("^fit: expected one of 'gerf', 'saderf', 'aderf', 'sderf', got 'derf'", DenseExponentialFeatures, "derf")
    with pytest.raises(ValueError, match="^parameters: expected a within -inf and 0.12, got 0.2 to 0.2"):
        DenseExponentialFeatures(parameters=parameters(4)._replace(a=torch.full((4,), 0.2)))
    for attention in FORMS:
        with pytest.raises(ValueError, match=r"^parameters: expected width 4 like q, got a of shape \(5,\)"):
            attention(*(draw(2, 5, 4) for _ in "qkv"), feature_map=DenseExponentialFeatures(parameters=parameters(5)))


@pytest.mark.parametrize("name", FITS)
@pytest.mark.parametrize("attention", FORMS)
def test_parameters_of_each_sequence(name, attention):
    """With one set for each sequence or one for all, sequences that they were fitted to have the output of the fit."""
    q, k, v = (draw(2, 3, 9, 4, seed=s) for s in range(3))
    fitted = getattr(dense, name)(q / math.sqrt(2), k / math.sqrt(2))
    assert fitted.a.shape == (2, 3, 4)
    expected = attention(q, k, v, feature_map=MAPS[name]())
    held = MAPS[name](parameters=fitted)
    torch.testing.assert_close(attention(q, k, v, feature_map=held), expected, atol=1e-13, rtol=1e-12)
    shared = MAPS[name](parameters=dense.DenseParameters(*(x if x is None else x[1, 2] for x in fitted)))
    o = attention(q, k, v, feature_map=shared)
    torch.testing.assert_close(o[1, 2], expected[1, 2], atol=1e-13, rtol=1e-12)
    assert (o[0, 0] - expected[0, 0]).abs().max() > 1e-3
    assert held.causal and shared.causal and not MAPS[name]().causal


@pytest.mark.parametrize("name", ["rff", "positive", "saderf", "aderf"])
@pytest.mark.parametrize("attention", FORMS)
def test_keys_far_out_of_range(name, attention):
    """Outputs and gradients are finite where exp(|y|^2/2) is not: |y|^2/2 is about 100 on average, and 89 overflows."""
    q, k, v = (draw(2, 20, 16, seed=s, dtype=torch.float32) for s in range(3))
    leaves = [(q / 3).requires_grad_(), (7 * k).requires_grad_(), v.requires_grad_()]
    assert rf.positive_features(leaves[1].detach() / 2, rows(8, 16).float()).min() == 0  # by the plain formula
    o = attention(*leaves, feature_map=MAPS[name]())
    assert all(x.isfinite().all() for x in (o, *torch.autograd.grad(o.sum(), leaves)))


# ---------------------------------------------------------------------------------------------- the module


def drawn_attention():
    return RandomFeatureAttention(4, 16, generator=generator(1), dtype=torch.float64)


def test_is_feature_attention_on_its_rows():
    rows = orthogonal_features(16, 4, generator=generator(1), dtype=torch.float64)
    q, k, v = (draw(2, 3, 9, 4, seed=s) for s in range(3))
    module = drawn_attention()
    assert torch.equal(module.features, rows)
    for causal in (False, True):
        expected = linear_attention(q, k, v, feature_map=PositiveFeatures(rows), is_causal=causal)
        assert torch.equal(module(q, k, v, is_causal=causal), expected)


def test_redraw():
    """It draws other rows of the same distribution, reproducibly; the output follows, and nothing else changes it."""
    module, (q, k, v) = drawn_attention(), [draw(2, 9, 4, seed=s) for s in range(3)]
    before = module(q, k, v)
    assert torch.equal(module(q, k, v), before)
    module.redraw(generator(2))
    assert not torch.equal(module(q, k, v), before)
    module.redraw(generator(1))
    torch.testing.assert_close(module(q, k, v), before, atol=1e-12, rtol=1e-12)


def test_the_rows_are_saved_and_not_trained():
    assert list(drawn_attention().state_dict()) == ["features"] and not trained(drawn_attention())


# ------------------------------------------------------------------------------------ what maps are, and what fits them

F32, F64 = torch.float32, torch.float64
FITTED = {name: getattr(dense, name) for name in ("gerf", "saderf", "aderf", "sderf")}


def queries_and_keys(N=30, M=40, K=6, dtype=F64, seed=0, batch=()):
    """Queries and keys with means and correlations, and scores of about 1."""
    mix = torch.eye(K, dtype=F64) + normal(2, K, K, seed=seed) / K
    x, y = normal(*batch, N, K, seed=seed + 1) @ mix[0] + 0.3, normal(*batch, M, K, seed=seed + 2) @ mix[1] - 0.2
    return (x * K**-0.25).to(dtype), (y * K**-0.25).to(dtype)


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


def tensors(parameters):
    return [each for each in parameters if each is not None]


def constraint(parameters):
    r"""$B_q^T (I - 4A)^{-1} B_k$, which should be I."""
    a, B_q, B_k = (each.double() for each in parameters[:3])
    return B_q.mT @ (B_k / (1 - 4 * a)[..., None])


@pytest.mark.parametrize("name", FITTED)
@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize("batch", [(), (2, 3)])
def test_fits_are_unbiased(name, dtype, batch):
    """The constraint holds to about K = 6 roundings of matrices with condition numbers of about 10."""
    x, y = queries_and_keys(dtype=dtype, batch=batch)
    fitted = FITTED[name](x, y)
    assert fitted.a.shape == (*batch, 6) and fitted.B_q.shape == fitted.B_k.shape == (*batch, 6, 6)
    assert all(each.dtype == dtype for each in tensors(fitted))
    assert bool((fitted.a < 0).all())
    eye = torch.eye(6, dtype=F64).expand(*batch, 6, 6)
    torch.testing.assert_close(constraint(fitted), eye, rtol=0, atol=500 * torch.finfo(dtype).eps)
    if batch:
        for ours, alone in zip(tensors(fitted), tensors(FITTED[name](x[1, 2], y[1, 2])), strict=True):
            # about a hundred roundings; axes have no sign
            torch.testing.assert_close(ours[1, 2].abs(), alone.abs(), rtol=1e-3, atol=500 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("name", FITTED)
def test_tokens_that_are_left_out(name):
    """The fit is as if they were not there, whatever they hold; with no token left it is still finite and unbiased."""
    x, y = queries_and_keys(batch=(2,))
    keep_x, keep_y = torch.arange(30) < torch.tensor([[30], [20]]), torch.arange(40) >= torch.tensor([[5], [0]])
    found = FITTED[name](x, y, keep_x=keep_x, keep_y=keep_y)
    for b, (rows, columns) in enumerate(((slice(0, 30), slice(5, 40)), (slice(0, 20), slice(0, 40)))):
        for ours, alone in zip(tensors(found), tensors(FITTED[name](x[b, rows], y[b, columns])), strict=True):
            torch.testing.assert_close(ours[b].abs(), alone.abs(), rtol=1e-9, atol=1e-9)  # axes have no sign
    nothing = FITTED[name](x, y, keep_x=keep_x & False, keep_y=keep_y & False)
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


@pytest.mark.parametrize("name", FITTED)
@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize("poor", POOR)
def test_poor_data(name, dtype, poor):
    """Finite parameters that keep the estimate unbiased on these data, and no worse than FAVOR+ on them."""
    x, y = POOR[poor](dtype)
    fitted = FITTED[name](x, y)
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


# ---------------------------------------------------------------------------------------------------- the draws of rows


@pytest.mark.parametrize("draw", [*FEATURE_DRAWS.values(), *WRONG_DRAWS.values()])
def test_draws_are_reproducible(draw):
    """Draws depend on the generator alone, with the dtype and device asked for; the global one is the default."""
    options = {"dtype": F64, "device": "cpu"}
    first = draw(10, 8, generator=generator(1), **options)
    state = torch.random.get_rng_state()
    assert torch.equal(first, draw(10, 8, generator=generator(1), **options))
    assert torch.equal(state, torch.random.get_rng_state())
    assert not torch.equal(first, draw(10, 8, generator=generator(2), **options))
    assert first.shape == (10, 8) and first.dtype == F64
    assert draw(10, 8, generator=generator(1)).dtype == torch.get_default_dtype()
    with torch.random.fork_rng():
        torch.manual_seed(1)
        drawn = draw(10, 8)
        torch.manual_seed(1)
        assert torch.equal(drawn, draw(10, 8))


@pytest.mark.parametrize(("m", "K"), [(8, 8), (3, 8), (20, 8), (5, 1), (128, 64)])
@pytest.mark.parametrize("draw", [orthogonal_features, structured_features])
def test_rows_of_a_block_are_orthogonal(draw, m, K):
    omega = draw(m, K, generator=generator(), dtype=F64)
    for block in omega.split(K):
        directions = block / block.norm(dim=-1, keepdim=True)
        torch.testing.assert_close(directions @ directions.mT, torch.eye(len(block)).double(), atol=1e-13, rtol=0)


def test_structured_blocks_by_hand():
    """Two rows of the 2 x 2 Hadamard matrix with one factor: their directions are (1, ±1) / sqrt 2, up to signs."""
    omega = structured_features(2, 2, generator=generator(), dtype=F64, factors=1)
    directions = omega / omega.norm(dim=-1, keepdim=True)
    torch.testing.assert_close(directions.abs(), torch.full((2, 2), sqrt(0.5), dtype=F64))
    assert float(directions.prod(-1).prod()) == pytest.approx(-1 / 4)


@pytest.mark.parametrize("K", [4, 16])
@pytest.mark.parametrize("draw", FEATURE_DRAWS.values())
def test_lengths(draw, K):
    """Squared lengths are chi^2(K), uncorrelated within a block (Kolmogorov-Smirnov and normal, error rates 1e-5)."""
    squares = draw(1000 * K, K, generator=generator(4), dtype=F64).square().sum(-1)
    assert stats.kstest(squares.numpy(), stats.chi2(K).cdf).pvalue > 1e-5
    first, second = squares.reshape(1000, K)[:, :2].mT
    assert abs(estimate((first - K) * (second - K)).deviation(0.0)) < SIGMAS


def test_structured_rows_are_cut_from_wider_ones():
    """For K = 5, blocks have 8 rows and keep the first five columns; rows are orthogonal on average over draws."""
    draws = structured_features(2000 * 8, 5, generator=generator(), dtype=F64).reshape(2000, 8, 5)
    products = (draws[:, 0] * draws[:, 1]).sum(-1)
    assert products.abs().max() > 0.1
    assert abs(estimate(products).deviation(0.0)) < SIGMAS
