"""Queries and keys of several distributions, and what fitted features gain on them."""

from collections.abc import Callable
from math import sqrt

import torch

from ortho._typing import Float, Tensor
from ortho.checks import expect, one_of
from ortho.orthogonal import haar
from ortho.theory.estimates import Estimate, estimate
from ortho.theory.variance import FITS, log_moments, log_variances, unfitted

SPREAD_OF_SCALES = 1.2  # the scales below are exp(u), with u uniform between -1.2 and 1.2


def _normal(tokens: int, K: int, g: torch.Generator | None) -> Tensor:
    return torch.randn(2, tokens, K, generator=g, dtype=torch.float64)


def _scales(K: int, g: torch.Generator | None) -> Tensor:
    return (SPREAD_OF_SCALES * (2 * torch.rand(K, generator=g, dtype=torch.float64) - 1)).exp()


def _isotropic(tokens: int, K: int, g: torch.Generator | None) -> Tensor:
    return _normal(tokens, K, g)


def _scaled(tokens: int, K: int, g: torch.Generator | None) -> Tensor:
    scales = _scales(K, g)
    return _normal(tokens, K, g) * torch.stack([scales, 1 / scales])[:, None]


def _correlated(tokens: int, K: int, g: torch.Generator | None) -> Tensor:
    scales = _scales(K, g)
    axes = haar(K, generator=g, dtype=torch.float64)
    return _normal(tokens, K, g) * (scales / scales.pow(4).mean() ** 0.25) @ axes


def _shifted(tokens: int, K: int, g: torch.Generator | None) -> Tensor:
    direction = haar(K, 1, generator=g, dtype=torch.float64)[:, 0]
    return _normal(tokens, K, g) + sqrt(K) * direction


DATA: dict[str, Callable[[int, int, torch.Generator | None], Tensor]] = {
    "isotropic": _isotropic,  # independent standard normal coordinates
    "scaled": _scaled,  # the queries' times some factors, the keys' divided by the same factors
    "correlated": _correlated,  # queries and keys wider along the same random axes
    "shifted": _shifted,  # queries and keys with a common mean, as long as what varies
}


def sample_data(
    name: str, tokens: int, K: int, spread: float, *, generator: torch.Generator | None = None
) -> tuple[Float[Tensor, "tokens K"], Float[Tensor, "tokens K"]]:
    """Scaled queries and keys of a distribution of `DATA`, float64; their scores have the standard deviation `spread`.

    (For 'shifted', that is the standard deviation without the means.) Raises ValueError for an unknown name or a spread
    that is not above 0.
    """
    one_of("name", name, DATA)
    expect(spread > 0, "spread", "a positive number", spread)
    x, y = DATA[name](tokens, K, generator) * sqrt(spread) * K**-0.25
    return x, y


def reductions(data: str, K: int, spread: float, *, tokens: int = 64, draws: int = 10) -> dict[str, Estimate]:
    """ln(variance of FAVOR+ / variance) for each of `FITS`, the mean over pairs, with its error over draws of the data.

    Each draw's features are fitted to its own tokens. Arguments and errors as in `sample_data`; needs two draws.
    """
    gains: dict[str, list[Tensor]] = {name: [] for name in FITS}
    generator = torch.Generator().manual_seed(0)
    for _ in range(draws):
        x, y = sample_data(data, tokens, K, spread, generator=generator)
        plain = log_variances(log_moments(x, y, unfitted(K)))
        for name, fit in FITS.items():
            gains[name].append((plain - log_variances(log_moments(x, y, fit(x, y)))).mean())
    return {name: estimate(torch.stack(values)) for name, values in gains.items()}
