r"""Kernels of feature maps: which functions of two tokens they are, and how far back they let a head look.

*Mercer*: which functions of two tokens are inner products of features. On n points a symmetric kernel is the matrix
$G_{ij} = \kappa(x_i, x_j)$. The kernel is positive semi-definite if no such matrix has a negative eigenvalue; exactly
then it is $\phi(x)^T \phi(y)$ with features in some Hilbert space (Aronszajn 1950; Mercer 1909 has them from
eigenfunctions, for continuous kernels on compact sets). On n points, n features suffice.

Matrices are divided by $\sqrt{G_{ii} G_{jj}}$ here, which changes the sign of no eigenvalue and limits them to n.

*Copying*, $o_t = v_{t-r}$: how far back a causal head can look with K features. A head with K features has the weights
$A_{tj} = \phi(q_t)^T \phi(k_j) / n_t$ for $j \le t$. Between the rows from c on and the tokens up to c nothing is
masked, so that block of A has rank K at most. In it, the $r + 1$ rows from c on must tell $r + 1$ tokens apart, those
from $c - r$ to c.
"""

from collections.abc import Callable

import torch

from ortho._typing import Float, Tensor
from ortho.attention.linear.feature_map import FeatureMap
from ortho.attention.linear.feature_maps import Exp
from ortho.attention.linear.linear_attention import kernel_weights
from ortho.checks import expect, positive_int

# --------------------------------------------------------------------------------------------------------------- mercer


Kernel = Callable[[Tensor, Tensor], Tensor]  # of points (N, K) and (M, K), the matrix (N, M)

KERNELS: dict[str, Kernel] = {
    "softmax": lambda x, y: (x @ y.mT).exp(),
    "Laplace": lambda x, y: (-(x[:, None] - y).abs().sum(-1)).exp(),
    "polynomial": lambda x, y: 1 + x @ y.mT + (x @ y.mT).square() / 2,
    "powers": lambda x, y: (1 + x[:, None] * y + (x[:, None] * y).square()).sum(-1),
    "cosine": lambda x, y: x.cos() @ y.cos().mT,
}
# Functions of the score that are not inner products of any features.
INDEFINITE: dict[str, Kernel] = {
    "ReLU": lambda x, y: (x @ y.mT).relu(),
    "sigmoid": lambda x, y: (x @ y.mT).sigmoid(),
    "absolute value": lambda x, y: (x @ y.mT).abs(),
}


def gram(kernel: Kernel, points: Float[Tensor, "n K"]) -> Float[Tensor, "n n"]:
    """The kernel's matrix on the points, scaled to ones on the diagonal; ValueError if an entry there is not
    positive."""
    return _ones_on_diagonal(kernel(points, points))


def map_gram(feature_map: FeatureMap, points: Float[Tensor, "n K"]) -> Float[Tensor, "n n"]:
    """`gram` of a feature map's kernel, with the points as queries and as keys, each at its own position."""
    weights = kernel_weights(feature_map, points, points)
    if feature_map.scales_keys:
        # Queries are scaled as well, each by a factor that cancels in attention: c_i W_ij = c_j W_ji gives it back.
        weights = weights * (weights[0] / weights[:, 0])[:, None]
    return _ones_on_diagonal(weights)


def _ones_on_diagonal(matrix: Tensor) -> Tensor:
    diagonal = matrix.diagonal()
    least = float(diagonal.min())
    expect(least > 0, "points", "a kernel above 0 of each with itself", f"{least:.3g}")
    root = diagonal.rsqrt()
    return root[:, None] * matrix * root


def rounding(n: int, m: int) -> float:
    r"""How much rounding in float64 can change an eigenvalue of the matrix of n points with m features (or K = m).

    An entry is an inner product of length m, of rows that are divided by roots of inner products: three errors of m
    spacings, and some for roots, exponentials and quotients. A row has n such errors; the solver adds n spacings times
    the norm.
    """
    return torch.finfo(torch.float64).eps * n * (3 * m + n + 10)


def least_eigenvalue(matrix: Float[Tensor, "n n"]) -> float:
    """The least eigenvalue of a symmetric matrix; ValueError if it is not symmetric."""
    return float(torch.linalg.eigvalsh(_symmetric(matrix))[0])


def rank(matrix: Float[Tensor, "n n"], m: int) -> int:
    """How many eigenvalues exceed the `rounding` of m features, so that rounding cannot have made them from 0."""
    return int((torch.linalg.eigvalsh(_symmetric(matrix)) > rounding(len(matrix), m)).sum())


def features_of(matrix: Float[Tensor, "n n"]) -> Float[Tensor, "n n"]:
    r"""Features $\Phi = U \Lambda^{1/2}$ (n, n) of a matrix $G = U \Lambda U^T$, so that $G = \Phi \Phi^T$.

    ValueError if an eigenvalue is negative by more than rounding: then no features exist.
    """
    values, vectors = torch.linalg.eigh(_symmetric(matrix))
    least = float(values[0])
    expect(least >= -rounding(len(matrix), len(matrix)), "matrix", "no negative eigenvalue", f"{least:.3g}")
    return vectors * values.clamp(min=0).sqrt()


def _symmetric(matrix: Tensor) -> Tensor:
    off = float((matrix - matrix.mT).abs().max())
    most = rounding(len(matrix), len(matrix)) * max(1.0, float(matrix.abs().max()))
    expect(off <= most, "matrix", "it symmetric", f"entries that differ by {off:.3g}")
    return (matrix + matrix.mT) / 2


# -------------------------------------------------------------------------------------------------------------- copying

SHARPNESS = 12.0  # an unwanted token has at most about exp(-12) of the weight of the wanted one
GROUPS = 4
STEPS, RATE = 400, 0.3


def least_error(distance: int, features: int) -> float:
    """A lower bound on `copy_error` for any queries, keys and features: 1 - K / (r + 1), or 0 where that is negative.

    The nearest matrix of rank K misses r + 1 - K of the r + 1 singular values of the identity (Eckart and Young 1936).
    """
    return max(0.0, 1 - features / (positive_int("distance", distance) + 1))


def tokens(distance: int, groups: int = GROUPS) -> int:
    """The length of a sequence with r tokens that have nothing to copy, and `groups` groups of r + 1 that have."""
    return positive_int("distance", distance) + groups * (distance + 1)


def copy_error(weights: Float[Tensor, "N N"], distance: int) -> Tensor:
    r"""The mean of $|A_t - e_{t-r}|^2$ over the rows $t \ge r$, which must form whole groups of r + 1.

    For values of independent random signs it is the expected square error, as a share of the target's square.
    """
    rows = len(weights) - positive_int("distance", distance)
    if rows < 1 or rows % (distance + 1):
        wanted = f"{distance} tokens and a multiple of {distance + 1}"
        raise ValueError(f"weights: expected {wanted}, got {len(weights)}")
    wanted_rows = torch.eye(len(weights), dtype=weights.dtype)[:rows]
    return (weights[distance:] - wanted_rows).square().sum(-1).mean()


def causal_weights(q: Float[Tensor, "N K"], k: Float[Tensor, "N K"]) -> Float[Tensor, "N N"]:
    """The weights of causal linear attention with the features exp(q) and exp(k), which can be any positive numbers."""
    weights = kernel_weights(Exp(), q, k, is_causal=True)
    return weights / weights.sum(-1, keepdim=True)


def copying(N: int, distance: int, features: int) -> tuple[Float[Tensor, "N K"], Float[Tensor, "N K"]]:
    """Queries and keys with which `causal_weights` copies from a distance below the number of features.

    Token j goes to slot j modulo K, louder than all before it, so that a query to a slot hears its last token. At most
    K - 1 tokens come after the wanted one, and none of them is in its slot.
    """
    expect(0 < distance < features, "distance", f"1 to {features - 1} with {features} features", distance)
    position = torch.arange(N, dtype=torch.float64)[:, None]
    slot = torch.arange(features)
    growth = SHARPNESS / features  # of the logarithm, for each token
    apart = growth * distance + SHARPNESS  # exceeds the extra loudness of later tokens
    k = growth * position - apart * (position % features != slot)
    q = -apart * ((position - distance) % features != slot).double()
    return q, k


def fitted_error(distance: int, features: int, *, generator: torch.Generator | None = None) -> float:
    """`copy_error` of `causal_weights` with queries and keys, one of each a position, fitted by gradient descent."""
    N = tokens(distance)
    q, k = torch.randn(2, N, features, generator=generator, dtype=torch.float64).unbind()
    q.requires_grad_(), k.requires_grad_()
    optimiser = torch.optim.Adam([q, k], RATE)
    for _ in range(STEPS):
        optimiser.zero_grad()
        copy_error(causal_weights(q, k), distance).backward()
        optimiser.step()
    return float(copy_error(causal_weights(q.detach(), k.detach()), distance))
