"""How many of all combinations are tested: some by default, all with ORTHO_TESTS=all, as in the nightly run.

Derivatives are compared with finite differences along one drawn direction by default (`fast_mode`), else entry by
entry.
"""

import os
from collections.abc import Iterable
from typing import TypeVar

T = TypeVar("T")
WHOLE = os.environ.get("ORTHO_TESTS") == "all"


def some(cases: Iterable[T], every: int) -> list[T]:
    """Every `every`-th case, always the same ones, so that a failure repeats."""
    return list(cases)[:: 1 if WHOLE else every]


def repeats(few: int, many: int) -> int:
    """How many times something is drawn."""
    return many if WHOLE else few
