"""The gradient of the values by an exchanged forward pass: as the definition has it, costs, what it keeps, errors."""

from functools import partial

import pytest
import torch
from exchanged_operands import K, draw, holes, operands, results
from torch.autograd import grad

from ortho.attention.softmax.value_gradient import (
    channels,
    recomputed_attention,
    value_gradient_attention,
    value_gradient_attention_reference,
    value_gradient_cost,
)
from ortho.cost.counting import Allocations, OperationCounter, saved_bytes

# Exponentials of scores up to 20, each off by some roundings of it, 20 x 8 x 1e-16 in all, and sums of at most 70.
close = partial(torch.testing.assert_close, atol=1e-13, rtol=1e-13)
LEADS = [(), (3,), (2, 3), (2, 1, 3)]
CAUSAL = pytest.mark.parametrize("causal", [False, True])


MASKS = {
    "none": lambda N, M: None,
    "keys": lambda N, M: torch.arange(M) > M // 4,
    "keys of heads": lambda N, M: draw(3, 1, M, seed=8) > 0,
    "pairs": lambda N, M: holes(N, M, ()),
    "pairs of heads": holes,
}


@CAUSAL
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("past", [0, 6])
def test_as_the_definition(past, mask, causal):
    for N in (1, 2, 17, 64):
        kwargs = {"is_causal": causal, "attn_mask": MASKS[mask](N, past + N)}
        if past:
            kwargs["initial_state"] = draw(2, 3, past, K, seed=5), draw(2, 3, past, K, seed=6).requires_grad_()
        for a, b in zip(
            results(value_gradient_attention, *operands(N), **kwargs),
            results(value_gradient_attention_reference, *operands(N), **kwargs),
            strict=True,
        ):
            close(a, b)


@CAUSAL
@pytest.mark.parametrize("lead", LEADS, ids=str)
def test_leading_axes(lead, causal):
    kwargs = {"is_causal": causal, "attn_mask": holes(9, 9, lead)}
    for options in ({"is_causal": causal}, kwargs):
        found, expected = (
            results(form, *operands(9, lead), **options)
            for form in (value_gradient_attention, value_gradient_attention_reference)
        )
        for a, b in zip(found, expected, strict=True):
            close(a, b)


def test_cut_anywhere():
    """Of a causal sequence in two calls, the gradient of the first one's values by way of the state."""
    q, k, v, do = operands(12)
    whole = results(value_gradient_attention, q, k, v, do, is_causal=True)
    for cut in (1, 5, 11):
        head, state = value_gradient_attention(*(x[..., :cut, :] for x in (q, k, v)), is_causal=True, return_state=True)
        tail = value_gradient_attention(*(x[..., cut:, :] for x in (q, k, v)), is_causal=True, initial_state=state)
        o = torch.cat([head, tail], -2)
        for a, b in zip((o, *grad(o, v, do)), whole, strict=True):
            close(a, b)


@CAUSAL
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", ["reference", "fast"])
def test_costs(form, dtype, causal):
    """Declared = counted, exactly: q, k and a number a row are kept."""
    call = value_gradient_attention if form == "fast" else value_gradient_attention_reference
    for B, N, H, width in [(1, 5, 1, 8), (2, 1, 3, 8), (2, 33, 3, 16), (1, 70, 2, 64)]:
        q, k, v, do = (torch.zeros(B, H, N, width, dtype=dtype) for _ in range(4))
        v.requires_grad_()
        with OperationCounter() as ahead, saved_bytes() as kept:
            o = call(q, k, v, is_causal=causal)
        with OperationCounter() as back:
            grad(o, v, do)
        declared = value_gradient_cost(B, N, H, width, width, form=form, causal=causal, itemsize=dtype.itemsize)
        assert (ahead.flops.total(), back.flops.total()) == (declared.forward, declared.backward)
        elementwise = declared.elementwise_forward, declared.elementwise_backward
        assert (ahead.elementwise.total(), back.elementwise.total()) == elementwise
        assert kept() == declared.saved_bytes
        if form == "fast":
            numbers = 2 * B * H * N * width
            assert kept() == dtype.itemsize * numbers + max(4, dtype.itemsize) * B * H * N
            assert channels(dtype.itemsize) * dtype.itemsize == 16


def test_memory_is_linear():
    """A token more takes as many bytes at any length, and no tensor is as large as the scores of a head."""
    peaks = []
    for N in (512, 1024, 2048):
        q, k, v, do = operands(N, (1, 1), torch.float32)
        with Allocations() as memory:
            results(value_gradient_attention, q, k, v, do, is_causal=True)
        assert memory.largest <= 4 * N * 2 * K
        peaks.append(memory.peak)
    assert abs((peaks[2] - peaks[1]) - 2 * (peaks[1] - peaks[0])) <= 64


@CAUSAL
@pytest.mark.parametrize("mask", ["none", "keys of heads", "pairs of heads"])
def test_recomputed(mask, causal):
    """Bit for bit the same from x, which is kept with a number a row in place of q and k; x has no gradient by them."""
    N, d = 17, 24
    x, weights = draw(2, N, d).requires_grad_(), draw(2, d, d, seed=1)

    def project(x):
        return tuple((x @ w).unflatten(-1, (3, K)).transpose(1, 2) for w in weights)

    q, k = (t.detach() for t in project(x))
    _, _, v, do = operands(N)
    kwargs = {"attn_mask": MASKS[mask](N, N), "is_causal": causal}
    with saved_bytes() as kept:
        o = recomputed_attention(x, v, project, **kwargs)
    pairs = {"none": 0, "keys of heads": 3 * N * (N if causal else 1), "pairs of heads": 2 * 3 * N * N}
    assert kept() == 8 * (2 * N * d + 2 * 3 * N) + pairs[mask]  # a byte for each of the mask's
    expected = results(value_gradient_attention, q, k, v, do, **kwargs)
    dv, dx = grad(o, [v, x], do, allow_unused=True)
    assert dx is None
    assert torch.equal(o, expected[0]) and torch.equal(dv, expected[1])


@pytest.mark.unchecked
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # of a class that dynamo makes
def test_compiles():
    """In one graph, forward and backward."""
    torch.compiler.reset()
    compiled = torch.compile(value_gradient_attention, backend="aot_eager", fullgraph=True)
    for kwargs in ({"is_causal": True}, {"scale": 0.3}, {"attn_mask": holes(17, 17)}):
        for a, b in zip(
            *(results(f, *operands(17), **kwargs) for f in (compiled, value_gradient_attention)), strict=True
        ):
            close(a, b)


def test_it_is_differentiated_once():
    q, k, v, _ = operands(5)
    with pytest.raises(RuntimeError, match="create_graph: expected False: the fast form cannot be differentiated twi"):
        grad(value_gradient_attention(q, k, v).sum(), v, create_graph=True)
    x = draw(2, 5, 24)
    with pytest.raises(RuntimeError, match="create_graph: expected False"):
        grad(recomputed_attention(x, v, lambda x: (q, k)).sum(), v, create_graph=True)


BAD = [
    ({"q": draw(2, 3, 5, K).requires_grad_()}, ValueError, "q: expected a constant, which has no gradient, got"),
    ({"k": draw(2, 3, 5, K).requires_grad_()}, ValueError, "k: expected a constant, which has no gradient, got"),
    ({"q": draw(2, 3, 4, K), "is_causal": True}, ValueError, "is_causal: expected as many queries as keys, got 4 and"),
    ({"scale": "1"}, TypeError, "scale: expected a number"),
    ({"scale": float("nan")}, ValueError, "scale: expected a finite number"),
    ({"attn_mask": torch.ones(5, 5)}, TypeError, "attn_mask: expected a boolean tensor"),
    ({"is_causal": 1}, TypeError, "is_causal: expected True or False"),
    ({"v": draw(2, 3, 5, K) / 0}, ValueError, "v: expected finite numbers"),
]


@pytest.mark.bad_input
@pytest.mark.parametrize("form", [value_gradient_attention, value_gradient_attention_reference])
@pytest.mark.parametrize(("kwargs", "error", "message"), BAD)
def test_errors(kwargs, error, message, form):
    q, k, v, _ = operands(5)
    with pytest.raises(error, match=message):
        form(**{"q": q, "k": k, "v": v, **kwargs})


@pytest.mark.bad_input
def test_values_of_another_width():
    """The definition takes them."""
    q, k, _, _ = operands(5)
    assert value_gradient_attention_reference(q, k, q[..., :3]).shape == (2, 3, 5, 3)
    with pytest.raises(ValueError, match=r"v: expected width 8 like q, for the fused kernel, got shape \(2, 3, 5, 3\)"):
        value_gradient_attention(q, k, q[..., :3])


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"is_causal": 1}, TypeError, "is_causal: expected True or False, got int 1"),
        ({"attn_mask": torch.ones(5, 5)}, TypeError, "attn_mask: expected a boolean tensor"),
        ({"attn_mask": torch.ones(5, 4) > 0}, ValueError, "attn_mask: expected a shape that broadcasts to"),
    ],
)
def test_errors_of_the_recomputed(kwargs, error, message):
    q, k, v, _ = operands(5)
    with pytest.raises(error, match=message):
        recomputed_attention(draw(2, 5, 24), v, lambda x: (q, k), **kwargs)
