"""S1, section 1: what attention, the feed-forward network and L blocks of both cost, and which part is the most.

The source writes attention with one head, and its orders are judged so.
"""

from math import inf

import sympy

from ortho.attention import MECHANISMS
from ortho.cost import block, feed_forward, layer
from ortho.cost.big_o import H, N, d
from ortho.cost.layers import Cost
from paper.claims.ledger import evidence
from paper.claims.rules import all_of, counted, growth, region
from paper.claims.s0.scenarios import SCENARIOS
from paper.claims.verdicts import Finding

CHAPTER = "23-whole-transformer"

LAYER = layer(1, N, d, 1, form="reference")
NETWORK = feed_forward(1, N, d)
BLOCK = block(1, N, d, H, form="reference")
CORE = MECHANISMS["softmax"].cost(1, N, 1, d, d, form="reference")
PRODUCT = MECHANISMS["softmax"].cost(1, N, 1, d, 0, form="reference").forward  # Q K^T
HEADS = "With $H$ heads there are $H$ matrices of scores"
L = sympy.Symbol("L", positive=True)
EXAMPLE = (10000, 768)  # N and d, the source's
HEAD = 64  # width of the models' heads
SHORT, LONG = 64, 65536  # tokens, d = 768


def quadratic(cost: sympy.Expr) -> sympy.Expr:
    """The terms of N^2."""
    return sympy.expand(cost).coeff(N, 2) * N**2


@evidence("S1.1.1a", chapter=CHAPTER)
def attention_time() -> Finding:
    return all_of(
        {
            "projections": growth("N*d^2", sympy.expand(LAYER.forward - CORE.forward)),
            "$Q K^T$": growth("N^2*d", PRODUCT),
            "softmax": growth("N^2", CORE.elementwise_forward),
            "$A V$": growth("N^2*d", CORE.forward - PRODUCT),
            "total": growth("N^2*d + N*d^2", sympy.expand(LAYER.forward + LAYER.elementwise_forward)),
        }
    ).noting(HEADS)


@evidence("S1.1.1b", chapter=CHAPTER)
def attention_space() -> Finding:
    kept = sympy.expand(LAYER.saved_bytes / LAYER.itemsize)
    linear = sympy.expand(kept - quadratic(kept))
    return all_of(
        {
            "parameters": counted({"": 4 * d**2}, {"": LAYER.trained}),
            "activations": growth("N*d", linear),
            "scores": growth("N^2", quadratic(kept)),
            "total": growth("N^2 + d^2", sympy.expand(kept + LAYER.trained)),
        }
    ).noting(f"{HEADS}. $N d$ is never more than $N^2 + d^2$")


def share(cost: sympy.Expr, length: int, width: int) -> float:
    """Of the terms of N^2, in per cent."""
    at = {N: length, d: width, H: width // HEAD}
    return round(float(100 * quadratic(cost).subs(at) / cost.subs(at)), 1)


@evidence("S1.1.1c", chapter=CHAPTER)
def bottleneck() -> Finding:
    lengths = {"the source's example": EXAMPLE} | {n: (at.length, at.width) for n, at in SCENARIOS.items()}
    heads = layer(1, N, d, H, form="reference")
    space = sympy.expand(heads.saved_bytes / heads.itemsize + heads.trained)
    return all_of(
        {
            "$N / d$, far larger than 1": region((2, inf), {n: round(N_ / d_, 2) for n, (N_, d_) in lengths.items()}),
            "the scores' share of a block's FLOPs, %": region(
                (50, 100), {n: share(BLOCK.forward, *sizes) for n, sizes in lengths.items()}
            ),
            "of a layer's numbers, %": region((50, 100), {n: share(space, *sizes) for n, sizes in lengths.items()}),
        }
    ).noting("The models are those of document S0")


@evidence("S1.1.2a", chapter=CHAPTER)
def network() -> Finding:
    kept = sympy.expand(NETWORK.saved_bytes / NETWORK.itemsize)
    return all_of(
        {
            "multiply-adds": counted({"": 8 * N * d**2}, {"": NETWORK.forward / 2}),
            "parameters": counted({"": 8 * d**2}, {"": NETWORK.trained}),
            "activations": growth("N*d", kept),
            "total": growth("N*d + d^2", sympy.expand(kept + NETWORK.trained)),
        }
    )


@evidence("S1.1.3a", chapter=CHAPTER)
def layers() -> Finding:
    time, space = (sympy.expand(L * (of(LAYER) + of(NETWORK))) for of in (_work, _numbers))
    return all_of(
        {
            "time": growth("L*N^2*d + L*N*d^2", time),
            "space": growth("L*N^2 + L*d^2 + L*N*d", space),
        }
    ).noting(HEADS)


def _work(cost: Cost) -> sympy.Expr:
    return cost.forward + cost.elementwise_forward


def _numbers(cost: Cost) -> sympy.Expr:
    return cost.saved_bytes / cost.itemsize + cost.trained


@evidence("S1.1.3b", chapter=CHAPTER)
def dominant() -> Finding:
    crossing = sympy.solve(sympy.expand(BLOCK.forward) - 2 * quadratic(BLOCK.forward), N)
    width = EXAMPLE[1]
    return all_of(
        {
            f"share of $N^2$ in a block's FLOPs at $N = {SHORT}$, %": region(
                (0, 50), {"": share(BLOCK.forward, SHORT, width)}
            ),
            f"at $N = {LONG:,}$, %": region((50, 100), {"": share(BLOCK.forward, LONG, width)}),
        }
    ).noting(f"$d = {width}$. They are equal at $N = {sympy.latex(crossing[-1])}$")
