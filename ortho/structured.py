r"""Frozen projections without a matrix: sign flips and small orthogonal transforms, one after the other.

With $d = a b$ a row of d numbers is an a x b table. A round flips signs, multiplies the table's rows by a fixed
orthogonal matrix, transposes it, and multiplies its rows again: $x\, D (I_a \otimes T_b) P (I_b \otimes T_a)$. All
parts are orthogonal, and so is any number of rounds, to rounding; one takes $2 d (a + b)$ FLOPs in place of $2 d^2$.
The transforms are Hadamard's for powers of two and Hartley's, $(\cos + \sin)(2 \pi j k / n) / \sqrt n$, for what is
left of d; all randomness is in the signs (Ailon & Chazelle 2009, *The fast Johnson-Lindenstrauss transform*; Yu et al.
2016, arXiv:1610.09072: three rounds are near a random orthogonal matrix in what kernels see of it).
"""

from math import isqrt, pi, sqrt
from typing import Any

import torch
from torch import Tensor

from ortho import _checks
from ortho._typing import Float
from ortho._weights import split_heads
from ortho.projections import FrozenProjection, Projection

__all__ = ["StructuredProjection", "factors", "transform"]

ROUNDS = 3


def factors(d: int) -> tuple[int, int]:
    """(a, b) with a b = d, a <= b and both as near to the root of d as can be; (1, d) for a prime.

    Raises TypeError or ValueError for a d below 1.
    """
    a = next(a for a in range(isqrt(_checks.positive_int("d", d)), 0, -1) if d % a == 0)
    return a, d // a


def transform(
    n: int, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
) -> Float[Tensor, "n n"]:
    """A fixed symmetric orthogonal matrix (n, n) whose entries are all about as large, computed in float64.

    It is the Kronecker product of Hadamard's matrix for the power of two in n with Hartley's for the rest. Raises
    TypeError or ValueError for an n below 1.
    """
    odd = _checks.positive_int("n", n)
    matrix = torch.ones(1, 1, dtype=torch.float64)
    two = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64) / sqrt(2)
    while odd % 2 == 0:
        matrix, odd = torch.kron(matrix, two), odd // 2
    k = torch.arange(odd, dtype=torch.float64)
    angles = 2 * pi / odd * (k[:, None] * k % odd)
    hartley = (angles.cos() + angles.sin()) / sqrt(odd)
    return torch.kron(matrix, hartley).to(dtype=dtype or torch.get_default_dtype(), device=device)


class StructuredProjection(Projection):
    """Orthogonal random attention's q and k by `rounds` of sign flips and small transforms, for `MultiheadAttention`.

    Only the signs are drawn, 2 rounds d of them; the transforms follow from d. With `stop_gradient` no gradient passes
    to x. Fewer heads of keys are the first of all. `weight_q` and `weight_k` are the matrices that it stands for, made
    when they are asked for, and `to_frozen` is a `FrozenProjection` with them.

    Raises TypeError or ValueError, naming the argument, for sizes below 1 and heads that do not divide.
    """

    transform_a: Tensor
    transform_b: Tensor
    signs_q: Tensor
    signs_k: Tensor

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        *,
        rounds: int = ROUNDS,
        stop_gradient: bool = False,
        num_kv_heads: int | None = None,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(d_model, num_heads, num_kv_heads=num_kv_heads)
        self.rounds, self.stop_gradient = _checks.positive_int("rounds", rounds), stop_gradient
        self.register_buffer("bias_q", None)
        self.register_buffer("bias_k", None)
        for name, size in zip("ab", factors(d_model), strict=True):
            self.register_buffer(f"transform_{name}", transform(size, dtype=dtype, device=device), persistent=False)
        for name in ("signs_q", "signs_k"):
            drawn = torch.randint(2, (rounds, d_model), generator=generator, device=device)
            self.register_buffer(name, (2 * drawn - 1).to(dtype or torch.get_default_dtype()))

    def forward(
        self, x: Float[Tensor, "B N d"], context: Float[Tensor, "B M d"] | None = None
    ) -> tuple[Float[Tensor, "B H N K"], Float[Tensor, "B G M K"]]:
        """x (B, N, d), context (B, M, d) or x -> q (B, H, N, K), k (B, G, M, K)."""
        if self.stop_gradient:
            x, context = x.detach(), None if context is None else context.detach()
        q = self._rotated(x, self.signs_q)
        k = self._rotated(x if context is None else context, self.signs_k)[..., : self.kv_width]
        return split_heads(q, self.num_heads), split_heads(k, self.num_kv_heads)

    def _rotated(self, x: Float[Tensor, "B N d"], signs: Float[Tensor, "rounds d"]) -> Float[Tensor, "B N d"]:
        a, b = self.transform_a, self.transform_b
        for flips in signs:
            x = (x * flips).unflatten(-1, (len(a), len(b))) @ b  # (B, N, a, b)
            x = (x.transpose(-1, -2).reshape(*x.shape[:-2], len(b), len(a)) @ a).flatten(-2)
        return x

    @property
    def weight_q(self) -> Float[Tensor, "d d"]:  # type: ignore[override]
        """The matrix of the queries, stored as in `torch.nn.Linear`."""
        return self._dense(self.signs_q)

    @property
    def weight_k(self) -> Float[Tensor, "kv d"]:  # type: ignore[override]
        """The matrix of the keys."""
        return self._dense(self.signs_k)[: self.kv_width]

    def _dense(self, signs: Tensor) -> Tensor:
        return self._rotated(torch.eye(self.d_model, dtype=signs.dtype, device=signs.device)[None], signs)[0].T

    def to_frozen(self) -> FrozenProjection:
        """A `FrozenProjection` that does the same with matrices, and that a layer converts from."""
        kind: dict[str, Any] = {"dtype": self.signs_q.dtype, "device": "meta"}  # no draw: its weights are these
        frozen = FrozenProjection(
            self.d_model,
            self.num_heads,
            num_kv_heads=self.num_kv_heads,
            stop_gradient=self.stop_gradient,
            draw="gaussian",
            **kind,
        )
        frozen.draw = "structured"
        frozen.weight_q, frozen.weight_k = self.weight_q.contiguous(), self.weight_k.contiguous()
        return frozen

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, rounds={self.rounds}, stop_gradient={self.stop_gradient}"
