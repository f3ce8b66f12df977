"""Layers of every kind: a step and a decoded token, declared = counted, exactly; formulas, parameters as published;
the published models: their parameters, and what a training step costs."""

from dataclasses import replace
from functools import partial
from itertools import pairwise, product

import pytest
import sympy as sp
import torch
from counted import SIZES, assert_declared, assert_decodes, assert_decodes_with_cache, assert_formula
from refusals import refusals
from sample import WHOLE

from ortho import PROJECTIONS
from ortho.attention import MECHANISMS
from ortho.cost import block, layer, model, synthesizer
from ortho.cost.big_o import H, N, d, symbolic
from ortho.cost.configurations import CONFIGURATIONS
from ortho.cost.layers import COSTS, hybrid, induction_heads, positional_heads, stopped_layer
from ortho.cost.models import recomputed
from ortho.layers.frozen_qk import FrozenQKAttention
from ortho.layers.hybrid import HEADS, HybridAttention
from ortho.layers.induction import InductionHeads
from ortho.layers.positional import PositionalHeads
from ortho.layers.synthesizer import SOURCES, FactoredDense, FactoredRandom, SynthesizerAttention

FORMS = ("reference", "fast")
SPLITS = [
    {"learned": 1, "positional": 3},
    {"learned": 2, "stopped": 2},
    {"positional": 1, "structured-stopped": 2, "rotary": 1},
    {"frozen": 1, "linear": 1, "window": 1, "structured": 1},
    {"structured-stopped": 4},
    {"induction": 2, "positional": 2},
    {"selective-induction": 3, "learned": 1},
    *({"positional": fixed, projection: 4 - fixed} for projection in PROJECTIONS for fixed in (0, 1, 4)),
]
FIXED = {"patterns": ("left", "end", "recent", "recent", "right", "previous"), "head_dim": 5}
SHARED = [{}, {"num_kv_heads": 1}, {"num_kv_heads": 1, "bias": True}, {"bias": True}, {"head_dim": 2}]
DRAWN = [
    {}, {"tokens": 2}, {"tokens": 3}, {"head_dim": 2},
    {"key_dim": 11, "sink": 0.8}, {"head_dim": 2, "key_dim": 3}, {"head_dim": 1, "key_dim": 12},
    {"sink": 0.5, "tokens": 2},
]  # fmt: skip
MIXTURES = [*SOURCES, *pairwise([*SOURCES, "random"]), ("random", "factored-random", "dot-product")]
BY_POSITION = ["random", "fixed-random", "factored-random", ("random", "factored-random")]
LAYERS = [
    *((FrozenQKAttention, stopped_layer, {"projection": p, "form": form, **kind})
      for p in ("stopped", "structured-stopped") for form in FORMS for kind in SHARED),
    *((HybridAttention, hybrid, {"heads": heads}) for heads in SPLITS),
    *((PositionalHeads, positional_heads, kind) for kind in ({}, FIXED, {"head_dim": 7})),
    *((InductionHeads, induction_heads, {"form": form, **kind}) for form in FORMS for kind in DRAWN),
    *((SynthesizerAttention, synthesizer, {"source": names, "max_length": 72}) for names in MIXTURES),
    *((SynthesizerAttention, synthesizer, {"source": names, "max_length": 72, "head_dim": width})
      for names in BY_POSITION for width in (3, 24)),
]  # fmt: skip
DECODING = [row for row in LAYERS if row[0] is not SynthesizerAttention]
DTYPES = [torch.float32, torch.float64]  # in turn: with the input's gradient and without, each size has both


def every(rows):
    return pytest.mark.parametrize(("layer", "declared", "kind"), rows, ids=lambda x: getattr(x, "__name__", str(x)))


def heads(kind, count):
    """How many heads a layer of this kind has: four of several kinds, a pattern each, or any number."""
    return 4 if "heads" in kind else len(kind.get("patterns", "")) or count


def test_all_kinds_have_a_closed_form():
    kinds = {kind for kind in HEADS if kind not in MECHANISMS}
    assert list(COSTS) == list(HEADS) and {kind for split in SPLITS for kind in split} >= kinds


# Whether x has a gradient changes what is kept and the products with the weights, whatever may be seen. By default each
# has a size with a single token, one without, and one of more than a chunk.
WAYS = [(True, True), (False, True), (True, False)] + [(False, False)] * WHOLE
STEPS = [*SIZES, (3, 1, 8, 4), (2, 70, 24, 4)] if WHOLE else [SIZES[1], SIZES[3], (2, 70, 24, 4)]


@every(LAYERS)
@pytest.mark.parametrize(("causal", "input_grad"), WAYS)
def test_a_step(layer, declared, kind, causal, input_grad):
    for number, (B, length, width, count) in enumerate(STEPS):
        dtype, H = DTYPES[(number + input_grad) % 2], heads(kind, count)
        if kind.get("head_dim", 0) * H > width and layer in (FrozenQKAttention, InductionHeads):
            continue  # a structured draw has no more columns than rows
        x = torch.zeros(B, length, width, dtype=dtype, requires_grad=input_grad)
        options = {"causal": causal, "input_grad": input_grad, "itemsize": dtype.itemsize, **kind}
        expected = declared(B, length, width, H, **options)
        assert_declared(expected, layer(width, H, dtype=dtype, **kind), x, is_causal=causal)


@every(DECODING)
def test_a_token_more(layer, declared, kind):
    """The state's bytes before it, and the FLOPs, at every length."""
    H = heads(kind, 4)
    decodes = assert_decodes if layer is FrozenQKAttention else assert_decodes_with_cache
    decodes(partial(declared, d=16, H=H, causal=True, **kind), layer(16, H, **kind), 16)


def test_formulas_equal_counts():
    """A closed form with the sizes put in is the closed form called with them."""
    for split in ({"learned": 1, "positional": 3}, {"stopped": 2, "frozen": 1, "rotary": 1}):
        formula, numbers = hybrid(2, N, d, 4, heads=split), hybrid(2, 48, 24, 4, heads=split)
        assert_formula(formula, numbers, {N: 48, d: 24})
    for source, causal in product([*SOURCES, ("factored-dense", "dot-product")], (False, True)):
        formula = synthesizer(2, N, d, H, source=source, rank=rank, k1=k1, causal=causal)
        numbers = synthesizer(2, 24, 16, 2, source=source, rank=3, k1=4, causal=causal)
        assert_formula(formula, numbers, {N: 24, d: 16, H: 2, rank: 3, k1: 4})


@pytest.mark.parametrize("length", [12, 7, 2])
def test_ranks_and_factors(length):
    """Other than the default; of the factors, only what a shorter sequence needs."""
    x = torch.zeros(2, length, 8, requires_grad=True)
    for source, option in [
        *((FactoredRandom(8, 2, 12, rank=r), {"rank": r}) for r in (1, 3)),
        *((FactoredDense(8, 2, 12, k1=k), {"k1": k}) for k in (1, 2, 6, 12)),
    ]:
        declared = synthesizer(2, length, 8, 2, source=source.name, max_length=12, **option)
        assert_declared(declared, SynthesizerAttention(8, 2, 12, source=source), x)


rank, k1 = sp.symbols("r k_1", positive=True)


@refusals(
    [
        (lambda: hybrid(1, 5, 8, 2, heads={"learned": 1, "positional": 2}), "heads: .* together num_heads = 2, got 3"),
        (lambda: hybrid(1, 5, 8, 2, heads={"learned": 3, "positional": -1}), "heads: expected numbers of at least 0,"),
        (lambda: hybrid(1, 5, 8, 2, heads={"learned": 2, "other": 0}), "heads: expected one of 'learned', "),
        (lambda: hybrid(1, 5, 8, 3, heads={"learned": 3}), "H: expected a divisor of d = 8, got 3"),
        (lambda: model(1, 10, 8, 2, 1, vocab_size=11, max_length=9), "N: expected at most max_length = 9, got 10"),
        (lambda: stopped_layer(1, 5, 8, 4, num_kv_heads=3), "num_kv_heads: .* divisor of num_heads = 4, got 3"),
        (lambda: stopped_layer(1, 5, 8, 4, projection="learned"), "projection: expected one of .*, got 'learned'"),
        (lambda: block(1, 2, 4, 2, input_grad=False), "input_grad: expected in ortho.cost.layer alone", TypeError),
        (lambda: layer(1, 4, 5, 2), "H: expected a divisor of d = 5, got 2"),
        (lambda: layer(1, 2, 8, 4, num_kv_heads=3), "num_kv_heads: expected a divisor of num_heads = 4, got 3"),
        (lambda: MECHANISMS["efficient"].cost(1, 8, 1, 4, 4, causal=True), "causal: expected False"),
        (lambda: recomputed(1, 4, 4, 1, 2, 3), "segments: expected at most the 2 blocks, got 3"),
        (lambda: synthesizer(1, 4, 8, 2, source=[]), "source: expected at least one, got none"),
        (lambda: synthesizer(1, 5, 8, 2, max_length=4), "N: expected at most max_length = 4, got 5"),
        (lambda: synthesizer(1, 5, 8, 2, source="factored-dense", k1=2), "k1: expected a divisor of max_length = 5,"),
        (lambda: synthesizer(1, 5, 8, 3, source=("random", "dense"), head_dim=2), "source: expected sources by posit"),
        (lambda: symbolic(synthesizer, source="factored-dense"), "k1: expected a size beside the symbol N for"),
    ]
)
def test_errors(refused):
    refused()


# ------------------------------------------------------------------------------------------------- the published models

TINY = {  # what differs from the published size
    "BERT-base": {"N": 7, "sizes": {"vocab_size": 11, "max_length": 7}},
    "GPT-2 medium": {"N": 7, "sizes": {"vocab_size": 11, "max_length": 7, "bias": True}},
    "ViT-Base": {"N": 10, "sizes": {"image_size": 6, "patch_size": 2, "num_classes": 5, "channels": 3}},
}


def tiny(name):
    return replace(CONFIGURATIONS[name], d=12, H=2, L=2, **TINY[name])


def test_published_parameters():
    """Those of the papers' released models: with the pooler, with the tied read-out once, with 1000 classes."""
    published = {"BERT-base": 109_482_240, "GPT-2 medium": 354_823_168, "ViT-Base": 86_567_656}
    assert {name: at.parameters for name, at in CONFIGURATIONS.items()} == published
    for at in CONFIGURATIONS.values():
        for projection in PROJECTIONS:
            built, declared = at.build(projection=projection, device="meta"), at.cost(1, projection=projection)
            stored = [*built.parameters(), *built.buffers()]
            trained, frozen = (sum(t.numel() for t in stored if t.requires_grad is needs) for needs in (True, False))
            assert (trained, frozen) == (declared.trained, declared.frozen)
            if not projection.startswith("structured"):  # their signs stand for matrices
                assert trained + frozen == at.parameters
                assert frozen == (0 if projection == "learned" else 2 * at.L * at.d * (at.d + 1))


@pytest.mark.parametrize("name", CONFIGURATIONS)
@pytest.mark.parametrize("projection", PROJECTIONS)
@pytest.mark.parametrize("form", ["reference", "fast"])
def test_costs(name, projection, form):
    at = tiny(name)
    for B, dtype in ((1, torch.float32), (2, torch.float64)):
        given = at.inputs(B, dtype=dtype, generator=torch.Generator().manual_seed(0))
        declared = at.cost(B, projection=projection, form=form, itemsize=dtype.itemsize)
        assert_declared(declared, at.build(projection=projection, form=form, dtype=dtype), *given)


@pytest.mark.parametrize("name", CONFIGURATIONS)
@pytest.mark.parametrize("projection", PROJECTIONS)
@pytest.mark.parametrize("form", ["reference", "fast"])
def test_parts_of_a_step(name, projection, form):
    """The parts equal the layer's closed form and sums by hand: look-ups have no products, patches no gradient."""
    at, B = CONFIGURATIONS[name], 3
    options = {"projection": projection, "form": form}
    parts = at.step_by_part(B, **options)
    assert sum(parts.values()) == at.cost(B, **options).step
    alone = layer(B, at.N, at.d, at.H, causal=name == "GPT-2 medium", bias=True, **options)
    assert parts["attention"] == at.L * alone.step
    assert parts["networks"] == at.L * 48 * B * at.N * at.d**2
    assert parts["embeddings"] == (2 * 2 * B * 196 * 768 * 768 if name == "ViT-Base" else 0)
    outputs = {"BERT-base": 768, "GPT-2 medium": 1024 * 50257, "ViT-Base": 1000}
    assert parts["read-out"] == 6 * B * at.d * outputs[name]
