"""The gradient of the values by an exchanged forward pass: as the definition has it, costs, what it keeps, errors; at
extreme scales and scores, and in half precision, where terms carry the log-sum-exp; in a layer."""

import os
import subprocess
import sys
import weakref
from functools import partial
from itertools import product
from math import sqrt
from pathlib import Path

import pytest
import torch
from counted import assert_declared
from gradients import step, trained
from refusals import refuses
from seeded import draw
from torch import nn
from torch.autograd import grad

from ortho import MultiheadAttention
from ortho.attention.softmax import frozen_qk
from ortho.attention.softmax.frozen_qk import (
    channels,
    frozen_qk_attention,
    frozen_qk_attention_reference,
    recomputed_attention,
)
from ortho.cost import of
from ortho.cost.counting import saved_bytes
from ortho.cost.mechanisms.softmax import frozen_qk_cost
from ortho.layers.frozen_qk import FrozenQKAttention

ROOT = Path(__file__).parents[2]
B, H, K = 2, 4, 8
# Exponentials of scores up to 20, each off by some roundings of it, 20 x 8 x 1e-16 in all, and sums of at most 70.
close = partial(torch.testing.assert_close, atol=1e-13, rtol=1e-13)
causal_or_not = pytest.mark.parametrize("causal", [False, True])


def operands(N, lead=(B, H), dtype=torch.float64, width=K, values=K):
    """q, k, v with a gradient, and the gradient of the output."""
    widths = (width, width, values, values)
    q, k, v, do = (draw(*lead, N, size, seed=seed).to(dtype) for seed, size in enumerate(widths))
    return q, k, v.requires_grad_(), do


def results(form, q, k, v, do, **kwargs):
    """The output, the gradient of v, and that of the state's values."""
    past = kwargs.get("initial_state")
    o = form(q, k, v, **kwargs)
    return o, *grad(o, [v] if past is None else [v, past[1]], do)


def exactly(q, k, v, do, **kwargs):
    """The definition's results for the same numbers in float64."""
    q, k, v, do = (x.detach().double() for x in (q, k, v, do))
    return results(frozen_qk_attention_reference, q, k, v.requires_grad_(), do, **kwargs)


def assert_same(*given, close=close, **kwargs):
    found, expected = (results(form, *given, **kwargs) for form in (frozen_qk_attention, frozen_qk_attention_reference))
    close(found, expected)


def holes(N, M, lead=(B, H)):
    """A mask in which a query attends to nothing, and a key is attended to by none."""
    mask = draw(*lead, N, M, seed=7) > -0.5
    mask[..., N // 2, :], mask[..., M // 3] = False, False
    return mask


MASKS = {
    "none": lambda N, M: None,
    "keys": lambda N, M: torch.arange(M) > M // 4,
    "keys of items": lambda N, M: (torch.arange(M) < torch.tensor([[0], [M // 2]]))[:, None, None],  # one has none
    "keys of heads": lambda N, M: draw(H, 1, M, seed=8) > 0,
    "pairs": lambda N, M: holes(N, M, ()),
    "pairs of heads": holes,
}


@causal_or_not
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("past", [0, 6])
def test_as_the_definition(past, mask, causal):
    """Without a sink, and with one, of values as wide as keys and narrower; scores are between -7 and 7."""
    cases = [(N, K, {}) for N in (1, 2, 17, 64)] + [(17, V, {"sink": s}) for V, s in ((K, 1.5), (3, -2), (1, 30.0))]
    for N, V, sink in cases:
        kwargs = {"is_causal": causal, "attn_mask": MASKS[mask](N, past + N), **sink}
        if past:
            kwargs["initial_state"] = draw(B, H, past, K, seed=5), draw(B, H, past, V, seed=6).requires_grad_()
        assert_same(*operands(N, values=V), **kwargs)
    for lead in ((), (3,), (2, 1, 3)):
        if mask in ("none", "pairs of heads") and not past:
            assert_same(*operands(9, lead), is_causal=causal, attn_mask=holes(9, 9, lead) if mask != "none" else None)


def test_a_sink_is_a_key_whose_value_is_0():
    """One more channel of q and k makes its score; one of the first key's, and the whole of its value, is 0."""
    (q, k, v, _), sink = operands(9), 0.7
    with_one = torch.cat([q, torch.full_like(q[..., :1], sqrt(K) * sink)], -1)
    keys = torch.nn.functional.pad(k, (0, 1, 1, 0))
    keys[..., 0, K] = 1.0
    expected = frozen_qk_attention_reference(
        with_one, keys, torch.nn.functional.pad(v, (0, 0, 1, 0)), scale=1 / sqrt(K)
    )
    close(frozen_qk_attention(q, k, v, sink=sink), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", ["reference", "fast"])
def test_costs(form, dtype):
    """Declared = counted, exactly; q, k and a number a row are kept."""
    call = frozen_qk_attention if form == "fast" else frozen_qk_attention_reference
    sizes = [(1, 5, 1, 8), (2, 1, 3, 8), (2, 33, 3, 16), (1, 70, 2, 64)]
    for (B, N, H, width), causal in product(sizes, (False, True)):
        q, k, v = (torch.zeros(B, H, N, width, dtype=dtype, requires_grad=name == "v") for name in "qkv")
        declared = frozen_qk_cost(B, N, H, width, width, form=form, causal=causal, itemsize=dtype.itemsize)
        assert_declared(declared, call, q, k, v, is_causal=causal)
        if form == "fast":
            numbers = 2 * B * H * N * width
            kept = dtype.itemsize * numbers + max(4, dtype.itemsize) * B * H * N
            assert of(call, q, k, v, is_causal=causal).saved_bytes == kept
            assert channels(dtype.itemsize) * dtype.itemsize == 16


def test_rows_with_gaps():
    """Operands whose numbers do not lie side by side, which kernels do not look at."""
    q, k, v, _ = operands(9, dtype=torch.float32)
    for change in (lambda x: x[..., :1].expand(x.shape), lambda x: x.mT.contiguous().mT):
        given = [change(x.detach()) for x in (q, k, v)]
        for sink in (None, 0.5):
            found = frozen_qk_attention(*given, is_causal=True, sink=sink)
            assert torch.equal(found, frozen_qk_attention(*map(torch.clone, given), is_causal=True, sink=sink))


class Projected(nn.Module):
    """Queries and keys of all heads by two frozen matrices."""

    def __init__(self, d):
        super().__init__()
        self.register_buffer("weights", draw(2, d, H * K, seed=1))

    def forward(self, x):
        return tuple((x @ w).unflatten(-1, (H, K)).transpose(1, 2) for w in self.weights)


def test_the_backward_pass_has_the_forward_pass_s_tensors():
    """Where a call is given others than the module's, and where the module gets others in between; a tensor that is
    written to in between is refused."""
    x, v, do = draw(2, 5, 24), operands(5)[2], operands(5)[3]
    project, other = Projected(24), 2 * draw(2, 24, H * K, seed=9)
    expected = grad(frozen_qk_attention(*project(x), v), v, do)[0]
    o = recomputed_attention(x, v, project)
    mine, project.weights = project.weights, other
    assert torch.equal(grad(o, v, do)[0], expected)
    o = recomputed_attention(x, v, project)
    project.weights = mine
    assert not torch.allclose(grad(o, v, do)[0], expected)
    o = recomputed_attention(x, v, project)
    mine.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        grad(o, v, do)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("case", ["mask", "causal and a mask", "causal and a state"])
def test_hidden_keys_have_no_weight_whatever_their_scores(case, dtype):
    """Scores reach 8 200^2 / sqrt(8) > 65,504, which float16's lowest number does not outweigh. Half precision rounds
    each output, at most 4, by 2^-8 of it."""
    q, k = torch.full((1, 1, 4, K), 200.0, dtype=dtype), torch.zeros(1, 1, 4, K, dtype=dtype)
    k[..., 3, :] = 200.0
    v = torch.arange(1.0, 5.0).view(1, 1, 4, 1).expand(1, 1, 4, K).to(dtype)
    kwargs = {
        "mask": {"attn_mask": torch.tensor([True, True, True, False])},
        "causal and a mask": {"is_causal": True, "attn_mask": torch.ones(4, 4) > 0},
        "causal and a state": {"is_causal": True, "initial_state": (k[..., :1, :], v[..., :1, :])},
    }[case]
    if "initial_state" in kwargs:
        q, k, v = (x[..., 1:, :] for x in (q, k, v))
    results = [
        form(q, k, v.detach().requires_grad_(), **kwargs)
        for form in (frozen_qk_attention, frozen_qk_attention_reference)
    ]
    torch.testing.assert_close(*results, atol=2**-6, rtol=0)


@causal_or_not
@pytest.mark.parametrize("mask", ["none", "keys of heads", "pairs of heads"])
def test_recomputed(mask, causal):
    """Bit for bit the same from x, which is kept with a number a row in place of q and k; x has no gradient by them."""
    N, d = 17, 24
    x, project = draw(B, N, d).requires_grad_(), Projected(d)
    q, k = project(x.detach())
    _, _, v, do = operands(N)
    kwargs = {"attn_mask": MASKS[mask](N, N), "is_causal": causal}
    with saved_bytes(project.buffers()) as kept:
        o = recomputed_attention(x, v, project, **kwargs)
    pairs = {"none": 0, "keys of heads": H * N * (N if causal else 1), "pairs of heads": B * H * N * N}
    assert kept() == 8 * (B * N * d + B * H * N) + pairs[mask]  # a byte for each of the mask's
    expected = results(frozen_qk_attention, q, k, v, do, **kwargs)
    dv, dx = grad(o, [v, x], do, allow_unused=True)
    assert dx is None
    assert torch.equal(o, expected[0]) and torch.equal(dv, expected[1])


def test_it_is_differentiated_once():
    q, k, v, _ = operands(5)
    with pytest.raises(RuntimeError, match="create_graph: expected False: the fast form cannot be differentiated twi"):
        grad(frozen_qk_attention(q, k, v).sum(), v, create_graph=True)
    x = draw(2, 5, 24)
    with pytest.raises(RuntimeError, match="create_graph: expected False"):
        grad(recomputed_attention(x, v, Projected(24)).sum(), v, create_graph=True)


@pytest.mark.bad_input
def test_errors():
    """Of both forms, and of the recomputed one, which looks at two arguments. The definition takes any width."""
    q, k, v, _ = operands(5)
    past = draw(B, H, 4, K, seed=5).requires_grad_(), draw(B, H, 4, K, seed=6)
    for change, message in (
        ({"q": q.clone().requires_grad_()}, "q: expected a constant without a gradient, got"),
        ({"k": k.clone().requires_grad_()}, "k: expected a constant without a gradient, got"),
        ({"initial_state": past}, "initial_state: expected a constant without"),
        ({"sink": float("nan")}, "sink: expected a number of at most"),
        ({"sink": 1e300}, r"sink: expected a number of at most 3.4e\+38 in size, got 1e\+300"),
    ):
        for form in (frozen_qk_attention, frozen_qk_attention_reference):
            refuses(message, form, **{"q": q, "k": k, "v": v} | change)
    for change, error, message in (
        ({"is_causal": 1}, TypeError, "is_causal: expected True or False, got int 1"),
        ({"attn_mask": torch.ones(5, 5)}, TypeError, "attn_mask: expected a boolean tensor"),
        ({"attn_mask": torch.ones(5, 4) > 0}, ValueError, "attn_mask: expected a shape that broadcasts to"),
    ):
        refuses(message, recomputed_attention, draw(2, 5, 24), v, Projected(24), error=error, **change)
    narrow = q[..., :3]
    assert frozen_qk_attention_reference(narrow, narrow, v).shape == v.shape
    refuses("v: expected at most the width 3 of q, for the fused kernel", frozen_qk_attention, narrow, narrow, v)


# ------------------------------------------------------------------------------------------------------- the limits


@causal_or_not
@pytest.mark.parametrize("scale", [0.0, -0.7, 3.0, 1e-300, 1e-9, -1e-9])
def test_scales(scale, causal):
    """In half precision too, where a log-sum-exp over a small scale is not within the range of float16."""
    options = {"is_causal": causal, "scale": scale}
    assert_same(*operands(17), close=partial(close, atol=1e-12, rtol=1e-12), **options)  # scores up to 100
    for dtype in (torch.float16, torch.bfloat16):
        rounded = operands(17, dtype=dtype)
        for a, b in zip(results(frozen_qk_attention, *rounded, **options), exactly(*rounded, **options), strict=True):
            assert (a - b).norm() <= 4 * torch.finfo(dtype).eps * b.norm()  # about as many roundings of each number


def worst(dtype, N, gain, causal):
    """The largest relative error of an entry of the gradient of v, over the dtype's rounding: of values and upstream
    gradients between 0 and 1, so that no sum of them cancels, and scores of spread `gain`."""
    q, k, v, do = operands(N, (1, 2), torch.float64, 64)
    v, do = ((x.detach().abs() / (1 + x.detach().abs())).to(dtype) for x in (v, do))
    given = (q * gain**0.5).to(dtype), (k * gain**0.5).to(dtype), v.requires_grad_(), do
    (found,) = results(frozen_qk_attention, *given, is_causal=causal)[1:]
    (exact,) = exactly(*given, is_causal=causal)[1:]
    seen = exact > 1e-3  # a key that hardly anybody reads has a gradient that half precision rounds coarsely or to 0
    assert seen.sum() > seen.numel() / 4
    return float(((found - exact).abs() / exact)[seen].max() / (torch.finfo(dtype).eps / 2))


@causal_or_not
def test_half_precision(causal, monkeypatch):
    """Three roundings: of the kernel's weights, of what it sums up with them, of the gradient; what float32 adds, some
    1e-5 for scores up to 40, is no tenth of one.

    One term would not do: a log-sum-exp of 20 that is rounded to 8 bits is off by up to 2^-4, more than 30 roundings.
    """
    for gain, dtype in product((1, 5), (torch.bfloat16, torch.float16)):
        assert worst(dtype, 200, gain, causal) <= 3.1
    for terms, least, most in ((1, 10, 1e9), (2, 0, 3.5), (3, 0, 3.1)):
        monkeypatch.setattr(frozen_qk, "channels", lambda itemsize, terms=terms: terms)
        assert least <= worst(torch.bfloat16, 200, 5, causal) <= most


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@causal_or_not
def test_huge_scores(causal, dtype):
    """Whole numbers, whose scores about 1000 are exact; the log-sum-exp then is rounded to 2^-14, three times over.

    Of scores of a million nothing overflows: no weight is above 1, so no gradient above the upstream ones' sum.
    """
    N, whole = 40, torch.randint(-2, 3, (2, 1, 1, 40, 4), generator=torch.Generator().manual_seed(0)).double()
    for sign in (1, -1):
        q, k = (torch.cat([x, torch.full((1, 1, N, 4), 16.0)], -1).to(dtype) for x in whole)
        q[..., 4:] *= sign
        v, do = (draw(1, 1, N, 8, seed=s).to(dtype) for s in (2, 3))
        given = q, k, v.requires_grad_(), do
        assert (q.double() @ k.double().mT * sign).min() > 900
        found = results(frozen_qk_attention, *given, is_causal=causal, scale=1.0)
        for a, b in zip(found, exactly(*given, is_causal=causal, scale=1.0), strict=True):
            assert (a - b).norm() <= (3 * 2**-14 + 4 * torch.finfo(dtype).eps) * b.norm()
        if dtype != torch.float16:
            q, k, v, do = operands(30, dtype=dtype)
            o, dv = results(frozen_qk_attention, sign * 1000 * q, 1000 * k, v, do, is_causal=causal)
            assert o.isfinite().all() and dv.isfinite().all()
            assert dv.abs().max() <= 2 * do.abs().sum(-2).max()


# In a process of its own, as Triton asks for its interpreter when it is first imported.
INTERPRETED = """
import sys
import torch
from ortho.attention.softmax.frozen_qk_triton import gradient_of_values

N, M, K, V, causal = (int(size) for size in sys.argv[1:])
torch.manual_seed(0)
q, k, do = (torch.randn(2, n, 3, width).transpose(1, 2) for n, width in ((N, K), (M, K), (N, V)))
scores = (q @ k.mT).double() / 8
if causal:
    scores = scores.masked_fill(torch.ones(N, M, dtype=torch.bool).triu(1), -torch.inf)
L = scores.logsumexp(-1)
dv = (scores - L[..., None]).exp().mT @ do.double()
found = gradient_of_values(q, k, L.float(), do, bool(causal), 1 / 8)
assert found.transpose(1, 2).is_contiguous()
# Scores and L, of order 1 and in float32, are off by K eps at most; so are weights, and by that share the sums of N.
error, bound = float((found - dv).norm() / dv.norm()), 2 * (K + N**0.5) * torch.finfo(torch.float32).eps
assert error <= bound, (error, bound)
"""


@pytest.mark.unchecked
@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param((256, 256, 64, 64, 0), id="whole blocks"),
        pytest.param((256, 256, 64, 64, 1), id="whole blocks, causal"),
        pytest.param((200, 200, 32, 16, 1), id="ragged, causal, narrow values"),
        pytest.param((130, 70, 16, 64, 0), id="fewer keys than queries, wide values"),
        pytest.param((1, 1, 128, 128, 1), id="one token"),
    ],
)
def test_the_kernel_for_gpus(sizes):
    """On Triton's interpreter, where Triton is installed (a gigabyte, so no extra brings it)."""
    pytest.importorskip("triton")
    command = [sys.executable, "-c", INTERPRETED, *map(str, sizes)]
    done = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


# ----------------------------------------------------------------------------------------------------------- in a layer

# Sums of at most 1e2 rounded products of size 1 in float64, in different orders.
near = partial(torch.testing.assert_close, atol=1e-12, rtol=1e-12)
PROJECTIONS = ["stopped", "structured-stopped"]
FORMS = pytest.mark.parametrize("form", ["reference", "fast"])
BOTH = pytest.mark.parametrize("projection", PROJECTIONS)
N, WIDTH = 9, 24


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


@FORMS
@pytest.mark.parametrize("mask", MASKS)
@causal_or_not
@BOTH
def test_as_by_autograd(projection, causal, mask, form):
    """Outputs and all gradients, also of rows that attend to nothing and of keys that none attends to."""
    for kwargs in ({}, {"bias": True, "num_kv_heads": 2}, {"num_kv_heads": 1}, {"head_dim": 4}):
        one, other = pair(projection, form=form, **kwargs)
        near(*(step(m, draw(B, N, WIDTH), attn_mask=MASKS[mask](N, N), is_causal=causal) for m in (one, other)))


def test_what_needs_no_gradient():
    """Into x none is made where it needs none; where nothing needs one, nothing is kept."""
    one, other = pair()
    x, upstream = draw(B, N, WIDTH), draw(B, N, WIDTH, seed=9)
    near(*(torch.autograd.grad(m(x), [*trained(m).values()], upstream) for m in (one, other)))
    one.requires_grad_(False)
    with saved_bytes() as kept:
        assert not one(x).requires_grad
    assert kept() == 0
    leaf = x.requires_grad_()
    (found,), (expected,) = (torch.autograd.grad(m(leaf), leaf, upstream) for m in (one, other))
    near(found, expected)


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
