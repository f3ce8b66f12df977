r"""S2, sections 2.2.1 to 2.2.3 and 3.3: random features of the softmax kernel, orthogonal rows, FAVOR+ as printed."""

from collections.abc import Callable
from functools import cache
from math import inf, sqrt

import numpy as np
import sympy
import torch
from torch import Tensor

from ortho.attention import MECHANISMS
from ortho.attention.linear.random_features import iid_features, orthogonal_features, positive_features
from ortho.cost.big_o import H, N, d, m
from ortho.theory import draw_bias
from ortho.theory.estimates import SIGMAS, Estimate
from ortho.theory.unbiasedness import omegas, unbiasedness
from ortho.theory.variance import orthogonal_gain, squared_error, where_orthogonality_helps
from ortho.theory.wrong_draws import unit_norm_rows
from paper.claims.figures import Interval, show
from paper.claims.ledger import evidence
from paper.claims.rules import CONFIGURATION, all_of, counted, effect, growth, holds, region
from paper.claims.s0.methods import EXACT, SOME, misplaced
from paper.claims.verdicts import Finding

CHAPTER = "08-favor-unbiased"
WIDTH = 64  # K, the source's d: its features are those of one head


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# --------------------------------------------------------------------------------------------- the kernel's expectation


def quadrature_error() -> float:
    """Relative error of the expectation in three dimensions, by a Gauss-Hermite rule of 40^3 nodes: no draws."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(40)
    x, y = np.array([[0.3, -0.2, 0.5], [0.4, 0.1, -0.2]])
    w = np.stack(np.meshgrid(*[nodes] * 3), -1)
    shares = np.prod(np.meshgrid(*[weights / sqrt(2 * np.pi)] * 3), 0)
    mean = (shares * np.exp(w @ x - x @ x / 2) * np.exp(w @ y - y @ y / 2)).sum()
    return float(abs(mean / np.exp(x @ y) - 1))


@evidence("S2.2.2a", chapter=CHAPTER)
def expectation() -> Finding:
    return holds(
        r"$\mathbb{E}_\omega[e^{\omega^\top x - |x|^2/2}\, e^{\omega^\top y - |y|^2/2}] = e^{x^\top y}$",
        quadrature_error(),
        EXACT,
    )


@cache
def proof_lines() -> dict[str, bool]:
    """Whether each line of the proof printed in section 3.3.1 holds: symbolically, in three dimensions."""
    x, y, w = (sympy.symbols(f"{name}1:4", real=True) for name in "xyw")
    s, t = sympy.symbols("s t", real=True)

    def dot(a: tuple[sympy.Symbol, ...], b: tuple[sympy.Symbol, ...]) -> sympy.Expr:
        return sum(i * j for i, j in zip(a, b, strict=True))

    def normal_mean(function: sympy.Expr, variable: sympy.Symbol) -> sympy.Expr:
        density = sympy.exp(-(variable**2) / 2) / sympy.sqrt(2 * sympy.pi)
        return sympy.integrate(function * density, (variable, -sympy.oo, sympy.oo))

    z = tuple(i + j for i, j in zip(x, y, strict=True))
    one = normal_mean(sympy.exp(s * t * w[0]), w[0])  # E exp(s t w_1); the entries of omega are independent
    generating = sympy.prod([one.subs(t, i) for i in z])  # E exp(s omega^T z)
    square = sympy.Symbol("v", positive=True)  # a normal variable is its root times a standard one
    exponent = dot(w, x) - dot(x, x) / 2 + dot(w, y) - dot(y, y) / 2
    taken_out = -dot(x, x) / 2 - dot(y, y) / 2
    expanded = taken_out + dot(x, x) / 2 + dot(x, y) + dot(y, y) / 2
    differences = {
        r"$\omega^\top (x + y) \sim N(0, |x + y|^2)$": sympy.log(generating) - s**2 * dot(z, z) / 2,
        r"$\mathbb{E}\, e^z = e^{|x + y|^2/2}$": normal_mean(sympy.exp(sympy.sqrt(square) * w[0]), w[0])
        - sympy.exp(square / 2),
        "the norms taken out": exponent - (taken_out + dot(w, z)),
        "the square expanded": taken_out + dot(z, z) / 2 - expanded,
        r"$= e^{x^\top y}$": expanded - dot(x, y),
    }
    return {line: sympy.simplify(sympy.expand_log(gap, force=True)) == 0 for line, gap in differences.items()}


@cache
def estimated(draw: Callable[..., Tensor]) -> Estimate:
    """The mean of estimate / kernel over many draws of 16 rows of width 16, at |x + y|^2 = 2.25 along the diagonal."""
    half = torch.full((1, 16), 1.5 / 8, dtype=torch.float64)
    return unbiasedness("positive", draw, half, half, m=16, count=3000, generator=generator())


def mean_is_the_kernel(draw: Callable[..., Tensor]) -> Finding:
    found = estimated(draw)
    return holds(
        r"the mean ratio of estimate and $e^{x^\top y}$ is 1",
        abs(found.value - 1),
        round(SIGMAS * found.standard_error, 3),
        at="3,000 draws of 16 rows",
    )


@evidence("S2.3.3a", chapter=CHAPTER)
def theorem() -> Finding:
    lines = proof_lines()
    return all_of(
        {
            "lines of the proof that hold": counted({"": len(lines)}, {"": sum(lines.values())}),
            "the map": mean_is_the_kernel(iid_features),
        }
    ).noting(
        r"With $m$ rows the map needs the factor $m^{-1/2}$ as well, which the source leaves out and attention cancels"
    )


# ------------------------------------------------------------------------------------------------------ orthogonal rows


@cache
def scaled(spread: float, length: int = 128, width: int = WIDTH) -> tuple[Tensor, Tensor, Tensor]:
    """(x, y, softmax weights) with normal x and y whose products have this standard deviation: q and k times K^-1/4."""
    x, y = sqrt(spread) / width**0.25 * torch.randn(2, length, width, generator=generator(), dtype=torch.float64)
    return x, y, (x @ y.mT).softmax(-1)


NARROW = 16  # K and m of what follows
REPETITIONS, DRAWN = 8, 250  # of the comparison, and draws in each
T = 3.5  # standard errors of a mean of 8, beyond which it is by chance once in a hundred times (Student's t)


def weights_spread(omega: Tensor, square: float) -> float:
    """The standard deviation, over draws of Omega (count, m, K), of attention's weights, in the root mean square.

    Of 32 tokens with |x + y|^2 = `square` in the mean.
    """
    x, y, _ = scaled(square / (2 * sqrt(NARROW)), 32, NARROW)
    weights = positive_features(x, omega) @ positive_features(y, omega).mT
    return float((weights / weights.sum(-1, keepdim=True)).var(0).mean().sqrt())


@cache
def _draws() -> list[list[Tensor]]:
    """For each repetition orthogonal rows, independent ones, and independent ones again as the control."""
    g, laws = generator(1), (orthogonal_features, iid_features, iid_features)
    return [[omegas(law, NARROW, NARROW, DRAWN, generator=g) for law in laws] for _ in range(REPETITIONS)]


@cache
def steadied(square: float) -> tuple[Interval, Interval]:
    """By how many per cent `weights_spread` is lower than with independent rows: for orthogonal ones, and the control.

    Intervals that hold the mean 99 times of a hundred, in full per cent.
    """
    spreads = torch.tensor([[weights_spread(omega, square) for omega in draws] for draws in _draws()])
    gains = 100 * (1 - spreads[:, [0, 2]] / spreads[:, [1]])
    middle, error = gains.mean(0), gains.std(0) / sqrt(REPETITIONS)
    low, high = (middle - T * error).round().int().tolist(), (middle + T * error).round().int().tolist()
    return (low[0], high[0]), (low[1], high[1])


@evidence("S2.2.2b", chapter=CHAPTER)
def orthogonal_rows() -> Finding:
    gains = {square: 100 * orthogonal_gain("positive", square, WIDTH) for square in (1, 2, 4, 8, 16)}
    steady = {f"$|x + y|^2 = {square}$ in the mean": steadied(square) for square in (1, 16)}
    return all_of(
        {
            "variance taken away": region(
                SOME, {f"$|x + y|^2 = {square}$": round(gain, 1) for square, gain in gains.items()}, unit=" %"
            ),
            "spread of the attention weights taken away": effect(
                SOME,
                {label: gain for label, (gain, _) in steady.items()},
                {label: control for label, (_, control) in steady.items()},
                unit=" %",
            ),
            "no bias": mean_is_the_kernel(orthogonal_features),
        }
    ).noting(
        f"Rows have the lengths $\\chi(K)$; $K = {WIDTH}$, for the weights {NARROW}. One per cent is gained up to "
        f"$|x + y|^2 = {where_orthogonality_helps(0.01, WIDTH):.1f}$; behind a LayerNorm this square is about "
        f"${2 * sqrt(WIDTH):g}$"
    )


@evidence("S2.2.2c", chapter=CHAPTER)
def complexity() -> Finding:
    core = MECHANISMS["favor"].cost(1, N, H, d / H, d / H, m=m)
    forward, kept = sympy.expand(core.forward), sympy.expand(core.saved_bytes / 4)
    softmax = MECHANISMS["softmax"].cost(1, N, H, d / H, d / H, form="reference")
    from_length = sympy.expand(sympy.solve(softmax.forward - core.forward, N)[0])
    return all_of(
        {
            "time": growth("N*m*d", forward),
            "space": growth("N*m", kept, settings=(*CONFIGURATION, "d")),
            "time for $m \\ll N$": growth("N", forward, held=("d", "H", "m")),
            "space for $m \\ll N$": growth("N", kept, held=("d", "H", "m")),
        }
    ).noting(f"The products are fewer than softmax attention's for $N$ above {show(from_length)}")


@evidence("S2.3.3b", chapter=CHAPTER)
def gram_schmidt() -> Finding:
    squares = (1, 2, 4)
    unit = {square: draw_bias.fixed_length_error(WIDTH, WIDTH, 1, square) for square in squares}
    bias = {square: draw_bias.fixed_length_mean(WIDTH, 1, square) - 1 for square in squares}
    lower = {
        square: 100 * (1 - (unit[square] - bias[square] ** 2) / squared_error("positive", square, WIDTH, WIDTH))
        for square in squares
    }
    sizes = {f"$m = {count}$": count for count in (WIDTH // 2, WIDTH, 4 * WIDTH)}
    omega = unit_norm_rows(4 * WIDTH, WIDTH, generator=generator(), dtype=torch.float64)
    return all_of(
        {
            r"size of $\Omega^\top \Omega$ for $\Omega \in \mathbb{R}^{m \times d}$": region(
                {label: (count, count) for label, count in sizes.items()},
                {label: len(omega[:count].mT @ omega[:count]) for label, count in sizes.items()},
            ),
            "correlation of two estimates": region(
                (-inf, 0),
                {f"$|x + y|^2 = {square}$": draw_bias.fixed_length_correlation(WIDTH, 1, square) for square in squares},
            ),
            "variance taken away": region(
                SOME, {f"$|x + y|^2 = {square}$": round(gain, 2) for square, gain in lower.items()}, unit=" %"
            ),
            "they estimate the kernel": holds(
                r"the mean ratio of estimate and $e^{x^\top y}$ is 1", abs(bias[1]), EXACT, at="$|x + y|^2 = 1$"
            ),
        }
    ).noting(
        f"$d = {WIDTH}$. Gaussian rows have the lengths $\\chi(d)$, about $\\sqrt d$, and not 1; and beyond $m = d$ "
        f"Gram-Schmidt has no direction left, so that further blocks must be drawn"
    )


# --------------------------------------------------------------------------------------------- the algorithm as printed


def printed_algorithm(q: Tensor, k: Tensor, v: Tensor, omega: Tensor) -> Tensor:
    """Steps 2 to 5 of the algorithm in section 3.3.3, as they are printed: (N, V)."""
    phi_q = (q @ omega.mT - q.square().sum(-1, keepdim=True) / 2).exp()
    phi_k = (k @ omega.mT - k.square().sum(-1, keepdim=True) / 2).exp()
    S, z = phi_k.mT @ v, phi_k.sum(0)
    return (phi_q @ S) / (phi_q @ z)[:, None]


def printed_limit(x: Tensor, y: Tensor) -> Tensor:
    """The weights that its outputs tend to with many blocks of orthonormal rows."""
    kernel = draw_bias.fixed_length_kernel(x, y, 1.0)
    return kernel / kernel.sum(-1, keepdim=True)


def query_share(weights: Tensor) -> float:
    """How many per cent of a row's weight depend on its query: what differs from the mean row."""
    return misplaced(weights, weights.mean(0, keepdim=True).expand_as(weights))


def reordering_error() -> float:
    """Relative difference of the algorithm's outputs and those of its weights, materialised."""
    x, y, _ = scaled(1)
    omega = unit_norm_rows(WIDTH, WIDTH, generator=generator(1), dtype=torch.float64)
    v = torch.randn(len(y), 8, generator=generator(2), dtype=torch.float64)
    weights = positive_features(x, omega) @ positive_features(y, omega).mT
    expected = weights @ v / weights.sum(-1, keepdim=True)
    return float((printed_algorithm(x, y, v, omega) - expected).norm() / expected.norm())


def finite_rows(length: float, width: int = 128, tokens: int = 64) -> float:
    """How many per cent of the algorithm's outputs are numbers, in float32, for queries and keys of one length."""
    g = generator()
    q, k = torch.nn.functional.normalize(torch.randn(2, tokens, width, generator=g), dim=-1) * length
    omega = unit_norm_rows(width, width, generator=g)
    o = printed_algorithm(q, k, torch.ones(tokens, 1), omega)
    return 100 * float(o.isfinite().all(-1).float().mean())


@evidence("S2.3.3c", chapter=CHAPTER)
def algorithm() -> Finding:
    x, y, exact = scaled(1)
    limit, equal = printed_limit(x, y), torch.full_like(exact, 1 / exact.shape[-1])
    lengths = {"$d^{1/4}$, divided as FAVOR+ has it": 128**0.25, "8": 8.0, r"$\sqrt d$, behind a LayerNorm": sqrt(128)}
    return all_of(
        {
            "sums over keys first": holds("as with the weights materialised", reordering_error(), EXACT),
            "for many features": holds(
                "the weights tend to those of softmax attention",
                misplaced(limit, exact) / 100,
                EXACT,
                at="scores of standard deviation 1",
            ),
            "rows that are numbers in float32": region(
                (100, 100), {f"length {label}": finite_rows(length) for label, length in lengths.items()}, unit=" %"
            ),
        }
    ).noting(
        f"With orthonormal rows {misplaced(limit, exact):.0f} % of the weight lies in the wrong place however many "
        f"features there are, with equal weights {misplaced(equal, exact):.0f} %; {query_share(limit):.1f} % of it "
        f"depends on the query, of softmax attention's {query_share(exact):.0f} %"
    )
