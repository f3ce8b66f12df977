"""Random constants that are drawn once and kept."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import wraps
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def drawn_once(draw: F) -> F:
    """`draw`, which draws once for each set of arguments.

    A separate thread draws: no mode of the caller (inference, a default device, counting of operations) may affect what
    outlives the call. `torch.compile` breaks its graph there, unless an earlier call has drawn.
    """
    kept: dict[Any, Any] = {}

    @wraps(draw)
    def call(*key: Any) -> Any:
        if key not in kept:
            with ThreadPoolExecutor(1) as thread:
                kept[key] = thread.submit(draw, *key).result()
        return kept[key]

    call.kept = kept  # type: ignore[attr-defined]
    return call  # type: ignore[return-value]
