"""How x becomes queries and keys: a file for each projection, a line here."""

from collections.abc import Callable
from functools import partial

from ortho.projections.matrices import FrozenProjection, LearnedProjection, MergedProjection
from ortho.projections.projection import Projection, head_sizes, kv_heads
from ortho.projections.seeded import SeededProjection
from ortho.projections.structured import StructuredProjection

# Each takes (d_model, num_heads, *, head_dim, num_kv_heads, bias, generator, dtype, device).
PROJECTIONS: dict[str, Callable[..., Projection]] = {
    "learned": LearnedProjection,
    "frozen": FrozenProjection,
    "stopped": partial(FrozenProjection, stop_gradient=True),
    "structured": StructuredProjection,
    "structured-stopped": partial(StructuredProjection, stop_gradient=True),
}

_BY_MATRICES = (LearnedProjection, FrozenProjection, SeededProjection, MergedProjection, StructuredProjection)


def by_matrices(projection: Projection) -> Projection:
    """A projection that multiplies by its `weight_q` and `weight_k`, and does nothing else but to add its biases.

    Raises TypeError for one of one's own, whose weights need not say what it does.
    """
    if type(projection) not in _BY_MATRICES:
        raise TypeError(f"projection: expected one of this package, got {type(projection).__name__}")
    return projection


__all__ = [
    "PROJECTIONS",
    "FrozenProjection",
    "LearnedProjection",
    "MergedProjection",
    "Projection",
    "SeededProjection",
    "StructuredProjection",
    "by_matrices",
    "head_sizes",
    "kv_heads",
]
