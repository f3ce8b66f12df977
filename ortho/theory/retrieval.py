r"""Retrieval by one random projection: does a head find a token again among M others, and how wide must it be?

Query and key are made by the *same* random matrix R (K, d), which is not trained: $q = R x$, $k_j = R x_j$, logits
$c\, q^T k_j / \sqrt{K}$. Tokens have length $\sqrt{d}$, as after a layer norm; R is a draw of `ortho.orthogonal`, with
orthonormal rows ('haar') or independent entries of variance 1/d ('gaussian'), so that $q^T k$ of equal tokens is K on
average. The other tokens are independent and uniform on their sphere.

Given R and x, another token's logit is $(c / \sqrt{K})\, \sqrt{d}\, |R^T q|\, u_j$, with $u_j$ the first coordinate of
a uniform point of the unit sphere. So the right token has the largest logit if no $u_j$ is above the *threshold*
$t = q^T k / (\sqrt{d}\, |R^T q|)$, and the law of t is known exactly (`threshold_law`).
"""

from functools import cache
from math import inf, log, log1p
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.optimize import brentq
from scipy.special import betainc, gammaln, logsumexp
from torch.nn.functional import normalize

from ortho._typing import Bool, Float, Tensor
from ortho.checks import expect, one_of
from ortho.orthogonal import DRAWS

KNOWN = ("haar", "gaussian")  # the draws whose threshold has a known law
NODES = 200  # of a Gauss-Legendre rule over the quantiles of a law


class Retrieved(NamedTuple):
    """What simulated heads did: the right token's weight, whether it is the largest, and the weight of all tokens,
    which is below 1 with a sink; (count,) each."""

    weight: Float[Tensor, "count"]
    found: Bool[Tensor, "count"]
    read: Float[Tensor, "count"]


def threshold_law(K: int, d: int, *, draw: str = "haar") -> Any:
    r"""The law of $t^2$, as a frozen distribution of scipy: Beta(K/2, (d-K)/2) for orthonormal rows, Beta(K/2, (d-1)/2)
    for Gaussian entries.

    Raises ValueError unless K < d: a square orthogonal matrix gives t = 1.
    """
    from scipy.stats import beta

    _widths(K, d, draw)
    expect(d > K or draw != "haar", "K", f"a width below d = {d} for an orthogonal draw", K)
    return beta(K / 2, (d - K if draw == "haar" else d - 1) / 2)


def found_chance(M: int, K: int, d: int, *, draw: str = "haar", cosine: float = 1.0) -> float:
    r"""The chance that the right one of M + 1 tokens has the largest logit, by quadrature over the exact law.

    `cosine` is that of the angle between the asking and the stored token: 1 if they are equal. The threshold of an
    orthogonal draw is then $t \cos + \sqrt{1 - \cos^2} \sqrt{1 - t^2}\, w$ with w a coordinate of a uniform point of a
    sphere in d - 1 dimensions; a cosine other than 1 is supported for that draw only.

    Raises ValueError for a cosine outside [-1, 1], or below 1 for another draw, and then for d below 3.
    """
    expect(-1 <= cosine <= 1, "cosine", "a number in [-1, 1]", cosine)
    expect(cosine == 1 or draw == "haar", "cosine", f"1 for a {draw} draw", cosine)
    expect(d > 2 or cosine == 1, "d", "at least 3 beside a cosine other than 1", d)
    return _found(M, K, d, draw, cosine)


def capacity(K: int, d: int, *, draw: str = "haar", chance: float = 0.5, cosine: float = 1.0) -> float:
    """The number M of other tokens, not rounded, among which the right one is found with that chance.

    Raises ValueError for a chance outside (0, 1).
    """
    expect(0 < chance < 1, "chance", "a number in (0, 1)", chance)
    if d == K and draw == "haar" and cosine == 1:
        return inf
    if found_chance(1, K, d, draw=draw, cosine=cosine) < chance:
        return 0.0
    return float(10 ** brentq(lambda e: _found(10**e, K, d, draw, cosine) - chance, 0, 300, xtol=1e-10))


def capacity_exponent(K: int, d: int, *, draw: str = "haar") -> float:
    r"""The logarithm of the capacity to leading order: $-\frac d2 \log(1 - K/d)$ for orthonormal rows and
    $\frac d2 \log(1 + K/d)$ for Gaussian entries. Both are K/2 where K is much smaller than d.
    """
    _widths(K, d, draw)
    if draw == "haar":
        return inf if d == K else -d / 2 * log1p(-K / d)
    return d / 2 * log1p(K / d)


def weight_bound(M: int, K: int, d: int, c: float, *, sink: float | None = None, draw: str = "haar") -> float:
    r"""A lower bound on the right token's expected weight, for equal tokens and orthonormal rows.

    Given R and x the weight is $1/(1 + \Sigma)$, a convex function of the sum of the others' exponentials; the mean of
    that sum is $M\, {}_0F_1(d/2; \lambda^2/4)\, e^{-\lambda t}$ with $\lambda = c\, d\, t / \sqrt{K}$ (Jensen). A sink
    is one more score, $s\, c \sqrt K$ for the share s; the right token's is $\lambda t$.

    Raises ValueError for another draw, and for a c or a sink that is not positive.
    """
    t, weights, slope, others = _others(M, K, d, c, sink, draw)
    exponent = others if sink is None else np.logaddexp(others, sink * c * K**0.5)
    return float(weights @ (1 / (1 + np.exp(np.minimum(exponent - slope * t, 700)))))  # beyond that it is 0


def unmatched_bound(M: int, K: int, d: int, c: float, *, sink: float, draw: str = "haar") -> float:
    r"""An upper bound on the expected weight that M tokens have together if none is the right one and there is a sink.

    Given R and x it is $\Sigma / (\Sigma + e^{s c \sqrt K})$, a concave function of the sum of their exponentials
    (Jensen).

    Raises ValueError for a draw without orthonormal rows, and for a c or a sink that is not positive.
    """
    _, weights, _, others = _others(M, K, d, c, sink, draw)
    return float(weights @ (1 / (1 + np.exp(np.clip(sink * c * K**0.5 - others, -700, 700)))))


def _others(M: int, K: int, d: int, c: float, sink: float | None, draw: str) -> tuple[Any, Any, Any, Any]:
    """Values of t, their weights, lambda, and the logarithm of the mean sum of M tokens' exponentials."""
    expect(draw == "haar", "draw", "'haar'", f"{draw!r}")
    for name, number in (("c", c), ("sink", 1.0 if sink is None else sink)):
        expect(0 < number < inf, name, "a positive number", number)
    t, weights = _thresholds(K, d, draw)
    slope = c * d * t / K**0.5
    return t, weights, slope, log(M) + _log_mean_exponential(slope, d)


def sample_retrieval(
    M: int,
    K: int,
    d: int,
    count: int,
    *,
    c: float,
    draw: str = "haar",
    cosine: float = 1.0,
    sink: float | None = None,
    tied: bool = True,
    generator: torch.Generator | None = None,
) -> Retrieved:
    r"""Simulate `count` heads, each with its own matrix and M + 1 tokens, in float64: see `Retrieved`.

    With `tied` False, queries have a matrix of their own, as with the frozen W_Q and W_K of a layer. A `sink` is one
    more score, this share of $c \sqrt K$, whose weight goes to no token.

    Raises ValueError for a cosine outside [-1, 1] and sizes below 1.
    """
    _widths(K, d, draw)
    expect(-1 <= cosine <= 1, "cosine", "a number in [-1, 1]", cosine)
    kind: dict[str, Any] = {"generator": generator, "dtype": torch.float64}
    weights, found, read = [], [], []
    for _ in range(count):
        R = DRAWS[draw](K, d, **kind)
        W = R if tied else DRAWS[draw](K, d, **kind)
        tokens = d**0.5 * normalize(torch.randn(M + 1, d, **kind), dim=-1)  # the first is the right one
        asking = tokens[0]
        if cosine < 1:
            other = torch.randn(d, **kind)
            other = d**0.5 * normalize(other - (other @ asking) / d * asking, dim=0)
            asking = cosine * asking + (1 - cosine**2) ** 0.5 * other
        logits = (W @ asking) @ (R @ tokens.T) * (c / K**0.5)  # (M + 1,)
        beside = logits.new_full((1,), -inf if sink is None else sink * c * K**0.5)
        shares = torch.cat([logits, beside]).softmax(0)
        weights.append(shares[0])
        found.append(logits.argmax() == 0)
        read.append(shares[:-1].sum())
    return Retrieved(torch.stack(weights), torch.stack(found), torch.stack(read))


def _widths(K: int, d: int, draw: str) -> None:
    one_of("draw", draw, KNOWN)
    expect(d >= K, "K", f"at most d = {d}", K)


def _found(M: float, K: int, d: int, draw: str, cosine: float) -> float:
    """`found_chance`, for any number M."""
    t, weights = _thresholds(K, d, draw)
    if cosine == 1:
        return float(weights @ np.exp(M * _log_below(t, d)))
    w, inner = _coordinates(d - 1)
    moved = cosine * t[:, None] + np.sqrt((1 - cosine**2) * (1 - t[:, None] ** 2)) * w
    return float(weights @ np.exp(M * _log_below(moved, d)) @ inner)


def _quantiles() -> tuple[Any, Any]:
    """Nodes and weights for the mean of a function of a uniform number."""
    nodes, weights = np.polynomial.legendre.leggauss(NODES)
    return (1 + nodes) / 2, weights / 2


@cache
def _thresholds(K: int, d: int, draw: str) -> tuple[Any, Any]:
    """Values of t and their weights."""
    _widths(K, d, draw)
    if d == K and draw == "haar":
        return np.ones(1), np.ones(1)
    nodes, weights = _quantiles()
    return np.sqrt(threshold_law(K, d, draw=draw).ppf(nodes)), weights


@cache
def _coordinates(n: int) -> tuple[Any, Any]:
    """Values of a coordinate of a uniform point of the unit sphere in n dimensions, and their weights."""
    from scipy.stats import beta

    nodes, weights = _quantiles()
    return np.sign(nodes - 0.5) * np.sqrt(beta(0.5, (n - 1) / 2).ppf(abs(2 * nodes - 1))), weights


def _log_mean_exponential(slope: Any, d: int) -> Any:
    r"""$\log \mathbb{E}\, e^{s u} = \log {}_0F_1(d/2; s^2/4)$, for a coordinate u as in `_log_below`.

    Its series is summed in logarithms, to more than twice the index of its largest term, since the nearest functions of
    SciPy leave the range of floats.
    """
    k = np.arange(int(slope.max()) + 60)
    logs = 2 * k * np.log(slope[:, None] / 2) - gammaln(k + 1) - gammaln(d / 2 + k) + gammaln(d / 2)
    return logsumexp(logs, axis=-1)


def _log_below(t: Any, d: int) -> Any:
    """Logarithm of the chance that a coordinate of a uniform point of the unit sphere in d dimensions is below t."""
    beyond = betainc((d - 1) / 2, 0.5, np.clip(1 - t**2, 0, 1)) / 2  # of |t|, on one side
    with np.errstate(divide="ignore"):
        return np.where(t >= 0, np.log1p(-beyond), np.log(beyond))
