"""Ctrl-C and SIGTERM: where they end a run in order, and where they wait.

Python runs handlers in the main thread alone; in another one these blocks change nothing.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class TerminatedError(BaseException):
    """SIGTERM came. Not an Exception, which a case may catch."""


@contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM raises TerminatedError in the block, so that what is open is closed, as after Ctrl-C."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def terminate(*_: object) -> None:
        raise TerminatedError

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C and SIGTERM take effect when the block has ended."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    numbers = (signal.SIGINT.value, signal.SIGTERM.value)
    before = {number: signal.signal(number, lambda number, _: came.append(number)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for number in came:
            signal.raise_signal(number)
