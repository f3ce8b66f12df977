r"""What random projections keep of an inner product: $\langle W_Q^T x, W_K^T y \rangle$ for fixed unit vectors x and y.

*Tied*: one map for both, $W_Q = W_K$, as in the Johnson-Lindenstrauss lemma. Otherwise the two are independent, as in a
frozen attention head. Both are (d, k) draws of `ortho.orthogonal`.
"""

from math import sqrt

import torch

from ortho._checks import checked, one_of, positive_int
from ortho._typing import Float, Tensor
from ortho.orthogonal import DRAWS, haar
from ortho.theory.johnson_lindenstrauss import Moments, share_moments
from ortho.theory.scores import score_moment

__all__ = ["product_moments", "sample_products"]


def _pair(d: int, cosine: float) -> None:
    if positive_int("d", d) < 2:
        raise ValueError(f"d: expected room for two directions, at least 2, got {d}")
    if not -1 <= cosine <= 1:
        raise ValueError(f"cosine: expected a number between -1 and 1, got {cosine}")


@checked
def product_moments(draw: str, d: int, k: int, cosine: float, *, tied: bool) -> Moments:
    r"""Mean and variance over the draws, exact, for unit vectors of which c is the cosine.

    Tied: mean $kc/d$; variance $\frac{k(d-k)}{d(d+2)} (\frac{2c^2}{d} + \frac{1-c^2}{d-1})$ for an orthogonal draw and
    $k(1 + c^2)/d^2$ for the Gaussian one. Independent: mean 0 and variance $k/d^2$, whatever c.
    """
    _pair(d, cosine)
    share = share_moments(draw, d, k)
    if not tied:
        return Moments(score_moment(draw, d, k, 1), score_moment(draw, d, k, 2))
    # With P = W W^T and y = c x + s z, z orthogonal to x, the product is c x^T P x + s x^T P z, whose parts are
    # uncorrelated: z -> -z changes the sign of the second alone. As P is a projection, |P x|^2 = x^T P x, and the
    # squares of x^T P z over d - 1 directions z sum to this less (x^T P x)^2.
    gaussian = draw == "gaussian"
    across = k / d**2 if gaussian else (share.mean - share.mean**2 - share.variance) / (d - 1)
    return Moments(share.mean * cosine, cosine**2 * share.variance + (1 - cosine**2) * across)


@checked
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
