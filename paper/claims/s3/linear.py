r"""S3, sections 1 and 2: the reordered product, its cost, and the recurrence. The source has one head, with K = d."""

from collections.abc import Callable
from typing import Any

import sympy
import torch

from ortho.attention import MECHANISMS
from ortho.cost import layer
from ortho.cost.big_o import H, N, d
from ortho.theory import associativity
from ortho.theory.associativity import Matrix, flops, left_first, product, product_flops, right_first
from paper.claims.figures import show
from paper.claims.ledger import evidence
from paper.claims.rules import all_of, counted, growth
from paper.claims.verdicts import Finding

CHAPTER = "07-linear-attention"

HEAD = MECHANISMS["linear"].cost(1, N, 1, d, d)


@evidence("S3.1a", chapter=CHAPTER)
def two_products() -> Finding:
    whole = flops(N, d, N, d).right
    of_heads = sympy.expand(H * flops(N, d / H, N, d / H).right)
    return all_of(
        {
            "$K^\\top V$": growth("N*d^2", product_flops(d, N, d)),
            "$Q (K^\\top V)$": growth("N*d^2", product_flops(N, d, d)),
            "both": growth("N*d^2", sympy.expand(whole)),
            "in $N$": growth("N", sympy.expand(whole), held=("d",)),
        }
    ).noting(f"With $H$ heads the two take {show(of_heads)}, and the four projections around them {show(8 * N * d**2)}")


def doubling(cost: Any) -> Any:
    """What a closed form in N becomes with twice the length, as a multiple of what it is."""
    return sympy.factor(sympy.cancel(cost.subs(N, 2 * N) / cost))


@evidence("S3.1b", chapter=CHAPTER)
def twice_the_length() -> Finding:
    cores = {
        "standard": MECHANISMS["softmax"].cost(1, N, 1, d, d, form="reference").forward,
        "linear": HEAD.forward,
    }
    layers = {name: layer(1, N, d, H, attention=name).forward for name in ("softmax", "linear")}
    return counted({"standard": 4, "linear": 2}, {name: doubling(forward) for name, forward in cores.items()}).noting(
        f"These are the products of the attention itself. With the projections a standard layer becomes "
        f"{show(doubling(layers['softmax']))} times as costly, between 2 for short sequences and 4 for long ones, "
        f"a linear one {show(doubling(layers['linear']))} times"
    )


# What the source prints of its example with v = (a, b), k = (c, d), q = (e, f).
PRINTED = {
    "$k^\\top q$": ("c*e + d*f",),
    "$v\\, (k^\\top q)$": ("a*(c*e + d*f)", "b*(c*e + d*f)"),
    "$v k^\\top$": ("a*c", "a*d", "b*c", "b*d"),
    "$(v k^\\top)\\, q$": ("a*(c*e + d*f)", "b*(c*e + d*f)"),
}


def worked_example(*numbers: Any) -> dict[str, tuple[Any, ...]]:
    """The entries of the four results for these six numbers a to f, by default for the letters."""
    values = numbers or sympy.symbols("a:f", positive=True)
    v, k, q = (tuple((x,) for x in values[i : i + 2]) for i in (0, 2, 4))
    row = associativity.transpose(k)
    found = (product(row, q), right_first(v, row, q), product(v, row), left_first(v, row, q))
    return {name: tuple(x for r in matrix for x in r) for name, matrix in zip(PRINTED, found, strict=True)}


def numbered(entries: tuple[Any, ...]) -> dict[str, Any]:
    """Entries by their number, for the rule; a single one without."""
    return {f"({i})" if len(entries) > 1 else "": entry for i, entry in enumerate(entries, 1)}


def differing(one: Callable[..., Matrix], other: Callable[..., Matrix], *, tokens: int = 12, width: int = 4) -> int:
    """Entries in which two ways of computing causal outputs differ, on random fractions."""
    g = torch.Generator().manual_seed(0)
    operands = [associativity.rational(tokens, width, generator=g) for _ in "qkv"]
    pairs = zip(one(*operands), other(*operands), strict=True)
    return sum(x != y for rows in pairs for x, y in zip(*rows, strict=True))


def float_bound(tokens: int = 64, width: int = 16) -> tuple[bool, float]:
    """Whether the two orders differ in float64 for normal matrices, and by how much at most, relatively."""
    g = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, tokens, width, generator=g, dtype=torch.float64)
    found = associativity.reorder(q, k.T, v)
    return found.changed > 0, found.bound


@evidence("S3.2a", chapter=CHAPTER)
def same_outputs() -> Finding:
    changed, bound = float_bound()
    return all_of(
        {
            **{name: counted(numbered(PRINTED[name]), numbered(entries)) for name, entries in worked_example().items()},
            "outputs that differ, in fractions": counted(
                {"": 0}, {"": differing(associativity.by_sums, associativity.by_states)}
            ),
        }
    ).noting(
        f"In floating point the two orders are {'not ' if changed else ''}the same numbers; in float64 they are within "
        f"{show(float(f'{bound:.0e}'))} of each other, relatively, at 64 tokens of width 16"
    )


@evidence("S3.2b", chapter=CHAPTER)
def recurrence() -> Finding:
    numbers = HEAD.state_bytes / 4
    first = sympy.solve(MECHANISMS["softmax"].cost(1, N, 1, d, d).decode - HEAD.decode, N)[0]
    return all_of(
        {
            "outputs that differ from the sums, in fractions": counted(
                {"": 0}, {"": differing(associativity.by_sums, associativity.by_states)}
            ),
            "a step": growth("d^2", sympy.expand(HEAD.decode)),
            "in all": growth("N*d^2", sympy.expand(N * HEAD.decode)),
            "numbers kept, in $t$": growth("1", sympy.expand(numbers), held=("d",)),
        }
    ).noting(f"A step takes fewer FLOPs than one of softmax attention from $t >$ {show(first)} on")
