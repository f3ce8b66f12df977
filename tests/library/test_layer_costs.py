"""Layers whose heads are of one kind or of several: a step and a decoded token, declared = counted, exactly."""

from functools import partial

import pytest
import torch
from counted import SIZES, assert_declared, assert_decodes, assert_decodes_with_cache, assert_formula
from extent import WHOLE
from refusals import refusals

from ortho import PROJECTIONS
from ortho.attention import MECHANISMS
from ortho.cost import model
from ortho.cost.big_o import N, d
from ortho.cost.layers import COSTS, hybrid, induction_heads, positional_heads, stopped_layer
from ortho.layers.frozen_qk import FrozenQKAttention
from ortho.layers.hybrid import HEADS, HybridAttention
from ortho.layers.induction import InductionHeads
from ortho.layers.positional import PositionalHeads

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
LAYERS = [
    *((FrozenQKAttention, stopped_layer, {"projection": p, "form": form, **kind})
      for p in ("stopped", "structured-stopped") for form in FORMS for kind in SHARED),
    *((HybridAttention, hybrid, {"heads": heads}) for heads in SPLITS),
    *((PositionalHeads, positional_heads, kind) for kind in ({}, FIXED, {"head_dim": 7})),
    *((InductionHeads, induction_heads, {"form": form, **kind}) for form in FORMS for kind in DRAWN),
]  # fmt: skip
EVERY = pytest.mark.parametrize(("layer", "declared", "kind"), LAYERS, ids=lambda x: getattr(x, "__name__", str(x)))
DTYPES = [torch.float32, torch.float64]  # in turn: with the input's gradient and without, each size has both


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


@EVERY
@pytest.mark.parametrize(("causal", "input_grad"), WAYS)
def test_a_step(layer, declared, kind, causal, input_grad):
    for number, (B, length, width, count) in enumerate(STEPS):
        dtype, H = DTYPES[(number + input_grad) % 2], heads(kind, count)
        if kind.get("head_dim", 0) * H > width and layer is not PositionalHeads:
            continue  # a structured draw has no more columns than rows
        x = torch.zeros(B, length, width, dtype=dtype, requires_grad=input_grad)
        options = {"causal": causal, "input_grad": input_grad, "itemsize": dtype.itemsize, **kind}
        expected = declared(B, length, width, H, **options)
        assert_declared(expected, layer(width, H, dtype=dtype, **kind), x, is_causal=causal)


@EVERY
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


@refusals(
    [
        (lambda: hybrid(1, 5, 8, 2, heads={"learned": 1, "positional": 2}), "heads: .* together num_heads = 2, got 3"),
        (
            lambda: hybrid(1, 5, 8, 2, heads={"learned": 3, "positional": -1}),
            "heads: expected numbers of at least 0, got",
        ),
        (lambda: hybrid(1, 5, 8, 2, heads={"learned": 2, "other": 0}), "heads: expected one of 'learned', "),
        (lambda: hybrid(1, 5, 8, 3, heads={"learned": 3}), "H: expected a divisor of d = 8, got 3"),
        (lambda: model(1, 10, 8, 2, 1, vocab_size=11, max_length=9), "N: expected at most max_length = 9, got 10"),
        (lambda: stopped_layer(1, 5, 8, 4, num_kv_heads=3), "num_kv_heads: .* divisor of num_heads = 4, got 3"),
        (lambda: stopped_layer(1, 5, 8, 4, projection="learned"), "projection: expected one of .*, got 'learned'"),
    ]
)
def test_errors(refused):
    refused()
