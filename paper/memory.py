"""Bytes that autograd keeps from the forward to the backward pass, counted: as formulas in the sizes, and of models."""

from collections.abc import Callable
from functools import cache
from itertools import product
from typing import Any

import sympy
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ortho import MultiheadAttention, TransformerBlock, cost
from ortho.cost.big_o import H, N, d, m
from ortho.cost.configurations import CONFIGURATIONS

SCOPES: dict[str, Callable[..., nn.Module]] = {"layer": MultiheadAttention, "block": TransformerBlock}
TERMS = (N * d, H * N, N, H * N**2)  # of a layer with softmax attention
SIZES = [(n, h * k, h, f) for n, k, h, f in product((3, 5, 8, 13), (2, 4, 6), (2, 3), (2, 4))]  # N, d, H, m
OTHERS = [(7, 8, 4, 6), (12, 20, 2, 2), (9, 15, 5, 8)]


def fitted(count: Callable[[int, int, int, int], int], *terms: sympy.Expr) -> sympy.Expr:
    """The formula of a count: the sum of these terms in N, d, H and m, each with a constant.

    `count(N, d, H, m)` is taken at as many sizes as there are terms. At three others the formula must be exact:
    AssertionError otherwise, as a term is missing.
    """

    def at(sizes: tuple[int, ...]) -> list[sympy.Expr]:
        given = dict(zip((N, d, H, m), sizes, strict=True))
        return [sympy.sympify(term).subs(given) for term in terms]

    chosen: list[tuple[int, int, int, int]] = []
    for sizes in SIZES:  # those that tell the terms apart
        if sympy.Matrix([at(each) for each in [*chosen, sizes]]).rank() > len(chosen):
            chosen.append(sizes)
    rows, counts = sympy.Matrix([at(sizes) for sizes in chosen]), sympy.Matrix([count(*sizes) for sizes in chosen])
    factors = rows.LUsolve(counts)
    for sizes in OTHERS:
        found = sympy.Matrix(at(sizes)).dot(factors)
        assert found == count(*sizes), f"terms: expected all, got {terms}, which give {found} at N, d, H, m = {sizes}"
    return sympy.expand(sympy.Matrix(terms).dot(factors))


def kept(build: Callable[..., nn.Module], *terms: sympy.Expr) -> sympy.Expr:
    """The formula of how many float32 numbers `build(N, d, H, m)` keeps of x (1, N, d), which needs a gradient."""

    def count(*sizes: int) -> int:
        return cost.of(build(*sizes), torch.zeros(1, *sizes[:2], requires_grad=True)).saved_bytes

    return fitted(count, *(terms or TERMS)) / 4


def kept_by_call(function: Callable[..., Any], *terms: sympy.Expr) -> sympy.Expr:
    """The formula of how many float32 numbers `function(q, k, v, m)` keeps for one head of width d, which with its
    output, if that is kept, is all that it keeps."""

    def count(n: int, width: int, _: int, features: int) -> int:
        qkv = [torch.zeros(1, 1, n, width, requires_grad=True) for _ in range(3)]
        return cost.of(function, *qkv, features).saved_bytes

    return fitted(count, *terms) / 4


@cache
def formula(
    *,
    scope: str = "layer",
    dtype: torch.dtype = torch.float32,
    input_grad: bool = True,
    causal: bool = False,
    **kind: Any,
) -> sympy.Expr:
    """The formula of the bytes that a layer or a block with softmax attention keeps of one sequence x (1, N, d); `kind`
    are its arguments (`projection`, `form`, ...)."""

    def count(n: int, width: int, heads: int, _: int) -> int:
        x = torch.zeros(1, n, width, dtype=dtype, requires_grad=input_grad)
        return cost.of(SCOPES[scope](width, heads, dtype=dtype, **kind), x, is_causal=causal).saved_bytes

    return fitted(count, *TERMS)


def layer_bytes(length: int, width: int, heads: int, **kind: Any) -> int:
    """`formula` at these sizes."""
    return int(formula(**kind).subs({N: length, d: width, H: heads}))


@cache
def model_bytes(name: str, B: int, *, dtype: torch.dtype = torch.float32, **kind: Any) -> int:
    """Bytes that a model of `CONFIGURATIONS` keeps of B sequences or images. It runs with one block and with two, on
    tensors that have shapes and no numbers; all further blocks keep the same."""
    at = CONFIGURATIONS[name]

    def of(layers: int) -> int:
        with FakeTensorMode():
            sizes = {"d_model": at.d, "num_heads": at.H, "num_layers": layers, **at.sizes}
            return cost.of(at.module(**sizes, dtype=dtype, **kind), *at.inputs(B, dtype=dtype)).saved_bytes

    one, two = of(1), of(2)
    return one + (at.L - 1) * (two - one)


def step_memory(of: cost.Cost, activations: int) -> dict[str, Any]:
    """Bytes in memory during a training step with AdamW, by part, if all numbers have the size that `of` assumes."""
    return {
        "trained weights": of.itemsize * of.trained,
        "frozen weights": of.itemsize * of.frozen,
        "gradients": of.itemsize * of.trained,
        "moments": of.optimiser_bytes,
        "activations": activations,
    }
