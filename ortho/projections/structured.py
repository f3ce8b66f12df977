r"""Frozen projections without a matrix: sign flips and small orthogonal transforms, one after the other.

With $d = a b$ a row of d numbers is an a x b table. A round flips signs, transforms the table's rows, flips signs
again, and transforms its columns, $x\, D (I_a \otimes T_b)\, D' (T_a \otimes I_b)$. All parts are orthogonal, and so
is any number of rounds, up to rounding. The signs go into the small matrices, so that a round is two products, one with
a blocks b x b and one with an a x a matrix, and takes $2 d (a + b)$ FLOPs in place of $2 d^2$. The transforms are
Hadamard's for powers of two and Hartley's, $(\cos + \sin)(2 \pi j k / n) / \sqrt n$, for the remaining factor; all
randomness is in the signs (Ailon & Chazelle 2009, *The fast Johnson-Lindenstrauss transform*; Yu et al. 2016,
arXiv:1610.09072).

Where it costs little, each row of the table is a head: a = d/K, b = K. A head's queries then lie in memory as attention
reads them, and nothing is moved. The flip between the two transforms makes one round enough: without it the last
transform, common to q and k, would cancel in their products, and each product would see d/K numbers of x at a time.
If a head spans several rows of the table, the transform of the columns cancels in part, and two rounds are needed.
"""

from collections.abc import Callable
from math import isqrt, pi, sqrt
from typing import Any

import torch
from torch import Tensor

from ortho import checks, heads
from ortho._typing import Float
from ortho.projections.projection import Projection


def factors(d: int, K: int | None = None) -> tuple[int, int]:
    """(a, b) with a b = d, a <= b and both as near to the square root of d as possible; (1, d) for a prime.

    With a width K of heads, (d/K, K) if that table costs at most twice as much. Raises TypeError or ValueError for
    numbers below 1.
    """
    a = next(a for a in range(isqrt(d), 0, -1) if d % a == 0)
    if K is not None and d % K == 0 and d // K + K <= 2 * (a + d // a):
        return d // K, K
    return a, d // a


def sufficient_rounds(d: int, K: int) -> int:
    """How many rounds heads of width K need for products of q and k that are spread like those of random matrices: 1 if
    a head lies within a row of the table, else 2. Raises TypeError or ValueError for numbers below 1."""
    return 1 if factors(d, K)[1] % K == 0 else 2


def transform(
    n: int, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
) -> Float[Tensor, "n n"]:
    """A fixed symmetric orthogonal matrix (n, n) whose entries are all about equally large, computed in float64.

    It is the Kronecker product of Hadamard's matrix for the power of two in n with Hartley's for the rest. Raises
    TypeError or ValueError for an n below 1.
    """
    odd = n
    matrix = torch.ones(1, 1, dtype=torch.float64)
    two = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64) / sqrt(2)
    while odd % 2 == 0:
        matrix, odd = torch.kron(matrix, two), odd // 2
    k = torch.arange(odd, dtype=torch.float64)
    angles = 2 * pi / odd * (k[:, None] * k % odd)
    hartley = (angles.cos() + angles.sin()) / sqrt(odd)
    return torch.kron(matrix, hartley).to(dtype=dtype or torch.get_default_dtype(), device=device)


class StructuredProjection(Projection):
    """Orthogonal random attention's q and k by `rounds` of sign flips and small transforms, by default as many as
    needed (`sufficient_rounds`).

    Only the signs are drawn, 4 rounds d of them; the transforms follow from d. With `stop_gradient` no gradient passes
    to x. If heads of queries or of keys do not fill d, they are the first of those that would. `weight_q` and
    `weight_k` are the equivalent matrices, made when they are read.

    Raises TypeError or ValueError, naming the argument, for sizes below 1, heads that do not divide, and heads that
    together are wider than d.
    """

    frozen = True
    transform_a: Tensor
    transform_b: Tensor
    signs_q: Tensor
    signs_k: Tensor

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        *,
        rounds: int | None = None,
        stop_gradient: bool = False,
        head_dim: int | None = None,
        num_kv_heads: int | None = None,
        bias: bool = False,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(d_model, num_heads, head_dim=head_dim, num_kv_heads=num_kv_heads)
        if self.q_width > d_model:
            raise ValueError(f"head_dim: expected heads of at most d_model = {d_model} together, got {self.q_width}")
        rounds = sufficient_rounds(d_model, self.head_dim) if rounds is None else checks.positive_int("rounds", rounds)
        self.rounds, self.stop_gradient = rounds, stop_gradient
        dtype = dtype or torch.get_default_dtype()
        for name, size in zip("ab", factors(d_model, self.head_dim), strict=True):
            self.register_buffer(f"transform_{name}", transform(size, dtype=dtype, device=device), persistent=False)
        for name, width in (("q", self.q_width), ("k", self.kv_width)):
            drawn = torch.randint(2, (rounds, 2, d_model), generator=generator, device=device)
            self.register_parameter(f"signs_{name}", heads.frozen((2 * drawn - 1).to(dtype)))
            self.register_parameter(f"bias_{name}", heads.frozen(drawn.new_zeros(width, dtype=dtype)) if bias else None)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Also make the transforms, which are not stored: in a module that was on `meta` they hold anything."""
        super()._load_from_state_dict(*args, **kwargs)
        self._make_transforms()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "StructuredProjection":
        """Also make the transforms again for another dtype: it may be wider than the one that they were rounded to."""
        before = self.signs_q.dtype
        super()._apply(fn, recurse)
        if self.signs_q.dtype != before:
            self._make_transforms()
        return self

    def _make_transforms(self) -> None:
        for name, size in zip("ab", factors(self.d_model, self.head_dim), strict=True):
            made = transform(size, dtype=self.signs_q.dtype, device=self.signs_q.device)
            setattr(self, f"transform_{name}", made)

    def forward(
        self, x: Float[Tensor, "B N d"], context: Float[Tensor, "B M d"] | None = None
    ) -> tuple[Float[Tensor, "B H N K"], Float[Tensor, "B G M K"]]:
        """x (B, N, d), context (B, M, d) or x -> q (B, H, N, K), k (B, G, M, K)."""
        x, context = self._sources(x, context)
        q = self._rotated(x, self.signs_q, self.num_heads)
        # Laid out token by token, as after a matrix product: kernels lay out results alike, so merging heads is free.
        q = q.transpose(1, 2).contiguous().transpose(1, 2)
        k = self._rotated(context, self.signs_k, self.num_kv_heads)
        if self.bias_q is not None and self.bias_k is not None:
            q = q + heads.split_heads(self.bias_q[None, None], self.num_heads).to(q.dtype)  # half precision in autocast
            k = k + heads.split_heads(self.bias_k[None, None], self.num_kv_heads).to(k.dtype)
        return q, k

    def _rotated(
        self, x: Float[Tensor, "B N d"], signs: Float[Tensor, "rounds 2 d"], count: int
    ) -> Float[Tensor, "B h N K"]:
        """The first `count` heads of x W^T."""
        B, N, _ = x.shape
        of_rows, of_columns = self.transform_b.to(signs.dtype), self.transform_a.to(signs.dtype)  # sharding casts one
        a, b = len(of_columns), len(of_rows)
        width = count * self.head_dim
        y = x.reshape(B * N, a, b).transpose(0, 1)  # (a, B N, b)
        for i, (first, second) in enumerate(signs.unflatten(-1, (a, b))):  # (a, b) each
            y = torch.bmm(y, first[..., None] * of_rows * second[:, None])
            rows = -(-width // b) if i == self.rounds - 1 else a  # rows of the table that are read in the end
            y = (of_columns[:rows] @ y.flatten(1)).view(rows, B * N, b)
        if b == self.head_dim:
            return y.view(count, B, N, b).transpose(0, 1)
        return heads.split_heads(y.transpose(0, 1).reshape(B, N, -1)[..., :width].contiguous(), count)

    @property
    def weight_q(self) -> Float[Tensor, "q d"]:  # type: ignore[override]
        """The matrix of the queries, stored as in `torch.nn.Linear`."""
        return self._dense(self.signs_q, self.num_heads)

    @property
    def weight_k(self) -> Float[Tensor, "kv d"]:  # type: ignore[override]
        """The matrix of the keys."""
        return self._dense(self.signs_k, self.num_kv_heads)

    def _dense(self, signs: Tensor, count: int) -> Tensor:
        eye = torch.eye(self.d_model, dtype=signs.dtype, device=signs.device)
        return self._rotated(eye[None], signs, count)[0].transpose(1, 2).flatten(0, 1).contiguous()  # (h K, d)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, rounds={self.rounds}, stop_gradient={self.stop_gradient}"
