"""Random-feature attention: maps are the plain formulas except for factors that cancel; the error falls like 1/sqrt(m).
At the end `RandomFeatureAttention`: its rows are in the state dict, and are redrawn only on request."""

import copy
import math
from functools import partial

import pytest
import torch
from gradients import trained
from refusals import refuses
from seeded import draw, generator

from ortho import MultiheadAttention
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
from ortho.attention.linear.random_feature_attention import MAPS as NAMED
from ortho.attention.linear.random_feature_attention import RandomFeatureAttention
from ortho.attention.linear.random_features import FEATURE_DRAWS
from ortho.cost.counting import flops_of

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


@pytest.mark.parametrize(("m", "K"), [(8, 8), (3, 8), (20, 8), (5, 1), (256, 64)])
def test_default_rows(m, K):
    """Default rows are orthogonal features drawn from a seed of their own, whatever the caller's random state."""
    expected = rows(m, K, seed=favor.SEED)
    default_rows.kept.clear()
    state = torch.random.get_rng_state()
    for dtype in (torch.float64, torch.float32):
        first = default_rows(m, K, dtype, torch.device("cpu"))
        assert first.dtype == dtype and torch.equal(first, expected.to(dtype))
        assert default_rows(m, K, dtype, torch.device("cpu")) is first
    assert torch.equal(state, torch.random.get_rng_state())


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


def drawn_attention(**options):
    return RandomFeatureAttention(4, 16, generator=generator(1), dtype=torch.float64, **options)


@pytest.mark.parametrize(("form", "function"), [("fast", linear_attention), ("reference", linear_attention_reference)])
def test_is_feature_attention_on_its_rows(form, function):
    rows = orthogonal_features(16, 4, generator=generator(1), dtype=torch.float64)
    q, k, v = (draw(2, 3, 9, 4, seed=s) for s in range(3))
    module = drawn_attention(form=form)
    assert torch.equal(module.features, rows)
    for causal in (False, True):
        expected = function(q, k, v, feature_map=PositiveFeatures(rows), is_causal=causal)
        assert torch.equal(module(q, k, v, is_causal=causal), expected)


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("kind", ["orthogonal", "iid", "structured"])
def test_redraw(name, kind):
    """It draws other rows of the same distribution, reproducibly; the output follows, and nothing else changes it."""
    module, (q, k, v) = drawn_attention(map=name, draw=kind), [draw(2, 9, 4, seed=s) for s in range(3)]
    before = module(q, k, v)
    assert torch.equal(module(q, k, v), before)
    module.redraw(generator(2))
    after = module(q, k, v)
    assert not torch.equal(after, before)
    assert module.features.shape == (16 // NAMED[name].of_a_row, 4)  # 16 features in all
    module.redraw(generator(1))
    torch.testing.assert_close(module(q, k, v), before, atol=1e-12, rtol=1e-12)


def test_state_dict():
    """The rows are saved, loaded, copied and cast with the module, and are not trained."""
    module, other = drawn_attention(), RandomFeatureAttention(4, 16, generator=generator(5), dtype=torch.float64)
    assert list(module.state_dict()) == ["features"]
    assert not trained(module)
    other.load_state_dict(module.state_dict())
    operands = [draw(2, 9, 4, seed=s) for s in range(3)]
    assert torch.equal(other(*operands), module(*operands))
    copied = copy.deepcopy(module)
    copied.redraw(generator(3))
    assert not torch.equal(copied.features, module.features)
    assert module.float().features.dtype == torch.float32


@pytest.mark.bad_input
def test_errors_of_the_module():
    refuses("map: expected one of 'positive', .* got 'cosine'", RandomFeatureAttention, 4, map="cosine")
    refuses("draw: expected one of .* got 'qr'", RandomFeatureAttention, 4, draw="qr")
    refuses("fit: expected one of .* got 'best'", RandomFeatureAttention, 4, map="dense", fit="best")
    layer = MultiheadAttention(12, 3, attention=RandomFeatureAttention(5))
    refuses(r"features: expected shape \(rows, 4\), as wide as q, got \(256, 5\)", layer, torch.ones(1, 2, 12))
    with pytest.raises(ValueError, match="is_causal: expected a feature map that looks at one token at a time"):
        drawn_attention(map="dense")(*[draw(2, 9, 4, seed=s) for s in range(3)], is_causal=True)
