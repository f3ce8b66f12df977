"""Attention from any feature maps: the fast form equals the definition, across chunks and tiles; what it refuses;
declared costs equal counted ones. (`test_overflow` has extreme numbers, `test_precision` half precision.)"""

from functools import partial
from itertools import product

import pytest
import sympy as sp
import torch
from counted import CALLS, assert_declared, assert_formula
from extent import WHOLE
from piecewise import held
from refusals import refuses
from seeded import draw

from ortho import _checks
from ortho.attention import MECHANISMS
from ortho.attention.linear.dense_features import FITS
from ortho.attention.linear.feature_maps import HORIZON, Cosine, Powers, Taylor
from ortho.attention.linear.linear_attention import (
    FeatureMap,
    Features,
    kernel_mechanism,
    linear_attention,
    linear_attention_reference,
)
from ortho.attention.recurrence import CHUNK, chunks
from ortho.cost import big_o as sym

# Sums of at most 1e3 rounded products, the largest about 10 (error 2e-13); a wrong term would show at 1e-2. Totals of
# signed weights cancel: the smallest total of a row here is about 1e-3 of its terms, and its gradient squares that.
TOLERANCE = {"atol": 1e-11, "rtol": 1e-11}
SIGNED = {"atol": 1e-7, "rtol": 1e-7}
WIDTH = 4  # the width of the data that the held fits were fitted to


def qkv(*lead, length, width=WIDTH, values=5, seed=0):
    return [draw(*lead, length, w, seed=3 * seed + i) for i, w in enumerate((width, width, values))]


FACTORED = {
    name: m for name, m in MECHANISMS.items() if isinstance(m.fast, partial) and "feature_map" in m.fast.keywords
}
HELD = {f"{fit}, held": held(fit) for fit in FITS}
ALL = FACTORED | HELD
FITTED = [name for name in FACTORED if FACTORED[name].data_dependent]
CAUSAL = [name for name in ALL if ALL[name].causal]
CASES = [(name, causal) for name in ALL for causal in (False, True)[: 1 + ALL[name].causal]]
FORMS = ["reference", "fast"]


def feature_map(name):
    return ALL[name].fast.keywords["feature_map"]


def tolerance(name):
    return SIGNED if ALL[name].signed else TOLERANCE


MAPS = {
    "linear": "EluPlusOne()",
    "linear-relu": "Relu()",
    "linear-exp": "Exp()",
    "cosformer": f"CosFormer(horizon={HORIZON})",
    "taylor": "Taylor(order=2)",
    "cosine": "Cosine()",
    "powers": "Powers(order=2)",
    "trigonometric": "TrigonometricFeatures(count=128)",
    "favor": "PositiveFeatures(count=256)",
    "favor++": "DenseExponentialFeatures('gerf', count=256)",
    **{fit: f"DenseExponentialFeatures({fit!r}, count=256)" for fit in ("saderf", "aderf", "sderf")},
}


def test_maps_of_the_mechanisms():
    """How each map is shown, that both forms have the same map, and what is declared about it."""
    assert {name: repr(feature_map(name)) for name in FACTORED} == MAPS
    assert all(m.reference.keywords["feature_map"] is m.fast.keywords["feature_map"] for m in FACTORED.values())
    said = {
        what: {name for name, m in FACTORED.items() if getattr(m, what)}
        for what in ("positional", "signed", "data_dependent")
    }
    assert said["positional"] == {"cosformer"} and said["signed"] == {"cosine", "trigonometric"}
    assert said["data_dependent"] == {"favor++", "saderf", "aderf", "sderf"} == set(FACTORED) - set(CAUSAL)


def test_chunks():
    """The fewest chunks that cover the sequence, no wider than asked for, and no wider than needed."""
    for length, chunk in product(range(1, 40), range(1, 12)):
        width, behind = chunks(length, chunk)
        number = -(-length // chunk)
        assert width * number == length + behind and (width - 1) * number < length <= width * number
        assert width <= chunk


class Given(FeatureMap):
    """The operands themselves, the keys scaled by e^s."""

    def __init__(self, s=None):
        self.s, self.scales_keys = s, s is not None

    def __call__(self, q, k, **_):
        return Features(q, k, self.s(k) if callable(self.s) else self.s)

    def width(self, K):
        return K

    def cost(self, G, N, M, K, m):
        raise NotImplementedError


@pytest.mark.parametrize("causal", [False, True])
def test_scales_of_keys_are_exact(causal):
    """e^s beside phi(k) acts as e^s phi(k), over a range of scales that e^s phi(k) itself can just hold in float64."""
    q, k, v = (x.abs() for x in qkv(2, length=40))
    s = 300 * torch.sin(torch.arange(40.0, dtype=torch.float64)).expand(2, 40)
    plain = linear_attention_reference(q, k * s.exp()[..., None], v, feature_map=Given(), is_causal=causal)
    for function, kwargs in ((linear_attention_reference, {}), (linear_attention, {"chunk": 8})):
        scaled = function(q, k, v, feature_map=Given(s), is_causal=causal, **kwargs)
        torch.testing.assert_close(scaled, plain, **TOLERANCE)
        below = function(q, k, v, feature_map=Given(s - 1e4), is_causal=causal, **kwargs)
        torch.testing.assert_close(below, plain, **TOLERANCE)  # s is rounded by 1e4 eps
        beyond = function(q, k, v, feature_map=Given(1e4 * s), is_causal=causal, **kwargs)
        # With scales so far apart, each row is the value at the largest scale that it sees.
        seen = s[:1].expand(40, 40) + (torch.ones(40, 40).triu(1) * -1e9 if causal else 0)
        torch.testing.assert_close(beyond, v[:, seen.argmax(-1)], **TOLERANCE)


@pytest.mark.parametrize("causal", [False, True])
def test_padding_of_the_last_chunk_is_not_seen(causal):
    """The state's scale is the largest scale of a real key, although all are far below 0, the scale of padding."""
    q, k, v = (x.abs() for x in qkv(2, length=13))
    given = Given(lambda k: -1e4 - k.sum(-1))
    _, (memory, total, peak) = linear_attention(
        q, k, v, feature_map=given, is_causal=causal, return_state=True, chunk=4
    )
    assert torch.equal(peak, given.s(k).amax(-1))
    scaled = k * (given.s(k) - peak[:, None]).exp()[..., None]
    torch.testing.assert_close(memory, scaled.mT @ v, **TOLERANCE)
    torch.testing.assert_close(total, scaled.sum(-2), **TOLERANCE)


@pytest.mark.parametrize("name", HELD)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("causal", [False, True])
def test_gradients_by_finite_differences(name, form, causal):
    """`test_properties` leaves these out, since the gradient of a fitted map is not its derivative; if held, it is."""
    operands = [x.requires_grad_() for x in qkv(length=4, values=2)]
    assert torch.autograd.gradcheck(
        lambda *x: ALL[name].form(form)(*x, is_causal=causal), operands, fast_mode=not WHOLE
    )


# ----------------------------------------------------------------------------------------------- the limits


@pytest.mark.parametrize("name", CAUSAL)
def test_a_state_in_half_precision(name):
    """Carried in float32, it gives in parts the outputs of the whole, except for their last rounding."""
    m = ALL[name]
    q, k, v = (x.to(torch.float16) for x in qkv(2, length=60))
    whole = m.fast(q, k, v, is_causal=True)
    head, state = m.fast(q[:, :23], k[:, :23], v[:, :23], is_causal=True, return_state=True)
    assert [x.dtype for x in state] == [torch.float32] * (len(state) - m.positional) + [torch.int64] * m.positional
    tail = m.fast(q[:, 23:], k[:, 23:], v[:, 23:], is_causal=True, initial_state=state)
    error = (torch.cat([head, tail], 1) - whole).abs().max()
    assert error <= torch.finfo(torch.float16).eps * whole.abs().max()


def test_sums_do_not_overflow_float16():
    ones = torch.ones(1, 70_000, 1, dtype=torch.float16)  # 2 x 70 000 is more than float16 holds
    assert torch.equal(MECHANISMS["linear"].fast(ones, ones, ones), ones)


@pytest.mark.bad_input
@pytest.mark.parametrize("form", FORMS)
def test_weights_out_of_range(form):
    """Sums of weights that are too small or too large are refused; sums of signed weights only if too large."""
    q, k, v = (draw(2, 20, 16, seed=s, dtype=torch.float32) for s in range(3))
    linear, favor, taylor, signed = (MECHANISMS[n].form(form) for n in ("linear", "favor", "taylor", "trigonometric"))
    for call, said in (
        (lambda: linear(-1e3 * q.abs(), k, v), r"within .* got 0 to"),
        (lambda: linear(1e20 * q, 1e20 * k, v), r"within .* to inf"),
        (lambda: favor(1e3 * q, 1e3 * k, v), r"within .* got 0 to"),
        (lambda: favor(1e20 * q, 1e20 * k, v, is_causal=True), r"within .* got (nan|-inf to inf)"),
        (lambda: taylor(1e10 * q, 1e10 * k, v), r"within .* got (nan|-inf to inf)"),
        (lambda: signed(1e20 * q, 1e20 * k, v), r"within -3.4e\+38 and 3.4e\+38, got nan"),
    ):
        refuses(rf"^q, k: expected row sums of the torch.float32 weights {said}", call)


BAD = [
    ({"attn_mask": torch.ones(5, 5, dtype=torch.bool)}, ValueError, "attn_mask: expected a mask of keys"),
    ({"attn_mask": torch.ones(2, 5, 1, dtype=torch.bool)}, ValueError, "attn_mask: expected a mask of keys"),
    ({"scale": -1.0}, ValueError, "scale: expected a finite number of at least 0, got -1.0"),
]


@pytest.mark.bad_input
@pytest.mark.parametrize("name", FACTORED)
def test_errors(name):
    for kwargs, error, message in BAD:
        refuses(f"^{message}", MECHANISMS[name].fast, *qkv(2, length=5), error=error, **kwargs)
    q, k, v = qkv(2, length=5)
    for form in FORMS:
        with pytest.raises(ValueError, match="^same_tokens: expected False for 4 queries and 5 keys, got True"):
            MECHANISMS[name].form(form)(q[:, :4], k, v, same_tokens=True)


@pytest.mark.bad_input
@pytest.mark.parametrize("name", CAUSAL)
def test_bad_states(name):
    """Missing or further tensors, another dtype, width or batch; and masks, which cannot reach into a state."""
    fast, operands = ALL[name].fast, qkv(2, length=5)
    _, state = fast(*operands, is_causal=True, return_state=True)
    assert len(state) == 2 + feature_map(name).scales_keys + ALL[name].positional
    for broken in (state[:-1], (*state, state[0]), ()):
        refuses(r"^initial_state: expected a tuple of tensors \(S, z", fast, *operands, initial_state=broken)
    for i, x in enumerate(state):
        for other in (x.to(torch.float32), x[None], x.expand(3, *x.shape)):
            with pytest.raises(ValueError, match="^initial_state: expected (S|z|peak|seen) torch"):
                fast(*operands, initial_state=(*state[:i], other, *state[i + 1 :]))
    refuses("^initial_state: expected a tuple of tensors", fast, *operands, initial_state=5, error=TypeError)
    with pytest.raises(ValueError, match="^attn_mask: expected None beside an initial_state"):
        fast(*operands, initial_state=state, attn_mask=torch.ones(5, dtype=torch.bool))


@pytest.mark.bad_input
@pytest.mark.parametrize("name", FITTED)
@pytest.mark.parametrize("form", FORMS)
def test_what_is_fitted_takes_no_parts(name, form):
    operands = qkv(2, length=5)
    state = tuple(x[:, :0] for x in operands[1:])
    wanted = {"is_causal": True, "return_state": True, "initial_state": state}
    for argument, value in wanted.items():
        with pytest.raises(ValueError, match=f"^{argument}: expected a feature map that looks at one token at a time"):
            MECHANISMS[name].form(form)(*operands, **{argument: value})


@pytest.mark.parametrize("name", ALL)
def test_masks_of_pairs_in_the_definition(name):
    """The definition serves them; the fast form serves only masks of keys."""
    m = ALL[name]
    q, k, v = qkv(2, 3, length=5)
    lone = m.reference(q, k, v, attn_mask=torch.eye(5, dtype=torch.bool))
    weightless = (lone == 0).all(-1, keepdim=True)
    assert not weightless.any() or feature_map(name).weights == "non-negative"
    torch.testing.assert_close(lone, v.masked_fill(weightless, 0), **tolerance(name))


@pytest.mark.parametrize("causal", [False, True])
def test_backward_under_autocast(causal):
    """A backward pass inside autocast is also computed in float32, except for the map's own products with its rows,
    which autocast rounds to bfloat16, by a relative 2^-8 for each factor."""
    operands = [torch.randn(2, 9, 4, generator=torch.Generator().manual_seed(i)).requires_grad_() for i in range(3)]
    fast = MECHANISMS["favor"].fast
    expected = torch.autograd.grad(fast(*operands, is_causal=causal).sum(), operands)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = torch.autograd.grad(fast(*operands, is_causal=causal).sum(), operands)
    assert torch.equal(found[2], expected[2])
    for one, other in zip(found, expected, strict=True):
        assert (one - other).norm() < 2**-6 * other.norm()


@pytest.mark.parametrize("form", ["reference", "fast"])
def test_overflow_beside_a_mask(form):
    """A mask may leave rows without weight, but it excuses no other row that is out of range."""
    q = torch.full((1, 3, 4), 1e25)
    with pytest.raises(ValueError, match="q, k: expected row sums of the torch.float32 weights within 9.9e-32 and"):
        MECHANISMS["linear"].form(form)(q, q, q, attn_mask=torch.tensor([True, True, False]))


def test_maps_keep_to_what_they_declare():
    class Undeclared(FeatureMap):
        def __call__(self, q, k, **_):
            return Features(q.exp(), k.exp(), k[..., 0])

        def width(self, K):
            return K

        def cost(self, *_):
            raise NotImplementedError

    q = torch.ones(1, 3, 4)
    with pytest.raises(TypeError, match="feature_map: expected a log_k if and only if it scales keys"):
        linear_attention(q, q, q, feature_map=Undeclared())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["favor", "favor++", "sderf"])
@pytest.mark.parametrize("masked", [False, True])
def test_rows_out_of_range_are_never_zero(form, name, masked, monkeypatch):
    """They are an error where values are checked, also beside a mask, and NaN where values are not checked, as on a
    GPU. Rows without a key are 0 in either case."""
    m = MECHANISMS[name]
    q, k, v = (torch.randn(1, 6, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(3))
    mask = torch.tensor([False, False, True, True, False, True]) if masked else None
    call = {"is_causal": m.causal, "attn_mask": mask}
    refuses("^q, k: expected row sums", m.form(form), 60 * q, 60 * k, v, **call)
    fine = m.form(form)(q, k, v, **call)
    monkeypatch.setattr(_checks, "shows_values", lambda _: True)
    assert torch.equal(m.form(form)(q, k, v, **call), fine)
    o = m.form(form)(60 * q, 60 * k, v, **call)[0]
    lost = o.isnan().all(-1)
    assert lost.any() and o[~lost].isfinite().all()
    empty = torch.arange(6) < (2 if masked and m.causal else 0)
    assert not o[empty].any() and o[~empty].any(-1).all()


# ------------------------------------------------------------------------------------------------- costs


OTHERS = [Cosine(), Powers(1), Powers(3), Taylor(1), Taylor(3)]
EFFICIENT = {name: MECHANISMS[name] for name in ("efficient", "efficient-causal")}
COSTED = ALL | {str(each): kernel_mechanism("", each, "") for each in OTHERS} | EFFICIENT


def serves(m, causal):
    return m.causal if causal else m.bidirectional


@pytest.mark.parametrize("name", COSTED)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("qk_grad", [False, True])
def test_declared_equals_counted(name, form, qk_grad):
    """With values of another width than the keys; in several chunks, padded and not, in one, and for one token."""
    m, widths = COSTED[name], (WIDTH, WIDTH, WIDTH) if name in HELD else (3, 2, 1)
    cases = zip([(1, 12, 2), (2, 13, 1), (1, 1, 1)], widths, (5, 1, 1), (4, 5, 64), strict=True)
    for ((B, N, H), K, V, chunk), causal in product(cases, [causal for causal in (False, True) if serves(m, causal)]):
        leaves = [torch.zeros(B, H, N, w) for w in (K, K, V)]
        for x in leaves if qk_grad else leaves[2:]:
            x.requires_grad_()
        kwargs = {"chunk": chunk} if form == "fast" and name != "efficient" else {}
        declared = m.cost(B, N, H, K, V, form=form, causal=causal, qk_grad=qk_grad, **kwargs)
        assert_declared(declared, m.form(form), *leaves, is_causal=causal, **kwargs)


@pytest.mark.parametrize(("name", "causal"), CASES)
def test_growth(name, causal):
    """Every part of the fast form's cost is linear in N, every part of the reference's is quadratic. The state of
    recurrent decoding does not grow; a fit, which a new key changes, needs all keys again."""
    K, V = sp.symbols("K V", positive=True)
    sizes = (sym.B, sym.N, sym.H, K, V)
    fast, reference = (ALL[name].cost(*sizes, form=form, causal=causal) for form in ("fast", "reference"))
    for part in CALLS:
        assert sym.order(getattr(fast, part), sym.N) == {sym.N}
        assert sym.order(getattr(reference, part), sym.N) == {sym.N**2}
    expected = {sym.N} if name in FITTED else {sp.Integer(1)}
    assert sym.order(fast.decode, sym.N) == sym.order(fast.state_bytes, sym.N) == expected


def test_formulas_equal_numbers():
    """A closed form with the sizes substituted is the one called with them, if N is a multiple of the chunk."""
    sizes = {sym.B: 2, sym.N: 3 * CHUNK, sym.H: 3, sym.d: 16, sym.m: 10}
    for name, m in ALL.items():
        if name in HELD:
            continue
        width = {"m": sym.m} if m.fast.keywords["feature_map"].scales_keys else {}
        for form, causal in product(FORMS, (False, True)[: 1 + m.causal]):
            formula = m.cost(sym.B, sym.N, sym.H, sym.d, sym.d, form=form, causal=causal, **width)
            numbers = m.cost(2, 3 * CHUNK, 3, 16, 16, form=form, causal=causal, **({"m": 10} if width else {}))
            assert_formula(formula, numbers, sizes)


def test_products_by_hand():
    """Per token 4 K V + 2 K for the memory, in a causal call also 2 (K + V) C within the chunk; by the definition
    2 (K + V) N."""
    cost = MECHANISMS["linear"].cost
    assert cost(1, 128, 1, 8, 7, causal=True).forward == 128 * (2 * (8 + 7) * CHUNK + 4 * 8 * 7 + 2 * 8)
    assert cost(1, 128, 1, 8, 7).forward == 128 * (4 * 8 * 7 + 2 * 8)
    assert cost(1, 128, 1, 8, 7, form="reference").forward == 2 * 128**2 * (8 + 7)
    # FAVOR+ with m = 10 projects each query and key on the rows, and gathers z by a product with the keys' scales.
    favor = MECHANISMS["favor"].cost(1, 128, 1, 8, 7, m=10)
    assert favor.forward == 2 * (128 + 128) * 8 * 10 + 128 * (4 * 10 * 7 + 2 * 2 * 10)
