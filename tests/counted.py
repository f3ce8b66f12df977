"""Declared = counted, exactly: a call, a step and a decoded token, held to their closed forms; formulas to numbers."""

from dataclasses import fields

import sympy as sp
import torch
from extent import WHOLE
from torch.utils._pytree import tree_leaves

from ortho.cost import Cost
from ortho.cost.counting import Counts, count_forward, count_step

COUNTED = [f.name for f in fields(Counts) if f.compare]
FIGURES = [f.name for f in fields(Cost) if f.name != "itemsize"]
CALLS = COUNTED[:5]  # of a function, which has no parameters
SIZES = [(1, 5, 8, 2), (2, 7, 12, 3), (3, 16, 16, 1), (1, 1, 4, 4), (2, 33, 64, 4)]  # B, N, d, H


def assert_declared(declared, call, *inputs, leaving_out=(), **kwargs):
    """What `call(*inputs, **kwargs)`, of a module or a function, executes, forward and backward, is what is declared.

    A function's output counts with what is saved if autograd keeps it. Figures are integers.
    """
    counts, expected = count_step(call, *inputs, **kwargs), declared + Cost(saved_bytes=declared.output_bytes)
    assert {n: getattr(counts, n) for n in COUNTED if n not in leaving_out} == {
        n: getattr(expected, n) for n in COUNTED if n not in leaving_out
    }
    assert all(type(figure) is int for figure in vars(declared).values())


def assert_decodes(declared, layer, width, lengths=range(1, 6 if WHOLE else 4)):
    """A token more of two sequences: FLOPs and the state's bytes are those of `declared(2, length)`, at each length."""
    state = None
    for length in lengths:
        x, expected = torch.zeros(2, 1, width), declared(2, length)
        assert count_forward(layer, x, is_causal=True, initial_state=state)[0] == expected.decode
        _, state = layer(x, is_causal=True, initial_state=state, return_state=True)
        assert sum(part.nbytes for part in tree_leaves(state) if isinstance(part, torch.Tensor)) == expected.state_bytes


def assert_formula(formula, numbers, sizes, figures=FIGURES):
    """A closed form with the sizes put in is the closed form called with them."""
    for name in figures:
        assert sp.sympify(getattr(formula, name)).subs(sizes) == getattr(numbers, name), name
