"""Projections, which make queries and keys from x: a file for each kind, and a line here for each name."""

from collections.abc import Callable
from functools import partial

from ortho.projections.matrices import FrozenProjection, LearnedProjection
from ortho.projections.projection import Projection, head_sizes, kv_heads
from ortho.projections.structured import StructuredProjection

# Each takes (d_model, num_heads, *, head_dim, num_kv_heads, bias, generator, dtype, device).
PROJECTIONS: dict[str, Callable[..., Projection]] = {
    "learned": LearnedProjection,
    "frozen": FrozenProjection,
    "stopped": partial(FrozenProjection, stop_gradient=True),
    "structured": StructuredProjection,
    "structured-stopped": partial(StructuredProjection, stop_gradient=True),
}

_BY_MATRICES = (LearnedProjection, FrozenProjection, StructuredProjection)


def by_matrices(projection: Projection) -> Projection:
    """The given projection, if all it does is to multiply by its `weight_q` and `weight_k` and to add its biases.

    Raises TypeError for a custom projection, whose weights need not define it.
    """
    if type(projection) not in _BY_MATRICES:
        raise TypeError(f"projection: expected one of this package, got {type(projection).__name__}")
    return projection


__all__ = [
    "PROJECTIONS",
    "FrozenProjection",
    "LearnedProjection",
    "Projection",
    "StructuredProjection",
    "by_matrices",
    "head_sizes",
    "kv_heads",
]
