"""The state that a mechanism's functions carry from one call to the next."""

from collections.abc import Callable
from typing import Any

from torch import nn

from ortho._typing import State, Tensor
from ortho._weights import spread_heads
from ortho.attention.decoding.cache import Cache


class StateCache(Cache):
    """For any mechanism: what it returns as its state, handed back to it with the next tokens.

    A recurrent mechanism's is as large as ever. What keeps keys of all tokens is copied with each: its memory is taken
    anew. Heads of keys that queries share are spread before, and take memory each.
    """

    def __init__(self, attention: str | nn.Module, function: Callable[..., Any], capacity: int | None = None) -> None:
        super().__init__(attention, capacity)
        self._function = function
        self._state: State = ()

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in self._state)

    def _own(self) -> None:
        self._state = tuple(x.clone() for x in self._state)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None, gates: dict[str, Tensor]) -> Tensor:
        heads = q.shape[-3] if q.dim() > 2 else 1
        spread = spread_heads(k, heads), spread_heads(v, heads)
        past = self._state if self.length else None
        o, state = self._function(
            q, *spread, is_causal=True, scale=scale, initial_state=past, return_state=True, **gates
        )
        given = {x.untyped_storage().data_ptr() for x in (*spread, *gates.values())}
        # The first call's state may be the operands themselves, which are the caller's to change.
        self._state = tuple(x.clone() if x.untyped_storage().data_ptr() in given else x for x in state)
        return o
