"""Attention by the exchanged pass in a layer: the same as with autograd, less kept, half precision, errors."""

import weakref
from functools import partial

import pytest
import torch
from gradients import step, trained
from seeded import draw

from ortho import MultiheadAttention
from ortho.cost.counting import saved_bytes
from ortho.layers.frozen_qk import FrozenQKAttention

# Sums of at most 1e2 rounded products of size 1 in float64, in different orders.
close = partial(torch.testing.assert_close, atol=1e-12, rtol=1e-12)
PROJECTIONS = ["stopped", "structured-stopped"]
FORMS = pytest.mark.parametrize("form", ["reference", "fast"])
BOTH = pytest.mark.parametrize("projection", PROJECTIONS)
B, N, WIDTH, H = 2, 9, 24, 4


def pair(projection="structured-stopped", *, dtype=torch.float64, form="fast", **kwargs):
    """The layer, and one that leaves its gradient to autograd, with the same weights; no bias is 0."""
    kwargs |= {"projection": projection, "dtype": dtype}
    g = torch.Generator().manual_seed(1)
    one = FrozenQKAttention(WIDTH, H, generator=g, form=form, **kwargs)
    with torch.no_grad():
        for name, bias in one.named_parameters():
            if "bias" in name:
                bias.normal_(generator=g)
    other = MultiheadAttention(WIDTH, H, generator=g, form=form, **kwargs)
    other.load_state_dict(one.state_dict())
    return one, other


def holes():
    """A mask of pairs in which a token attends to nothing, and another is attended to by none."""
    mask = draw(B, H, N, N, seed=3) > -0.5
    mask[:, :, 4], mask[..., 6] = False, False
    return mask


MASKS = {
    "none": None,
    "keys": torch.arange(N) < 7,
    "keys of items": (torch.arange(N) < torch.tensor([[0], [5]]))[:, None, None],  # one has none
    "keys of heads": draw(B, H, 1, N, seed=2) > 0,
    "pairs": holes()[0, 0],
    "pairs of heads": holes(),
}


@FORMS
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("causal", [False, True])
@BOTH
def test_as_by_autograd(projection, causal, mask, form):
    """Outputs and all gradients, also of rows that attend to nothing and of keys that none attends to."""
    for kwargs in ({}, {"bias": True, "num_kv_heads": 2}, {"num_kv_heads": 1}, {"head_dim": 4}):
        one, other = pair(projection, form=form, **kwargs)
        found, expected = (step(m, draw(B, N, WIDTH), attn_mask=MASKS[mask], is_causal=causal) for m in (one, other))
        close(found, expected)


def test_what_needs_no_gradient():
    """Into x none is made where it needs none; where nothing needs one, nothing is kept."""
    one, other = pair()
    x, upstream = draw(B, N, WIDTH), draw(B, N, WIDTH, seed=9)
    close(*(torch.autograd.grad(m(x), [*trained(m).values()], upstream) for m in (one, other)))
    one.requires_grad_(False)
    with saved_bytes() as kept:
        assert not one(x).requires_grad
    assert kept() == 0
    leaf = x.requires_grad_()
    (found,), (expected,) = (torch.autograd.grad(m(leaf), leaf, upstream) for m in (one, other))
    close(found, expected)


@BOTH
@pytest.mark.parametrize("autocast", [True, False])
@pytest.mark.parametrize("causal", [False, True])
def test_half_precision(projection, causal, autocast):
    """Under autocast, or with the weights in bfloat16: no further from float64 than autograd's layer is, but for a
    fifth, as both round to 8 bits, and some numbers at other places."""
    kind = torch.float32 if autocast else torch.bfloat16
    layers = pair(projection, dtype=kind)
    x = draw(1, 200, WIDTH, dtype=kind)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        found, theirs = (step(m, x, is_causal=causal) for m in layers)
    assert [t.dtype for t in found] == [t.dtype for t in theirs] and found[0].dtype == torch.bfloat16
    exact = step(layers[1].double(), x.double(), is_causal=causal)
    for mine, standard, value in zip(found, theirs, exact, strict=True):
        assert (mine - value).norm() < 1.2 * (standard - value).norm() < 0.02 * value.norm()


@BOTH
@pytest.mark.parametrize("autocast", [True, False])
def test_queries_and_keys_are_made_twice(projection, autocast):
    """Alike, whether the backward pass runs inside autocast or outside of it; and nobody holds them in between."""
    one, _ = pair(projection, dtype=torch.float32)
    x, gradients, made, alive = draw(B, N, WIDTH, dtype=torch.float32).requires_grad_(), [], [], []
    make = one.projection.forward

    def recorded(x):
        found = make(x)
        made.append([t.clone() for t in found])
        alive.extend(map(weakref.ref, found))
        return found

    one.projection.forward = recorded
    for inside in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = one(x, is_causal=True)
        assert all(reference() is None for reference in alive)
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):
            gradients.append(torch.autograd.grad(y, [x, *trained(one).values()], torch.ones_like(y)))
    if autocast:  # else a backward pass inside would round PyTorch's own products
        assert all(map(torch.equal, *gradients))
    assert len(made) == 4 and all(torch.equal(a, b) for again in made[1:] for a, b in zip(made[0], again, strict=True))
    assert made[0][0].dtype == (torch.bfloat16 if autocast else torch.float32)
