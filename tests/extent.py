"""How much of a crossed product is tried: some of it by default, all of it with ORTHO_TESTS=all, as every night.

Derivatives are held to finite differences along one drawn direction by default (`fast_mode`), else entry by entry.
"""

import os
from collections.abc import Iterable
from typing import TypeVar

T = TypeVar("T")
WHOLE = os.environ.get("ORTHO_TESTS") == "all"


def some(cases: Iterable[T], every: int) -> list[T]:
    """Each `every`-th case, always the same ones, so that a run that fails fails again."""
    return list(cases)[:: 1 if WHOLE else every]


def repeats(few: int, many: int) -> int:
    """How often something is drawn."""
    return many if WHOLE else few
