r"""Positive semi-definite kernels: which functions of two tokens are inner products of features.

On n points a symmetric kernel is the matrix $G_{ij} = \kappa(x_i, x_j)$. The kernel is positive semi-definite if no
such matrix has a negative eigenvalue; exactly then it is $\phi(x)^T \phi(y)$ with features in some Hilbert space
(Aronszajn 1950; Mercer 1909 has them from eigenfunctions, for continuous kernels on compact sets). On n points, n
features do.

Matrices are divided by $\sqrt{G_{ii} G_{jj}}$ here, which changes the sign of no eigenvalue and limits them to n.
"""

from collections.abc import Callable

import torch

from ortho import _checks
from ortho._checks import checked
from ortho._typing import Float, Tensor
from ortho.attention.linear.linear_attention import FeatureMap, kernel_weights

__all__ = ["INDEFINITE", "KERNELS", "features_of", "gram", "least_eigenvalue", "map_gram", "rank", "rounding"]

Kernel = Callable[[Tensor, Tensor], Tensor]  # of points (N, K) and (M, K), the matrix (N, M)

KERNELS: dict[str, Kernel] = {
    "softmax": lambda x, y: (x @ y.mT).exp(),
    "Laplace": lambda x, y: (-(x[:, None] - y).abs().sum(-1)).exp(),
    "polynomial": lambda x, y: 1 + x @ y.mT + (x @ y.mT).square() / 2,
    "powers": lambda x, y: (1 + x[:, None] * y + (x[:, None] * y).square()).sum(-1),
    "cosine": lambda x, y: x.cos() @ y.cos().mT,
}
# Functions of the score that are no inner products of features, whatever the features.
INDEFINITE: dict[str, Kernel] = {
    "ReLU": lambda x, y: (x @ y.mT).relu(),
    "sigmoid": lambda x, y: (x @ y.mT).sigmoid(),
    "absolute value": lambda x, y: (x @ y.mT).abs(),
}


@checked
def gram(kernel: Kernel, points: Float[Tensor, "n K"]) -> Float[Tensor, "n n"]:
    """The kernel's matrix on the points, with ones on the diagonal; ValueError if a point has none to divide by."""
    return _ones_on_diagonal(kernel(points, points))


@checked
def map_gram(feature_map: FeatureMap, points: Float[Tensor, "n K"]) -> Float[Tensor, "n n"]:
    """The same of a feature map's kernel, the points serving as queries and as keys, each at its own position."""
    weights = kernel_weights(feature_map, points, points)
    if feature_map.scales_keys:
        # Queries are scaled as well, each by a factor that cancels in attention: c_i W_ij = c_j W_ji gives it back.
        weights = weights * (weights[0] / weights[:, 0])[:, None]
    return _ones_on_diagonal(weights)


def _ones_on_diagonal(matrix: Tensor) -> Tensor:
    diagonal = matrix.diagonal()
    if not (diagonal > 0).all():
        raise ValueError(f"points: expected a kernel above 0 of each with itself, got {float(diagonal.min()):.3g}")
    root = diagonal.rsqrt()
    return root[:, None] * matrix * root


@checked
def rounding(n: int, m: int) -> float:
    r"""What rounding in float64 can do to an eigenvalue of the matrix of n points with m features (or K = m).

    An entry is an inner product of length m, of rows that are divided by roots of such: three errors of m spacings, and
    some for roots, exponentials and quotients. n such errors a row; the solver adds n spacings times the norm.
    """
    return torch.finfo(torch.float64).eps * n * (3 * m + n + 10)


@checked
def least_eigenvalue(matrix: Float[Tensor, "n n"]) -> float:
    """The least eigenvalue of a symmetric matrix; ValueError if it is not symmetric."""
    return float(torch.linalg.eigvalsh(_symmetric(matrix))[0])


@checked
def rank(matrix: Float[Tensor, "n n"], m: int) -> int:
    """How many eigenvalues are above what rounding could make of 0, by the `rounding` of m features."""
    return int((torch.linalg.eigvalsh(_symmetric(matrix)) > rounding(len(matrix), m)).sum())


@checked
def features_of(matrix: Float[Tensor, "n n"]) -> Float[Tensor, "n n"]:
    r"""Features (n, n), $\Phi = U \Lambda^{1/2}$, of which the matrix is $\Phi \Phi^T$, from $G = U \Lambda U^T$.

    ValueError if an eigenvalue is negative by more than rounding: then there are none.
    """
    values, vectors = torch.linalg.eigh(_symmetric(matrix))
    if values[0] < -rounding(len(matrix), len(matrix)):
        raise ValueError(f"matrix: expected no negative eigenvalue, got {float(values[0]):.3g}")
    return vectors * values.clamp(min=0).sqrt()


def _symmetric(matrix: Tensor) -> Tensor:
    _checks.float_tensor("matrix", matrix)
    if matrix.dim() != 2 or matrix.shape[0] != matrix.shape[1] or 0 in matrix.shape:
        raise ValueError(f"matrix: expected shape (n, n), got {tuple(matrix.shape)}")
    off = float((matrix - matrix.mT).abs().max())
    if not off <= rounding(len(matrix), len(matrix)) * max(1.0, float(matrix.abs().max())):
        raise ValueError(f"matrix: expected it symmetric, got entries that differ by {off:.3g}")
    return (matrix + matrix.mT) / 2
