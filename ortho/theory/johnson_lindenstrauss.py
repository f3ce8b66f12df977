r"""How well a random projection keeps the distances between points: laws, bounds and measurements.

W is a (d, k) draw of `ortho.orthogonal`, k <= d, whose entries have variance 1/d. A vector x keeps the share
$|W^T x|^2 / |x|^2$ of its squared length, k/d on average; *rescaled* means times d/k, so that the average is one.
Points are kept to eps if no rescaled squared distance between two of them is off by more than the share eps.

*Inner products* $\langle W_Q^T x, W_K^T y \rangle$ of fixed unit vectors x and y. *Tied*: one map for both, $W_Q =
W_K$, as in the Johnson-Lindenstrauss lemma. Otherwise the two are independent, as in a frozen attention head. Both are
such draws.
"""

from math import ceil, log, sqrt
from typing import Any, NamedTuple

import numpy as np
import torch

from ortho._typing import Float, Tensor
from ortho.checks import expect, one_of
from ortho.orthogonal import DRAWS, haar

# ------------------------------------------------------------------------------------------------------------ distances


class Moments(NamedTuple):
    """A mean and a variance, exact."""

    mean: float
    variance: float


def _known(draw: str, d: int, k: int) -> None:
    """Raises ValueError for an unknown draw, and for a k above d."""
    expect(k <= d, "k", f"at most d = {d}", k)
    one_of("draw", draw, DRAWS)


def _eps(eps: float) -> None:
    expect(0 < eps < 1, "eps", "a number between 0 and 1", eps)


def dimension(n: int, eps: float) -> int:
    r"""The k of Dasgupta & Gupta (2003), theorem 2.1: the least with $k \ge 4 \ln n / (\epsilon^2/2 - \epsilon^3/3)$.

    For any n points some rescaled projection to k dimensions keeps them to eps. k may be above d, where the whole space
    keeps all distances.
    """
    _eps(eps)
    return max(1, ceil(4 * log(n) / (eps**2 / 2 - eps**3 / 3)))


def _law(draw: str, d: int, k: Any) -> Any:
    r"""The law of the share: Beta(k/2, (d-k)/2) for an orthogonal draw with k < d, $\chi^2_k / d$ for the Gaussian."""
    from scipy import stats  # takes a second to import, and most users of this module do not need it

    return stats.chi2(k, scale=1 / d) if draw == "gaussian" else stats.beta(k / 2, (d - k) / 2)


def share_moments(draw: str, d: int, k: int) -> Moments:
    r"""Mean k/d and variance of the share: $2k(d-k)/(d^2(d+2))$ for an orthogonal draw, $2k/d^2$ for the Gaussian."""
    _known(draw, d, k)
    return Moments(k / d, 2 * k / d**2 * (1.0 if draw == "gaussian" else (d - k) / (d + 2)))


def _outside(draw: str, d: int, k: Any, eps: float) -> Any:
    """The probability that a rescaled share is off by more than eps, for k < d or an array of them."""
    law = _law(draw, d, k)
    return law.cdf((1 - eps) * k / d) + law.sf((1 + eps) * k / d)


def failure_bound(n: int, d: int, k: int, eps: float, *, draw: str = "haar") -> float:
    """An upper bound on the probability that one draw does not keep n points to eps, whatever the points.

    The union bound: n (n - 1) / 2 times the exact probability for one pair; above one it says nothing. For the Gaussian
    draw it does not depend on d, and is the limit for orthogonal draws as d grows.
    """
    _known(draw, d, k)
    _eps(eps)
    if k == d and draw != "gaussian":
        return 0.0
    return n * (n - 1) / 2 * float(_outside(draw, d, k, eps))


def least_dimension(n: int, d: int, eps: float, *, failure: float = 1.0, draw: str = "haar") -> int:
    """The least k from which on `failure_bound` stays below `failure`: 1 only asks that some draw works.

    At most d for an orthogonal draw, which keeps everything at k = d; d + 1 if even d is too few for the Gaussian one.
    """
    one_of("draw", draw, DRAWS)
    _eps(eps)
    expect(0 < failure <= 1, "failure", "a probability above 0", failure)
    k = np.arange(1, d + 1 if draw == "gaussian" else d)
    short = k[n * (n - 1) / 2 * _outside(draw, d, k, eps) >= failure]
    return int(short.max(initial=0)) + 1


def distortion(points: Float[Tensor, "n d"], images: Float[Tensor, "n k"]) -> float:
    """The largest share by which a squared distance of the images (n, k) differs from that of the points (n, d).

    ValueError for fewer than two points, or equal ones.
    """
    expect(len(points) >= 2, "points", "(n, d) with n of at least 2", tuple(points.shape))
    low, high = _change(_squares(points), torch.pdist(images).square())
    return max(1 - low, high - 1)


def measured_dimension(
    points: Float[Tensor, "n d"], eps: float, *, draw: str = "haar", generator: torch.Generator | None = None
) -> int:
    """The least k from which on the first k columns of one d x d draw, rescaled, keep these points (n, d) to eps.

    The first k columns of such a draw follow the law of a (d, k) one. d + 1 if even all columns do not keep them.
    """
    law = DRAWS[one_of("draw", draw, DRAWS)]
    _eps(eps)
    d = points.shape[-1]
    images = points @ law(d, generator=generator, dtype=points.dtype)
    before = _squares(points)
    after = torch.zeros_like(before)
    least = 1
    for k in range(1, d + 1):
        after += torch.pdist(images[:, k - 1 : k]).square()
        low, high = _change(before, after)
        if max(1 - low * d / k, high * d / k - 1) > eps:
            least = k + 1
    return least


def _squares(points: Tensor) -> Tensor:
    """The squared distances of all pairs (n (n - 1) / 2,), none of them zero."""
    squares = torch.pdist(points).square()
    if not squares.all():
        raise ValueError("points: expected no two equal points")
    return squares


def _change(before: Tensor, after: Tensor) -> tuple[float, float]:
    """The least and the greatest factor between squared distances."""
    low, high = (after / before).aminmax()
    return float(low), float(high)


# ------------------------------------------------------------------------------------------------------- inner products


def _pair(d: int, cosine: float) -> None:
    expect(d >= 2, "d", "room for two directions, at least 2", d)
    expect(-1 <= cosine <= 1, "cosine", "a number between -1 and 1", cosine)


def product_moments(draw: str, d: int, k: int, cosine: float, *, tied: bool) -> Moments:
    r"""The exact mean and variance over the draws, for unit vectors with the cosine c.

    Tied: mean $kc/d$; variance $\frac{k(d-k)}{d(d+2)} (\frac{2c^2}{d} + \frac{1-c^2}{d-1})$ for an orthogonal draw and
    $k(1 + c^2)/d^2$ for the Gaussian one. Independent: mean 0 and variance $k/d^2$, whatever c.
    """
    _pair(d, cosine)
    share = share_moments(draw, d, k)
    if not tied:
        return Moments(0.0, k / d**2)
    # With P = W W^T and y = c x + s z, z orthogonal to x, the product is c x^T P x + s x^T P z, whose parts are
    # uncorrelated: z -> -z changes the sign of the second alone. As P is a projection, |P x|^2 = x^T P x, and the
    # squares of x^T P z over d - 1 directions z sum to this less (x^T P x)^2.
    gaussian = draw == "gaussian"
    across = k / d**2 if gaussian else (share.mean - share.mean**2 - share.variance) / (d - 1)
    return Moments(share.mean * cosine, cosine**2 * share.variance + (1 - cosine**2) * across)


def sample_products(
    draw: str, d: int, k: int, cosine: float, count: int, *, tied: bool, generator: torch.Generator | None = None
) -> Float[Tensor, "count"]:
    """Products (count,) of one random pair of unit vectors with that cosine, each under fresh draws, float64."""
    law = DRAWS[one_of("draw", draw, DRAWS)]
    _pair(d, cosine)
    x, z = haar(d, 2, generator=generator, dtype=torch.float64).T
    y = cosine * x + sqrt(1 - cosine**2) * z
    products = []
    for _ in range(count):
        w_q = law(d, k, generator=generator, dtype=torch.float64)
        w_k = w_q if tied else law(d, k, generator=generator, dtype=torch.float64)
        products.append((x @ w_q) @ (y @ w_k))
    return torch.stack(products)
