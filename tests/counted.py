"""Declared = counted, exactly: a step and a decoded token of a layer or model, held to its closed form."""

from dataclasses import fields

import torch
from torch.utils._pytree import tree_leaves

from ortho.cost.counting import Counts, count_forward, count_step

COUNTED = [f.name for f in fields(Counts) if f.compare]
SIZES = [(1, 5, 8, 2), (2, 7, 12, 3), (3, 16, 16, 1), (1, 1, 4, 4), (2, 33, 64, 4)]  # B, N, d, H


def assert_declared(declared, module, *inputs, **kwargs):
    """What `module(*inputs, **kwargs)` executes, forward and backward, is what is declared."""
    counts = count_step(module, *inputs, **kwargs)
    assert {n: getattr(counts, n) for n in COUNTED} == {n: getattr(declared, n) for n in COUNTED}


def assert_decodes(declared, layer, width, lengths=range(1, 6)):
    """A token more of two sequences: FLOPs and the state's bytes are those of `declared(2, length)`, at each length."""
    state = None
    for length in lengths:
        x, expected = torch.zeros(2, 1, width), declared(2, length)
        assert count_forward(layer, x, is_causal=True, initial_state=state)[0] == expected.decode
        _, state = layer(x, is_causal=True, initial_state=state, return_state=True)
        assert sum(part.nbytes for part in tree_leaves(state) if isinstance(part, torch.Tensor)) == expected.state_bytes
