r"""Random features of the softmax kernel: FAVOR+ as printed, orthogonal rows, variances, and what projections keep.

S2, sections 2.2, 3.3, 4.2 and 4.3.
"""

from collections.abc import Callable
from functools import cache, partial
from math import inf, log, sqrt

import numpy as np
import sympy
import torch
from torch import Tensor

from ortho.attention import MECHANISMS
from ortho.attention.linear.favor import PositiveFeatures, orthogonal_features
from ortho.attention.linear.linear_attention import linear_attention
from ortho.attention.linear.random_features import iid_features, positive_features
from ortho.cost import of
from ortho.cost.big_o import H, N, d, m
from ortho.orthogonal import haar
from ortho.theory.estimates import SIGMAS, Estimate
from ortho.theory.johnson_lindenstrauss import dimension, distortion, failure_bound, least_dimension
from ortho.theory.unbiasedness import (
    fixed_length_correlation,
    fixed_length_error,
    fixed_length_kernel,
    fixed_length_mean,
    omegas,
    unbiasedness,
    unit_norm_rows,
)
from ortho.theory.variance import (
    DATA,
    log_gain,
    moment,
    orthogonal_gain,
    reductions,
    squared_error,
    where_gain,
    where_orthogonality_helps,
)
from paper import memory
from paper.claims.evidence.methods import COSTS, FAVOR_WIDTH, favor_misplaced, misplaced, unlike_softmax
from paper.claims.figures import Interval, outward, show, span
from paper.claims.ledger import evidence, evidence_table
from paper.claims.rules import all_of, counted, growth, holds, improves, mended, region
from paper.claims.shared.common import EXACT, SOME, as_much_as, normal, orders, relative_error, seeded
from paper.claims.verdicts import Finding, Parts
from paper.theory.approximation import MOST, drawn_errors

CHAPTER, VARIANCE, PROJECTIONS = "08-favor-unbiased", "09-variance", "10-johnson-lindenstrauss"
WIDTH = 64  # K, the source's d: its features are those of one head
NARROW = 16  # K where many rows are drawn

# --------------------------------------------------------------------------------------------- the kernel's expectation


def quadrature_error() -> float:
    """Relative error of the expectation in three dimensions, by a Gauss-Hermite rule of 40^3 nodes: no draws."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(40)
    x, y = np.array([[0.3, -0.2, 0.5], [0.4, 0.1, -0.2]])
    w = np.stack(np.meshgrid(*[nodes] * 3), -1)
    shares = np.prod(np.meshgrid(*[weights / sqrt(2 * np.pi)] * 3), 0)
    mean = (shares * np.exp(w @ x - x @ x / 2) * np.exp(w @ y - y @ y / 2)).sum()
    return float(abs(mean / np.exp(x @ y) - 1))


EXPECTATION = r"$\mathbb{E}_\omega[e^{\omega^\top x - |x|^2/2}\, e^{\omega^\top y - |y|^2/2}] = e^{x^\top y}$"
evidence_table(CHAPTER, {"S2.2.2a": lambda: holds(EXPECTATION, quadrature_error(), EXACT)})


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
    return unbiasedness("positive", draw, half, half, m=16, count=3000, generator=seeded())


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
    parts = {
        "lines of the proof that hold": counted({"": len(lines)}, {"": sum(lines.values())}),
        "the map": mean_is_the_kernel(iid_features),
    }
    return all_of(parts).noting(
        r"With $m$ rows the map needs the factor $m^{-1/2}$ as well, which the source leaves out and attention cancels"
    )


@evidence("S2.3.2d", chapter=CHAPTER)
def an_equality() -> Finding:
    x, y, _ = scaled(0.25, 128, NARROW)
    exact = (x @ y.mT).exp()
    drawn = {m: iid_features(m, NARROW, generator=seeded(1), dtype=torch.float64) for m in (16, 256, 4096)}
    products = {m: positive_features(x, omega) @ positive_features(y, omega).mT for m, omega in drawn.items()}
    off = {m: f"{relative_error(product, exact):.2f} for $m = {m:,}$" for m, product in products.items()}
    m = 256  # `positive_features` have the factor m^-1/2, the printed ones do not
    return mended(
        "$e^{q^\\top k} = \\phi(q)^\\top \\phi(k)$ with $m$ random features",
        relative_error(m * products[m], exact),
        {"with the factor $m^{-1/2}$": relative_error(products[m], exact)},
        EXACT,
        at=f"$m = {m}$ rows, normal tokens of width {NARROW}",
    ).noting(
        "In the mean the printed features have $m$ times the kernel. With the factor the mean is right, and a draw is "
        f"not: relative errors are {', '.join(off.values())}. No finite number of features has "
        "$e^{x^\\top y}$ as its product"
    )


# ------------------------------------------------------------------------------------------------------ orthogonal rows


@cache
def scaled(spread: float, length: int = 128, width: int = WIDTH) -> tuple[Tensor, Tensor, Tensor]:
    """(x, y, softmax weights) with normal x and y whose products have this standard deviation: q and k times K^-1/4."""
    x, y = sqrt(spread) / width**0.25 * normal(2, length, width)
    return x, y, (x @ y.mT).softmax(-1)


REPETITIONS, DRAWN = 24, 250  # of the comparison, and draws in each
T = 2.81  # a mean of 24 is off by more than this many standard errors once in a hundred times (Student's t)


def weights_spread(omega: Tensor, square: float) -> float:
    """The standard deviation of attention's weights over draws of Omega (count, m, K), as a root mean square.

    For 32 tokens with |x + y|^2 = `square` in the mean.
    """
    x, y, _ = scaled(square / (2 * sqrt(NARROW)), 32, NARROW)
    weights = positive_features(x, omega) @ positive_features(y, omega).mT
    return float((weights / weights.sum(-1, keepdim=True)).var(0).mean().sqrt())


@cache
def _draws() -> list[list[Tensor]]:
    """For each repetition orthogonal rows, independent ones, and independent ones again as the control."""
    g, laws = seeded(1), (orthogonal_features, iid_features, iid_features)
    return [[omegas(law, NARROW, NARROW, DRAWN, generator=g) for law in laws] for _ in range(REPETITIONS)]


@cache
def steadied(square: float) -> tuple[Interval, Interval]:
    """By how many per cent `weights_spread` is lower than with independent rows: for orthogonal ones, and the control.

    These are 99 % intervals of the mean, rounded outwards to tenths of a per cent.
    """
    spreads = torch.tensor([[weights_spread(omega, square) for omega in draws] for draws in _draws()])
    gains = 100 * (1 - spreads[:, [0, 2]] / spreads[:, [1]])
    middle, error = gains.mean(0), gains.std(0) / sqrt(REPETITIONS)
    orthogonal, control = (
        outward(ends) for ends in zip((middle - T * error).tolist(), (middle + T * error).tolist(), strict=True)
    )
    return orthogonal, control


@evidence("S2.2.2b", chapter=CHAPTER)
def orthogonal_rows() -> Finding:
    squares = (1, 2, 4, 8, 16)
    gains = {f"$|x + y|^2 = {n}$": float(f"{100 * orthogonal_gain('positive', n, WIDTH):.2g}") for n in squares}
    steady = {f"$|x + y|^2 = {square}$ in the mean": steadied(square) for square in (1, 16)}
    parts = {
        "variance taken away": improves("less variance", gains, unit=" %"),
        "spread of the attention weights taken away": improves(
            "steadier", {label: ours for label, (ours, _) in steady.items()}, unit=" %"
        ),
        "no bias": mean_is_the_kernel(orthogonal_features),
    }
    controls = ", ".join(span(control, " %") for _, control in steady.values())
    return all_of(parts).noting(
        f"Of independent rows against others: {controls}. Rows have the lengths $\\chi(K)$; $K = {WIDTH}$, for the "
        f"weights {NARROW}. Of these squares the variance gains most at {max(gains, key=gains.__getitem__)}, and one "
        f"per cent up to $|x + y|^2 = {where_orthogonality_helps(0.01, WIDTH):.1f}$; behind a LayerNorm this square is "
        f"about ${2 * sqrt(WIDTH):g}$"
    )


def _kept() -> sympy.Expr:
    """Numbers that a call with H heads and m features keeps for the backward pass, with its output."""

    def count(n: int, width: int, heads: int, features: int) -> int:
        q, k, v = (x.requires_grad_() for x in torch.zeros(3, 1, heads, n, width // heads).unbind())
        attend = partial(linear_attention, feature_map=PositiveFeatures(m=features))
        return of(attend, q, k, v).saved_bytes

    return memory.fitted(count, N * d, H * N, H * N * m, m * d, m * H, m * d / H) / 4


@evidence("S2.2.2c", chapter=CHAPTER)
def complexity() -> Finding:
    core = MECHANISMS["favor"].cost(1, N, H, d / H, d / H, m=m)
    kept = _kept()
    softmax = MECHANISMS["softmax"].cost(1, N, H, d / H, d / H, form="reference")
    from_length = sympy.expand(sympy.solve(softmax.forward - core.forward, N)[0])
    few = ("d", "H", "m")
    rows = {
        "time": ("N*m*d", core.forward),
        "space": ("N*m", kept),
        "time for $m \\ll N$": ("N", core.forward, *few),
        "space for $m \\ll N$": ("N", kept, *few),
    }
    return all_of(orders(rows)).noting(
        "The space is $O(N m)$ where both $N$ and $m$ grow at least in proportion to $d$. The products are fewer than "
        f"softmax attention's for $N$ above {show(from_length)}"
    )


@evidence("S2.3.3b", chapter=CHAPTER)
def gram_schmidt() -> Finding:
    squares = (1, 2, 4)
    bias = fixed_length_mean(WIDTH, 1, 1) - 1
    printed = {square: fixed_length_error(WIDTH, WIDTH, 1, square) for square in squares}
    independent = {square: squared_error("positive", square, WIDTH, WIDTH) for square in squares}
    omega = unit_norm_rows(4 * WIDTH, WIDTH, generator=seeded(), dtype=torch.float64)
    eye = torch.eye(WIDTH, dtype=torch.float64)
    parts = {
        r"greatest entry of $\Omega^\top \Omega - I$ for $\Omega \in \mathbb{R}^{m \times d}$": region(
            (0, EXACT),
            {f"$m = {m}$": float((omega[:m].mT @ omega[:m] - eye).abs().max()) for m in (WIDTH // 2, WIDTH, 4 * WIDTH)},
        ),
        "how far the correlation of two estimates is below 0": improves(
            "less than of independent rows",
            {f"$|x + y|^2 = {n}$": -fixed_length_correlation(WIDTH, 1, n) for n in squares},
        ),
        "mean squared error taken away": improves(
            "less than of independent rows",
            {f"$|x + y|^2 = {n}$": round(100 - 100 * printed[n] / independent[n]) for n in squares},
            unit=" %",
        ),
        "they estimate the kernel": holds(
            r"the mean ratio of estimate and $e^{x^\top y}$ is 1", abs(bias), EXACT, at="$|x + y|^2 = 1$"
        ),
    }
    hardly = ", ".join(
        f"{100 * (printed[n] - (fixed_length_mean(WIDTH, 1, n) - 1) ** 2) / independent[n]:.1g}" for n in squares
    )
    return all_of(parts).noting(
        f"$d = {WIDTH}$. The variance alone is {hardly} % of independent rows', as the estimate hardly depends on its "
        f"draw, and is wrong. Gaussian rows have the lengths $\\chi(d)$, about $\\sqrt d$, and not 1; and beyond "
        f"$m = d$ Gram-Schmidt has no direction left, so that further blocks must be drawn"
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
    kernel = fixed_length_kernel(x, y, 1.0)
    return kernel / kernel.sum(-1, keepdim=True)


def query_share(weights: Tensor) -> float:
    """How many per cent of a row's weight depend on its query: what differs from the mean row."""
    return misplaced(weights, weights.mean(0, keepdim=True).expand_as(weights))


def finite_rows(length: float, width: int = 128, tokens: int = 64) -> float:
    """How many per cent of the algorithm's outputs are numbers, in float32, for queries and keys of one length."""
    g = seeded()
    q, k = torch.nn.functional.normalize(torch.randn(2, tokens, width, generator=g), dim=-1) * length
    omega = unit_norm_rows(width, width, generator=g)
    o = printed_algorithm(q, k, torch.ones(tokens, 1), omega)
    return 100 * float(o.isfinite().all(-1).float().mean())


@evidence("S2.3.3c", chapter=CHAPTER)
def algorithm() -> Finding:
    x, y, exact = scaled(1)
    limit, equal = printed_limit(x, y), torch.full_like(exact, 1 / exact.shape[-1])
    lengths = {"$d^{1/4}$, divided as FAVOR+ has it": 128**0.25, "8": 8.0, r"$\sqrt d$, behind a LayerNorm": sqrt(128)}
    parts = {
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
    return all_of(parts).noting(
        f"With orthonormal rows {misplaced(limit, exact):.0f} % of the weight lies in the wrong place however many "
        f"features there are, with equal weights {misplaced(equal, exact):.0f} %; {query_share(limit):.1f} % of it "
        f"depends on the query, of softmax attention's {query_share(exact):.0f} %"
    )


# ----------------------------------------------- the variance of trigonometric features, FAVOR+, FAVOR++ and FAVOR#

HEAD_WIDTHS = (8, 16, 64)  # K
SQUARES = (2.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0)  # |x + y|^2
LENGTH = 2.0  # |x|^2 = |y|^2 of the pairs that separate trigonometric from positive features
SCORES = (-1.0, -0.5, 0.0, 0.5, 1.0)
SPREADS = (0.25, 1.0)  # standard deviations of the scores
FEATURES = 256
FITTED_TOKENS, FITTED_DRAWS = 128, 5


def trigonometric_over_positive(score: float) -> float:
    """ln(variance of trigonometric features / of positive ones), equally many of each, for x^T y = `score`."""
    trigonometric = 2 * (moment("rff", 2 * LENGTH - 2 * score) - 1)  # two features a row
    return log(trigonometric / (moment("positive", 2 * LENGTH + 2 * score) - 1))


@cache
def rows_off(kind: str, K: int, spread: float) -> float:
    """Per cent of rows further from softmax's than any two rows of weights can be from each other."""
    errors = drawn_errors(kind, "orthogonal", FEATURES, K, spread)
    return 100 * float((errors > MOST + 1e-9).double().mean())  # rounding aside


@cache
def sharp_gains(data: str, K: int, spread: float) -> float:
    """ln(variance of FAVOR+ / of FAVOR#), the mean over pairs and draws; the better of SDERF and ADERF."""
    found = reductions(data, K, spread, tokens=FITTED_TOKENS, draws=FITTED_DRAWS)
    return max(found["sderf"].value, found["aderf"].value)


@evidence("S2.2.2d", chapter=VARIANCE)
def variances() -> Finding:
    settings = [(K, spread) for K in (16, 64) for spread in SPREADS]
    off = {
        kind: {f"({K}, {spread:g})": round(rows_off(kind, K, spread)) for K, spread in settings}
        for kind in ("rff", "positive")
    }
    gains = {f"({K}, {square:g})": round(log_gain(square, K), 2) for K in HEAD_WIDTHS for square in SQUARES}
    sharp = {
        f"{data} ({K}, {spread:g})": round(sharp_gains(data, K, spread), 1)
        for data in DATA
        for K in (8, 64)
        for spread in (0.5, 1.0)
    }
    listed = "; ".join(f"{setting}: {gain:g}" for setting, gain in sharp.items())
    where = "; ".join(
        f"{where_gain(2.0, K):.1f} to {where_gain(3.0, K):.1f} at $K = {K}$ (with unit scores it is {2 * sqrt(K):.1f})"
        for K in HEAD_WIDTHS
    )
    parts = {
        "TrigRF, ln of its variance over FAVOR+'s": region(
            (0, inf), {f"$x^\\top y = {score:g}$": round(trigonometric_over_positive(score), 2) for score in SCORES}
        ),
        "TrigRF, rows further off than weights can be, by $(K, \\sigma)$": region((1, 100), off["rff"], unit=" %"),
        "FAVOR+, such rows": region((0, 0), off["positive"], unit=" %"),
        "FAVOR+, ln of its variance over FAVOR++'s": region(
            (0, inf), {"least of the settings below": min(gains.values())}
        ),
        "FAVOR++, ln of the factor, by $(K, \\lvert x + y \\rvert^2)$": region((2, 3), gains),
        "FAVOR#, ln of the factor": as_much_as(10, max(sharp.values())),
    }
    return all_of(parts).noting(
        f"FAVOR# has, by data and $(K, \\sigma)$, {listed}. FAVOR++ has $e^2$ to $e^3$ "
        f"at $\\lvert x + y \\rvert^2$ from {where}; "
        "$\\sigma$ is the standard deviation of the scores, for shifted data without the common means. "
        "FAVOR+ has no row further off than weights can be, as its weights are not negative"
    )


# ------------------------------------- what random orthogonal projections keep of distances, and how they are used

POINTS, EPS = 100, 0.5
SPACES = (222, 256, 512, 2048)  # widths of the space; the first is the k that the source's section 4.3 asks for
SIZES = ((5, 0.1), (1000, 0.5), (1000, 0.3), (1000, 0.1), (10**6, 0.1))  # n, eps
# "With high probability": the source gives no figure. Any up to 0.89 would decide the same.
LIKELY = (0.8, 1)


@cache
def distortions(width: int) -> tuple[float, float]:
    """How far off squared distances are after a projection to the k of section 4.3: as it is, and if rescaled."""
    k = dimension(POINTS, EPS)
    g = seeded()
    points = torch.randn(POINTS, width, generator=g, dtype=torch.float64)
    images = points @ haar(width, k, generator=g, dtype=torch.float64)
    return distortion(points, images), distortion(points, (width / k) ** 0.5 * images)


def alike(width: int) -> tuple[float, float]:
    """The correlation of x^T y with the score of x and y after projection: by one matrix for both, and by one for each.

    Over pairs of normal points; both projections go to the k of section 4.3.
    """
    k, g = dimension(POINTS, EPS), seeded(1)
    x, y = torch.randn(2, POINTS, width, generator=g, dtype=torch.float64)
    y = 0.5**0.5 * (x + y)  # neighbours, so that there is a score to keep
    w_q, w_k = (haar(width, k, generator=g, dtype=torch.float64) for _ in "qk")
    exact = (x @ y.mT).flatten()

    def correlation(w: Tensor, u: Tensor) -> float:
        return float(torch.corrcoef(torch.stack([exact, ((x @ w) @ (y @ u).mT).flatten()]))[0, 1])

    return correlation(w_q, w_q), correlation(w_q, w_k)


@evidence("S2.4.2b", chapter=PROJECTIONS)
def distances_kept() -> Finding:
    k = dimension(POINTS, EPS)
    off = {width: distortions(width) for width in SPACES}
    found = mended(
        "no squared distance changes by more than the share $\\epsilon$",
        max(printed for printed, _ in off.values()),
        {"for the projection times $\\sqrt{d/k}$": max(rescaled for _, rescaled in off.values())},
        EPS,
        at=f"{POINTS} points, $k = {k}$, $\\epsilon = {EPS}$, $d$ up to {max(SPACES):,}",
    )
    printed = ", ".join(f"{one:.2f} at $d = {width:,}$" for width, (one, _) in off.items())
    same, independent = alike(SPACES[-1])
    return found.noting(
        f"Section 4.3 has this $k$. As printed the greatest changes are {printed}. The statement is about one "
        f"projection, and says nothing about scores $q^\\top k$ with independent $W_Q$ and $W_K$: these correlate with "
        f"$x^\\top y$ by {independent:.2f}, scores with one matrix for both by {same:.2f}"
    )


def unlikely(n: int, eps: float) -> float:
    """An upper bound on the probability that a random projection to the k of section 4.3 does not keep n points."""
    k = dimension(n, eps)
    return failure_bound(n, k, k, eps, draw="gaussian")  # the limit, for large d, of the bound for orthogonal draws


@evidence("S2.4.3a", chapter=PROJECTIONS)
def lemma() -> Finding:
    labels = {(n, eps): f"{n:,} points, $\\epsilon = {eps}$" for n, eps in SIZES}
    asked = {size: dimension(*size) for size in SIZES}
    n, eps, width = 1000, 0.3, 1024
    parts = {
        "$k$ that suffices": region(
            {labels[size]: (-inf, k) for size, k in asked.items()},
            {labels[size]: least_dimension(size[0], k, size[1], draw="gaussian") for size, k in asked.items()},
        ),
        "probability with the source's": region(
            LIKELY, {labels[size]: round(1 - unlikely(*size), 3) for size in SIZES}
        ),
    }
    return all_of(parts).noting(
        f"This holds for any $d$ and the projection times $\\sqrt{{d/k}}$. In {width:,} dimensions {n:,} points and "
        f"$\\epsilon = {eps}$ need no more than $k = {least_dimension(n, width, eps)}$"
    )


@evidence("S2.4.3d", chapter=PROJECTIONS)
def two_uses() -> Parts:
    standard, favor, ora = (COSTS[name] for name in ("learned", "favor", "frozen"))
    others = {"FAVOR+": favor.trained - 4 * d**2, "ORA": ora.trained - 2 * d**2}  # beyond the weights that both train
    return {
        "trained entries of the orthogonal matrices": counted(dict.fromkeys(others, 0), others),
        "FAVOR+, in time": growth("N", sympy.expand(favor.forward), held=("d", "H", "m")),
        "ORA, in time": growth("N^2", sympy.expand(ora.forward), held=("d", "H")),
        "trained parameters that ORA saves": region(
            SOME, {"": 100 - 100 * float(ora.trained / standard.trained)}, unit=" %"
        ),
        f"weight that FAVOR+ misplaces, $K = {FAVOR_WIDTH}$": region(
            SOME, {f"$m = {m}$": round(favor_misplaced(0.25, m)[0]) for m in (64, 1024)}, unit=" %"
        ),
        "ORA": holds("softmax attention, exactly", unlike_softmax(), EXACT),
    }
