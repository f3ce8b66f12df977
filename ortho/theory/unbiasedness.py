r"""Is $E\, \phi(x)^T \phi(y) = \exp(x^T y)$? A test for every feature map under every draw, with its rate of errors.

What is averaged are *ratios*: estimates of the kernel, one for each of many independent $\Omega$, divided by the
kernel, so that the right mean is 1. Their distribution has tails that grow fast with $|x + y|^2$. Up to 3 the mean of
some hundred of them is near enough to normal for the stated rates (`calibration` shows that); far above, no affordable
number is.
"""

from collections.abc import Callable
from math import erfc, sqrt
from typing import NamedTuple

import torch

from ortho import _checks
from ortho._checks import checked
from ortho._typing import Float, Tensor
from ortho.attention.linear import dense_features as dense
from ortho.attention.linear import random_features as maps
from ortho.theory.estimates import SIGMAS, Estimate, estimate

__all__ = [
    "LEVELS", "MAPS", "Calibration", "calibration", "omegas", "p_value", "pairs", "ratios", "rejects", "unbiasedness",
]  # fmt: skip

Products = Callable[[Tensor, Tensor, Tensor], Tensor]


def _plain(phi: Callable[[Tensor, Tensor], Tensor]) -> Products:
    return lambda x, y, omega: (phi(x, omega) * phi(y, omega)).sum(-1)


def _fitted(parameters: Callable[[Tensor, Tensor], dense.DenseParameters]) -> Products:
    def products(x: Tensor, y: Tensor, omega: Tensor) -> Tensor:
        a, B_q, B_k, axes = parameters(x, y)
        omega = omega if axes is None else omega @ axes
        return (dense.dense_features(x, omega, a, B_q) * dense.dense_features(y, omega, a, B_k)).sum(-1)

    return products


# phi(x_i) . phi(y_i) for x and y (N, K) and Omega (..., m, K): (..., N). The dense maps are fitted to all of x and y.
MAPS: dict[str, Products] = {
    "trigonometric": _plain(maps.trigonometric_features),
    "positive": _plain(maps.positive_features),
    "hyperbolic": _plain(maps.hyperbolic_features),
    "gerf": _fitted(dense.gerf),
    "saderf": _fitted(dense.saderf),
    "aderf": _fitted(dense.aderf),
    "sderf": _fitted(dense.sderf),
}


@checked
def pairs(
    N: int, K: int, square: float, *, generator: torch.Generator | None = None
) -> tuple[Float[Tensor, "N K"], Float[Tensor, "N K"]]:
    r"""N random pairs, x and y (N, K) in float64, the larger of $|x_i + y_i|^2$ and $|x_i - y_i|^2$ being `square`.

    x has its larger entries at one end of the axis and y at the other, so that maps which treat the two alike and maps
    which do not are fitted differently.
    """
    _checks.positive_int("N", N)
    _checks.positive_int("K", K)
    tilt = torch.linspace(-0.4, 0.4, K, dtype=torch.float64).exp()
    x, y = torch.randn(2, N, K, generator=generator, dtype=torch.float64)
    x, y = x * tilt, y / tilt
    size = torch.maximum((x + y).norm(dim=-1), (x - y).norm(dim=-1))[:, None] / sqrt(square)
    return x / size, y / size


@checked
def omegas(
    draw: Callable[..., Tensor], m: int, K: int, count: int, *, generator: torch.Generator | None = None
) -> Float[Tensor, "count m K"]:
    """Independent draws of Omega (count, m, K), float64."""
    return torch.stack([draw(m, K, generator=generator, dtype=torch.float64) for _ in range(count)])


@checked
def ratios(
    name: str, omega: Float[Tensor, "count m K"], x: Float[Tensor, "N K"], y: Float[Tensor, "N K"]
) -> Float[Tensor, "count"]:
    """For each Omega, the mean over the pairs of estimate / kernel: (count,). `name` is a key of `MAPS`."""
    products = MAPS[_checks.one_of("name", name, MAPS)]
    kernel = (x * y).sum(-1).exp()
    # In portions, so that the features of many Omega stay in the cache.
    return torch.cat([(products(x, y, some) / kernel).mean(-1) for some in omega.split(512)])


@checked
def unbiasedness(
    name: str,
    draw: Callable[..., Tensor],
    x: Float[Tensor, "N K"],
    y: Float[Tensor, "N K"],
    *,
    m: int,
    count: int,
    generator: torch.Generator | None = None,
) -> Estimate:
    """The mean of `count` ratios, each of m rows drawn anew, and its standard error; 1 is right."""
    return estimate(ratios(name, omegas(draw, m, x.shape[-1], count, generator=generator), x, y))


@checked
def rejects(found: Estimate, expected: float = 1.0) -> bool:
    """Whether the mean is more than SIGMAS standard errors off: by chance once in 100,000 times if it is right."""
    return abs(found.deviation(expected)) > SIGMAS


@checked
def p_value(found: Estimate, expected: float = 1.0) -> float:
    """The chance of a deviation as large as this one, on either side, if `expected` is the mean."""
    return erfc(abs(found.deviation(expected)) / sqrt(2))


LEVELS = (0.1, 0.05, 0.01)


class Calibration(NamedTuple):
    """How often the test rejects at each of `LEVELS`, and how likely p-values less uniform would be by chance.

    `rates` have the standard errors sqrt(level (1 - level) / repetitions) if the test is right. `uniform` is the
    p-value of a Kolmogorov-Smirnov test of the p-values.
    """

    repetitions: int
    rates: tuple[float, ...]
    uniform: float


@checked
def calibration(samples: Float[Tensor, "repetitions count"], expected: float = 1.0) -> Calibration:
    """The test, repeated on each row of independent ratios."""
    from scipy.stats import kstest  # a second to import, which most users of this module do without

    p_values = [p_value(estimate(row), expected) for row in samples]
    rates = tuple(sum(p < level for p in p_values) / len(p_values) for level in LEVELS)
    return Calibration(len(p_values), rates, float(kstest(p_values, "uniform").pvalue))
