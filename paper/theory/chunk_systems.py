r"""A chunk's system of the delta rule: its condition, and how large its inverse is.

The system is triangular. In a chunk with keys K (C, K) and write
strengths b, what is written at each key is the solution of $(I + A) X = Y$ with $A = \mathrm{tril}(\mathrm{Diag}(b) K
K^T, -1)$. The inverse holds products of transitions,

$$(I + A)^{-1}_{ij} = -b_i k_i^T H_{i-1} \cdots H_{j+1} k_j, \quad i > j, \qquad H_s = I - b_s k_s k_s^T,$$

so that for unit keys and $0 \le b \le 2$, where these contract, no entry below the diagonal exceeds its $b_i$.
"""

import torch
from torch.nn.functional import normalize

from ortho._typing import Float, Tensor
from ortho.checks import expect, one_of
from ortho.theory.transitions import unit_keys

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

    I + A and its inverse both have ones on the diagonal and entries of at most `beta` below. So the Frobenius norm of
    each is at most the root of that number, and the spectral norm is at most the Frobenius norm.
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
