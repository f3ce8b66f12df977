"""The standard layer and the whole Transformer: time, space and parameters.

All orders are judged by a layer with H heads, whether the source names them or not: a claim that leaves H out is
corrected.
"""

from functools import cache

import sympy

from ortho.attention import MECHANISMS
from ortho.cost import layer
from ortho.cost.big_o import H, N, d
from ortho.layers.multihead import MultiheadAttention
from paper import elementwise, memory

STANDARD = layer(1, N, d, H, form="reference")
CORE = MECHANISMS["softmax"].cost(1, N, H, d / H, d / H, form="reference")


@cache
def kept(form: str = "reference") -> sympy.Expr:
    """Numbers that a layer keeps for the backward pass."""
    return memory.formula(form=form) / 4


@cache
def softmax() -> sympy.Expr:
    """Scalar operations of a layer outside its products: the scale and the softmax."""
    return elementwise.formulas(lambda _, d, H, __: MultiheadAttention(d, H, form="reference"), H * N**2, N * d)[0]


def time() -> sympy.Expr:
    return STANDARD.forward + softmax()


def product(*widths: sympy.Expr | int) -> sympy.Expr:
    """FLOPs of one of the core's two products: a width of zero on one side leaves the other."""
    return MECHANISMS["softmax"].cost(1, N, H, *widths, form="reference").forward


def quadratic(cost: sympy.Expr) -> sympy.Expr:
    """The terms of N^2."""
    return sympy.expand(cost).coeff(N, 2) * N**2
