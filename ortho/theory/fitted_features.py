r"""What features fitted to the data (FAVOR++, FAVOR#) gain, by the distribution of the queries and keys.

Likhosherstov et al. 2022 (arXiv:2205.15317) and 2023 (arXiv:2302.00787). Throughout, x and y are the scaled queries and
keys, $q K^{-1/4}$ and $k K^{-1/4}$, whose products are the scores.
"""

from collections.abc import Callable
from math import sqrt

import torch

from ortho import _checks
from ortho._checks import checked
from ortho._typing import Float, Tensor
from ortho.attention.linear.dense_features import DenseParameters, aderf, gerf, isotropic, saderf, sderf
from ortho.orthogonal import haar
from ortho.theory.estimates import Estimate, estimate
from ortho.theory.variance import log_moments, log_variances

__all__ = ["DATA", "FITS", "mean_log_moment", "reductions", "sample_data", "unfitted"]

FITS: dict[str, Callable[[Tensor, Tensor], DenseParameters]] = {
    "gerf": gerf,
    "saderf": saderf,
    "aderf": aderf,
    "sderf": sderf,
}
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
    "scaled": _scaled,  # those of queries times some factors, those of keys divided by the same ones
    "correlated": _correlated,  # queries and keys wider along the same random axes
    "shifted": _shifted,  # queries and keys with a common mean, as long as what varies
}


@checked
def sample_data(
    name: str, tokens: int, K: int, spread: float, *, generator: torch.Generator | None = None
) -> tuple[Float[Tensor, "tokens K"], Float[Tensor, "tokens K"]]:
    """Scaled queries and keys of a distribution of `DATA`, float64; of scores with the standard deviation `spread`.

    (Of 'shifted', that is the standard deviation of what the means leave.) Raises ValueError for an unknown name or a
    spread that is not above 0.
    """
    _checks.one_of("name", name, DATA)
    if not spread > 0:
        raise ValueError(f"spread: expected a positive number, got {spread}")
    _checks.positive_int("tokens", tokens)
    x, y = DATA[name](tokens, _checks.positive_int("K", K), generator) * sqrt(spread) * K**-0.25
    return x, y


@checked
def unfitted(K: int) -> DenseParameters:
    """FAVOR+ as dense-exponential features: a = 0 and B = I, float64."""
    return isotropic(torch.zeros((), dtype=torch.float64), K)


@checked
def mean_log_moment(
    x: Float[Tensor, "*batch N K"], y: Float[Tensor, "*batch M K"], parameters: DenseParameters
) -> Float[Tensor, "*batch"]:
    """What all of `FITS` minimise, each within its family: the mean of ln E f^2 over all pairs."""
    return log_moments(x, y, parameters).mean((-2, -1))


@checked
def reductions(
    data: str, K: int, spread: float, *, tokens: int = 64, draws: int = 10, seed: int = 0
) -> dict[str, Estimate]:
    """ln(variance of FAVOR+ / variance) for each of `FITS`, the mean over pairs; with its error over draws of the data.

    Each draw's features are fitted to its own tokens. Arguments and errors as in `sample_data`; needs two draws.
    """
    gains: dict[str, list[Tensor]] = {name: [] for name in FITS}
    generator = torch.Generator().manual_seed(seed)
    for _ in range(_checks.positive_int("draws", draws)):
        x, y = sample_data(data, tokens, K, spread, generator=generator)
        plain = log_variances(log_moments(x, y, unfitted(K)))
        for name, fit in FITS.items():
            gains[name].append((plain - log_variances(log_moments(x, y, fit(x, y)))).mean())
    return {name: estimate(torch.stack(values)) for name, values in gains.items()}
