"""What must hold for every layer: its forms agree, the past, cuts, caches, masks; on random shapes (hypothesis)."""

from functools import partial

import pytest
import torch
from gradients import step
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refuses
from sample import WHOLE, repeats
from synthesizer_layers import CASES

from ortho import (
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
from ortho.layers.short_convolution import short_convolution

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


def random_features(width, heads, *, generator, dtype, **kwargs):
    attention = RandomFeatureAttention(width // heads, 8, generator=generator, dtype=dtype, **kwargs)
    return MultiheadAttention(width, heads, attention=attention, generator=generator, dtype=dtype)


# Each takes (width, heads, *, form, generator, dtype).
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
ALL = LAYERS | BLOCKS | SYNTHESIZERS
# See tests/library/test_properties.py: some 1e3 rounded terms, magnified by exponentials of scores up to 20.
close = partial(torch.testing.assert_close, atol=1e-10, rtol=1e-10)

shapes = st.tuples(st.integers(1, 3), st.integers(1, LONGEST), st.sampled_from([4, 8, 12, 24]))
seeds = st.integers(0, 2**32 - 1)
examples = settings(max_examples=repeats(3, 15), deadline=None, derandomize=True)
# Every layer in its fast form; the definition of each kind of heads, of the others every night.
FORMS = [(name, form) for name in ALL for form in ("fast", "reference") if form == "fast" or WHOLE or name in LAYERS]
forms = pytest.mark.parametrize(("name", "form"), FORMS)


def layer(name, form, width, seed):
    """A layer whose kernel and shares say something."""
    g = torch.Generator().manual_seed(seed)
    one = ALL[name](width, H, form=form, generator=g, dtype=torch.float64)
    with torch.no_grad():
        for key, parameter in one.named_parameters():
            if key.rpartition(".")[2] in ("kernel", "mixing", "values"):
                parameter.normal_(generator=g)
    return one


def inputs(shape, seed):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=g, dtype=torch.float64), g


@pytest.mark.parametrize("name", LAYERS)
@given(shape=shapes, seed=seeds, causal=st.booleans(), padded=st.sampled_from(["no", "all heads", "each head"]))
@examples
def test_fast_equals_reference(name, shape, seed, causal, padded):
    """Outputs and every gradient; with padded keys too, up to a sequence that is padding altogether."""
    x, g = inputs(shape, seed)
    mask = None
    if padded != "no":
        several = padded == "each head" and not name.startswith("convolved")
        lengths = torch.randint(0, shape[1] + 1, (shape[0], H if several else 1), generator=g)
        mask = (torch.arange(shape[1]) < lengths[..., None])[:, :, None]  # (B, h, 1, N)
    d_out = torch.randn(x.shape, generator=g, dtype=x.dtype)
    layers = (layer(name, form, shape[2], seed) for form in ("reference", "fast"))
    reference, fast = (step(one, x, d_out, unused=True, is_causal=causal, attn_mask=mask) for one in layers)
    close(fast, reference)


@forms
@given(shape=shapes, seed=seeds, data=st.data())
@examples
def test_the_future_leaves_the_prefix(name, form, shape, seed, data):
    """New tokens after a cut, however large, change nothing before it: bit for bit. Items of a batch do not see each
    other."""
    x, g = inputs(shape, seed)
    one, cut = layer(name, form, shape[2], seed), data.draw(st.integers(0, shape[1]))
    y, other = one(x, is_causal=True), x.clone()
    other[:, cut:] = 30 * torch.randn(other[:, cut:].shape, generator=g, dtype=x.dtype)
    assert torch.equal(y[:, :cut], one(other, is_causal=True)[:, :cut])
    close(torch.cat([one(item[None], is_causal=True) for item in x]), y)
    close(torch.cat([one(item[None]) for item in x]), one(x))


@pytest.mark.parametrize(("name", "form"), [case for case in FORMS if case[0] not in SYNTHESIZERS])
@given(shape=shapes, seed=seeds, data=st.data())
@examples
def test_cut_equals_whole(name, form, shape, seed, data):
    """By a cache, of which a copy reads on by itself."""
    x, _ = inputs(shape, seed)
    one = layer(name, form, shape[2], seed)
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


@forms
@given(shape=shapes, seed=seeds, causal=st.booleans(), data=st.data())
@examples
def test_padding_equals_truncation(name, form, shape, seed, causal, data):
    """Masked keys are as good as absent, whatever they hold; with nothing left to attend to, zeros without NaN."""
    x, _ = inputs(shape, seed)
    one, length = layer(name, form, shape[2], seed), data.draw(st.integers(0, shape[1]))
    there = torch.arange(shape[1]) < length
    x[:, length:] *= 30
    y = one(x.requires_grad_(), attn_mask=there[None, None, None], is_causal=causal)
    if length:
        close(y[:, :length], one(x[:, :length], is_causal=causal))
        close(one(x, key_padding_mask=~there.expand(shape[0], -1), is_causal=causal)[:, :length], y[:, :length])
    elif name not in BLOCKS and name != "stopped, grouped":  # what adds to zeros, or has a bias
        assert torch.equal(y, torch.zeros_like(y))
    assert torch.autograd.grad(y.sum(), x, allow_unused=True, materialize_grads=True)[0].isfinite().all()


@forms
def test_float32_is_near_float64(name, form):
    """Rounding the input and the weights to float32 moves a score by its size times eps; 1e-4 is some 800 eps."""
    x, _ = inputs((2, 33, 24), 5)
    one = layer(name, form, 24, 5)
    exact = one(x, is_causal=True)
    single = one.float()(x.float(), is_causal=True)
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
    one, x = layer(name, "fast", D, 0), tokens()
    y = one(x, key_padding_mask=PADDING)
    close(y, one(x, attn_mask=~PADDING[:, None, None]))
    louder = torch.where(PADDING[..., None], 9.0, x)
    close(one(louder, key_padding_mask=PADDING)[~PADDING], y[~PADDING])
    assert not torch.allclose(one(x)[~PADDING], y[~PADDING])


def test_groups_of_heads_are_not_taken_for_batches():
    """Two heads of a kind, two items: masks that tell heads apart."""
    one = HybridAttention(D, H, heads={"learned": 2, "rotary": 2}, dtype=torch.float64)
    masks = torch.randn(1, H, N, N, generator=torch.Generator().manual_seed(1)) > -1
    x = tokens(2)
    y = one(x, attn_mask=masks)
    close(y, sum(group(x, attn_mask=masks[:, h : h + 2]) for group, h in zip(one.groups, (0, 2), strict=True)))
    close(y, one(x, attn_mask=masks[0]))
    for shape in ((2, N, N), (2, 2, N, N)):  # as many as a group has heads
        wanted = r"^attn_mask: expected a shape that broadcasts to \(2, 4, 5, 5\), got"
        refuses(wanted, one, x, attn_mask=masks.new_ones(shape))


def test_a_convolution_and_a_context():
    """The masks are of the context's tokens, and leave those of x as they are."""
    one, x, context = layer("convolved", "fast", D, 0), tokens(), tokens(length=7, seed=1)
    padding = torch.tensor([[False] * 7, [True] * 6 + [False], [False, True] * 3 + [False]])
    expected = one.attention(short_convolution(x, one.kernel), context, key_padding_mask=padding)
    close(one(x, context=context, key_padding_mask=padding), expected)
    close(one(x, context=context, attn_mask=~padding[:, None, None]), expected)
