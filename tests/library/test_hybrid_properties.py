"""What must hold for every layer with heads of several kinds, on random shapes (hypothesis)."""

from functools import partial

import pytest
import torch
from extent import WHOLE, repeats
from hypothesis import given, settings
from hypothesis import strategies as st

from ortho.layers.hybrid import HEADS, HybridAttention

SPLITS = [
    {"learned": 1, "positional": 3},
    {"positional": 1, "learned": 1, "structured-stopped": 2},
    {"rotary": 1, "stopped": 1, "window": 1, "linear": 1},
    {"linear": 2, "frozen": 1, "structured": 1},
    {"learned": 1, "frozen": 1, "stopped": 1, "linear": 1},
    {"positional": 4},
    {"induction": 2, "positional": 1, "learned": 1},
]
CONSTANT = {"stopped", "structured-stopped", "induction"}  # whose queries and keys pass on no gradient
POSITIONAL = {"rotary", "positional", "window", "induction"}  # of which the order of the tokens makes a difference
H = 4
# See tests/library/test_properties.py: some 1e3 rounded terms, magnified by exponentials of scores up to 20.
close = partial(torch.testing.assert_close, atol=1e-10, rtol=1e-10)

shapes = st.tuples(st.integers(1, 3), st.integers(1, 40), st.sampled_from([4, 8, 12, 24]))
seeds = st.integers(0, 2**32 - 1)
examples = settings(max_examples=repeats(6, 15), deadline=None, derandomize=True)
splits = pytest.mark.parametrize("heads", SPLITS, ids=str)
forms = pytest.mark.parametrize("form", ["reference", "fast"])


def layer(heads, form, width, seed):
    g = torch.Generator().manual_seed(seed)
    return HybridAttention(width, H, heads=heads, form=form, generator=g, dtype=torch.float64)


def inputs(shape, seed):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=g, dtype=torch.float64), g


def test_the_splits_have_all_kinds():
    assert {kind for heads in SPLITS for kind in heads} == set(HEADS)


@splits
@given(shape=shapes, seed=seeds, causal=st.booleans(), padded=st.sampled_from(["no", "all heads", "each head"]))
@examples
def test_fast_equals_reference(heads, shape, seed, causal, padded):
    """Outputs and every gradient; with padded keys too, up to a sequence that is padding altogether."""
    x, g = inputs(shape, seed)
    mask = None
    if padded != "no":
        lengths = torch.randint(0, shape[1] + 1, (shape[0], H if padded == "each head" else 1), generator=g)
        mask = (torch.arange(shape[1]) < lengths[..., None])[:, :, None]  # (B, h, 1, N)
    d_out = torch.randn(x.shape, generator=g, dtype=x.dtype)
    results = []
    for form in ("reference", "fast"):
        one, leaf = layer(heads, form, shape[2], seed), x.clone().requires_grad_()
        y = one(leaf, is_causal=causal, attn_mask=mask)
        results.append([y, *torch.autograd.grad(y, [leaf, *one.parameters()], d_out)])
    for reference, fast in zip(*results, strict=True):
        close(fast, reference)


@forms
@splits
@given(shape=shapes, seed=seeds, data=st.data())
@examples
def test_the_future_leaves_the_prefix(heads, form, shape, seed, data):
    """New tokens after a cut, however large, change nothing before it: bit for bit."""
    x, g = inputs(shape, seed)
    one, cut = layer(heads, form, shape[2], seed), data.draw(st.integers(0, shape[1]))
    other = x.clone()
    other[:, cut:] = 30 * torch.randn(other[:, cut:].shape, generator=g, dtype=x.dtype)
    assert torch.equal(one(x, is_causal=True)[:, :cut], one(other, is_causal=True)[:, :cut])


@forms
@splits
@given(shape=shapes, seed=seeds, data=st.data())
@examples
def test_cut_equals_whole(heads, form, shape, seed, data):
    """By states, which are the same in the end, and by a cache."""
    x, _ = inputs(shape, seed)
    one = layer(heads, form, shape[2], seed)
    cuts = data.draw(st.lists(st.integers(1, shape[1]), max_size=3).map(lambda c: sorted({*c, shape[1]})))
    whole, final = one(x, is_causal=True, return_state=True)
    pieces, read, state, cache = [], [], None, one.new_cache(shape[1])
    for start, stop in zip([0, *cuts[:-1]], cuts, strict=True):
        y, state = one(x[:, start:stop], is_causal=True, initial_state=state, return_state=True)
        pieces.append(y)
        read.append(one(x[:, start:stop], is_causal=True, cache=cache))
    close(torch.cat(pieces, 1), whole)
    close(torch.cat(read, 1), whole)
    assert len(state) == len(final) == len(one.groups)
    for parts in zip(state, final, strict=True):
        for piecewise, once in zip(*parts, strict=True):
            close(piecewise, once)


@forms
@splits
@given(shape=shapes, seed=seeds)
@examples
def test_symmetries(heads, form, shape, seed):
    """Items of a batch do not see each other; without causality, and heads that know of positions, permuted tokens give
    permuted outputs."""
    x, g = inputs(shape, seed)
    one = layer(heads, form, shape[2], seed)
    y = one(x)
    close(torch.cat([one(item[None]) for item in x]), y)
    if not POSITIONAL & set(heads):
        permutation = torch.randperm(shape[1], generator=g)
        close(one(x[:, permutation]), y[:, permutation])


@forms
@splits
@given(shape=shapes, seed=seeds, data=st.data())
@examples
def test_padding_equals_truncation(heads, form, shape, seed, data):
    """Masked keys are as good as absent, whatever they hold; with nothing left to attend to, zeros without NaN."""
    x, _ = inputs(shape, seed)
    one, length = layer(heads, form, shape[2], seed), data.draw(st.integers(0, shape[1]))
    mask = (torch.arange(shape[1]) < length)[None, None, None]
    x[:, length:] *= 30
    y = one(x.requires_grad_(), attn_mask=mask)
    if length:
        close(y[:, :length], one(x[:, :length]))
    else:
        assert torch.equal(y, torch.zeros_like(y))
    assert torch.autograd.grad(y.sum(), x)[0].isfinite().all()


@forms
@splits
def test_gradients_by_finite_differences(heads, form):
    """With respect to x, where q and k pass it on; where they do not, with respect to what is trained."""
    x, _ = inputs((2, 5, 8), 0)
    one = layer(heads, form, 8, 0)
    if not CONSTANT & set(heads):
        assert torch.autograd.gradcheck(lambda x: one(x, is_causal=True), x.requires_grad_(), fast_mode=not WHOLE)
    names, weights = zip(*one.named_parameters(), strict=True)

    def call(*weights):
        return torch.func.functional_call(one, dict(zip(names, weights, strict=True)), (x,), {"is_causal": True})

    assert torch.autograd.gradcheck(call, weights, fast_mode=True)


@forms
@splits
def test_float32_is_near_float64(heads, form):
    """Rounding the input and the weights to float32 moves a score by its size times eps; 1e-4 is some 800 eps."""
    x, _ = inputs((2, 33, 24), 5)
    one = layer(heads, form, 24, 5)
    exact = one(x, is_causal=True)
    single = one.float()(x.float(), is_causal=True)
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), exact, atol=1e-4, rtol=1e-4)
