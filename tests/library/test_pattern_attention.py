"""Attention by the parts of static patterns equals attention under their masks: outputs and all gradients."""

import pytest
import torch
from drawn_tilings import draw
from static_patterns import IDS, RULES

from ortho.attention.sparse import block_sparse, dilated, fixed, global_local, strided, window
from ortho.attention.sparse.pattern import pattern_attention, pattern_attention_reference

PATTERNS = [pattern for pattern, _ in RULES]
MODULES = (block_sparse, dilated, fixed, global_local, strided, window)
MECHANISMS = [mechanism for module in MODULES for mechanism in module.MECHANISMS]
FORMS = (pattern_attention_reference, pattern_attention)
# Sums of at most 300 float64 products of size 10, in another order and behind the exponentials of scores up to 10.
TOLERANCE = {"atol": 1e-12, "rtol": 1e-12}
K, V = 3, 4


def operands(*lead, length, keys=None):
    shapes = (length, K), (keys or length, K), (keys or length, V)
    return [draw(*lead, *shape, seed=s).requires_grad_() for s, shape in enumerate(shapes)]


def compare(leaves, state=(), **kwargs):
    results = []
    for form in FORMS:
        o = form(*leaves, initial_state=tuple(state) or None, **kwargs)
        results.append([o, *torch.autograd.grad(o, [*leaves, *state], draw(*o.shape, seed=9))])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, **TOLERANCE)
    return results[0][0]


@pytest.mark.parametrize("pattern", PATTERNS, ids=IDS)
@pytest.mark.parametrize("causal", [False, True])
def test_fast_equals_reference(pattern, causal):
    for length in (1, 7, 64, 150):
        compare(operands(2, length=length), pattern=pattern, is_causal=causal)


@pytest.mark.parametrize("pattern", PATTERNS, ids=IDS)
def test_other_numbers_of_keys(pattern):
    for length, keys in ((40, 150), (150, 40), (1, 99)):
        compare(operands(length=length, keys=keys), pattern=pattern)


@pytest.mark.parametrize("pattern", PATTERNS, ids=IDS)
@pytest.mark.parametrize("causal", [False, True])
def test_behind_a_state(pattern, causal):
    """Queries stand behind the state's keys; a sequence in pieces gives what the whole gives."""
    past = [draw(2, 70, width, seed=s).requires_grad_() for s, width in ((5, K), (6, V))]
    for length in (1, 5, 66):
        compare(operands(2, length=length), past, pattern=pattern, is_causal=causal)
    leaves = [x.detach() for x in operands(length=140)]
    whole = pattern_attention_reference(*leaves, pattern=pattern, is_causal=True)
    state = None
    for start, stop in ((0, 1), (1, 64), (64, 66), (66, 140)):
        some = (x[start:stop] for x in leaves)
        o, state = pattern_attention(*some, pattern=pattern, is_causal=True, initial_state=state, return_state=True)
        torch.testing.assert_close(o, whole[start:stop], **TOLERANCE)


@pytest.mark.parametrize("pattern", PATTERNS, ids=IDS)
@pytest.mark.parametrize("causal", [False, True])
def test_masks(pattern, causal):
    """One for all sequences, one for each, of keys alone; rows may be left with nothing."""
    g = torch.Generator().manual_seed(3)
    for shape in ((90, 90), (2, 1, 90), (2, 90, 90)):
        mask = torch.rand(shape, generator=g) < 0.4
        o = compare(operands(2, length=90), pattern=pattern, is_causal=causal, attn_mask=mask)
        kept = mask.expand(2, 90, 90) & pattern.mask(90, is_causal=causal)
        assert not o[~kept.any(-1)].any()


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=lambda m: m.name)
@pytest.mark.parametrize("causal", [False, True])
def test_mechanisms(mechanism, causal):
    """At the sizes that are registered, longer than they reach; float32 is near float64, and half precision near that.

    A score of 5 is rounded by 3e-7 of it, as are sums of weighted values of 4; 2e-5 leaves a factor of 10. bfloat16
    rounds the operands by 2^-9 of them and the output by as much: 0.1 for scores of 5 and values of 4.
    """
    leaves = operands(2, length=700)
    exact = mechanism.reference(*leaves, is_causal=causal)
    torch.testing.assert_close(mechanism.fast(*leaves, is_causal=causal), exact, **TOLERANCE)
    for dtype, tolerance in ((torch.float32, 2e-5), (torch.bfloat16, 0.1)):
        o = mechanism.fast(*(x.to(dtype) for x in leaves), is_causal=causal)
        assert o.dtype == dtype
        torch.testing.assert_close(o.double(), exact, atol=tolerance, rtol=0)


def test_names_are_told_apart():
    names = [mechanism.name for mechanism in MECHANISMS]
    assert len(set(names)) == len(names)
