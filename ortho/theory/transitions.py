r"""Products of the delta rule's transitions $I - \beta k k^T$: when they contract, and what orthogonalising changes.

Along k a transition multiplies by $1 - c$, $c = \beta |k|^2$, and leaves the rest as it is. It is symmetric, so its
spectral norm is $\max(1, |1 - c|)$: for $0 \le c \le 2$ no product of such transitions enlarges anything, whatever the
keys, and for other c a key that is written again and again multiplies by $|1 - c| > 1$ each time.

For independent keys of uniform direction and one c, $|P_t x|^2 = |x|^2 \prod_s (1 - c (2 - c) u_s)$ with independent
$u_s \sim \mathrm{Beta}(1/2, (K - 1)/2)$, the square of one coordinate of a unit vector. So the logarithm of the length
is a random walk, and falls exactly where $c (2 - c) > 0$: the same range of c, without assuming the worst case.
"""

from math import cos, inf, log, log1p, pi, sin, sqrt
from typing import NamedTuple

import torch
from scipy.integrate import quad
from torch.nn.functional import normalize

from ortho._typing import Float, Tensor
from ortho.checks import expect


class Growth(NamedTuple):
    """Mean and standard deviation of what one step adds to the logarithm of a vector's length."""

    rate: float
    spread: float


class Drift(NamedTuple):
    """How far a computed product of reflections is from orthogonal, and from the exact product; spectral norms."""

    from_orthogonal: float
    from_exact: float


def unit_keys(
    *shape: int, generator: torch.Generator | None = None, dtype: torch.dtype = torch.float64
) -> Float[Tensor, "..."]:
    """Independent unit vectors of uniform direction, (..., K), normalised in `dtype`."""
    return normalize(torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype), dim=-1)


def norm_bound(c: float, steps: int) -> float:
    r"""The largest spectral norm of a product of `steps` transitions with $\beta |k|^2 = c$: max(1, |1 - c|)^steps."""
    try:
        return max(1.0, abs(1 - c)) ** steps
    except OverflowError:
        return inf


def growth(c: float, K: int) -> Growth:
    r"""The mean and the spread of $\frac12 \ln(1 - c (2 - c) u)$, by quadrature; K of at least 2.

    u is the square of the sine of an angle whose density is proportional to $\cos^{K-2}$.
    """
    expect(K >= 2, "K", "at least 2", K)
    shrink = c * (2 - c)

    def moment(power: int) -> float:
        def integrand(angle: float) -> float:
            # At c = 1 the logarithm is that of the cosine, without the digits that 1 - sin^2 would lose.
            step = log(cos(angle)) if shrink == 1 else 0.5 * log1p(-shrink * sin(angle) ** 2)
            return step**power * cos(angle) ** (K - 2)

        return quad(integrand, 0, pi / 2)[0]

    mass = quad(lambda angle: cos(angle) ** (K - 2), 0, pi / 2)[0]
    mean = moment(1) / mass
    return Growth(mean, sqrt(max(0.0, moment(2) / mass - mean**2)))


def sample_growth(
    c: float, K: int, steps: int, count: int, *, generator: torch.Generator | None = None
) -> Float[Tensor, "count"]:
    """The logarithms of |P x| / |x| after `steps` transitions with independent keys, (count,), float64."""
    x = unit_keys(count, K, generator=generator)
    total = x.new_zeros(count)
    for _ in range(steps):
        k = unit_keys(count, K, generator=generator)
        x = x - c * k * (k * x).sum(-1, keepdim=True)
        length = x.norm(dim=-1, keepdim=True)
        total += length[:, 0].log()
        x = x / length  # so that no number of steps over- or underflows
    return total


def nearest_orthogonal(P: Float[Tensor, "K K"]) -> Float[Tensor, "K K"]:
    """The orthogonal matrix nearest to P in every unitarily invariant norm: the polar factor (Fan & Hoffman 1955)."""
    left, _, right = torch.linalg.svd(P)
    return left @ right


def product(k: Float[Tensor, "N K"], beta: float, *, orthogonalise_every: int | None = None) -> Float[Tensor, "K K"]:
    r"""$P = \prod_t (I - \beta k_t k_t^T)$, the last on the left, in the dtype of k.

    With `orthogonalise_every`, the nearest orthogonal matrix replaces the product each time that many steps are done.
    """
    P = torch.eye(k.shape[-1], dtype=k.dtype)
    for t, key in enumerate(k[:, None].unbind(), 1):  # (1, K)
        P = torch.addmm(P, key.T, key @ P, alpha=-beta)
        if orthogonalise_every is not None and t % orthogonalise_every == 0:
            P = nearest_orthogonal(P)
    return P


def reflection_drift(
    steps: int,
    K: int,
    *,
    orthogonalise_every: int | None = None,
    dtype: torch.dtype = torch.float32,
    generator: torch.Generator | None = None,
) -> Drift:
    r"""How far a product of reflections, $\beta = 2$, computed in `dtype`, is from orthogonal and from exact.

    The exact product takes the same keys in float64, scaled to length 1 again, from which rounding moved them.
    """
    k = unit_keys(steps, K, generator=generator, dtype=dtype)
    P = product(k, 2.0, orthogonalise_every=orthogonalise_every).double()
    exact = product(normalize(k.double(), dim=-1), 2.0)
    errors = (P.T @ P - torch.eye(K, dtype=P.dtype), P - exact)
    return Drift(*(float(torch.linalg.matrix_norm(error, 2)) for error in errors))


def recall_errors(K: int, *, generator: torch.Generator | None = None) -> tuple[float, float]:
    r"""The errors of a full memory's answers, before and after the nearest orthogonal matrix replaces it.

    K orthonormal keys hold K normal values, $S = \sum_j k_j v_j^T$, so that $S^T k_j = v_j$. The errors are relative
    (Frobenius norm), over all keys.
    """
    keys = nearest_orthogonal(torch.randn(K, K, generator=generator, dtype=torch.float64))
    values = torch.randn(K, K, generator=generator, dtype=torch.float64)
    S = keys.T @ values
    before, after = (float((keys @ memory - values).norm() / values.norm()) for memory in (S, nearest_orthogonal(S)))
    return before, after
