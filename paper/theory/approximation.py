r"""How far attention weights from random features are from softmax's, and when they beat equal weights.

The error of a row of weights is the sum of absolute differences to the exact row. For weights that are not negative it
is at most 2, twice the share of weight that is misplaced. Trigonometric rows are divided by sums that may be near 0 or
below it; they can be off by any amount, and have no mean error, so an error beyond 2 counts as 2. m is the number of
features; a row of $\Omega$ makes two trigonometric features, and one of any other kind.
"""

from collections.abc import Iterator
from math import erf, log2, sqrt

import torch

from ortho._typing import Float, Tensor
from ortho.attention.linear.random_features import FEATURE_DRAWS
from ortho.checks import expect, one_of
from ortho.theory.estimates import Estimate, estimate
from ortho.theory.unbiasedness import WRONG_DRAWS
from ortho.theory.variance import FEATURES, features
from paper.theory.drawn_data import sample_data

MOST = 2.0  # the error of two rows of weights that have no key in common
TOKENS, DRAWS = 128, 8
ROWS = FEATURE_DRAWS | WRONG_DRAWS  # unbiased and biased draws of the rows, by name
FEWEST, LIMIT = 4, 2**14  # numbers of features between which a crossing is sought


def kernel_estimates(
    kind: str, x: Float[Tensor, "N K"], y: Float[Tensor, "M K"], omega: Float[Tensor, "rows K"]
) -> Float[Tensor, "N M"]:
    r"""Estimates of $\exp(x_i^T y_j)$ with features of a kind of `FEATURES`; fitted kinds are fitted to x and y.

    They come from the plain maps, which float64 can hold for $|x|^2$ and $|y|^2$ up to some hundreds.
    """
    phi_x, phi_y = features(kind, x, y, omega)
    return phi_x @ phi_y.mT


def weights(kernel: Float[Tensor, "*batch N M"]) -> Float[Tensor, "*batch N M"]:
    """Rows divided by their sums."""
    return kernel / kernel.sum(-1, keepdim=True)


def row_errors(ours: Float[Tensor, "*batch N M"], exact: Float[Tensor, "*batch N M"]) -> Float[Tensor, "*batch N"]:
    """The sum of absolute differences of each row."""
    return (ours - exact).abs().sum(-1)


def drawn_errors(
    kind: str, draw: str, m: int, K: int, spread: float, *, draws: int = DRAWS
) -> Float[Tensor, "draws tokens"]:
    """The errors of all rows, not limited to 2, for some draws of normal queries and keys and of features.

    `spread` is the standard deviation of the scores. The data of draw i are the same for all features. Raises
    ValueError for an unknown kind or draw, and for an odd m of trigonometric features.
    """
    per_row = 2 if one_of("kind", kind, FEATURES) == "rff" else 1
    expect(not m % per_row, "m", f"an even number of {kind} features", m)
    rows = ROWS[one_of("draw", draw, ROWS)]
    found = []
    for x, y, generator in _data(K, spread, draws):
        omega = rows(m // per_row, K, generator=generator, dtype=x.dtype)
        found.append(row_errors(weights(kernel_estimates(kind, x, y, omega)), torch.softmax(x @ y.mT, -1)))
    return torch.stack(found)


def attention_errors(kind: str, draw: str, m: int, K: int, spread: float, *, draws: int = DRAWS) -> Estimate:
    """The mean of `drawn_errors`, each counting as 2 at most, with its standard error over the draws (two or more)."""
    errors = drawn_errors(kind, draw, m, K, spread, draws=draws)
    return estimate(errors.clamp(max=MOST).mean(-1))


def uniform_errors(K: int, spread: float, *, draws: int = DRAWS) -> Estimate:
    """The yardstick: the mean error of equal weights, which need no features, on the same data."""
    return estimate(_uniform(K, spread, draws))


def uniform_error(spread: float) -> float:
    r"""The error of equal weights on many keys with scores $N(0, \sigma^2)$: $2 \operatorname{erf}(\sigma / \sqrt 8)$.

    ($E\,|e^{s - \sigma^2/2} - 1|$ is twice the distance in total variation of $N(0, \sigma^2)$ and
    $N(\sigma^2, \sigma^2)$.)
    """
    return 2 * erf(spread / sqrt(8))


def crossing(kind: str, draw: str, K: int, spread: float, *, draws: int = DRAWS) -> Estimate | None:
    """log2 of the least m at which the features are nearer to softmax's weights than equal weights are.

    For each draw, the m at which its error falls to that of equal weights, interpolated between powers of two by a
    straight line in logarithms; their mean, with its standard error over draws. None if a draw does not get there with
    2^14 features.
    """
    level = _uniform(K, spread, draws).log2()
    found: Tensor = torch.full_like(level, torch.nan)
    before, m = None, FEWEST
    while bool(found.isnan().any()):
        if m > LIMIT:
            return None
        errors = drawn_errors(kind, draw, m, K, spread, draws=draws)
        above = errors.clamp(max=MOST).mean(-1).log2() - level
        step = torch.ones_like(above) if before is None else above / (above - before)  # back from m
        here = found.isnan() & (above <= 0)
        found = torch.where(here, log2(m) - (0 if before is None else step), found)
        before, m = above, 2 * m
    return estimate(found)


def _data(K: int, spread: float, draws: int) -> Iterator[tuple[Tensor, Tensor, torch.Generator]]:
    """For each draw: x, y, and the generator that they come from, for further draws."""
    for i in range(draws):
        generator = torch.Generator().manual_seed(i)
        x, y = sample_data("isotropic", TOKENS, K, spread, generator=generator)
        yield x, y, generator


def _uniform(K: int, spread: float, draws: int) -> Tensor:
    exact = torch.stack([torch.softmax(x @ y.mT, -1) for x, y, _ in _data(K, spread, draws)])
    return row_errors(torch.full_like(exact, 1 / TOKENS), exact).mean(-1)
