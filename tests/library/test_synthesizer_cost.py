"""Synthesizers' costs: declared equals counted for every source and mixture; by hand, as published, and as N grows."""

from itertools import cycle, product

import pytest
import sympy as sp
import torch
from counted import assert_declared, assert_formula
from refusals import refuses

from ortho import cost
from ortho.cost.big_o import H, N, d, symbolic
from ortho.layers.synthesizer import SOURCES, FactoredDense, FactoredRandom, SynthesizerAttention

MIXTURES = [*product(SOURCES, SOURCES), ("random", "factored-random", "dot-product"), ("dense", "random", "dense")]
# batch, length, width, heads, positions: also one of each, heads of width one, fewer tokens than positions
SIZES = [
    (1, 5, 8, 2, 5),
    (2, 7, 12, 3, 9),
    (3, 16, 16, 1, 16),
    (1, 1, 4, 4, 1),
    (2, 1, 4, 4, 6),
    (2, 5, 8, 2, 12),
    (2, 3, 8, 2, 16),
]
rank, k1 = sp.symbols("r k_1", positive=True)


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize(("causal", "input_grad"), list(product([True, False], repeat=2)))
def test_one_source(source, causal, input_grad):
    for (batch, n, width, heads, longest), dtype in zip(SIZES, cycle([torch.float32, torch.float64]), strict=False):
        module = SynthesizerAttention(width, heads, longest, source=source, dtype=dtype)
        x = torch.zeros(batch, n, width, dtype=dtype, requires_grad=input_grad)
        variant = {"source": source, "max_length": longest, "causal": causal, "input_grad": input_grad}
        declared = cost.synthesizer(batch, n, width, heads, itemsize=x.element_size(), **variant)
        assert_declared(declared, module, x, is_causal=causal)


@pytest.mark.parametrize("names", MIXTURES, ids="+".join)
def test_mixtures(names):
    for (batch, n, width, heads, longest), flag in zip(SIZES, cycle([True, False]), strict=False):
        x = torch.zeros(batch, n, width, requires_grad=flag)
        kind = {"source": names, "max_length": longest}
        declared = cost.synthesizer(batch, n, width, heads, causal=flag, input_grad=flag, **kind)
        assert_declared(declared, SynthesizerAttention(width, heads, **kind), x, is_causal=flag)


@pytest.mark.parametrize(
    "source", ["random", "fixed-random", "factored-random", ("random", "factored-random")], ids=str
)
def test_heads_of_another_width(source):
    """Any number of heads, together wider or narrower than x."""
    for (batch, n, width, heads, longest), head_dim, flag in product(SIZES, [1, 3, 24], [True, False]):
        x = torch.zeros(batch, n, width, requires_grad=flag)
        kind = {"source": source, "max_length": longest, "head_dim": head_dim}
        declared = cost.synthesizer(batch, n, width, heads, causal=flag, input_grad=flag, **kind)
        assert_declared(declared, SynthesizerAttention(width, heads, **kind), x, is_causal=flag)


@pytest.mark.parametrize("length", [12, 7, 2])
def test_own_options(length):
    """Ranks and factors other than the default; of the factors, only what a shorter sequence needs."""
    x = torch.zeros(2, length, 8, requires_grad=True)
    for source, option in [
        *((FactoredRandom(8, 2, 12, rank=r), {"rank": r}) for r in (1, 3)),
        *((FactoredDense(8, 2, 12, k1=k), {"k1": k}) for k in (1, 2, 6, 12)),
    ]:
        declared = cost.synthesizer(2, length, 8, 2, source=source.name, max_length=12, **option)
        assert_declared(declared, SynthesizerAttention(8, 2, 12, source=source), x)


@pytest.mark.parametrize("source", [*SOURCES, ("random", "dense"), ("factored-dense", "dot-product")], ids=str)
def test_formulas_equal_counts(source):
    """A symbolic closed form with the sizes substituted equals the closed form called with them."""
    for batch, causal in product([1, 2], [False, True]):
        formula = cost.synthesizer(batch, N, d, H, source=source, rank=rank, k1=k1, causal=causal)
        numbers = cost.synthesizer(batch, 24, 16, 2, source=source, rank=3, k1=4, causal=causal)
        assert_formula(formula, numbers, {N: 24, d: 16, H: 2, rank: 3, k1: 4})


# Trained parameters of a layer, from Tay et al. 2021, table 1, with W_V and W_O, one R a head and no biases.
PUBLISHED = {
    "random": 2 * d**2 + H * N**2,
    "fixed-random": 2 * d**2,
    "factored-random": 2 * d**2 + 2 * H * N * rank,
    "dense": 3 * d**2 + d * N,
    "factored-dense": 3 * d**2 + d * (k1 + N / k1),
    "dot-product": 4 * d**2,
}


@pytest.mark.parametrize("source", SOURCES)
def test_parameters_as_published(source):
    declared = symbolic(cost.synthesizer, source=source, rank=rank, k1=k1)
    assert sp.expand(declared.trained - PUBLISHED[source]) == 0
    assert declared.frozen == (H * N**2 if source == "fixed-random" else 0)
    sizes = {N: 36, d: 24, H: 3, rank: 8, k1: 6}
    module = SynthesizerAttention(24, 3, 36, source=source)
    assert sum(p.numel() for p in module.parameters() if p.requires_grad) == PUBLISHED[source].subs(sizes)


@pytest.mark.bad_input
def test_errors():
    refuses("source: expected at least one, got none", cost.synthesizer, 1, 4, 8, 2, source=[])
    refuses("N: expected at most max_length = 4, got 5", cost.synthesizer, 1, 5, 8, 2, max_length=4)
    with pytest.raises(ValueError, match="k1: expected a divisor of max_length = 5, got 2"):
        cost.synthesizer(1, 5, 8, 2, source="factored-dense", k1=2)
    with pytest.raises(ValueError, match="source: expected sources by position beside head_dim, got 'dense'"):
        cost.synthesizer(1, 5, 8, 3, source=("random", "dense"), head_dim=2)
    with pytest.raises(ValueError, match="k1: expected a size beside the symbol N for max_length, got None"):
        symbolic(cost.synthesizer, source="factored-dense")
