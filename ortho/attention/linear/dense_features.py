r"""FAVOR++ and FAVOR#: positive random features whose quadratic terms are fitted to the queries and keys.

$\exp(x^T y) = E\, \phi(x)^T \phi(y)$ as for `favor`, by dense-exponential features with the parameters of
`DenseParameters` (Likhosherstov et al. 2022, arXiv:2205.15317; 2023, arXiv:2302.00787). Below are the features as their
formula reads, then the fits, then the map, which keeps the features in range.
"""

from collections.abc import Callable
from functools import partial
from math import inf, log, sqrt
from typing import Any, NamedTuple

import torch

from ortho import checks
from ortho._typing import Bool, Float, Size, Tensor
from ortho.attention.linear.favor import RandomFeatureMap, exponentials
from ortho.attention.linear.feature_map import Features
from ortho.attention.linear.linear_attention import kernel_mechanism
from ortho.attention.scores import root_scale

Queries = Float[Tensor, "*batch N K"]  # scaled
Keys = Float[Tensor, "*batch M K"]
KeptQueries = Bool[Tensor, "*batch N"] | None  # True for tokens that enter the means
KeptKeys = Bool[Tensor, "*batch M"] | None


def dense_features(
    x: Float[Tensor, "... N K"],
    omega: Float[Tensor, "... m K"],
    a: Float[Tensor, "... K"],
    B: Float[Tensor, "... K K"],
) -> Float[Tensor, "... N m"]:
    r"""Dense-exponential features, $m^{-1/2} D \exp(w^T A w + w^T B x + x^T C x)$ for each row w of $\Omega$.

    $A = \mathrm{diag}(a)$ with a < 1/8, $C = -\frac12 B^T (I - 4A)^{-1} B$ and $D = \det(I - 4A)^{1/4}$
    (Likhosherstov et al. 2023, arXiv:2302.00787, section 3). With $B_k$ for keys and $B_q$ for queries they are
    unbiased if $B_q^T (I - 4A)^{-1} B_k = I$. a = 0 and B = I give `positive_features`.
    """
    a, mapped = a[..., None, :], x @ B.mT
    exponents = mapped @ omega.mT + (a * omega.square()).sum(-1)[..., None, :]
    half = (mapped.square() / (1 - 4 * a)).sum(-1, keepdim=True) / 2
    return (exponents - half + (1 - 4 * a).log().sum(-1, keepdim=True) / 4 - log(omega.shape[-2]) / 2).exp()


class DenseParameters(NamedTuple):
    r"""Parameters of `dense_features`: the diagonal of A, and $B_q$, $B_k$ with $B_q^T (I - 4A)^{-1} B_k = I$.

    The columns of `axes` are the axes in which A is diagonal; None means the axes of x. Rows taken in these axes,
    $\Omega$ times `axes`, have the same law, and give features that do not depend on the signs of the axes.
    """

    a: Float[Tensor, "*batch K"]
    B_q: Float[Tensor, "*batch K K"]
    B_k: Float[Tensor, "*batch K K"]
    axes: Float[Tensor, "*batch K K"] | None = None


def optimal_a(moment: Float[Tensor, "*sizes"]) -> Float[Tensor, "*sizes"]:
    r"""The a of $A = a I$, $B = \sqrt{1 - 4a}\, I$, that minimises the mean logarithm of the features' second moment.

    `moment` is the mean of $|x + y|^2 / K$ over pairs of K-wide x and y. (FAVOR++: Likhosherstov et al. 2022,
    arXiv:2205.15317; in the form of 2023, arXiv:2302.00787, section 3.) a is 0 for a moment of 0 and falls from there.
    """
    return (1 - 2 * moment - ((2 * moment + 1).square() + 8 * moment).sqrt()) / 16


def mean_square_sum(
    x: Queries, y: Keys, *, keep_x: KeptQueries = None, keep_y: KeptKeys = None
) -> Float[Tensor, "*batch"]:
    r"""The mean of $|x_i + y_j|^2$ over all pairs, in time linear in N and M.

    Here and below, means are over the tokens in `keep_x` and `keep_y`, by default over all.
    """
    cross = (_mean(x, keep_x) * _mean(y, keep_y)).sum(-1)
    return _mean(x.square(), keep_x).sum(-1) + _mean(y.square(), keep_y).sum(-1) + 2 * cross


def isotropic(a: Float[Tensor, "*batch"], K: int) -> DenseParameters:
    r"""$A = a I$, $B = \sqrt{1 - 4a}\, I$, the parameters of generalised exponential features (GERF)."""
    B = (1 - 4 * a)[..., None, None].sqrt() * torch.eye(K, dtype=a.dtype, device=a.device)
    return DenseParameters(a[..., None].expand(*a.shape, K), B, B)


def gerf(x: Queries, y: Keys, *, keep_x: KeptQueries = None, keep_y: KeptKeys = None) -> DenseParameters:
    r"""FAVOR++: `isotropic`, with the a that `optimal_a` gives for these scaled queries x and keys y."""
    K = x.shape[-1]
    return isotropic(optimal_a(mean_square_sum(x, y, keep_x=keep_x, keep_y=keep_y) / K), K)


def saderf(x: Queries, y: Keys, *, keep_x: KeptQueries = None, keep_y: KeptKeys = None) -> DenseParameters:
    r"""FAVOR#, simplified asymmetric: GERF on $\Psi x$ and $\Psi^{-1} y$, with a diagonal $\Psi$ that equates moments.

    (Likhosherstov et al. 2023, arXiv:2302.00787, section 3.) A coordinate that is 0 in all of x or y keeps its scale.
    """
    of_x, of_y = _mean(x.square(), keep_x), _mean(y.square(), keep_y)
    unusable = (of_x == 0) | (of_y == 0)
    # Separate fourth roots, since the quotient itself may leave the range of the dtype.
    root_y, root_x = (of.masked_fill(unusable, 1).pow(0.25) for of in (of_y, of_x))
    psi = (root_y / root_x)[..., None, :]  # (..., 1, K)
    fitted = gerf(x * psi, y / psi, keep_x=keep_x, keep_y=keep_y)
    return DenseParameters(fitted.a, fitted.B_q * psi, fitted.B_k / psi)


def aderf(x: Queries, y: Keys, *, keep_x: KeptQueries = None, keep_y: KeptKeys = None) -> DenseParameters:
    r"""FAVOR#, asymmetric: $A = a I$ and the best $B_q$ and $B_k$, which differ.

    (Likhosherstov et al. 2023, arXiv:2302.00787, section 3.) $R_q$ and $R_k = R_q^{-T}$ bring the second moments of
    x and y to the same matrix; the rest is GERF. Such pairs differ by a rotation, and this is the symmetric one:
    $R_q^2$ is the geometric mean of $M_x^{-1}$ and $M_y$. It is continuous in the data; a pair from a decomposition
    would not be, because its signs are arbitrary.
    """
    K = x.shape[-1]
    of_x, of_y = (_moment(each, keep).double() for each, keep in ((x, keep_x), (y, keep_y)))
    root_x, inverse_x = _roots(_lifted(of_x, of_y))
    values, axes = torch.linalg.eigh(root_x @ _lifted(of_y, of_x) @ root_x)
    S = values.clamp(min=0).sqrt()  # the moments' common singular values
    R_q, R_k = _roots(inverse_x @ (axes * S[..., None, :]) @ axes.mT @ inverse_x)
    cross = (_mean(x, keep_x) * _mean(y, keep_y)).sum(-1)
    a = optimal_a(2 * (S.to(x.dtype).sum(-1) + cross) / K)
    root = (1 - 4 * a)[..., None, None].sqrt()
    return DenseParameters(a[..., None].expand(*a.shape, K), root * R_q.to(x.dtype), root * R_k.to(x.dtype))


def sderf(x: Queries, y: Keys, *, keep_x: KeptQueries = None, keep_y: KeptKeys = None) -> DenseParameters:
    r"""FAVOR#, symmetric: $B_q = B_k$, and A diagonal along the principal axes of x + y.

    (Likhosherstov et al. 2023, arXiv:2302.00787, section 3.)
    """
    cross = _mean(x, keep_x)[..., None] * _mean(y, keep_y)[..., None, :]
    moments, axes = torch.linalg.eigh((_moment(x, keep_x) + _moment(y, keep_y) + cross + cross.mT).double())
    a = optimal_a(moments.clamp(min=0)).to(x.dtype)
    axes = axes.to(x.dtype)
    B = (1 - 4 * a)[..., None].sqrt() * axes.mT
    return DenseParameters(a, B, B, axes)


def _mean(x: Tensor, keep: Tensor | None) -> Tensor:
    """The mean token (..., K); 0 where none is kept."""
    if keep is None:
        return x.mean(-2)
    return (x * keep[..., None]).sum(-2) / keep.sum(-1, keepdim=True).clamp(min=1)


def _moment(x: Tensor, keep: Tensor | None) -> Tensor:
    """The mean of x x^T (..., K, K); 0 where no token is kept."""
    if keep is None:
        return x.mT @ x / x.shape[-2]
    return (x * keep[..., None]).mT @ x / keep.sum(-1).clamp(min=1)[..., None, None]


# The amount added to a second moment, relative to its mean eigenvalue: fewer tokens than dimensions leave it singular.
# Any B_q and B_k that invert each other leave the estimate unbiased, so this costs at most a little variance.
RIDGE = 1e-4
# The least mean eigenvalue of a second moment, relative to the other side's. With less, balancing queries of 0 would
# leave no digits of the keys, and the queries' gradient would be rounding errors only.
BALANCE = 1e-12


def _lifted(moment: Tensor, other: Tensor) -> Tensor:
    """A second moment made positive definite, given the other side's. Both are float64, since the result is inverted
    and has only K x K numbers."""
    mean, beside = (each.diagonal(dim1=-2, dim2=-1).mean(-1) for each in (moment, other))
    mean = torch.maximum(mean, BALANCE * beside).clamp(min=torch.finfo(moment.dtype).tiny ** 0.25)
    return moment + RIDGE * mean[..., None, None] * torch.eye(moment.shape[-1]).to(moment)


def _roots(moment: Tensor) -> tuple[Tensor, Tensor]:
    """The symmetric root of a positive definite matrix, and its inverse."""
    values, axes = torch.linalg.eigh(moment)
    root = values.clamp(min=torch.finfo(values.dtype).tiny).sqrt()[..., None, :]
    return (axes * root) @ axes.mT, (axes / root) @ axes.mT


class Fit(NamedTuple):
    """How parameters are fitted to queries and keys, and the cost of that per sequence.

    products: FLOPs, as multiples of K^2 for each query and key, and of K^3. turned: whether the fit has its own axes
    for the rows.
    """

    function: Callable[..., DenseParameters]
    products: tuple[int, int]
    turned: bool = False


FITS = {
    "gerf": Fit(gerf, (0, 0)),
    "saderf": Fit(saderf, (0, 0)),
    "aderf": Fit(aderf, (2, 45)),
    "sderf": Fit(sderf, (2, 9), turned=True),
}


class DenseExponentialFeatures(RandomFeatureMap):
    r"""FAVOR++ and FAVOR#: `dense_features` with parameters fitted to the scaled queries and keys of each sequence.

    `fit` is a name in `FITS`. A fit looks at the whole sequence. For causal use, and for a sequence in parts, give
    `parameters` fitted elsewhere; the estimate of the kernel is unbiased with any parameters that satisfy their
    constraint. Refitting at each token to the tokens so far is causal too, but needs a
    state that grows: a new a changes the feature $\exp(c\, w^T k)$, $c = \sqrt{1 - 4a}$, of every earlier key. As
    functions of c these exponentials are linearly independent, so the sums over N keys for N values of c determine N
    numbers.
    With `same_tokens` the queries at hidden keys' positions are left out of the fit as well. The parameters are
    constants to autograd.
    """

    def __init__(
        self,
        fit: str = "gerf",
        parameters: DenseParameters | None = None,
        features: Float[Tensor, "m K"] | None = None,
        *,
        m: int | None = None,
    ) -> None:
        super().__init__(features, m=m)
        self.fit, self.parameters = checks.one_of("fit", fit, FITS), parameters
        self.causal = parameters is not None
        if parameters is not None:
            checks.within("parameters", "a", parameters.a, -inf, 1 / 8)
            K = parameters.a.shape[-1]
            for name, matrix in zip(DenseParameters._fields[1:], parameters[1:], strict=True):
                got = None if matrix is None else tuple(matrix.shape)
                fits = matrix is None or matrix.shape[-2:] == (K, K)
                checks.expect(fits, "parameters", f"{name} of shape (..., {K}, {K}) like a, of width {K}", got)

    def __repr__(self) -> str:
        given = "" if self.parameters is None else "parameters=..., "
        return f"{type(self).__name__}({self.fit!r}, {given}m={self.m})"

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        *,
        scale: float | None = None,
        hidden: Tensor | None = None,
        hidden_q: Tensor | None = None,
        **_: Any,
    ) -> Features:
        root = root_scale(1 / sqrt(q.shape[-1]) if scale is None else scale)
        omega = self.rows(q)
        with torch.no_grad():  # and detached, since derivatives in forward mode pass through no_grad
            a, B_q, B_k, axes = self._parameters((q * root).detach(), (k * root).detach(), hidden_q, hidden)
            if axes is not None:
                omega = omega @ axes  # (..., m, K)
            bias = 2 * (omega.square() @ a[..., None]).mT  # (..., 1, m), for both features of a pair
            rows_q, rows_k = omega @ (B_q * root), omega @ (B_k * root)  # (..., m, K)
            R = B_k * (root / (1 - 4 * a).sqrt()[..., None])
        half = (k @ R.mT).square().sum(-1, keepdim=True) / 2
        return exponentials(q @ rows_q.mT + bias, k @ rows_k.mT, half)

    def flops(self, G: Size, N: Size, M: Size, K: Size, m: Size) -> tuple[Size, Size]:
        mapped = 2 * G * (N + M) * K * m + 2 * G * M * K * K  # projections, and the keys' quadratic form
        given = self.parameters
        fit = FITS[self.fit] if given is None else Fit(gerf, (0, 0), given.axes is not None)
        sets = 1 if given is not None and given.a.dim() == 1 else G  # one for all sequences, or one for each
        products = fit.products[0] * G * (N + M) * K * K + fit.products[1] * G * K**3
        # The rows, turned, for q, and for k; the bias.
        parameters = (4 + 2 * fit.turned) * sets * m * K * K + 2 * sets * m * K
        return mapped + parameters + products, mapped

    def _parameters(self, x: Tensor, y: Tensor, hidden_x: Tensor | None, hidden_y: Tensor | None) -> DenseParameters:
        if self.parameters is not None:
            a, B_q, B_k, axes = self.parameters
            if a.shape[-1] != x.shape[-1]:
                raise ValueError(f"parameters: expected width {x.shape[-1]} like q, got a of shape {tuple(a.shape)}")
            return DenseParameters(a.to(x), B_q.to(x), B_k.to(x), None if axes is None else axes.to(x))
        keep_x, keep_y = (None if hidden is None else ~hidden for hidden in (hidden_x, hidden_y))
        return FITS[self.fit].function(x, y, keep_x=keep_x, keep_y=keep_y)


MECHANISMS = tuple(
    kernel_mechanism(name, partial(DenseExponentialFeatures, fit), source)
    for name, fit, source in (
        ("favor++", "gerf", "Likhosherstov et al. 2022, arXiv:2205.15317"),
        ("saderf", "saderf", "Likhosherstov et al. 2023, arXiv:2302.00787"),
        ("aderf", "aderf", "Likhosherstov et al. 2023, arXiv:2302.00787"),
        ("sderf", "sderf", "Likhosherstov et al. 2023, arXiv:2302.00787"),
    )
)
