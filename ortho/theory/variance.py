r"""Variance of random features in closed form, and the same from draws.

Everything is relative: a row of $\Omega$ gives an estimate of $\exp(x^T y)$, and f is that estimate divided by
$\exp(x^T y)$, of mean 1. Of x and y the formulas need one number, `square`: $|x - y|^2$ for trigonometric features and
$|x + y|^2$ for the others. Positive features with `a` are generalised exponential ones (GERF), $A = a I$ and
$B = \sqrt{1 - 4a}\, I$; a = 0 is FAVOR+.
"""

from math import comb, exp, expm1, inf, log, log1p, sqrt

import torch
from scipy.optimize import brentq, minimize_scalar
from scipy.special import hyp1f1

from ortho import _checks
from ortho._checks import checked
from ortho._typing import Float, Tensor
from ortho.attention.linear.dense_features import DenseParameters, dense_features, optimal_a
from ortho.attention.linear.random_features import hyperbolic_features, positive_features, trigonometric_features
from ortho.theory.estimates import Estimate, estimate

__all__ = [
    "KINDS",
    "dense_pair",
    "gain_limit",
    "log_gain",
    "log_moment",
    "log_moments",
    "log_variances",
    "moment",
    "orthogonal_covariance",
    "orthogonal_gain",
    "pair_optimum",
    "row_estimates",
    "same_block_pairs",
    "sampled_covariance",
    "sampled_variance",
    "squared_error",
    "squared_error_bound",
    "variance_spread",
    "where_gain",
    "where_orthogonality_helps",
]

KINDS = {
    "trigonometric": trigonometric_features,
    "positive": positive_features,
    "hyperbolic": hyperbolic_features,
}


# --------------------------------------------------------------------------------------------------- independent rows


@checked
def log_moment(square: float, K: int, a: float = 0.0, order: int = 2) -> float:
    r"""$\ln E f^p$ for one row of positive features, p = `order`.

    With $s = 1 - 4pa$ it is $\frac K2 (p \ln(1 - 4a) - \ln s) + p (p - 1) |x + y|^2 / (2s)$, a Gaussian integral. For
    p = 2 and a = 0 that is lemma 2 of Choromanski et al. 2021, arXiv:2009.14794. ValueError unless s > 0.
    """
    _check(square, K)
    if not 4 * order * a < 1:
        raise ValueError(f"a: expected a number below 1/{4 * order}, got {a}")
    s = 1 - 4 * order * a
    return K / 2 * (order * log(1 - 4 * a) - log(s)) + order * (order - 1) * square / (2 * s)


@checked
def moment(kind: str, square: float, order: int = 2, *, K: int = 1, a: float = 0.0) -> float:
    r"""$E f^p$ for one row, p = `order`; infinite beyond the range of a float. K matters only with an a.

    A hyperbolic f is $e^{-t/2} \cosh u$ with u normal of variance $t = |x + y|^2$, and a trigonometric one is the same
    at $t = -|x - y|^2$, for $\cosh iu = \cos u$. At p = 2 both are $\cosh t$.
    """
    _checks.one_of("kind", kind, KINDS)
    if a and kind != "positive":
        raise ValueError(f"a: expected 0 for {kind} features, got {a}")
    try:
        if kind == "positive":
            return exp(log_moment(square, K, a, order))
        t = _signed(kind, square, K)
        return sum(comb(order, k) * exp(((order - 2 * k) ** 2 - order) * t / 2) for k in range(order + 1)) / 2**order
    except OverflowError:
        return inf


@checked
def log_moments(
    x: Float[Tensor, "*batch N K"], y: Float[Tensor, "*batch M K"], parameters: DenseParameters, order: int = 2
) -> Float[Tensor, "*batch N M"]:
    r"""$\ln E f^p$ of dense-exponential features, for every pair of rows of x and y.

    `log_moment` coordinate by coordinate: the a of each, and $z = (I - 4A)^{-1/2} (B_q x + B_k y)$ for x + y. For
    p = 2 in Likhosherstov et al. 2023, arXiv:2302.00787, section 3. ValueError unless a < 1/(4p) throughout.
    """
    a = parameters.a[..., None, :]
    if not bool((4 * order * a < 1).all()):
        raise ValueError(f"parameters: expected each a below 1/{4 * order}, got {float(a.max()):.4g}")
    s = 1 - 4 * order * a
    z_q, z_k = ((each @ B.mT) / (1 - 4 * a).sqrt() for each, B in ((x, parameters.B_q), (y, parameters.B_k)))
    weight = order * (order - 1) / (2 * s)
    own_q, own_k = ((weight * z.square()).sum(-1) for z in (z_q, z_k))
    squares = own_q[..., None] + own_k[..., None, :] + 2 * (weight * z_q) @ z_k.mT
    return squares + (order * (1 - 4 * a).log() - s.log()).sum(-1)[..., None] / 2


@checked
def log_variances(log_second_moments: Float[Tensor, "*sizes"]) -> Float[Tensor, "*sizes"]:
    """The logarithm of E f^2 - 1 from that of E f^2, without leaving the range of a float."""
    return log_second_moments + torch.log1p(-torch.exp(-log_second_moments))


# --------------------------------------------------------------------------------------------------- orthogonal rows


@checked
def orthogonal_covariance(kind: str, square: float, K: int) -> float:
    r"""The covariance of the f of two rows of one block, orthogonal, Haar and of lengths $\chi(K)$.

    $e^{-t}\, {}_1F_1(K; K/2; t/2) - 1$ at $t = |x + y|^2$ for positive features, whatever their a, and for hyperbolic
    ones; at $t = -|x - y|^2$ for trigonometric ones. (The sum of two such rows has a uniform direction and the squared
    length $\chi^2_{2K}$.) Negative for t > 0.
    """
    t = _signed(kind, square, K)
    return float(exp(-t / 2) * hyp1f1(-K / 2, K / 2, -t / 2) - 1)  # Kummer: for t > 0, K even a sum without cancelling


@checked
def same_block_pairs(m: int, K: int) -> int:
    """Ordered pairs of different rows that share a block, of m rows in blocks of K."""
    blocks, rest = divmod(_checks.positive_int("m", m), _checks.positive_int("K", K))
    return blocks * K * (K - 1) + rest * (rest - 1)


@checked
def squared_error(kind: str, square: float, m: int, K: int, *, draw: str = "iid", a: float = 0.0) -> float:
    r"""The relative mean squared error of the estimate from m rows, 'iid' or 'orthogonal', exact.

    $(\operatorname{Var} f + \frac nm \operatorname{Cov}) / m$ with n = `same_block_pairs`, and 0 for independent rows.
    Of trigonometric and hyperbolic features each row makes two.
    """
    pairs = same_block_pairs(m, K) if _checks.one_of("draw", draw, ("iid", "orthogonal")) == "orthogonal" else 0
    covariance = orthogonal_covariance(kind, square, K) if pairs else 0.0
    return (moment(kind, square, K=K, a=a) - 1 + pairs / _checks.positive_int("m", m) * covariance) / m


@checked
def orthogonal_gain(kind: str, square: float, K: int, *, m: int | None = None, a: float = 0.0) -> float:
    """The share of the squared error that orthogonal rows take away: m of them, by default any number of whole blocks.

    ValueError at `square` = 0, where there is none.
    """
    m = K if m is None else m
    independent = squared_error(kind, square, m, K, a=a)
    if not independent > 0:
        raise ValueError(f"square: expected a number at which there is an error, got {square}")
    return 1 - squared_error(kind, square, m, K, draw="orthogonal", a=a) / independent


@checked
def gain_limit(square: float) -> float:
    r"""The limit of `orthogonal_gain` of positive features for wide K: $\frac12 t^2 / (e^t - 1)$ at $t = |x + y|^2$."""
    return square**2 / 2 / expm1(square)


@checked
def where_orthogonality_helps(share: float, K: int) -> float:
    """The $|x + y|^2$ up to which orthogonal rows of positive features take away that share of the error, or more.

    The gain rises from 0 to a maximum and falls again: it is the larger of two. ValueError for a share not below it.
    """
    top = minimize_scalar(lambda t: -orthogonal_gain("positive", t, K), bounds=(0.1, 10), method="bounded").x
    most = orthogonal_gain("positive", top, K)
    if not 0 < share < most:
        raise ValueError(f"share: expected a number between 0 and {most:.4g}, the most at K = {K}, got {share}")
    return float(brentq(lambda t: orthogonal_gain("positive", t, K) - share, top, 100))


@checked
def squared_error_bound(square: float, m: int, K: int) -> float:
    r"""The bound on the error of m <= K orthogonal rows of positive features, from Choromanski et al. 2021, theorem 2.

    (arXiv:2009.14794.) That of independent ones less $\frac{2 (m - 1)}{m (K + 2)} (1 - e^{-t/2})^2$ at
    $t = |x + y|^2$. ValueError for m > K.
    """
    if _checks.positive_int("m", m) > _checks.positive_int("K", K):
        raise ValueError(f"m: expected at most K = {K}, got {m}")
    return squared_error("positive", square, m, K) - 2 * (m - 1) / (m * (K + 2)) * expm1(-square / 2) ** 2


# --------------------------------------------------------------------------------------------- what GERF brings


@checked
def pair_optimum(square: float, K: int) -> float:
    r"""The a of GERF that has the least variance at one $|x + y|^2$."""
    _check(square, K)
    return float(optimal_a(torch.tensor(square / K, dtype=torch.float64)))


@checked
def log_gain(square: float, K: int, a: float | None = None) -> float:
    r"""ln(variance of FAVOR+ / variance of GERF) at a $|x + y|^2$ above 0, with `pair_optimum` where no a is given."""
    moments = [log_moment(square, K, each) for each in (0.0, pair_optimum(square, K) if a is None else a)]
    if not square > 0:
        raise ValueError(f"square: expected a positive number, got {square}")
    plain, fitted = (each + log1p(-exp(-each)) for each in moments)
    return plain - fitted


@checked
def where_gain(log_factor: float, K: int) -> float:
    r"""The $|x + y|^2$ at which GERF, fitted to it, lowers the variance by exp(`log_factor`) > 1, and from there on."""
    if not log_factor > 0:
        raise ValueError(f"log_factor: expected a positive number, got {log_factor}")
    high = 1.0
    while log_gain(high, K) < log_factor:
        high *= 2
    return float(brentq(lambda t: log_gain(t, K) - log_factor, 1e-9, high))


# ------------------------------------------------------------------------------------------------------- from draws


@checked
def dense_pair(
    x: Float[Tensor, "N K"], y: Float[Tensor, "M K"], omega: Float[Tensor, "m K"], parameters: DenseParameters
) -> tuple[Float[Tensor, "N m"], Float[Tensor, "M m"]]:
    """Dense-exponential features of queries and of keys, the rows of omega taken in the parameters' axes."""
    rows = omega if parameters.axes is None else omega @ parameters.axes
    a = parameters.a
    return dense_features(x, rows, a, parameters.B_q), dense_features(y, rows, a, parameters.B_k)


@checked
def row_estimates(
    kind: str | DenseParameters, x: Float[Tensor, "K"], y: Float[Tensor, "K"], omega: Float[Tensor, "m K"]
) -> Float[Tensor, "m"]:
    """f of each row (m,): a kind of `KINDS`, or dense-exponential features with these parameters."""
    if isinstance(kind, DenseParameters):
        phi_x, phi_y = dense_pair(x[None], y[None], omega, kind)
    else:
        phi_x, phi_y = (KINDS[_checks.one_of("kind", kind, KINDS)](each[None], omega) for each in (x, y))
    m = len(omega)
    return (phi_x * phi_y).reshape(-1, m).sum(0) * (m / torch.exp(x @ y))


@checked
def sampled_variance(f: Float[Tensor, "count"]) -> Estimate:
    """The variance of f, of the known mean 1, from independent values. Its standard error is itself from the sample.

    That is far too small where the fourth moment rests on values too rare to be in the sample: see `variance_spread`.
    """
    return estimate((f - 1).square())


@checked
def variance_spread(kind: str, square: float, count: int, *, K: int = 1, a: float = 0.0) -> float:
    """The exact standard error of `sampled_variance` from `count` independent values."""
    second, third, fourth = (moment(kind, square, order, K=K, a=a) for order in (2, 3, 4))
    central = fourth - 4 * third + 6 * second - 3
    return sqrt((central - (second - 1) ** 2) / _checks.positive_int("count", count))


@checked
def sampled_covariance(f: Float[Tensor, "blocks n"]) -> Estimate:
    """The covariance of two f of the same block, of the known mean 1, from independent blocks of n of them."""
    centred = f - 1
    n = f.shape[-1]
    return estimate((centred.sum(-1).square() - centred.square().sum(-1)) / (n * (n - 1)))


def _signed(kind: str, square: float, K: int) -> float:
    _check(square, K)
    return -square if _checks.one_of("kind", kind, KINDS) == "trigonometric" else square


def _check(square: float, K: int) -> None:
    _checks.positive_int("K", K)
    if not square >= 0:
        raise ValueError(f"square: expected a number of at least 0, got {square}")
