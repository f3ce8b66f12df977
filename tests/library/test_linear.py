"""Linear attention's maps: each kernel compared with its formula by loops, its range, and what is declared about it;
efficient attention, whose softmax over positions is not such a map; which functions of the score are kernels."""

import math
from inspect import signature

import pytest
import torch
from by_loops import averaged
from refusals import refuses
from seeded import draw

from ortho import attention as functions
from ortho.attention import MECHANISMS
from ortho.attention.linear.efficient import efficient_attention, efficient_attention_reference
from ortho.attention.linear.efficient_causal import causal_efficient_attention, causal_efficient_attention_reference
from ortho.attention.linear.feature_map import EluPlusOne
from ortho.attention.linear.feature_maps import CosFormer, Cosine, Exp, Powers, Relu, Taylor
from ortho.attention.linear.linear_attention import kernel_weights, linear_attention, linear_attention_reference
from ortho.cost.mechanisms.linear import linear_attention_cost
from ortho.theory import kernels

FORMS = [linear_attention_reference, linear_attention]
TOLERANCE = {"atol": 1e-13, "rtol": 1e-13}  # sums of at most 30 rounded products, about 100 eps of float64


def elu(x):
    return x + 1 if x > 0 else math.exp(x)


def relu(x):
    return max(x, 0.0)


def elementwise(phi):
    """The kernel of an elementwise function: the scale, 1 by default, multiplies queries and keys before it."""

    def kernel(q, k, scale, i, j):
        root = math.sqrt(1 if scale is None else scale)
        return sum(phi(root * a) * phi(root * b) for a, b in zip(q, k, strict=True))

    return kernel


def cosformer(horizon):
    def kernel(q, k, scale, i, j):
        product = sum(relu(a) * relu(b) for a, b in zip(q, k, strict=True))
        return (1 if scale is None else scale) * product * math.cos(math.pi * (i - j) / (2 * horizon))

    return kernel


def taylor(order):
    """The Taylor series in q.k / sqrt(K), or in `scale` times q.k."""

    def kernel(q, k, scale, i, j):
        t = sum(a * b for a, b in zip(q, k, strict=True)) * (1 / math.sqrt(len(q)) if scale is None else scale)
        return sum(t**n / math.factorial(n) for n in range(order + 1))

    return kernel


def powers(order):
    def kernel(q, k, scale, i, j):
        products = [(1 if scale is None else scale) * a * b for a, b in zip(q, k, strict=True)]
        return sum(t**n for t in products for n in range(order + 1))

    return kernel


KERNELS = {
    "elu": (EluPlusOne(), elementwise(elu)),
    "relu": (Relu(), elementwise(lambda x: relu(x) + 1e-3)),
    "exp": (Exp(), elementwise(math.exp)),
    "cosformer": (CosFormer(horizon=5), cosformer(5)),
    "taylor 1": (Taylor(1), taylor(1)),
    "taylor 2": (Taylor(2), taylor(2)),
    "taylor 3": (Taylor(3), taylor(3)),
    "cosine": (Cosine(), elementwise(math.cos)),
    "powers 2": (Powers(2), powers(2)),
    "powers 3": (Powers(3), powers(3)),
}


@pytest.mark.parametrize("attention", FORMS)
@pytest.mark.parametrize("case", ["plain", "causal", "mask", "pairs", "scale", "no scale", "cross"])
@pytest.mark.parametrize("name", KERNELS)
def test_formula(name, attention, case):
    """The reference also serves any mask of pairs; a row without a pair is 0."""
    if case == "pairs" and attention is linear_attention:
        return
    feature_map, kernel = KERNELS[name]
    q, k, v = draw(5, 3), draw(5, 3, seed=1), draw(5, 2, seed=2)
    if case == "cross":
        q = q[:3]
    allowed, kwargs = torch.ones(len(q), 5, dtype=torch.bool), {}
    if case == "causal":
        allowed, kwargs = allowed.tril(), {"is_causal": True}
    if case == "mask":
        allowed = torch.tensor([True, False, True, True, False]).expand(5, 5)
        kwargs = {"attn_mask": allowed[:1]}
    if case == "pairs":
        allowed = torch.tensor([[1, 0, 1, 0, 1], [0] * 5, [1] * 5, [0, 0, 0, 1, 0], [1, 1, 0, 0, 0]]) > 0
        kwargs = {"attn_mask": allowed}
    if "scale" in case:  # at scale 0 a map cannot tell tokens apart, and ReLUs without a floor have no weight
        kwargs = {"scale": 0.3 if case == "scale" else 0.0}
    scale = kwargs.get("scale")
    expected = averaged(lambda i, j: kernel(q[i].tolist(), k[j].tolist(), scale, i, j), v, allowed)
    o = attention(q, k, v, feature_map=feature_map, **kwargs)
    # Totals of weights of both signs cancel, here to a thirtieth at worst.
    loose = 100 if feature_map.weights == "signed" else 1
    torch.testing.assert_close(o, expected, atol=loose * 1e-13, rtol=loose * 1e-13)


def test_elu_plus_one():
    """The map keeps all digits of small values, and its derivative is continuous at 0, where padding lies."""
    small, zero = torch.tensor([-30.0, -80.0]), torch.zeros(1, requires_grad=True)
    assert torch.equal(EluPlusOne().function(small), small.exp())
    assert torch.autograd.grad(EluPlusOne().function(zero), zero)[0] == 1


@pytest.mark.parametrize("attention", FORMS)
def test_cosformer_ends_at_its_horizon(attention):
    """Positions below it are served, and the next one is an error, also after a state."""
    q, k, v = draw(2, 7, 4), draw(2, 7, 4, seed=1), draw(2, 7, 3, seed=2)
    seven, six = CosFormer(horizon=7), CosFormer(horizon=6)
    attention(q, k, v, feature_map=seven, is_causal=True)
    assert (kernel_weights(seven, q, k) >= 0).all()
    head, tail = ([x[:, part] for x in (q, k, v)] for part in (slice(4), slice(4, 7)))
    _, state = attention(*head, feature_map=six, is_causal=True, return_state=True)
    for call in (
        lambda: attention(q, k, v, feature_map=six),
        lambda: attention(q[:, :3], k, v, feature_map=six),
        lambda: attention(*tail, feature_map=six, is_causal=True, initial_state=state),
    ):
        refuses("^horizon: expected (at least 7 positions, got 6|positions within 0 and 5, got 4 to 6)", call)


@pytest.mark.parametrize("attention", FORMS)
@pytest.mark.parametrize("causal", [False, True])
def test_rows_with_nothing_in_common(attention, causal):
    """A query whose ReLUs overlap with no key's gives 0, and neither the query nor the keys get a gradient from it."""
    q, k = torch.tensor([[1.0, -1.0], [1.0, 1.0]]), torch.tensor([[-1.0, 2.0], [-1.0, 3.0]])
    leaves = [x.requires_grad_() for x in (q, k, torch.ones(2, 3))]
    o = attention(*leaves, feature_map=CosFormer(), is_causal=causal)
    torch.testing.assert_close(o.detach(), torch.tensor([[0.0] * 3, [1.0] * 3]))
    assert not any(x.any() for x in torch.autograd.grad(o[0].sum(), leaves))


@pytest.mark.bad_input
def test_bad_maps():
    assert repr(Powers(3)) == "Powers(order=3)"
    for make, name in ((CosFormer, "horizon"), (Taylor, "order"), (Powers, "order")):
        refuses(f"{name}: expected an integer of at least 1, got 0", make, 0)


@pytest.mark.parametrize("form", ["reference", "fast"])
def test_options_reach_the_map(form):
    """The mechanisms' functions and closed forms take the options of their maps."""
    q, k, v = (draw(2, 9, 4, seed=s) for s in range(3))
    for mechanism, function, options in (
        ("favor", "favor_attention", {"m": 10}),
        ("rff", "rff_attention", {"m": 10}),
        ("saderf", "saderf_attention", {"m": 10}),
        ("taylor", "taylor_attention", {"order": 3}),
        ("cosformer", "cosformer_attention", {"horizon": 9}),
    ):
        m = MECHANISMS[mechanism]
        attend = m.form(form)
        assert getattr(functions, function) is m.fast and m.fast.__name__ == function
        assert set(options) <= set(signature(attend).parameters)
        own = type(m.fast.feature_map)(**({"fit": mechanism} if mechanism == "saderf" else {}) | options)
        of_map = linear_attention_reference if form == "reference" else linear_attention
        assert torch.equal(attend(q, k, v, **options), of_map(q, k, v, feature_map=own))
        assert not torch.equal(attend(q, k, v, **options), attend(q, k, v))
        assert m.cost(1, 9, 1, 4, 4, **options) == linear_attention_cost(1, 9, 1, 4, 4, feature_map=own)


# ------------------------------------------------------------------------------------------------ efficient attention


EFFICIENT = [efficient_attention_reference, efficient_attention]


def softmax(row):
    powers = [math.exp(x - max(row)) for x in row]
    return [x / sum(powers) for x in powers]


def efficient_by_loops(q, k, v, kept, root):
    """The formula, one scalar at a time: a query's softmax over features, times each feature's softmax over keys."""
    keys = [j for j in range(len(k)) if kept[j]]
    columns = [softmax([float(root * k[j, c]) for j in keys]) if keys else [] for c in range(k.shape[1])]
    out = torch.zeros(len(q), v.shape[1], dtype=q.dtype)
    for i in range(len(q)):
        features = softmax([float(root * x) for x in q[i]])
        for n, j in enumerate(keys):
            out[i] += sum(feature * column[n] for feature, column in zip(features, columns, strict=True)) * v[j]
    return out


@pytest.mark.parametrize("attention", EFFICIENT)
def test_efficient_formula(attention):
    q, k, v = draw(4, 3), draw(7, 3, seed=1), draw(7, 2, seed=2)
    for kept in ([True] * 7, [True, False, True, False, True, True, False], [False] * 7):
        for scale in (None, 0.3, 0.0):
            expected = efficient_by_loops(q, k, v, kept, math.sqrt(1 if scale is None else scale))
            o = attention(q, k, v, attn_mask=torch.tensor(kept), scale=scale)
            torch.testing.assert_close(o, expected, **TOLERANCE)
    q, k, v = (draw(2, 3, 4, 3, seed=s) for s in range(3))
    mask = draw(2, 3, 1, 4, seed=3) > 0
    for b, h in ((0, 0), (1, 2)):
        expected = efficient_by_loops(q[b, h], k[b, h], v[b, h], mask[b, h, 0].tolist(), 1)
        torch.testing.assert_close(attention(q, k, v, attn_mask=mask)[b, h], expected, **TOLERANCE)


CAUSAL_EFFICIENT = [causal_efficient_attention_reference, causal_efficient_attention]


@pytest.mark.parametrize("attention", CAUSAL_EFFICIENT)
def test_causal_efficient_formula(attention):
    """Row i is what the formula gives, at its last query, for the tokens up to i."""
    q, k, v = draw(7, 3), draw(7, 3, seed=1), draw(7, 2, seed=2)
    for kept in ([True] * 7, [False, True, True, False, True, True, False], [False] * 7):
        for scale in (None, 0.3, 0.0):
            o = attention(q, k, v, is_causal=True, attn_mask=torch.tensor(kept), scale=scale)
            for i in range(7):
                upto = (x[: i + 1] for x in (q, k, v))
                expected = efficient_by_loops(*upto, kept[: i + 1], math.sqrt(1 if scale is None else scale))
                torch.testing.assert_close(o[i], expected[-1], **TOLERANCE)


@pytest.mark.parametrize("pieces", [1, 64])
def test_causal_efficient_rows_sum_to_one(pieces):
    """Over 131,072 tokens in float32, in one call or with a state between calls.

    Each of 2,048 chunks rounds the state, of size 1, by three times 6e-8 at most, and later chunks let an earlier error
    fade as t / N. Independent errors sum up to 6e-8 sqrt(3 * 2048 / 3) = 2.7e-6; a running sum that loses what tokens
    add, or products of decays that all round alike, are off by 1e-4.
    """
    q, k = (draw(1, 2**17, 4, seed=s, dtype=torch.float32) for s in range(2))
    v, state = torch.ones(1, 2**17, 1), None
    for q_part, k_part, v_part in zip(*(x.chunk(pieces, 1) for x in (q, k, v)), strict=True):
        call = {"is_causal": True, "initial_state": state, "return_state": True}
        o, state = causal_efficient_attention(q_part, k_part, v_part, **call)
        assert (o - 1).abs().max() < 1e-5


@pytest.mark.bad_input
@pytest.mark.parametrize("attention", CAUSAL_EFFICIENT)
def test_causal_efficient_refuses(attention):
    q, k, v = (draw(5, 3, seed=s) for s in range(3))
    refuses("^is_causal: expected True .*got False", attention, q, k, v, is_causal=False)
    refuses("^causal: expected True, got False", MECHANISMS["efficient-causal"].cost, 1, 5, 1, 3, 3, causal=False)


@pytest.mark.bad_input
@pytest.mark.parametrize("attention", EFFICIENT)
def test_efficient_refuses(attention):
    q, k, v = (draw(2, 20, 6, seed=s) for s in range(3))
    for kwargs, message in (
        ({"is_causal": True}, "is_causal: expected none, since keys are normalised over the whole"),
        ({"return_state": True}, "return_state: expected none, since "),
        ({"initial_state": (torch.ones(2),)}, "initial_state: expected none, since "),
        ({"attn_mask": torch.ones(20, 20) > 0}, r"attn_mask: expected a mask of keys, of shape \(..., 1, 20\), got"),
        ({"scale": -1.0}, "scale: expected a finite number of at least 0, got -1.0"),
    ):
        refuses(f"^{message}", attention, q, k, v, **kwargs)


# -- functions of the score that are kernels, and copying (page linear-kernels and chapter 10 have their properties)


def test_the_polynomial_kernel_is_taylor_s():
    points = draw(40, 4)
    weights = kernel_weights(Taylor(2), points, points, scale=1.0)
    torch.testing.assert_close(kernels.KERNELS["polynomial"](points, points), weights, **TOLERANCE)


def test_the_bound_of_copying_is_that_of_the_rank():
    """The bound is for r + 1 rows of the identity: K of their singular values can be matched."""
    for distance, features in ((1, 1), (5, 2), (9, 3), (3, 8)):
        missed = torch.linalg.svdvals(torch.eye(distance + 1))[features:].square().sum() / (distance + 1)
        assert kernels.least_error(distance, features) == pytest.approx(float(missed))
