"""The standard layer and the whole Transformer: time, space and parameters.

All orders are judged by a layer with H heads, whether the source names them or not: a claim that leaves H out is
corrected.
"""

from functools import cache
from math import inf

import sympy
import torch

from ortho.attention import MECHANISMS
from ortho.cost import block, feed_forward, layer
from ortho.cost.big_o import H, N, d
from ortho.layers.feed_forward import FeedForward
from ortho.layers.multihead import MultiheadAttention
from paper import elementwise, memory
from paper.claims.evidence.printed_models import SCENARIOS
from paper.claims.ledger import evidence, evidence_table
from paper.claims.rules import all_of, counted, region
from paper.claims.shared.common import orders
from paper.claims.verdicts import Finding

CHAPTER, WHOLE = "01-the-standard-layer", "23-whole-transformer"

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


evidence_table(
    CHAPTER,
    {
        # Q, K, V and the output projection, all alike
    },
)

# ------------------------------------------------------------------------------------------------ S1 and S2

NETWORK = feed_forward(1, N, d)
BLOCK = block(1, N, d, H, form="reference")
L = sympy.Symbol("L", positive=True)
EXAMPLE = (10000, 768)  # N and d, the source's
HEAD = 64  # width of the models' heads
SHORT, LONG = 64, 65536  # tokens, d = 768


@cache
def network() -> tuple[sympy.Expr, sympy.Expr]:
    """(operations forward, numbers kept) of a feed-forward network."""

    def build(_: int, width: int, *__: int) -> FeedForward:
        return FeedForward(width)

    return NETWORK.forward + elementwise.formulas(build, N * d)[0], memory.kept(build, N * d)


def quadratic(cost: sympy.Expr) -> sympy.Expr:
    """The terms of N^2."""
    return sympy.expand(cost).coeff(N, 2) * N**2


def share(cost: sympy.Expr, length: int, width: int) -> float:
    """The share of the terms of N^2, in per cent."""
    at = {N: length, d: width, H: width // HEAD}
    return round(float(100 * quadratic(cost).subs(at) / cost.subs(at)), 1)


def steps() -> dict[str, tuple[str, sympy.Expr]]:
    """Step by step: the claimed time, and the FLOPs."""
    return {
        "projection": ("N*d^2", STANDARD.forward - CORE.forward),
        "similarity": ("N^2*d", product(d / H, 0)),
        "softmax": ("N^2", softmax()),
        "aggregation": ("N^2*d", product(0, d / H)),
    }


@evidence("S1.1.1b", chapter=WHOLE)
def attention_space() -> Finding:
    parts = {
        "parameters": counted({"": 4 * d**2}, {"": STANDARD.trained}),
        **orders(
            {
                "activations": ("N*d", kept() - quadratic(kept())),
                "scores": ("N^2", quadratic(kept())),
                "total": ("N^2 + d^2", kept() + STANDARD.trained),
            }
        ),
    }
    return all_of(parts).noting("$N d$ is never more than $N^2 + d^2$")


@evidence("S1.1.1c", chapter=WHOLE)
def bottleneck() -> Finding:
    lengths = {"the source's example": EXAMPLE} | {n: (at.length, at.width) for n, at in SCENARIOS.items()}
    space = kept() + STANDARD.trained
    parts = {
        "$N / d$, far larger than 1": region((2, inf), {n: round(N_ / d_, 2) for n, (N_, d_) in lengths.items()}),
        "the scores' share of a block's FLOPs, %": region(
            (50, 100), {n: share(BLOCK.forward, *sizes) for n, sizes in lengths.items()}
        ),
        "of a layer's numbers, %": region((50, 100), {n: share(space, *sizes) for n, sizes in lengths.items()}),
    }
    return all_of(parts).noting("The models are those of document S0")


@evidence("S1.1.3b", chapter=WHOLE)
def dominant() -> Finding:
    crossing = sympy.solve(sympy.expand(BLOCK.forward) - 2 * quadratic(BLOCK.forward), N)
    width = EXAMPLE[1]
    parts = {
        f"share of $N^2$ in a block's FLOPs at $N = {SHORT}$, %": region(
            (0, 50), {"": share(BLOCK.forward, SHORT, width)}
        ),
        f"at $N = {LONG:,}$, %": region((50, 100), {"": share(BLOCK.forward, LONG, width)}),
    }
    return all_of(parts).noting(f"$d = {width}$. They are equal at $N = {sympy.latex(crossing[-1])}$")


def given_out(length: int, width: int, heads: int) -> dict[str, int]:
    """How many numbers each step of a layer's forward pass puts out, read off its tensors."""
    made = MultiheadAttention(width, heads, device="meta")
    x = torch.empty(1, length, width, device="meta")
    q, k = made.projection(x)
    v = (x @ made.weight_v.mT).unflatten(-1, (heads, -1)).transpose(1, 2)
    scores = q @ k.mT
    weights = scores.softmax(-1)
    sizes = {"projection": 3 * v.numel(), "similarity": scores.numel(), "softmax": weights.numel()}
    assert q.numel() == k.numel() == v.numel()
    return sizes | {"aggregation": (weights @ v).numel()}


def space_of_steps() -> dict[str, sympy.Expr]:
    """The same in N, d and H: multiples of N d and of H N^2, solved from two sizes and checked at a third."""
    terms, sizes, other = (N * d, H * N**2), ((3, 4, 2), (5, 8, 4)), (7, 16, 2)
    at = {run: [term.subs(dict(zip((N, d, H), run, strict=True))) for term in terms] for run in (*sizes, other)}
    found = {}
    for step in given_out(*other):
        factors = sympy.Matrix([at[run] for run in sizes]).solve(sympy.Matrix([given_out(*run)[step] for run in sizes]))
        assert sympy.Matrix(at[other]).dot(factors) == given_out(*other)[step]
        found[step] = sympy.Matrix(terms).dot(factors)
    return found


@evidence("S2.3.1a", chapter=WHOLE)
def step_by_step() -> Finding:
    work = {**steps(), "total": ("N^2*d", time())}
    said = {"projection": "N*d", "similarity": "N^2", "softmax": "N^2", "aggregation": "N*d"}
    space = {step: (said[step], ours) for step, ours in space_of_steps().items()} | {"total": ("N^2", kept())}
    rows = {f"{step}, {name}": side[step] for step in work for name, side in (("time", work), ("space", space))}
    return all_of(orders(rows)).noting("The totals hold where $N$ grows at least in proportion to $d$")


evidence_table(
    WHOLE,
    {
        "S1.1.1a": lambda: orders(
            {
                **dict(zip(("projections", "$Q K^T$", "softmax", "$A V$"), steps().values(), strict=True)),
                "total": ("N^2*d + N*d^2", time()),
            }
        ),
        "S1.1.2a": lambda: {
            "multiply-adds": counted({"": 8 * N * d**2}, {"": NETWORK.forward / 2}),
            "parameters": counted({"": 8 * d**2}, {"": NETWORK.trained}),
            **orders(
                {
                    "activations": ("N*d", network()[1]),
                    "total": ("N*d + d^2", network()[1] + NETWORK.trained),
                }
            ),
        },
        "S1.1.3a": lambda: orders(
            {
                "time": ("L*N^2*d + L*N*d^2", L * (time() + network()[0])),
                "space": (
                    "L*N^2 + L*d^2 + L*N*d",
                    L * (kept() + STANDARD.trained + network()[1] + NETWORK.trained),
                ),
            }
        ),
    },
)
