"""What every cache does with the tokens that it is given: check them, count them, have queries share heads of keys."""

import copy
from abc import ABC, abstractmethod
from typing import Any, TypeVar

import torch
from torch import nn

from ortho import _checks
from ortho._checks import checked
from ortho._typing import Float, Tensor

CacheT = TypeVar("CacheT", bound="Cache")


class Cache(ABC):
    """What a causal mechanism keeps of the tokens that it has read, to read on from there. It has no gradients.

    `attention` is what it was made for, a mechanism's name or a module; `length` the number of tokens read.
    """

    def __init__(self, attention: str | nn.Module, capacity: int | None) -> None:
        self.attention = attention
        self.capacity = None if capacity is None else _checks.positive_int("capacity", capacity)
        self.length = 0
        self._before: tuple[Tensor, Tensor] | None = None  # keys and values of no tokens, like those read

    @checked(shapes=False)
    @torch.no_grad()
    def attend(
        self,
        q: Float[Tensor, "*heads n K"],
        k: Float[Tensor, "*kv_heads n K"],
        v: Float[Tensor, "*kv_heads n V"],
        *,
        scale: float | None = None,
        **gates: Tensor,
    ) -> Float[Tensor, "*heads n V"]:
        """The outputs of n more tokens, as a causal call on the whole sequence would give them; they are kept.

        Of q (..., H, n, K), k (..., G, n, K) and v (..., G, n, V), with H a multiple of G, each H/G heads of queries
        one after the other share a head of keys and values. `gates` are what the mechanism takes besides, for these
        tokens.

        Raises TypeError or ValueError, naming the argument, for operands that do not fit together or the tokens before,
        by shape, dtype or device, and for more tokens than there is room for. Whatever is raised, the cache is then as
        it was.
        """
        self._check(q, k, v, scale)
        o = self._attend(q, k, v, scale, gates)
        if self._before is None:
            self._before = k.new_empty(*k.shape[:-2], 0, k.shape[-1]), v.new_empty(*v.shape[:-2], 0, v.shape[-1])
        self.length += k.shape[-2]
        return o

    @abstractmethod
    def _attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None, gates: dict[str, Tensor]) -> Tensor:
        """`attend`, of operands that were checked, behind `length` tokens."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes that are held; none before the first token."""

    def copy(self: CacheT) -> CacheT:
        """Another cache that has read the same, and reads on by itself."""
        other = copy.copy(self)
        other._own()
        return other

    @abstractmethod
    def _own(self) -> None:
        """Take memory of its own for all that changes."""

    def _check(self, q: Any, k: Any, v: Any, scale: float | None) -> None:
        _checks.scale_factor(scale)
        for name, x in (("k", k), ("q", q), ("v", v)):  # k, with which the others are compared, first
            _checks.float_tensor(name, x)
            if x.dim() < 2 or 0 in x.shape:
                raise ValueError(f"{name}: expected shape (..., n, width) without empty axes, got {tuple(x.shape)}")
            if x.dtype != k.dtype or x.device != k.device:
                raise TypeError(f"{name}: expected {k.dtype} on {k.device} like k, got {x.dtype} on {x.device}")
            _checks.finite(name, x)
        if v.shape[:-1] != k.shape[:-1]:
            raise ValueError(f"v: expected shape {(*k.shape[:-1], 'V')} like k, got {tuple(v.shape)}")
        heads = k.shape[-3] if k.dim() > 2 else 1
        fits = q.dim() == k.dim() and q.shape[:-3] == k.shape[:-3] and q.shape[-2:] == k.shape[-2:]
        if not fits or (q.dim() > 2 and q.shape[-3] % heads):
            several = f" with a multiple of {heads} for {heads}" if k.dim() > 2 else ""
            raise ValueError(f"q: expected shape {tuple(k.shape)} like k{several}, got {tuple(q.shape)}")
        for name, x, before in zip("kv", (k, v), self._before or (k, v), strict=True):
            if x.dtype != before.dtype or x.device != before.device:
                kind = f"{before.dtype} on {before.device}"
                raise TypeError(f"{name}: expected {kind} like the tokens before, got {x.dtype} on {x.device}")
            expected = (*before.shape[:-2], x.shape[-2], before.shape[-1])
            if x.shape != expected:
                raise ValueError(f"{name}: expected shape {expected} like the tokens before, got {tuple(x.shape)}")
        room = None if self.capacity is None else self.capacity - self.length
        if room is not None and k.shape[-2] > room:
            raise ValueError(
                f"k: expected at most {room} tokens more in a cache of capacity {self.capacity}, got {k.shape[-2]}"
            )


def together(q: Float[Tensor, "*heads n K"], G: int) -> Float[Tensor, "*kv_heads rows K"]:
    """The queries that share a head of keys as rows of one: (..., H, n, K) -> (..., G, H/G n, K)."""
    return q if q.dim() < 3 else q.unflatten(-3, (G, -1)).flatten(-3, -2)


def apart(o: Float[Tensor, "*kv_heads rows V"], n: int) -> Float[Tensor, "*heads n V"]:
    """What `together` has put together, of n tokens."""
    return o if o.dim() < 3 else o.unflatten(-2, (-1, n)).flatten(-4, -3)
