r"""Variance of random features in closed form, and the same from draws.

Everything is relative: a row of $\Omega$ gives an estimate of $\exp(x^T y)$, and f is that estimate divided by
$\exp(x^T y)$, of mean 1. The formulas need one number from x and y, `square`: $|x - y|^2$ for trigonometric features
and $|x + y|^2$ for the others. Positive features with `a` are generalised exponential ones (GERF), $A = a I$ and
$B = \sqrt{1 - 4a}\, I$; a = 0 is FAVOR+.

*Fitted features* (FAVOR++, FAVOR#; Likhosherstov et al. 2022, arXiv:2205.15317, and 2023, arXiv:2302.00787): what they
gain for each distribution of queries and keys. There x and y are the scaled queries and keys, $q K^{-1/4}$ and
$k K^{-1/4}$, whose products are the scores.
"""

from collections.abc import Callable
from math import comb, exp, expm1, inf, log, log1p, sqrt

import torch
from scipy.optimize import brentq, minimize_scalar
from scipy.special import hyp1f1

from ortho._typing import Float, Tensor
from ortho.attention.linear import dense_features as dense
from ortho.attention.linear import random_features as maps
from ortho.checks import expect, one_of
from ortho.theory.estimates import Estimate, estimate

KINDS = {
    "rff": maps.rff_features,
    "positive": maps.positive_features,
}


# --------------------------------------------------------------------------------------------------- independent rows


def log_moment(square: float, K: int, a: float = 0.0, order: int = 2) -> float:
    r"""$\ln E f^p$ for one row of positive features, p = `order`.

    With $s = 1 - 4pa$ it is $\frac K2 (p \ln(1 - 4a) - \ln s) + p (p - 1) |x + y|^2 / (2s)$, a Gaussian integral. For
    p = 2 and a = 0 that is lemma 2 of Choromanski et al. 2021, arXiv:2009.14794. ValueError unless s > 0.
    """
    _check(square)
    expect(4 * order * a < 1, "a", f"a number below 1/{4 * order}", a)
    s = 1 - 4 * order * a
    return K / 2 * (order * log(1 - 4 * a) - log(s)) + order * (order - 1) * square / (2 * s)


def moment(kind: str, square: float, order: int = 2, *, K: int = 1, a: float = 0.0) -> float:
    r"""$E f^p$ for one row, p = `order`; infinite beyond the range of a float. K matters only if a is not 0.

    A trigonometric f is $e^{t/2} \cos u$ with u normal of variance $t = |x - y|^2$; at p = 2 its moment is $\cosh t$.
    """
    one_of("kind", kind, KINDS)
    expect(a == 0 or kind == "positive", "a", f"0 for {kind} features", a)
    try:
        if kind == "positive":
            return exp(log_moment(square, K, a, order))
        t = _signed(kind, square)
        return sum(comb(order, k) * exp(((order - 2 * k) ** 2 - order) * t / 2) for k in range(order + 1)) / 2**order
    except OverflowError:
        return inf


def log_moments(
    x: Float[Tensor, "*batch N K"], y: Float[Tensor, "*batch M K"], parameters: dense.DenseParameters, order: int = 2
) -> Float[Tensor, "*batch N M"]:
    r"""$\ln E f^p$ of dense-exponential features, for every pair of rows of x and y.

    The sum of `log_moment` over coordinates, with the a of each, and $z = (I - 4A)^{-1/2} (B_q x + B_k y)$ in place of
    x + y. For p = 2 it is in Likhosherstov et al. 2023, arXiv:2302.00787, section 3. ValueError unless a < 1/(4p)
    throughout.
    """
    a = parameters.a[..., None, :]
    most = float(a.max())
    expect(4 * order * most < 1, "parameters", f"each a below 1/{4 * order}", f"{most:.4g}")
    s = 1 - 4 * order * a
    z_q, z_k = ((each @ B.mT) / (1 - 4 * a).sqrt() for each, B in ((x, parameters.B_q), (y, parameters.B_k)))
    weight = order * (order - 1) / (2 * s)
    own_q, own_k = ((weight * z.square()).sum(-1) for z in (z_q, z_k))
    squares = own_q[..., None] + own_k[..., None, :] + 2 * (weight * z_q) @ z_k.mT
    return squares + (order * (1 - 4 * a).log() - s.log()).sum(-1)[..., None] / 2


def log_variances(log_second_moments: Float[Tensor, "*sizes"]) -> Float[Tensor, "*sizes"]:
    """The logarithm of E f^2 - 1 from that of E f^2, without leaving the range of a float."""
    return log_second_moments + torch.log1p(-torch.exp(-log_second_moments))


# --------------------------------------------------------------------------------------------------- orthogonal rows


def orthogonal_covariance(kind: str, square: float, K: int) -> float:
    r"""The covariance of f between two rows of one block, which is orthogonal, Haar, with lengths $\chi(K)$.

    $e^{-t}\, {}_1F_1(K; K/2; t/2) - 1$ at $t = |x + y|^2$ for positive features, whatever their a;
    at $t = -|x - y|^2$ for trigonometric ones. (The sum of two such rows has a uniform direction and the squared
    length $\chi^2_{2K}$.) Negative for t > 0.
    """
    t = _signed(kind, square)
    return float(exp(-t / 2) * hyp1f1(-K / 2, K / 2, -t / 2) - 1)  # Kummer: for t > 0, even K, no cancellation


def same_block_pairs(m: int, K: int) -> int:
    """Ordered pairs of different rows that share a block, of m rows in blocks of K."""
    blocks, rest = divmod(m, K)
    return blocks * K * (K - 1) + rest * (rest - 1)


def squared_error(kind: str, square: float, m: int, K: int, *, draw: str = "iid", a: float = 0.0) -> float:
    r"""The relative mean squared error of the estimate from m rows, 'iid' or 'orthogonal', exact.

    $(\operatorname{Var} f + \frac nm \operatorname{Cov}) / m$ with n = `same_block_pairs`, and 0 for independent rows.
    Each row makes two trigonometric features.
    """
    pairs = same_block_pairs(m, K) if one_of("draw", draw, ("iid", "orthogonal")) == "orthogonal" else 0
    covariance = orthogonal_covariance(kind, square, K) if pairs else 0.0
    return (moment(kind, square, K=K, a=a) - 1 + pairs / m * covariance) / m


def orthogonal_gain(kind: str, square: float, K: int, *, m: int | None = None, a: float = 0.0) -> float:
    """The share of the squared error that m orthogonal rows remove; m is by default any number of whole blocks.

    ValueError where independent rows have no error: at `square` = 0, unless `a` is not 0.
    """
    m = K if m is None else m
    independent = squared_error(kind, square, m, K, a=a)
    expect(independent > 0, "square", "a number at which there is an error", square)
    return 1 - squared_error(kind, square, m, K, draw="orthogonal", a=a) / independent


def gain_limit(square: float) -> float:
    r"""The limit of `orthogonal_gain` of positive features for wide K: $\frac12 t^2 / (e^t - 1)$ at $t = |x + y|^2$."""
    return square**2 / 2 / expm1(square)


def where_orthogonality_helps(share: float, K: int) -> float:
    """The largest $|x + y|^2$ at which orthogonal rows of positive features remove that share of the error.

    The gain rises from 0 to a maximum and falls again: it is that share or more between two solutions, and the result
    is the larger one. ValueError for a share not above 0 and below the maximum.
    """
    top = minimize_scalar(lambda t: -orthogonal_gain("positive", t, K), bounds=(0.1, 10), method="bounded").x
    most = orthogonal_gain("positive", top, K)
    expect(0 < share < most, "share", f"a number between 0 and {most:.4g}, the most at K = {K}", share)
    return float(brentq(lambda t: orthogonal_gain("positive", t, K) - share, top, 100))


def squared_error_bound(square: float, m: int, K: int) -> float:
    r"""The bound on the error of m <= K orthogonal rows of positive features, from Choromanski et al. 2021, theorem 2.

    (arXiv:2009.14794.) It is the error of independent rows less $\frac{2 (m - 1)}{m (K + 2)} (1 - e^{-t/2})^2$ at
    $t = |x + y|^2$. ValueError for m > K.
    """
    expect(m <= K, "m", f"at most K = {K}", m)
    return squared_error("positive", square, m, K) - 2 * (m - 1) / (m * (K + 2)) * expm1(-square / 2) ** 2


# --------------------------------------------------------------------------------------------- what GERF brings


def pair_optimum(square: float, K: int) -> float:
    r"""The a of GERF that has the least variance at one $|x + y|^2$."""
    _check(square)
    return float(dense.optimal_a(torch.tensor(square / K, dtype=torch.float64)))


def log_gain(square: float, K: int, a: float | None = None) -> float:
    r"""ln(variance of FAVOR+ / variance of GERF) at a $|x + y|^2$ above 0, with `pair_optimum` where no a is given."""
    moments = [log_moment(square, K, each) for each in (0.0, pair_optimum(square, K) if a is None else a)]
    expect(square > 0, "square", "a positive number", square)
    plain, fitted = (each + log1p(-exp(-each)) for each in moments)
    return plain - fitted


def where_gain(log_factor: float, K: int) -> float:
    r"""The $|x + y|^2$ from which on GERF, fitted to it, lowers the variance by exp(`log_factor`) > 1 or more."""
    expect(log_factor > 0, "log_factor", "a positive number", log_factor)
    high = 1.0
    while log_gain(high, K) < log_factor:
        high *= 2
    return float(brentq(lambda t: log_gain(t, K) - log_factor, 1e-9, high))


# ------------------------------------------------------------------------------------------------------- from draws


def features(
    kind: str | dense.DenseParameters,
    x: Float[Tensor, "N K"],
    y: Float[Tensor, "M K"],
    omega: Float[Tensor, "*batch m K"],
) -> tuple[Float[Tensor, "*batch N f"], Float[Tensor, "*batch M f"]]:
    """Features of queries and of keys: of a kind of `KINDS`; of `FITS`, fitted to x and y; or dense-exponential ones
    with these parameters, the rows of omega taken in their axes."""
    if isinstance(kind, str) and one_of("kind", kind, FEATURES) in KINDS:
        return KINDS[kind](x, omega), KINDS[kind](y, omega)
    a, B_q, B_k, axes = FITS[kind](x, y) if isinstance(kind, str) else kind
    rows = omega if axes is None else omega @ axes
    return dense.dense_features(x, rows, a, B_q), dense.dense_features(y, rows, a, B_k)


def row_estimates(
    kind: str | dense.DenseParameters, x: Float[Tensor, "K"], y: Float[Tensor, "K"], omega: Float[Tensor, "m K"]
) -> Float[Tensor, "m"]:
    """f of each row (m,), with `features` of that kind."""
    phi_x, phi_y = features(kind, x[None], y[None], omega)
    m = len(omega)
    return (phi_x * phi_y).reshape(-1, m).sum(0) * (m / torch.exp(x @ y))


def sampled_variance(f: Float[Tensor, "count"]) -> Estimate:
    """The variance of f around the known mean 1, from independent values. Its standard error is itself from the sample.

    That is far too small where the fourth moment rests on values too rare to be in the sample: see `variance_spread`.
    """
    return estimate((f - 1).square())


def variance_spread(kind: str, square: float, count: int, *, K: int = 1, a: float = 0.0) -> float:
    """The exact standard error of `sampled_variance` from `count` independent values."""
    second, third, fourth = (moment(kind, square, order, K=K, a=a) for order in (2, 3, 4))
    central = fourth - 4 * third + 6 * second - 3
    return sqrt((central - (second - 1) ** 2) / count)


def sampled_covariance(f: Float[Tensor, "blocks n"]) -> Estimate:
    """The covariance of two f of the same block around the known mean 1, from independent blocks of n values each."""
    centred = f - 1
    n = f.shape[-1]
    return estimate((centred.sum(-1).square() - centred.square().sum(-1)) / (n * (n - 1)))


def _signed(kind: str, square: float) -> float:
    _check(square)
    return -square if one_of("kind", kind, KINDS) == "rff" else square


def _check(square: float) -> None:
    expect(square >= 0, "square", "a number of at least 0", square)


# ------------------------------------------------------------------------------------------------------ fitted features

FITS: dict[str, Callable[[Tensor, Tensor], dense.DenseParameters]]
FITS = {"gerf": dense.gerf, "saderf": dense.saderf, "aderf": dense.aderf, "sderf": dense.sderf}
FEATURES = (*KINDS, *FITS)


def unfitted(K: int) -> dense.DenseParameters:
    """FAVOR+ as dense-exponential features: a = 0 and B = I, float64."""
    return dense.isotropic(torch.zeros((), dtype=torch.float64), K)


def mean_log_moment(
    x: Float[Tensor, "*batch N K"], y: Float[Tensor, "*batch M K"], parameters: dense.DenseParameters
) -> Float[Tensor, "*batch"]:
    """The mean of ln E f^2 over all pairs, which all of `FITS` minimise, each within its family."""
    return log_moments(x, y, parameters).mean((-2, -1))
