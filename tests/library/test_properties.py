"""What must hold for every attention mechanism, every projection and every layer, on random shapes (hypothesis).

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
from types import SimpleNamespace

import pytest
import torch
from gradients import step
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refuses
from sample import WHOLE, repeats
from synthesizer_layers import CASES

from ortho import (
    MECHANISMS,
    PROJECTIONS,
    ConvolvedAttention,
    FrozenQKAttention,
    HybridAttention,
    InductionHeads,
    MultiheadAttention,
    PositionalHeads,
    RandomFeatureAttention,
    SynthesizerAttention,
    TransformerBlock,
)
from ortho.attention.linear.favor import PositiveFeatures
from ortho.attention.linear.linear_attention import linear_attention_reference
from ortho.layers.short_convolution import short_convolution

# A mechanism sees only a projection's queries and keys, and whether they need a gradient. So each mechanism has one
# projection that passes the gradient and, where gradients are tested, one that stops it; and each projection is tested
# with one mechanism.
PAIRS = [("learned", a) for a in MECHANISMS] + [(p, "softmax") for p in PROJECTIONS if p != "learned"]
GRADIENT_PAIRS = PAIRS + [("stopped", a) for a in MECHANISMS if a != "softmax"]
CAUSAL_PAIRS = [(p, a) for p, a in PAIRS if MECHANISMS[a].causal]

# The other layers. Each takes (width, heads, *, form, generator, dtype); the tests name it in place of an attention.
H, LONGEST = 4, 40
SPLITS = [
    {"learned": 1, "positional": 3},
    {"positional": 1, "learned": 1, "structured-stopped": 2},
    {"rotary": 1, "stopped": 1, "window": 1, "linear": 1},
    {"linear": 2, "frozen": 1, "structured": 1},
    {"learned": 1, "frozen": 1, "stopped": 1, "linear": 1},
    {"positional": 4},
    {"induction": 1, "selective-induction": 1, "positional": 1, "learned": 1},
]
PATTERNS = ("previous", "next", "right", "end")


def random_features(width, heads, *, form, generator, dtype):
    attention = RandomFeatureAttention(width // heads, 8, generator=generator, dtype=dtype)
    if form == "reference":
        attention = partial(linear_attention_reference, feature_map=PositiveFeatures(attention.features))
    return MultiheadAttention(width, heads, attention=attention, generator=generator, dtype=dtype)


LAYERS = {str(heads): partial(HybridAttention, heads=heads) for heads in SPLITS}
LAYERS |= {
    "stopped, grouped": partial(FrozenQKAttention, projection="stopped", num_kv_heads=2, bias=True),
    "induction of three": partial(InductionHeads, tokens=3),
    "induction with a sink": partial(InductionHeads, tokens=2, key_dim=9, sink=0.75),
    "patterns": partial(PositionalHeads, patterns=PATTERNS),
    "random features": random_features,
    "convolved": ConvolvedAttention,
    "convolved patterns": partial(ConvolvedAttention, of=PositionalHeads),
    "convolved kinds": partial(ConvolvedAttention, of=HybridAttention, heads=SPLITS[0]),
}
KINDS = {"layer": HybridAttention, "heads": SPLITS[0]}
BLOCKS = {"block": TransformerBlock, "block of kinds": partial(TransformerBlock, **KINDS)}


def synthesizer(width, heads, *, source, form, **kwargs):
    del form  # it has but one
    return SynthesizerAttention(width, heads, LONGEST, source=source, **kwargs)


SYNTHESIZERS = {f"synthesizer {name}": partial(synthesizer, source=source) for name, source in CASES.items()}
OTHERS = LAYERS | BLOCKS | SYNTHESIZERS
LAYER = SimpleNamespace(causal=True, bidirectional=True, positional=True, data_dependent=False)  # in place of an entry


def cases(pairs):
    """Pairs and other layers in both forms; Synthesizers, and blocks of tested layers, in the fast one."""
    own = [("", name) for name in OTHERS]
    both = [(p, a) for p, a in pairs + own if WHOLE or a not in BLOCKS | SYNTHESIZERS]
    rows = [("reference", *pair) for pair in both] + [("fast", *pair) for pair in pairs + own]
    return pytest.mark.parametrize(("form", "projection", "attention"), rows)


# Two float64 computations of the same sums in different orders: at most about 1e3 rounded terms (2e-13), magnified by
# the exponentials of scores up to 20 (4e-12). The bound leaves a factor 25; a wrong term would show at 1e-2.
close = partial(torch.testing.assert_close, atol=1e-10, rtol=1e-10)
# With few tokens a fit solves nearly singular systems, with condition numbers up to about 1e6 (3e-10 was seen).
close_fit = partial(torch.testing.assert_close, atol=1e-8, rtol=1e-8)

shapes = st.tuples(st.integers(1, 3), st.integers(1, 40), st.sampled_from([(4, 1), (8, 2), (12, 3)]))
seeds = st.integers(0, 2**32 - 1)
examples = settings(max_examples=repeats(8, 25), deadline=None, derandomize=True)
each_form = settings(examples, max_examples=repeats(5, 25))  # of both forms together, which are one function


def causality(attention, wanted):
    """Whether a call is causal: as wanted, or in the only way that the mechanism has."""
    mechanism = MECHANISMS.get(attention, LAYER)
    return (wanted and mechanism.causal) or not mechanism.bidirectional


def closeness(attention):
    """The assertion, with its tolerance, that two computations of the same are equal."""
    return close_fit if MECHANISMS.get(attention, LAYER).data_dependent else close


def pair(projection, attention, width, heads, seed):
    """The same layer in both forms, float64; layers other than of a mechanism have four heads, and kernels and shares
    that say something."""
    forms = []
    for form in ("reference", "fast"):
        g = torch.Generator().manual_seed(seed)
        kwargs = {"form": form, "generator": g, "dtype": torch.float64}
        if attention in OTHERS:
            one = OTHERS[attention](width, H, **kwargs)
            with torch.no_grad():
                for key, parameter in one.named_parameters():
                    if key.rpartition(".")[2] in ("kernel", "mixing", "values"):
                        parameter.normal_(generator=g)
        else:
            one = MultiheadAttention(width, heads, projection=projection, attention=attention, **kwargs)
        forms.append(one)
    return forms


def inputs(shape, seed):
    batch, length, (width, heads) = shape
    g = torch.Generator().manual_seed(seed)
    return torch.randn(batch, length, width, generator=g, dtype=torch.float64), width, heads, g


@pytest.mark.parametrize(("projection", "attention"), [*GRADIENT_PAIRS, *(("", name) for name in LAYERS)])
@given(shape=shapes, seed=seeds, causal=st.booleans(), padded=st.sampled_from(["no", "all heads", "each head"]))
@examples
def test_fast_equals_reference(projection, attention, shape, seed, causal, padded):
    """Outputs and every gradient; with padding too, anywhere, up to a sequence that is padding altogether."""
    x, width, heads, g = inputs(shape, seed)
    causal = causality(attention, causal)
    mask = None
    if padded != "no":
        several = padded == "each head" and attention in LAYERS and not attention.startswith("convolved")
        axes = (shape[0], H if several else 1, 1)
        share = torch.randint(0, 5, (*axes, 1), generator=g) / 4  # none, some or all of a sequence
        mask = torch.rand(*axes, shape[1], generator=g) < share  # (B, 1 or H, 1, N)
    d_out = torch.randn(x.shape, generator=g, dtype=x.dtype)
    layers = pair(projection, attention, width, heads, seed)
    reference, fast = (
        step(layer, x, d_out, unused=attention in LAYERS, is_causal=causal, attn_mask=mask) for layer in layers
    )
    close(fast, reference)


@cases(CAUSAL_PAIRS)
@given(shape=shapes, seed=seeds, data=st.data())
@each_form
def test_the_future_leaves_the_prefix(form, projection, attention, shape, seed, data):
    """New tokens after a cut, however large, change nothing before it: bit for bit."""
    x, width, heads, g = inputs(shape, seed)
    layer = pair(projection, attention, width, heads, seed)[form == "fast"]
    cut = data.draw(st.integers(0, shape[1]))
    other = x.clone()
    other[:, cut:] = 30 * torch.randn(other[:, cut:].shape, generator=g, dtype=x.dtype)
    y = layer(x, is_causal=True)
    assert torch.equal(y[:, :cut], layer(other, is_causal=True)[:, :cut])
    if attention in OTHERS:
        close(torch.cat([layer(item[None], is_causal=True) for item in x]), y)


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
@pytest.mark.parametrize("name", LAYERS | BLOCKS)
@given(shape=shapes, seed=seeds, data=st.data())
@each_form
def test_reading_on_with_a_cache(name, form, shape, seed, data):
    """The same as the whole; a copy of the cache reads on by itself."""
    x, width, heads, _ = inputs(shape, seed)
    one = pair("", name, width, heads, seed)[form == "fast"]
    cuts = data.draw(st.lists(st.integers(1, shape[1]), max_size=3).map(lambda c: sorted({*c, shape[1]})))
    cached = (one.attention if name in BLOCKS else one).new_cache(shape[1])
    read = []
    assert (cached.length, cached.nbytes) == (0, 0)
    with torch.no_grad():  # as a block computes with gradients beside its attention
        for start, stop in zip([0, *cuts[:-1]], cuts, strict=True):
            piece, copy = x[:, start:stop], cached.copy()
            read.append(one(piece, is_causal=True, cache=cached))
            close(one(piece, is_causal=True, cache=copy), read[-1])
            assert copy.length == cached.length == stop
    close(torch.cat(read, 1), one(x, is_causal=True))
    assert cached.nbytes > 0


@cases(PAIRS)
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
    if MECHANISMS.get(attention, LAYER).positional:
        return
    permutation = torch.randperm(shape[1], generator=g)
    if causal:
        before = permutation[permutation < shape[1] - 1]
        order = torch.cat([before, torch.tensor([shape[1] - 1])])
        closeness(attention)(layer(x[:, order], is_causal=True)[:, -1], y[:, -1])
        return
    closeness(attention)(layer(x[:, permutation]), y[:, permutation])


@cases(PAIRS)
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
    causal = causality(attention, attention in OTHERS and data.draw(st.booleans()))
    y = layer(x, is_causal=causal, attn_mask=mask)
    if length:
        closeness(attention)(y[:, :length], layer(x[:, :length], is_causal=causal))
    elif attention not in BLOCKS and attention != "stopped, grouped":  # what adds to zeros, or has a bias
        assert torch.equal(y, torch.zeros_like(y))
    assert torch.autograd.grad(y.sum(), x, allow_unused=True, materialize_grads=True)[0].isfinite().all()


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


@cases(PAIRS)
def test_float32_is_near_float64(form, projection, attention):
    """Rounding the input and the weights to float32 moves a score by its size times eps; 1e-4 is about 800 eps."""
    x = inputs((2, 33, (12, 3)), 5)[0]
    layer = pair(projection, attention, 12, 3, 5)[form == "fast"]
    causal = causality(attention, True)
    exact = layer(x, is_causal=causal)
    single = layer.float()(x.float(), is_causal=causal)
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), exact, atol=1e-4, rtol=1e-4)


# -- masks: padding by its own argument; shapes that may be meant in two ways are refused

B, N, D = 3, 5, 12
PADDING = torch.tensor([[False] * 5, [False, True, False, False, True], [False] * 4 + [True]])
MASKED = [*LAYERS, *BLOCKS, "synthesizer dense"]


def tokens(batch=B, *, length=N, seed=0):
    return torch.randn(batch, length, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("name", MASKED)
def test_padding_is_hidden(name):
    """Anywhere, the same as a mask of keys, and what padding holds does not matter."""
    one, x = pair("", name, D, H, 0)[1], tokens()
    y = one(x, key_padding_mask=PADDING)
    close(y, one(x, attn_mask=~PADDING[:, None, None]))
    louder = torch.where(PADDING[..., None], 9.0, x)
    close(one(louder, key_padding_mask=PADDING)[~PADDING], y[~PADDING])
    assert not torch.allclose(one(x)[~PADDING], y[~PADDING])


def test_groups_of_heads_are_not_taken_for_batches():
    """Two heads of a kind, two items: masks that tell heads apart. The layer is the sum of its groups."""
    one = HybridAttention(D, H, heads={"learned": 2, "rotary": 1, "frozen": 1}, dtype=torch.float64)
    masks = torch.randn(1, H, N, N, generator=torch.Generator().manual_seed(1)) > -1
    x = tokens(2)
    y = one(x, attn_mask=masks)
    own = masks.split((2, 1, 1), 1)
    close(y, sum(group(x, attn_mask=mask) for group, mask in zip(one.groups, own, strict=True)))
    close(y, one(x, attn_mask=masks[0]))
    for shape in ((2, N, N), (2, 2, N, N)):  # as many as a group has heads
        wanted = r"^attn_mask: expected a shape that broadcasts to \(2, 4, 5, 5\), got"
        refuses(wanted, one, x, attn_mask=masks.new_ones(shape))


def test_a_convolution_and_a_context():
    """The masks are of the context's tokens, and leave those of x as they are."""
    one, x, context = pair("", "convolved", D, H, 0)[1], tokens(), tokens(length=7, seed=1)
    padding = torch.tensor([[False] * 7, [True] * 6 + [False], [False, True] * 3 + [False]])
    expected = one.attention(short_convolution(x, one.kernel), context, key_padding_mask=padding)
    close(one(x, context=context, key_padding_mask=padding), expected)
    close(one(x, context=context, attn_mask=~padding[:, None, None]), expected)
