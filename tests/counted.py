"""Assert that counted costs of calls, steps and decoded tokens equal closed forms exactly, and formulas numbers."""

from dataclasses import fields

import sympy as sp
import torch
from sample import WHOLE
from torch.utils._pytree import tree_leaves

from ortho.cost import Cost, of
from ortho.cost.counting import flops_of

COUNTED = ["forward", "backward", "trained", "frozen"]
FIGURES = [f.name for f in fields(Cost) if f.name != "itemsize"]
CALLS = COUNTED[:2]  # for a function, which has no parameters
SIZES = [(1, 5, 8, 2), (2, 7, 12, 3), (3, 16, 16, 1), (1, 1, 4, 4), (2, 33, 64, 4)]  # B, N, d, H


def assert_declared(declared, call, *inputs, **kwargs):
    """Assert that `call(*inputs, **kwargs)`, of a module or a function, costs what is declared, forward and backward.
    All figures must be integers, or not derived."""
    counts = of(call, *inputs, **kwargs)
    assert {n: getattr(counts, n) for n in COUNTED} == {n: getattr(declared, n) for n in COUNTED}
    assert all(type(figure) is int or figure != figure for figure in vars(declared).values())


def assert_decodes(declared, layer, width, lengths=range(1, 6 if WHOLE else 4)):
    """Assert that a further token of two sequences has the FLOPs and state bytes of `declared(2, length)`."""
    state = None
    for length in lengths:
        x, expected = torch.zeros(2, 1, width), declared(2, length)
        assert flops_of(layer, x, is_causal=True, initial_state=state) == expected.decode
        _, state = layer(x, is_causal=True, initial_state=state, return_state=True)
        assert sum(part.nbytes for part in tree_leaves(state) if isinstance(part, torch.Tensor)) == expected.state_bytes


def assert_decodes_with_cache(declared, layer, width, lengths=range(1, 6 if WHOLE else 4)):
    """The same for a layer that has caches but no states; the cache has room for just these tokens."""
    for length in lengths:
        x, expected, cache = torch.zeros(2, length, width), declared(2, length), layer.new_cache(length)
        if length > 1:
            layer(x[:, 1:], is_causal=True, cache=cache)
        assert flops_of(layer, x[:, :1], is_causal=True, cache=cache) == expected.decode
        assert cache.nbytes == expected.state_bytes


def assert_formula(formula, numbers, sizes, figures=FIGURES):
    """Assert that a symbolic closed form, with the sizes substituted, equals the closed form called with the sizes."""
    for name in figures:
        number = getattr(numbers, name)
        assert sp.sympify(getattr(formula, name)).subs(sizes) == (sp.nan if number != number else number), name
