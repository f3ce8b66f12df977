"""What must hold for every attention mechanism and for every projection, on random shapes (hypothesis).

No other file needs to show these for a listed mechanism, in the layer that calls it:
- the fast form equals the definition: outputs, all gradients, with and without padded keys, wherever they are;
- new tokens leave the prefix as it was, bit for bit; a sequence cut anywhere gives outputs and state of the whole;
- items of a batch do not see each other; permuted tokens give permuted outputs where positions do not count;
- masked keys are as good as absent, and a row that may attend to nothing gives zeros without NaN;
- gradients agree with finite differences in both forms; float32 is near float64.

Other files test all mechanisms too: pieces, such as chunks and tiles, and second derivatives in `test_pieces.py`; costs
and the counted decode step in `test_cost.py`; decoding with a cache in `test_decoding.py`; refusals in
`test_refusals.py`; compiling in `test_compile.py`.
"""

from functools import partial

import pytest
import torch
from gradients import step
from hypothesis import given, settings
from hypothesis import strategies as st
from sample import WHOLE, repeats

from ortho import MECHANISMS, PROJECTIONS, MultiheadAttention

# A mechanism sees only a projection's queries and keys, and whether they need a gradient. So each mechanism has one
# projection that passes the gradient and, where gradients are tested, one that stops it; and each projection is tested
# with one mechanism.
PAIRS = [("learned", a) for a in MECHANISMS] + [(p, "softmax") for p in PROJECTIONS if p != "learned"]
GRADIENT_PAIRS = PAIRS + [("stopped", a) for a in MECHANISMS if a != "softmax"]
CAUSAL_PAIRS = [(p, a) for p, a in PAIRS if MECHANISMS[a].causal]
# Two float64 computations of the same sums in different orders: at most about 1e3 rounded terms (2e-13), magnified by
# the exponentials of scores up to 20 (4e-12). The bound leaves a factor 25; a wrong term would show at 1e-2.
close = partial(torch.testing.assert_close, atol=1e-10, rtol=1e-10)
# With few tokens a fit solves nearly singular systems, with condition numbers up to about 1e6 (3e-10 was seen).
close_fit = partial(torch.testing.assert_close, atol=1e-8, rtol=1e-8)

shapes = st.tuples(st.integers(1, 3), st.integers(1, 40), st.sampled_from([(4, 1), (8, 2), (12, 3)]))
seeds = st.integers(0, 2**32 - 1)
examples = settings(max_examples=repeats(10, 25), deadline=None, derandomize=True)
each_form = settings(examples, max_examples=repeats(6, 25))  # of both forms together, which are one function


def causality(attention, wanted):
    """Whether a call is causal: as wanted, or in the only way that the mechanism has."""
    mechanism = MECHANISMS[attention]
    return (wanted and mechanism.causal) or not mechanism.bidirectional


def closeness(attention):
    """The assertion, with its tolerance, that two computations of the same are equal."""
    return close_fit if MECHANISMS[attention].data_dependent else close


def pair(projection, attention, width, heads, seed):
    """The same layer in both forms, float64."""
    forms = []
    for form in ("reference", "fast"):
        g = torch.Generator().manual_seed(seed)
        kwargs = {"projection": projection, "attention": attention, "form": form, "generator": g}
        forms.append(MultiheadAttention(width, heads, dtype=torch.float64, **kwargs))
    return forms


def inputs(shape, seed):
    batch, length, (width, heads) = shape
    g = torch.Generator().manual_seed(seed)
    return torch.randn(batch, length, width, generator=g, dtype=torch.float64), width, heads, g


@pytest.mark.parametrize(("projection", "attention"), GRADIENT_PAIRS)
@given(shape=shapes, seed=seeds, causal=st.booleans(), padded=st.booleans())
@examples
def test_fast_equals_reference(projection, attention, shape, seed, causal, padded):
    """Outputs and every gradient; with padding too, anywhere, up to a sequence that is padding altogether."""
    x, width, heads, g = inputs(shape, seed)
    causal = causality(attention, causal)
    mask = None
    if padded:
        share = torch.randint(0, 5, (shape[0], 1), generator=g) / 4  # none, some or all of a sequence
        mask = (torch.rand(shape[0], shape[1], generator=g) < share)[:, None, None]  # (B, 1, 1, N)
    d_out = torch.randn(x.shape, generator=g, dtype=x.dtype)
    layers = pair(projection, attention, width, heads, seed)
    reference, fast = (step(layer, x, d_out, is_causal=causal, attn_mask=mask) for layer in layers)
    close(fast, reference)


@pytest.mark.parametrize("form", ["reference", "fast"])
@pytest.mark.parametrize(("projection", "attention"), CAUSAL_PAIRS)
@given(shape=shapes, seed=seeds, data=st.data())
@each_form
def test_the_future_leaves_the_prefix(form, projection, attention, shape, seed, data):
    """New tokens after a cut, however large, change nothing before it: bit for bit."""
    x, width, heads, g = inputs(shape, seed)
    layer = pair(projection, attention, width, heads, seed)[form == "fast"]
    cut = data.draw(st.integers(0, shape[1]))
    other = x.clone()
    other[:, cut:] = 30 * torch.randn(other[:, cut:].shape, generator=g, dtype=x.dtype)
    assert torch.equal(layer(x, is_causal=True)[:, :cut], layer(other, is_causal=True)[:, :cut])


@pytest.mark.parametrize("form", ["reference", "fast"])
@pytest.mark.parametrize(("projection", "attention"), CAUSAL_PAIRS)
@given(shape=shapes, seed=seeds, data=st.data())
@each_form
def test_cut_equals_whole(form, projection, attention, shape, seed, data):
    x, width, heads, _ = inputs(shape, seed)
    layer = pair(projection, attention, width, heads, seed)[form == "fast"]
    cuts = data.draw(st.lists(st.integers(1, shape[1]), max_size=3).map(lambda c: sorted({*c, shape[1]})))
    whole, final = layer(x, is_causal=True, return_state=True)
    pieces, state = [], None
    for start, stop in zip([0, *cuts[:-1]], cuts, strict=True):
        y, state = layer(x[:, start:stop], is_causal=True, initial_state=state, return_state=True)
        pieces.append(y)
    close(torch.cat(pieces, 1), whole)
    close(state, final)


@pytest.mark.parametrize("form", ["reference", "fast"])
@pytest.mark.parametrize(("projection", "attention"), PAIRS)
@given(shape=shapes, seed=seeds)
@each_form
def test_symmetries(form, projection, attention, shape, seed):
    """Items of a batch do not see each other; without causality, permuted tokens give permuted outputs. If a mechanism
    is only causal, the order of earlier tokens does not change the answer to the last one."""
    x, width, heads, g = inputs(shape, seed)
    layer = pair(projection, attention, width, heads, seed)[form == "fast"]
    causal = causality(attention, False)
    y = layer(x, is_causal=causal)
    closeness(attention)(torch.cat([layer(item[None], is_causal=causal) for item in x]), y)
    if MECHANISMS[attention].positional:
        return
    permutation = torch.randperm(shape[1], generator=g)
    if causal:
        before = permutation[permutation < shape[1] - 1]
        order = torch.cat([before, torch.tensor([shape[1] - 1])])
        closeness(attention)(layer(x[:, order], is_causal=True)[:, -1], y[:, -1])
        return
    closeness(attention)(layer(x[:, permutation]), y[:, permutation])


@pytest.mark.parametrize("form", ["reference", "fast"])
@pytest.mark.parametrize(("projection", "attention"), PAIRS)
@given(shape=shapes, seed=seeds, data=st.data())
@each_form
def test_padding_equals_truncation(form, projection, attention, shape, seed, data):
    """Masked keys are as good as absent, whatever they hold; with nothing left to attend to, zeros without NaN."""
    x, width, heads, _ = inputs(shape, seed)
    layer = pair(projection, attention, width, heads, seed)[form == "fast"]
    length = data.draw(st.integers(0, shape[1]))
    mask = (torch.arange(shape[1]) < length)[None, None, None]
    x[:, length:] *= 30
    x.requires_grad_()
    causal = causality(attention, False)
    y = layer(x, is_causal=causal, attn_mask=mask)
    if length:
        closeness(attention)(y[:, :length], layer(x[:, :length], is_causal=causal))
    else:
        assert torch.equal(y, torch.zeros_like(y))
    assert torch.autograd.grad(y.sum(), x)[0].isfinite().all()


@pytest.mark.parametrize("form", ["reference", "fast"])
@pytest.mark.parametrize(("projection", "attention"), GRADIENT_PAIRS)
def test_gradients_by_finite_differences(form, projection, attention):
    x = inputs((2, 5, (4, 2)), 0)[0].requires_grad_()
    layer = pair(projection, attention, 4, 2, 0)[form == "fast"]
    if MECHANISMS[attention].data_dependent:
        return  # its gradient leaves out the fit, and is not the derivative; test_pieces.py holds the fit still
    if projection.endswith("stopped"):  # its gradient is by design not the derivative: hold q and k where they are
        q, k = layer.projection(x)
        layer.projection.forward = lambda x, context: (q, k)
    causal = causality(attention, True)
    assert torch.autograd.gradcheck(lambda x: layer(x, is_causal=causal), x, fast_mode=not WHOLE)


@pytest.mark.parametrize("form", ["reference", "fast"])
@pytest.mark.parametrize(("projection", "attention"), PAIRS)
def test_float32_is_near_float64(form, projection, attention):
    """Rounding the input and the weights to float32 moves a score by its size times eps; 1e-4 is about 800 eps."""
    x = inputs((2, 33, (12, 3)), 5)[0]
    layer = pair(projection, attention, 12, 3, 5)[form == "fast"]
    causal = causality(attention, True)
    exact = layer(x, is_causal=causal)
    single = layer.float()(x.float(), is_causal=causal)
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), exact, atol=1e-4, rtol=1e-4)
