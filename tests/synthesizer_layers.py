"""Layers of every source of logits, alone and mixed, that the tests of Synthesizers share."""

import pytest
import torch

from ortho.layers.synthesizer import SOURCES, SynthesizerAttention

# Sums of at most 1e2 rounded terms of size up to 10 in float64, in different orders (2e-13), and their exponentials.
TOLERANCE = {"atol": 1e-12, "rtol": 1e-12}
D, HEADS, LENGTH = 12, 3, 12
K = D // HEADS
CASES = {
    **{name: name for name in SOURCES},
    "random + dot product": ["random", "dot-product"],
    "factored random + dense": ["factored-random", "dense"],
    "three": ["factored-dense", "fixed-random", "dot-product"],
    "two matrices": ["random", "fixed-random"],
}
every_case = pytest.mark.parametrize("case", CASES)


def layer(case="random", max_length=LENGTH, dtype=torch.float64):
    """A layer that, if it mixes sources, mixes them in unequal shares."""
    source = CASES.get(case, case)
    g = torch.Generator().manual_seed(1)
    module = SynthesizerAttention(D, HEADS, max_length, source=source, generator=g, dtype=dtype)
    if module.mixing is not None:
        with torch.no_grad():
            module.mixing.copy_(torch.arange(len(module.sources)) * 0.7)
    return module
