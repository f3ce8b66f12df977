"""The projections of this package's layers as matrices of which some rows are frozen, and back."""

from typing import Any

import torch
from torch import nn

from ortho._typing import Float, Tensor
from ortho._weights import split_heads
from ortho.adapters.rows import FrozenRows
from ortho.projections import FrozenProjection, LearnedProjection, Projection, by_matrices
from ortho.projections.projection import Detached


class PartlyFrozenProjection(Projection):
    """W_Q and W_K of which some heads are frozen, and the others trained."""

    def __init__(self, q: FrozenRows, k: FrozenRows, *, num_heads: int, head_dim: int) -> None:
        super().__init__(q.in_features, num_heads, head_dim=head_dim, num_kv_heads=k.out_features // head_dim)
        self.rows_q, self.rows_k = q, k

    @property
    def weight_q(self) -> Float[Tensor, "HK d"]:  # type: ignore[override]
        return self.rows_q.weight

    @property
    def weight_k(self) -> Float[Tensor, "GK d"]:  # type: ignore[override]
        return self.rows_k.weight

    @property
    def bias_q(self) -> Float[Tensor, "HK"] | None:  # type: ignore[override]
        return self.rows_q.bias

    @property
    def bias_k(self) -> Float[Tensor, "GK"] | None:  # type: ignore[override]
        return self.rows_k.bias

    def forward(
        self, x: Float[Tensor, "B N d"], context: Float[Tensor, "B M d"] | None = None
    ) -> tuple[Float[Tensor, "B H N K"], Float[Tensor, "B G M K"]]:
        """x (B, N, d), context (B, M, d) or x -> q (B, H, N, K), k (B, G, M, K)."""
        q, k = self.rows_q(x), self.rows_k(x if context is None else context)
        return split_heads(q, self.num_heads), split_heads(k, self.num_kv_heads)


def read_projection(projection: Projection) -> dict[str, FrozenRows]:
    """Its matrices. Raises TypeError for a projection of one's own, whose weights need not say what it does."""
    if isinstance(projection, PartlyFrozenProjection):
        return {"q": projection.rows_q, "k": projection.rows_k}
    old = by_matrices(projection)
    matrices = {}
    for name, weight, bias in (("q", old.weight_q, old.bias_q), ("k", old.weight_k, old.bias_k)):
        if isinstance(old, Detached):
            frozen = torch.ones(len(weight), dtype=torch.bool, device=weight.device)
            matrices[name] = FrozenRows(weight, bias, frozen, stop_gradient=old.stop_gradient)
        else:
            matrices[name] = FrozenRows.trainable(weight, bias)
    return matrices


def written_projection(old: Projection, matrices: dict[str, FrozenRows]) -> Projection:
    """A projection of the old one's sizes with these matrices: learned, frozen, or in part both."""
    q, k = matrices["q"], matrices["k"]
    frozen = torch.cat([q.frozen, k.frozen])
    if frozen.any() and not frozen.all():
        return PartlyFrozenProjection(q, k, num_heads=old.num_heads, head_dim=old.head_dim).train(old.training)
    sizes: dict[str, Any] = {"num_kv_heads": old.num_kv_heads, "bias": q.bias is not None, "device": "meta"}
    if old.q_width != old.d_model:
        sizes["head_dim"] = old.head_dim
    new: Projection
    if frozen.any():
        new = FrozenProjection(old.d_model, old.num_heads, draw="gaussian", **sizes, stop_gradient=q.stop_gradient)
        new.draw = "given"
    else:
        new = LearnedProjection(old.d_model, old.num_heads, **sizes)
    for name, matrix in matrices.items():
        for part, value, needs in zip(("weight", "bias"), (matrix.weight, matrix.bias), matrix.needs, strict=True):
            if value is not None:
                kept = value.detach().clone()  # the matrix may be the old one's own
                setattr(new, f"{part}_{name}", kept if frozen.any() else nn.Parameter(kept, needs))
    return new.train(old.training)
