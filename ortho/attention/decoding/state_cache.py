"""The state that a mechanism's functions carry from one call to the next."""

from collections.abc import Callable
from typing import Any

from torch.utils._pytree import tree_leaves

from ortho._typing import State, Tensor
from ortho._weights import spread_heads
from ortho.attention.decoding.cache import Cache


class StateCache(Cache):
    """For any mechanism: what it returns as its state, handed back to it with the next tokens.

    A recurrent mechanism's is as large as ever. What keeps keys of all tokens is copied with each: its memory is taken
    anew. Heads of keys that queries share are spread before, and take memory each.
    """

    def __init__(self, function: Callable[..., Any], capacity: int | None = None) -> None:
        super().__init__(capacity)
        self._function = function
        self._state: State | None = None

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in tree_leaves(self._state) if isinstance(x, Tensor))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None, gates: dict[str, Tensor]) -> Tensor:
        heads = q.shape[-3] if q.dim() > 2 else 1
        k, v = spread_heads(k, heads), spread_heads(v, heads)
        o, self._state = self._function(
            q, k, v, is_causal=True, scale=scale, initial_state=self._state, return_state=True, **gates
        )
        return o
