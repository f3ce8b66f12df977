"""A context that marks index arithmetic, as opposed to work on a sequence's numbers."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_indexing: ContextVar[bool] = ContextVar("indexing", default=False)


@contextmanager
def indexing() -> Iterator[None]:
    """Mark the integers and booleans in this context as positions, tables and masks: they say what is read and what is
    left out, and are made once for all numbers at those places.

    Inside, `ortho.cost.counting` does not count operations on these alone. Elsewhere it does, since they may come from
    comparing numbers, as in Huber's loss. Also works as a decorator.
    """
    token = _indexing.set(True)
    try:
        yield
    finally:
        _indexing.reset(token)


def is_indexing() -> bool:
    """Whether the caller runs inside `indexing`."""
    return _indexing.get()
