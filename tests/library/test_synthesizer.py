"""Synthesizers: every source of logits, alone and mixed, by its formula in loops; shares, errors."""

import math
from itertools import product

import pytest
import torch
from gradients import trained
from seeded import SIGMAS, draw
from synthesizer_layers import HEADS, LENGTH, TOLERANCE, D, K, every_case, layer
from torch.nn.functional import linear

from ortho.layers.synthesizer import SOURCES, FactoredDense, SynthesizerAttention


def positions(source, x, b, h, i, j):
    return source.matrix[h, i, j]


def hidden(source, x, b, h, i):
    return [max(x[b, i] @ source.weight_1[h * K + u], torch.zeros((), dtype=x.dtype)) for u in range(K)]


def dense(source, x, b, h, i, j):
    return sum(unit * source.weight_2[h, j, u] for u, unit in enumerate(hidden(source, x, b, h, i)))


def factored_dense(source, x, b, h, i, j):
    units = hidden(source, x, b, h, i)
    number_a = sum(unit * source.weight_a[h, j // source.k2, u] for u, unit in enumerate(units))
    number_b = sum(unit * source.weight_b[h, j % source.k2, u] for u, unit in enumerate(units))
    return number_a * number_b


def dot_product(source, x, b, h, i, j):
    own = slice(h * K, (h + 1) * K)
    return (source.weight_q[own] @ x[b, i]) @ (source.weight_k[own] @ x[b, j]) / math.sqrt(K)


FORMULAS = {
    "random": positions,
    "fixed-random": positions,
    "factored-random": lambda s, x, b, h, i, j: sum(s.left[h, i, r] * s.right[h, j, r] for r in range(s.rank)),
    "dense": dense,
    "factored-dense": factored_dense,
    "dot-product": dot_product,
}


def by_loops(module, x, allowed):
    """The output by one logit and one row of weights at a time: exp of logits over their sum for allowed keys."""
    shares = [1] if module.mixing is None else module.mixing.exp() / module.mixing.exp().sum()
    v = linear(x, module.weight_v)
    batch, length, _ = x.shape
    rows = []
    for b, h, i in product(range(batch), range(HEADS), range(length)):
        row = torch.zeros(K, dtype=x.dtype)
        logits = {
            j: sum(a * FORMULAS[s.name](s, x, b, h, i, j) for a, s in zip(shares, module.sources, strict=True))
            for j in range(length)
            if allowed[b, h, i, j]
        }
        total = sum(logit.exp() for logit in logits.values())
        for j, logit in logits.items():
            row = row + logit.exp() / total * v[b, j, h * K : (h + 1) * K]
        rows.append(row)
    heads = torch.stack(rows).unflatten(0, (batch, HEADS, length)).transpose(1, 2)
    return linear(heads.flatten(2), module.weight_o)


MASKINGS = ["plain", "causal", "heads", "causal items"]


@every_case
@pytest.mark.parametrize(("length", "masking"), [*product([1, 5], MASKINGS), (LENGTH, "causal")])
def test_formula(case, length, masking):
    """Outputs and every gradient, also of a sequence shorter than the layer's positions."""
    module, x = layer(case), draw(2, length, D).requires_grad_()
    allowed = torch.ones(2, HEADS, length, length, dtype=torch.bool)
    kwargs = {}
    if masking == "heads":  # one mask a head, the same for the batch
        kwargs["attn_mask"] = draw(HEADS, length, length, seed=2) > 0
    if masking == "causal items":
        kwargs["attn_mask"] = draw(2, 1, length, length, seed=3) > 0
    if "attn_mask" in kwargs:
        allowed = allowed & kwargs["attn_mask"]
    if "causal" in masking:
        kwargs["is_causal"] = True
        allowed = allowed.tril()
    d_out = draw(2, length, D, seed=4)
    results = [
        [y, *torch.autograd.grad(y, [x, *trained(module).values()], d_out, materialize_grads=True)]
        for y in (module(x, **kwargs), by_loops(module, x, allowed))
    ]
    torch.testing.assert_close(*results, **TOLERANCE)


@pytest.mark.parametrize("name", SOURCES)
def test_first_logits_have_variance_one(name):
    """Over 100 draws of the parameters and of normal tokens; a draw is one number, the mean square of its logits."""
    squares, width, length = [], 64, 16
    for seed in range(100):
        g = torch.Generator().manual_seed(seed)
        source = SOURCES[name](width, 1, length, generator=g, dtype=torch.float64)
        x = torch.randn(4, length, width, generator=g, dtype=torch.float64)
        squares.append(source.logits(x).square().mean())
    mean, error = torch.stack(squares).mean(), torch.stack(squares).std() / 10
    if name == "factored-dense":  # its two numbers share their hidden units, so their squares are correlated
        assert 1 - SIGMAS * error < mean < 1 + 8 / width + SIGMAS * error
    else:
        assert abs(mean - 1) < SIGMAS * error


def test_positions_of_factored_dense():
    """k1 k2 is max_length with any k1; the numbers A of blocks beyond the last key are not computed."""
    x = draw(1, 5, D)
    for k1 in (1, 2, 3, 4, 6, 12):
        source = FactoredDense(D, HEADS, 12, k1=k1, dtype=torch.float64)
        module = SynthesizerAttention(D, HEADS, 12, source=source, dtype=torch.float64)
        torch.testing.assert_close(
            module(x), by_loops(module, x, torch.ones(1, HEADS, 5, 5, dtype=torch.bool)), **TOLERANCE
        )
        with torch.no_grad():
            source.weight_a[:, -(-5 // source.k2) :] = torch.nan
        assert module(x).isfinite().all()
    assert [FactoredDense(D, HEADS, n).k1 for n in (1, 2, 7, 12, 16, 36, 60)] == [1, 1, 1, 3, 4, 6, 6]


@every_case
def test_half_precision_is_computed_in_float32(case):
    """The weights' sums are off by at most 1e-6, about ten roundings of float32; in bfloat16 it would be 4e-3. There is
    one matrix for the batch if no source looks at the tokens."""
    module, x = layer(case, dtype=torch.bfloat16), draw(2, 9, D, dtype=torch.bfloat16)
    weights = module.weights(x)
    blind = {s.name for s in module.sources} <= {"random", "fixed-random", "factored-random"}
    assert weights.dtype == torch.float32 and weights.shape == (1 if blind else 2, HEADS, 9, 9)
    assert (weights.sum(-1) - 1).abs().max() < 1e-6
    assert module(x).dtype == torch.bfloat16
