r"""S2, section 2.2.4: the variance of trigonometric features, FAVOR+, FAVOR++ and FAVOR#."""

from collections.abc import Mapping
from functools import cache
from math import inf, log, sqrt

from ortho.theory.approximation import MOST, drawn_errors
from ortho.theory.fitted_features import DATA, reductions
from ortho.theory.variance import log_gain, moment, where_gain
from paper.claims.ledger import evidence
from paper.claims.rules import all_of, region
from paper.claims.verdicts import Finding

CHAPTER = "09-variance"
WIDTHS = (8, 16, 64)  # K
SQUARES = (2.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0)  # |x + y|^2
LENGTH = 2.0  # |x|^2 = |y|^2 of the pairs that tell trigonometric from positive features
SCORES = (-1.0, -0.5, 0.0, 0.5, 1.0)
SPREADS = (0.25, 1.0)  # standard deviations of the scores
FEATURES = 256
FITTED_TOKENS, FITTED_DRAWS = 128, 5


def trigonometric_over_positive(score: float) -> float:
    """ln(variance of trigonometric features / of positive ones), as many of each, for x and y of that product."""
    trigonometric = 2 * (moment("trigonometric", 2 * LENGTH - 2 * score) - 1)  # two features a row
    return log(trigonometric / (moment("positive", 2 * LENGTH + 2 * score) - 1))


@cache
def rows_off(kind: str, K: int, spread: float) -> float:
    """Per cent of rows further from softmax's than any two rows of weights are from each other."""
    errors = drawn_errors(kind, "orthogonal", FEATURES, K, spread)
    return 100 * float((errors > MOST + 1e-9).double().mean())  # rounding aside


def gerf_gains() -> Mapping[str, float]:
    """ln(variance of FAVOR+ / of GERF fitted to the pair), closed form."""
    return {f"({K}, {square:g})": round(log_gain(square, K), 2) for K in WIDTHS for square in SQUARES}


@cache
def sharp_gains(data: str, K: int, spread: float) -> float:
    """ln(variance of FAVOR+ / of FAVOR#), the mean over pairs and draws; of SDERF and ADERF the better."""
    found = reductions(data, K, spread, tokens=FITTED_TOKENS, draws=FITTED_DRAWS)
    return max(found["sderf"].value, found["aderf"].value)


@evidence("S2.2.2d", chapter=CHAPTER)
def variances() -> Finding:
    settings = [(K, spread) for K in (16, 64) for spread in SPREADS]
    off = {
        kind: {f"({K}, {spread:g})": round(rows_off(kind, K, spread)) for K, spread in settings}
        for kind in ("trigonometric", "positive")
    }
    gains = gerf_gains()
    where = "; ".join(
        f"{where_gain(2.0, K):.1f} to {where_gain(3.0, K):.1f} at $K = {K}$ (with unit scores it is {2 * sqrt(K):.1f})"
        for K in WIDTHS
    )
    return all_of(
        {
            "TrigRF, ln of its variance over FAVOR+'s": region(
                (0, inf), {f"$x^\\top y = {score:g}$": round(trigonometric_over_positive(score), 2) for score in SCORES}
            ),
            "TrigRF, rows further off than weights can be, by $(K, \\sigma)$": region(
                (1, 100), off["trigonometric"], unit=" %"
            ),
            "FAVOR+, such rows": region((0, 0), off["positive"], unit=" %"),
            "FAVOR+, ln of its variance over FAVOR++'s": region(
                (0, inf), {"least of the settings below": min(gains.values())}
            ),
            "FAVOR++, ln of the factor, by $(K, \\lvert x + y \\rvert^2)$": region((2, 3), gains),
            "FAVOR#, ln of the factor, by data and $(K, \\sigma)$": region(
                (10, inf),
                {
                    f"{data} ({K}, {spread:g})": round(sharp_gains(data, K, spread), 1)
                    for data in DATA
                    for K in (8, 64)
                    for spread in (0.5, 1.0)
                },
            ),
        }
    ).noting(
        f"FAVOR++ has $e^2$ to $e^3$ at $\\lvert x + y \\rvert^2$ from {where}; "
        "$\\sigma$ is the standard deviation of the scores"
    )
