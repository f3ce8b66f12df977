"""Which layers of a model, and which of their heads, a caller means."""

from collections.abc import Mapping, Sequence
from typing import Any

from ortho import _checks
from ortho.adapters.finding import AttentionLayer


def indices(name: str, value: Any, allowed: Sequence[int]) -> list[int]:
    """`value` in order, if they are distinct integers among `allowed`, else TypeError or ValueError."""
    if isinstance(value, str) or not isinstance(value, Sequence | range | set | frozenset):
        raise TypeError(f"{name}: expected indices, got {_checks.describe(value)}")
    for index in value:
        if isinstance(index, bool) or not isinstance(index, int):
            raise TypeError(f"{name}: expected integers, got {_checks.describe(index)}")
        if index not in allowed:
            raise ValueError(f"{name}: expected a part of {list(allowed)}, got {index}")
    if not value or len(set(value)) < len(value):
        raise ValueError(f"{name}: expected at least one index, and none twice, got {list(value)}")
    return sorted(value)


def by_layer(name: str, value: Any, layers: Any, found: Sequence[AttentionLayer]) -> dict[int, Any]:
    """A value for each chosen layer, by its index: all have the same one, or those of a mapping their own."""
    every = range(len(found))
    if not isinstance(value, Mapping):
        return dict.fromkeys(every if layers is None else indices("layers", layers, every), value)
    if layers is not None:
        raise ValueError(f"layers: expected None beside a mapping of {name}, whose keys are layers, got {layers!r}")
    return {index: value[index] for index in indices(name, list(value), every)}
