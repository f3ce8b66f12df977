"""Layers with heads of several kinds: each kind is what it is alone; what is stored, decoded, compiled; errors."""

from functools import partial
from itertools import pairwise

import pytest
import torch
from gradients import step, trained
from seeded import draw

from ortho import MultiheadAttention
from ortho.attention import MECHANISMS
from ortho.layers.hybrid import HEADS, HybridAttention
from ortho.layers.positional import PositionalHeads

# Sums of at most 1e2 rounded products of size 1 in float64, in different orders.
close = partial(torch.testing.assert_close, atol=1e-12, rtol=1e-12)
FORMS = pytest.mark.parametrize("form", ["reference", "fast"])
WIDTH, H, K = 24, 4, 6
SPLIT = {"learned": 1, "positional": 2, "stopped": 1}
SPLITS = [
    SPLIT,
    {"rotary": 1, "frozen": 1, "structured-stopped": 2},
    {"linear": 1, "window": 1, "structured": 1, "positional": 1},
    {"induction": 1, "selective-induction": 2, "positional": 1},
]


# The kinds that are not mechanisms alone, and mechanisms of all sorts of states and gates.
OF_ALL_SORTS = ["rotary", "window", "linear", "gated-delta", "gla", "selective-scan"]
KINDS = [kind for kind in HEADS if kind not in MECHANISMS] + OF_ALL_SORTS


def layer(heads=SPLIT, *, dtype=torch.float64, **kwargs):
    return HybridAttention(WIDTH, H, heads=heads, generator=torch.Generator().manual_seed(1), dtype=dtype, **kwargs)


@FORMS
@pytest.mark.parametrize("kind", KINDS)
def test_of_one_kind_it_is_that_layer(kind, form):
    """With the same weights bit for bit, forward and backward; and it has drawn what that layer draws."""
    one = layer({kind: H}, form=form)
    kwargs = {"head_dim": K, "form": form, "dtype": torch.float64}
    alone = HEADS[kind](WIDTH, H, generator=torch.Generator().manual_seed(1), **kwargs)
    x = draw(2, 7, WIDTH)
    for causal in (False, True):
        assert all(map(torch.equal, step(one, x, is_causal=causal), step(alone, x, is_causal=causal)))
    alone.load_state_dict(layer({kind: H}).groups[0].state_dict())


@FORMS
@pytest.mark.parametrize("kind", ["learned", "rotary", "frozen", "stopped", "window", "linear"])
def test_a_layer_is_the_sum_of_layers_of_some_of_its_heads(kind, form):
    """Of one kind in three groups, with rows of the layer's W_Q, W_K and W_V and columns of its W_O; also the gradients
    are rows and columns of the layer's."""
    one = layer([(kind, 1), (kind, 2), (kind, 1)], form=form)
    whole = HEADS[kind](WIDTH, H, head_dim=K, form=form, dtype=torch.float64)
    cuts = [slice(a * K, b * K) for a, b in pairwise((0, 1, 3, 4))]
    with torch.no_grad():
        for group, rows in zip(one.groups, cuts, strict=True):
            group.weight_o.copy_(whole.weight_o[:, rows])
            group.weight_v.copy_(whole.weight_v[rows])
            for name in ("weight_q", "weight_k"):
                getattr(group.projection, name).copy_(getattr(whole.projection, name)[rows])
    x = draw(2, 7, WIDTH)
    for kwargs in ({}, {"is_causal": True}, {"attn_mask": draw(2, H, 1, 7, seed=3) > -0.5}):
        y, dx, *gradients = step(one, x, **kwargs)
        expected, expected_dx, *of_whole = step(whole, x, **kwargs)
        close(y, expected)
        close(dx, expected_dx)
        names = list(trained(whole))
        for i, rows in enumerate(cuts):
            for j, name in enumerate(names):
                of_rows = of_whole[j][:, rows] if name == "weight_o" else of_whole[j][rows]
                close(gradients[i * len(names) + j], of_rows)


@pytest.mark.parametrize("kind", KINDS)
def test_initial_variance(kind):
    """1/d for every weight, beside whatever others: of the entries of a uniform law the variance is estimated with a
    relative spread of sqrt(0.8 / n), 0.35 % for n = 64 * 1024; the bound is ten of them."""
    other = "linear" if kind == "learned" else "learned"
    heads = {other: 15, kind: 1}
    one = HybridAttention(1024, 16, heads=heads, generator=torch.Generator().manual_seed(0)).groups[1]
    weights = [one.weight_v, one.weight_o]
    if kind != "positional":
        weights += [one.projection.weight_q, one.projection.weight_k]
    for weight in weights:
        assert weight.numel() == 64 * 1024
        assert abs(weight.square().mean().item() * 1024 - 1) < 0.04


@pytest.mark.parametrize("heads", SPLITS, ids=str)
def test_autocast(heads):
    """Products in bfloat16, of 8 bits: outputs and gradients differ from float32's by some roundings of 2^-9 a number,
    in the norm. What is wrong in one of four heads would show at 1/2."""
    one, x = layer(heads, dtype=torch.float32), draw(2, 33, WIDTH, dtype=torch.float32)
    for causal in (False, True):
        expected = step(one, x, is_causal=causal)
        with torch.autocast("cpu", torch.bfloat16):
            y = one(leaf := x.clone().requires_grad_(), is_causal=causal)
        assert y.dtype == torch.bfloat16
        found = [y, *torch.autograd.grad(y, [leaf, *trained(one).values()], draw(*y.shape, seed=9).bfloat16())]
        for a, b in zip(found, expected, strict=True):
            assert (a - b).norm() < 8 * 2**-8 * b.norm()


def test_kinds_of_ones_own():
    """A class, or what makes a layer of some heads, beside names; twice the same, too."""
    fixed = partial(PositionalHeads, patterns=("next", "end"))
    one = layer([(MultiheadAttention, 1), (fixed, 2), ("learned", 1)])
    assert [type(group) for group in one.groups] == [MultiheadAttention, PositionalHeads, MultiheadAttention]
    assert [p.name for p in one.groups[1].patterns] == ["next", "end"]
    assert one(draw(2, 5, WIDTH)).shape == (2, 5, WIDTH)
