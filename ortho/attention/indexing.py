"""Index arithmetic, as opposed to work on a sequence's numbers."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_indexing: ContextVar[bool] = ContextVar("indexing", default=False)


@contextmanager
def indexing() -> Iterator[None]:
    """Say that integers and booleans, in here, are positions, tables and masks: they tell what is read and what is left
    out, and are made once for all numbers that stand there.

    `ortho.cost.counting` does not count operations on these alone, in here; elsewhere it does, since they may be made
    of numbers by comparison, as Huber's loss makes them. Also a decorator of functions.
    """
    token = _indexing.set(True)
    try:
        yield
    finally:
        _indexing.reset(token)


def is_indexing() -> bool:
    """Whether this is inside `indexing`."""
    return _indexing.get()
