r"""Steps of the delta rule as products of transitions: what they enlarge, and what chunks, keys and gates add.

*Products* of the delta rule's transitions $I - \beta k k^T$: when they contract, and what orthogonalising changes.
Along k a transition multiplies by $1 - c$, $c = \beta |k|^2$, and leaves the rest as it is. It is symmetric, so its
spectral norm is $\max(1, |1 - c|)$: for $0 \le c \le 2$ no product of such transitions enlarges anything, whatever the
keys, and for other c a key that is written again and again multiplies by $|1 - c| > 1$ each time.

For independent keys of uniform direction and one c, $|P_t x|^2 = |x|^2 \prod_s (1 - c (2 - c) u_s)$ with independent
$u_s \sim \mathrm{Beta}(1/2, (K - 1)/2)$, the square of one coordinate of a unit vector. So the logarithm of the length
is a random walk, and falls exactly where $c (2 - c) > 0$: the same range of c, without assuming the worst case.

*A chunk's system* is triangular: its condition, and how large its inverse is. In a chunk with keys K (C, K) and write
strengths b, what is written at each key is the solution of $(I + A) X = Y$ with $A = \mathrm{tril}(\mathrm{Diag}(b) K
K^T, -1)$. The inverse holds products of transitions,

$$(I + A)^{-1}_{ij} = -b_i k_i^T H_{i-1} \cdots H_{j+1} k_j, \quad i > j, \qquad H_s = I - b_s k_s k_s^T,$$

so that for unit keys and $0 \le b \le 2$, where these contract, no entry below the diagonal exceeds its $b_i$.

*Several keys at once*: all errors are taken from the old memory, or each from the memory that the key before it left.
One step of the delta rule for n keys could be $S + \sum_j \beta_j k_j (v_j - S^T k_j)^T$, a sum of n outer products
made of the old memory alone: `at_once`. Or the keys are written one after the other, which DeltaProduct does (Siems et
al. 2025, arXiv:2502.10297): `in_turn`. Both add $U^T D$ with the keys as rows of U (n, K) and some errors D (n, V). For
one key they are the same. What was in the memory is multiplied by

$$I - \sum_j \beta_j k_j k_j^T \qquad \text{and} \qquad (I - \beta_n k_n k_n^T) \cdots (I - \beta_1 k_1 k_1^T).$$

The second is a product of contractions for unit keys and $0 \le \beta_j \le 2$. The first is one exactly if
$\sum_j \beta_j k_j k_j^T$ has no eigenvalue above 2. That is so for orthogonal keys, and for $\sum_j \beta_j \le 2$.
For two keys with the cosine c and the same strength $\beta$ the eigenvalues are $\beta (1 \pm c)$, so the condition
fails if $\beta (1 + |c|) > 2$: each token then flips and enlarges what lies along nearly parallel keys.

*Gated forms*: two ways to write a delta rule that forgets, and the exact map from one to the other. The `input` form
gates the old memory and the error separately (stored here as (K, V), with answers $S^T q$):

$$S_t = \gamma_t S_{t-1} + \eta_t k_t (v_t - S_{t-1}^T k_t)^T .$$

The `erasing` form is Gated DeltaNet's (Yang et al. 2024, arXiv:2412.06464): the memory fades first, and the error is
taken from what is left, $S_t = (I - \beta_t k_t k_t^T)\, a_t S_{t-1} + \beta_t k_t v_t^T$. The input form is the
erasing form with $a = \gamma$, $\beta = \eta / \gamma$ and the values $\gamma v$. It multiplies the memory by
$\gamma - \eta |k|^2$ along k and by $\gamma$ elsewhere, so that it contracts exactly where $|\gamma| \le 1$ and
$|\gamma - \eta |k|^2| \le 1$. Gated DeltaNet's ranges, $0 < a \le 1$ and $0 \le \beta |k|^2 \le 2$, cover this part of
it: $0 < \gamma \le 1$, $0 \le \eta |k|^2 \le 2 \gamma$.

With one gate for each channel, $\mathrm{Diag}(\gamma_t) S_{t-1}$, there is no such map:
$\mathrm{Diag}(\gamma) - \eta k k^T$ is $(I - \eta k l^T) \mathrm{Diag}(\gamma)$ with $l = k / \gamma$, which is not
parallel to k. The mechanism 'vector-gated' is this form.
"""

from collections.abc import Callable
from math import cos, inf, log, log1p, pi, sin, sqrt
from typing import NamedTuple

import torch
from scipy.integrate import quad
from torch.nn.functional import normalize

from ortho._typing import Float, Tensor
from ortho.checks import expect, one_of

# ------------------------------------------------------------------------------------------------------------- products


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


def mean_square(c: float, K: int, steps: int) -> float:
    """E |P x|^2 / |x|^2 over independent keys of uniform direction: (1 - c (2 - c) / K)^steps."""
    return (1 - c * (2 - c) / K) ** steps


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


# ----------------------------------------------------------------------------------------------------- a chunk's system

KEYS = ("random", "near-parallel", "identical")
NEARNESS = 0.1  # of near-parallel keys: the length of each key's part beside the one direction that all share


def chunk_keys(kind: str, C: int, K: int, *, generator: torch.Generator | None = None) -> Float[Tensor, "C K"]:
    """Unit keys (C, K), float64: of uniform direction, all near one direction, or all the same."""
    one_of("kind", kind, KEYS)
    if kind == "random":
        return unit_keys(C, K, generator=generator)
    shared = unit_keys(1, K, generator=generator)
    if kind == "identical":
        return shared.repeat(C, 1)
    return normalize(shared + NEARNESS * unit_keys(C, K, generator=generator), dim=-1)


def chunk_system(k: Float[Tensor, "*batch C K"], beta: Float[Tensor, "*batch C"]) -> Float[Tensor, "*batch C C"]:
    """I + A, unit lower triangular."""
    return (beta[..., None] * (k @ k.mT)).tril(-1) + torch.eye(k.shape[-2], dtype=k.dtype)


def condition(k: Float[Tensor, "C K"], beta: Float[Tensor, "C"]) -> float:
    """The spectral condition number of I + A."""
    return float(torch.linalg.cond(chunk_system(k, beta), 2))


def condition_bound(C: int, beta: float) -> float:
    r"""The bound $C + \beta^2 C (C - 1) / 2$ on condition numbers of unit keys with strengths up to `beta` $\le 2$.

    I + A and its inverse both have ones on the diagonal and entries of at most `beta` below: neither's Frobenius norm,
    which is no less than the spectral norm, is above the root of that number.
    """
    expect(0 <= beta <= 2, "beta", "a number in [0, 2]", beta)
    return C + beta**2 * C * (C - 1) / 2


def inverse_by_products(k: Float[Tensor, "C K"], beta: Float[Tensor, "C"]) -> Float[Tensor, "C C"]:
    """$(I + A)^{-1}$ by its formula with products of transitions."""
    C = len(k)
    inverse = torch.eye(C, dtype=k.dtype)
    for j in range(C):
        x = k[j]  # the products so far, times k_j
        for i in range(j + 1, C):
            inverse[i, j] = -beta[i] * (k[i] @ x)
            x = x + inverse[i, j] * k[i]
    return inverse


def solve_error(k: Float[Tensor, "C K"], beta: Float[Tensor, "C"], dtype: torch.dtype) -> float:
    r"""The relative error of $(I + A)^{-1} \mathrm{Diag}(b) K$ when the inverse is rounded to `dtype`.

    For float32 the system is also solved in float32; for narrower formats in float64, so that the error is that of
    keeping the inverse.
    """
    exact_inverse = torch.linalg.inv(chunk_system(k, beta))
    exact = exact_inverse @ (beta[:, None] * k)
    if dtype == torch.float32:
        system = chunk_system(k, beta).float()
        inverse = torch.linalg.solve_triangular(system, torch.eye(len(k)), upper=False, unitriangular=True)
    else:
        inverse = exact_inverse.to(dtype)
    found = inverse.double() @ (beta[:, None] * k)
    return float((found - exact).norm() / exact.norm())


# ------------------------------------------------------------------------------------------------- several keys at once


def at_once(
    S: Float[Tensor, "*batch K V"],
    k: Float[Tensor, "*batch n K"],
    v: Float[Tensor, "*batch n V"],
    beta: Float[Tensor, "*batch n"],
) -> Float[Tensor, "*batch K V"]:
    """The memory after n keys, with all errors taken from the memory S before them."""
    return S + k.mT @ (beta[..., None] * (v - k @ S))


def in_turn(
    S: Float[Tensor, "*batch K V"],
    k: Float[Tensor, "*batch n K"],
    v: Float[Tensor, "*batch n V"],
    beta: Float[Tensor, "*batch n"],
) -> Float[Tensor, "*batch K V"]:
    """The memory after n keys, written one after the other."""
    for j in range(k.shape[-2]):
        one = slice(j, j + 1)
        S = at_once(S, k[..., one, :], v[..., one, :], beta[..., one])
    return S


def transition(update: str, k: Float[Tensor, "n K"], beta: Float[Tensor, "n"]) -> Float[Tensor, "K K"]:
    """What an update, 'at once' or 'in turn', multiplies the memory by."""
    function = UPDATES[one_of("update", update, UPDATES)]
    K = k.shape[-1]
    return function(torch.eye(K, dtype=k.dtype), k, k.new_zeros(len(k), K), beta)


def pair(cosine: float, *, dtype: torch.dtype = torch.float64) -> Float[Tensor, "2 2"]:
    """Two unit keys in the plane, (2, 2), with that cosine."""
    expect(-1 <= cosine <= 1, "cosine", "a number in [-1, 1]", cosine)
    return torch.tensor([[1, 0], [cosine, sqrt(1 - cosine**2)]], dtype=dtype)


def pair_norm(cosine: float, beta: float) -> float:
    """The spectral norm of `transition('at once')` for two keys of that cosine: max |1 - beta (1 +- c)|."""
    return max(abs(1 - beta * (1 + cosine)), abs(1 - beta * (1 - cosine)))


def repeated(
    update: str, k: Float[Tensor, "n K"], v: Float[Tensor, "n V"], beta: Float[Tensor, "n"], steps: int
) -> Float[Tensor, "steps"]:
    """How far the answers at the keys are from their values when one token is repeated: relative errors, (steps,).

    The token brings n keys and values; the memory is empty at first.
    """
    function = UPDATES[one_of("update", update, UPDATES)]
    S = v.new_zeros(k.shape[-1], v.shape[-1])
    errors = []
    for _ in range(steps):
        S = function(S, k, v, beta)
        errors.append((k @ S - v).norm() / v.norm())
    return torch.stack(errors)


# ---------------------------------------------------------------------------------------------------------- gated forms


class ErasingForm(NamedTuple):
    """Operands of Gated DeltaNet's form beside q and k: `v`, `beta` and `log_decay`."""

    v: Float[Tensor, "*batch N V"]
    beta: Float[Tensor, "*batch N"]
    log_decay: Float[Tensor, "*batch N"]


def gated_step(S: Tensor, k: Tensor, v: Tensor, gamma: Tensor, eta: Tensor) -> Float[Tensor, "*batch K V"]:
    """One step of the input form: S (..., K, V), k (..., K), v (..., V), gates (...) or, for gamma, (..., K)."""
    kept = gamma[..., None] if gamma.dim() == k.dim() else gamma[..., None, None]
    error = v[..., None, :] - k[..., None, :] @ S  # (..., 1, V)
    return kept * S + eta[..., None, None] * k[..., None] * error


def gated_recurrence(
    q: Float[Tensor, "*batch N K"],
    k: Float[Tensor, "*batch N K"],
    v: Float[Tensor, "*batch N V"],
    gamma: Float[Tensor, "..."],
    eta: Float[Tensor, "*batch N"],
) -> Float[Tensor, "*batch N V"]:
    """The input form over a sequence, from an empty memory; gamma is (..., N) or (..., N, K)."""
    if gamma.shape not in (k.shape[:-1], k.shape):
        wanted = f"{tuple(k.shape[:-1])} or {tuple(k.shape)}"
        raise ValueError(f"gamma: expected shape {wanted}, got {tuple(gamma.shape)}")
    S = v.new_zeros(*k.shape[:-2], k.shape[-1], v.shape[-1])
    rows = []
    for t in range(k.shape[-2]):
        kept = gamma[..., t, :] if gamma.dim() == k.dim() else gamma[..., t]
        S = gated_step(S, k[..., t, :], v[..., t, :], kept, eta[..., t])
        rows.append(q[..., t, None, :] @ S)
    return torch.cat(rows, -2)


def as_erasing(
    v: Float[Tensor, "*batch N V"], gamma: Float[Tensor, "*batch N"], eta: Float[Tensor, "*batch N"]
) -> ErasingForm:
    """The operands with which Gated DeltaNet computes what the input form does; ValueError for a gamma not above 0."""
    expect((gamma > 0).all(), "gamma", "numbers above 0", f"{float(gamma.min()):.3g}")
    return ErasingForm(gamma[..., None] * v, eta / gamma, gamma.log())


def contracts(gamma: float, eta: float, length: float = 1.0) -> bool:
    """Whether a step with these gates and a key of this length enlarges nothing that is in the memory."""
    return abs(gamma) <= 1 and abs(gamma - eta * length**2) <= 1


def maps(gamma: float, eta: float, length: float = 1.0) -> bool:
    """Whether `as_erasing` gives gates within Gated DeltaNet's ranges, for a key of this length."""
    return 0 < gamma <= 1 and 0 <= eta * length**2 <= 2 * gamma


def affinity_error(
    step: Callable[[Tensor], Tensor], one: Float[Tensor, "*shape"], other: Float[Tensor, "*shape"]
) -> float:
    """How far a step is from affine, between two memories: the relative distance of its value at the midpoint from the
    mean of its values.

    Steps $S \\to A_t S + B_t$ with $A_t$ and $B_t$ made of the input alone can be composed before S is known, which
    computing a sequence in parallel relies on; for such a step this is 0.
    """
    half, mean = step((one + other) / 2), (step(one) + step(other)) / 2
    return float((half - mean).norm() / mean.norm())


UPDATES = {"at once": at_once, "in turn": in_turn}
