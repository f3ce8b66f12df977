"""What a layer, a block and a model cost: closed forms, and the same figures counted from running code.

A closed form is a plain function of sizes, for FLOPs of matrix products, parameters and what decoding costs. Called
with integers it gives an exact count; called with sympy symbols it gives the formula. `of` runs any module and counts
its FLOPs, and the bytes that autograd keeps; the tests require that formulas and counts are exactly equal.
"""

from ortho._cost import Cost
from ortho.cost import mechanisms as mechanisms
from ortho.cost.counting import Counts, of
from ortho.cost.layers import hybrid, layer
from ortho.cost.models import block, feed_forward, model
from ortho.cost.synthesizers import synthesizer

__all__ = [
    "Cost",
    "Counts",
    "block",
    "feed_forward",
    "hybrid",
    "layer",
    "model",
    "of",
    "synthesizer",
]
