"""FlashAttention by tiles: exact for any tile, no weight is kept, tiles behind the queries are skipped."""

from functools import partial

import pytest
import torch

from ortho.attention.softmax.flash import flash_attention, flash_cost, log_sum_exp, tiles
from ortho.attention.softmax.softmax_attention import softmax_attention_reference
from ortho.cost.counting import Allocations, count_forward

SIZES = [(1, 1), (3, 7), (16, 5), (64, 64), (1000, 1000)]  # rows and columns of a tile
# Sums of at most 70 products of size 10, in another order and behind exponentials of scores up to 10.
TOLERANCE = {"atol": 1e-12, "rtol": 1e-12}
K, V = 4, 5


def draw(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def operands(N, M=None, lead=(2, 3), dtype=torch.float64):
    shapes = (N, K), (M or N, K), (M or N, V)
    return [draw(*lead, *shape, seed=s, dtype=dtype).requires_grad_() for s, shape in enumerate(shapes)]


def results(form, leaves, upstream, **kwargs):
    o = form(*leaves[:3], **kwargs)
    return o, *torch.autograd.grad(o, leaves, upstream)


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("length", [1, 2, 17, 64])
@pytest.mark.parametrize("kind", ["all", "some", "keys"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("past", [0, 6])
def test_exact(size, length, kind, causal, past):
    """Output and all gradients, that of the state too; queries that may attend to nothing among them."""
    leaves = operands(length)
    state = tuple(draw(2, 3, past, width, seed=7).requires_grad_() for width in (K, V)) if past else None
    mask = {
        "all": None,
        "some": draw(2, 1, length, past + length, seed=8) > 0.5,
        "keys": torch.arange(past + length) > 2,
    }
    kwargs = {"is_causal": causal, "attn_mask": mask[kind], "initial_state": state, "scale": 0.7}
    leaves, upstream = [*leaves, *(state or ())], draw(2, 3, length, V, seed=9)
    tiled = partial(flash_attention, rows=size[0], columns=size[1])
    for one, other in zip(
        results(tiled, leaves, upstream, **kwargs),
        results(softmax_attention_reference, leaves, upstream, **kwargs),
        strict=True,
    ):
        torch.testing.assert_close(one, other, **TOLERANCE)


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize(("N", "M"), [(1, 1), (17, 17), (5, 40), (70, 70)])
@pytest.mark.parametrize("causal", [False, True])
def test_tiles_are_what_may_be_seen(size, N, M, causal):
    """Each pair that may be seen is in one tile, and none of those behind a whole tile of queries in any."""
    read, wanted = torch.zeros(N, M, dtype=torch.int), torch.ones(N, M, dtype=torch.bool).tril(M - N if causal else M)
    for queries, tile in tiles(N, M, causal, size):
        for keys, diagonal in tile:
            assert keys.stop - keys.start <= max(size)
            read[queries, keys] += 1
            assert diagonal or wanted[queries, keys].all()
    assert (read[wanted] == 1).all() and read.max() == 1
    beyond = int((read.bool() & ~wanted).sum())
    assert beyond <= N * (min(size[0], N) - 1) / 2 * causal


@pytest.mark.parametrize("causal", [False, True])
def test_the_logarithm_of_the_sum(causal):
    q, k, _ = operands(300)
    scores = 0.5 * q @ k.mT
    if causal:
        scores = scores.masked_fill(torch.ones(300, 300).triu(1).bool(), -torch.inf)
    found = log_sum_exp(q, k, is_causal=causal, scale=0.5)
    assert not found.requires_grad
    torch.testing.assert_close(found, scores.logsumexp(-1), **TOLERANCE)


@pytest.mark.parametrize("size", [(3, 7), (16, 5), (1000, 1000)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_costs_of_other_tiles(size, causal):
    sizes = {"rows": size[0], "columns": size[1]}
    for N in (1, 16, 33):
        q, k, v = (x.detach().float() for x in operands(N))
        flops, elementwise = count_forward(partial(flash_attention, **sizes, is_causal=causal), q, k, v)
        declared = flash_cost(2, N, 3, K, V, **sizes, causal=causal)
        assert (flops, elementwise) == (declared.forward, declared.elementwise_forward)


def test_memory_is_linear():
    """Of all tensors that are made, forward and backward, the largest: that of one head's scores would be 64 MB."""
    q, k, v = (draw(1, 4096, 8, seed=s, dtype=torch.float32).requires_grad_() for s in range(3))
    with Allocations() as memory:
        o = flash_attention(q, k, v, is_causal=True)
        torch.autograd.grad(o, (q, k, v), torch.ones_like(o))
    assert memory.largest <= 4 * 128 * 512


def test_half_precision_is_summed_in_float32():
    """Rounded once, to 8 bits: 2^-9 of the value."""
    leaves = [x.detach() for x in operands(300, dtype=torch.bfloat16)]
    exact = softmax_attention_reference(*(x.double() for x in leaves))
    o = flash_attention(*leaves)
    assert o.dtype == torch.bfloat16
    torch.testing.assert_close(o.double(), exact, atol=1e-5, rtol=2**-8)


def test_it_is_differentiated_once():
    leaves = operands(5)
    with pytest.raises(RuntimeError, match="create_graph: expected False"):
        torch.autograd.grad(flash_attention(*leaves).sum(), leaves, create_graph=True)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("sizes", "error", "message"),
    [
        ({"rows": 0}, ValueError, "rows: expected an integer of at least 1, got 0"),
        ({"columns": -1}, ValueError, "columns: expected an integer of at least 1, got -1"),
        ({"rows": 2.0}, TypeError, "rows: expected an integer of at least 1, got float 2.0"),
        ({"scale": "1"}, TypeError, "scale: expected a number"),
    ],
)
def test_errors(sizes, error, message):
    with pytest.raises(error, match=message):
        flash_attention(*operands(3), **sizes)
