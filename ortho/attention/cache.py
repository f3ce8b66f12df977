"""Caches for decoding: what a mechanism keeps of a sequence that is read token by token, with one interface for all.

`new_cache("softmax", 4096).attend(q, k, v)` reads further tokens and returns their outputs. Softmax attention keeps
keys and values, a pattern keeps those that a later token may read, and any other mechanism keeps its functions' state.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from ortho import _checks
from ortho._checks import checked
from ortho._typing import Bool, Float, Tensor
from ortho._weights import spread_heads
from ortho.attention import MECHANISMS
from ortho.attention.mechanism import AttentionFunction
from ortho.attention.position_bias import rotary
from ortho.attention.scores import blocked_pairs
from ortho.attention.sparse.pattern import Pattern, pattern_of

__all__ = ["Cache", "KeyValueCache", "PatternCache", "RotaryCache", "StateCache", "new_cache"]

CacheT = TypeVar("CacheT", bound="Cache")


@checked
def new_cache(
    attention: str | nn.Module, capacity: int | None = None, *, form: str = "fast", **options: Any
) -> "Cache":
    """An empty cache for a mechanism by its name, or for a module with a mechanism's signature.

    `capacity` is the total number of tokens that the cache can read. A cache that allocates its memory at once needs
    it; for others None means no limit. `form` and `options` are a mechanism's; a module has its own. In the fast form
    values must be as wide as keys if the fused kernels are used.

    Raises TypeError or ValueError, naming the argument, for a mechanism that is not causal, for a capacity below 1, and
    for a missing capacity where one is needed.
    """
    if isinstance(attention, nn.Module):
        return StateCache(attention, attention, capacity)
    mechanism = MECHANISMS[_checks.one_of("attention", attention, MECHANISMS)]
    if not mechanism.causal:
        raise ValueError(f"attention: expected a causal mechanism, got {attention!r}")
    softmax, function = MECHANISMS["softmax"].form(form), mechanism.form(form)
    function = partial(function, **options) if options else function
    pattern = pattern_of(mechanism, **options)
    if pattern is not None:
        return PatternCache(attention, pattern, softmax, function, capacity)
    if mechanism.exact:
        return KeyValueCache(attention, function, capacity)
    if mechanism is rotary.MECHANISM and not options:
        return RotaryCache(attention, softmax, capacity)
    return StateCache(attention, function, capacity)


class Cache(ABC):
    """What a causal mechanism keeps of the tokens read so far, to decode further ones. No gradient flows through it.

    `attention` names the mechanism, or is the module, that the cache is for; `length` is the number of tokens read.
    """

    length: int = 0

    def __init__(self, attention: str | nn.Module, capacity: int | None) -> None:
        self.attention = attention
        self.capacity = None if capacity is None else _checks.positive_int("capacity", capacity)
        self._before: tuple[Tensor, Tensor] | None = None  # empty keys and values, shaped like those read
        self._held: tuple[Tensor, ...] = ()

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
        """The outputs of n more tokens, as a causal call on the whole sequence would give them; the tokens are kept.

        q is (..., H, n, K), k (..., G, n, K) and v (..., G, n, V), where H is a multiple of G: H/G successive heads of
        queries share a head of keys and values. `gates` are the mechanism's further operands for these tokens.

        Raises TypeError or ValueError, naming the argument, if shapes, dtypes or devices do not fit together or do not
        fit the earlier tokens, or if there is no room for the tokens. The cache then stays unchanged.
        """
        self._check(q, k, v)
        o = self._attend(q, k, v, scale, gates)
        if self._before is None:
            self._before = k.new_empty(*k.shape[:-2], 0, k.shape[-1]), v.new_empty(*v.shape[:-2], 0, v.shape[-1])
        self.length += k.shape[-2]
        return o

    @abstractmethod
    def _attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None, gates: dict[str, Tensor]) -> Tensor:
        """`attend` for operands that are already checked, after `length` tokens."""

    @property
    def nbytes(self) -> int:
        """Bytes held; 0 before the first token."""
        return sum(x.nbytes for x in self._held)

    def copy(self: CacheT) -> CacheT:
        """An independent copy."""
        other = copy.copy(self)
        other._own()
        return other

    def _own(self) -> None:
        """Replace everything that later calls change by a copy."""
        with torch.inference_mode(False):  # inference tensors cannot be written to outside that mode
            self._held = tuple(x.clone() for x in self._held)

    def _check(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        for name, x in (("k", k), ("q", q), ("v", v)):  # k first: the others are compared with it
            if x.dim() < 2 or 0 in x.shape:
                raise ValueError(f"{name}: expected shape (..., n, width) without empty axes, got {tuple(x.shape)}")
            if x.dtype != k.dtype or x.device != k.device:
                raise TypeError(f"{name}: expected {k.dtype} on {k.device} like k, got {x.dtype} on {x.device}")
            _checks.finite(name, x)
        if v.shape[:-1] != k.shape[:-1]:
            raise ValueError(f"v: expected shape {(*k.shape[:-1], 'V')} like k, got {tuple(v.shape)}")
        fits = q.dim() == k.dim() and q.shape[:-3] == k.shape[:-3] and q.shape[-2:] == k.shape[-2:]
        if not fits or _heads(q) % _heads(k):
            several = f" with a multiple of {_heads(k)} for {_heads(k)}" if k.dim() > 2 else ""
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


def _heads(x: Tensor) -> int:
    return x.shape[-3] if x.dim() > 2 else 1


class StateCache(Cache):
    """For any mechanism: keeps the state that it returns, and hands it back with the next tokens.

    A recurrent mechanism's state does not grow. A mechanism that keeps the keys of all tokens copies them into new
    memory with each token. Key heads that queries share are first repeated for each query head, which takes memory.
    """

    def __init__(self, attention: str | nn.Module, function: Callable[..., Any], capacity: int | None = None) -> None:
        super().__init__(attention, capacity)
        self._function = function

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None, gates: dict[str, Tensor]) -> Tensor:
        spread = spread_heads(k, _heads(q)), spread_heads(v, _heads(q))
        past = self._held if self.length else None
        o, state = self._function(
            q, *spread, is_causal=True, scale=scale, initial_state=past, return_state=True, **gates
        )
        given = {x.untyped_storage().data_ptr() for x in (*spread, *gates.values()) if isinstance(x, Tensor)}
        # The first call's state may be the operands themselves, which the caller may change later.
        self._held = tuple(x.clone() if x.untyped_storage().data_ptr() in given else x for x in state)
        return o


class Slots(Cache):
    """A cache of keys and values with `slots` slots, one per token; all memory is allocated with the first token."""

    def __init__(
        self, attention: str | nn.Module, slots: int, capacity: int | None, softmax: AttentionFunction
    ) -> None:
        super().__init__(attention, capacity)
        self.slots, self._softmax = slots, softmax

    def _keys_values(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and the values in their slots."""
        if self._softmax is MECHANISMS["softmax"].fast:
            wanted = f"width {k.shape[-1]} like q, for the fused kernel"
            _checks.expect(v.shape[-1] == k.shape[-1], "v", wanted, f"shape {tuple(v.shape)}")
        if self._before is None:  # also after the first tokens were refused
            with torch.inference_mode(False):  # inference tensors cannot be written to outside that mode
                self._held = tuple(x.new_empty(*x.shape[:-2], self.slots, x.shape[-1]) for x in (k, v))
        keys, values = self._held
        return keys, values


class KeyValueCache(Slots):
    """Keeps all keys and values of at most `capacity` tokens, for softmax attention in one of its forms."""

    def __init__(self, attention: str, softmax: AttentionFunction, capacity: int | None) -> None:
        if capacity is None:
            raise ValueError("capacity: expected a number of tokens, as keys and values of all are kept, got None")
        super().__init__(attention, _checks.positive_int("capacity", capacity), capacity, softmax)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None, gates: dict[str, Tensor]) -> Tensor:
        _no_gates(gates)
        keys, values = self._keys_values(k, v)
        n, stop = k.shape[-2], self.length + k.shape[-2]
        keys[..., self.length : stop, :], values[..., self.length : stop, :] = k, v
        if n > 1 and not self.length:
            spread = spread_heads(k, _heads(q)), spread_heads(v, _heads(q))
            return self._softmax(q, *spread, is_causal=True, scale=scale)
        blocked = None if n == 1 else blocked_pairs(n, stop, True, None, q.device)
        mask = None if blocked is None else ~blocked
        return _shared_attention(self._softmax, q, keys[..., :stop, :], values[..., :stop, :], mask, scale)


class RotaryCache(KeyValueCache):
    """`KeyValueCache` with rotary positions: it keeps rotated keys, and values."""

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None, gates: dict[str, Tensor]) -> Tensor:
        q, k = rotary.rotated(q, k, self.length)
        return super()._attend(q, k, v, scale, gates)


class PatternCache(Slots):
    """Keeps the keys and values that a pattern's later queries may read: all, or the first few and a ring of the last.

    `Pattern.kv_window` says which; in the ring the newest token replaces the oldest. A single query is multiplied only
    with the keys that its pattern allows. Several at once are multiplied with all keys that any of them may read, under
    a mask. `softmax` is softmax attention; `whole` is the pattern's own attention in the same form, for several tokens
    at the start. With a ring, `capacity` may be None.
    """

    def __init__(
        self,
        attention: str,
        pattern: Pattern,
        softmax: AttentionFunction,
        whole: AttentionFunction,
        capacity: int | None,
    ) -> None:
        window = pattern.kv_window()
        if window is None:
            if capacity is None:
                raise ValueError(f"capacity: expected a number of tokens, as {pattern} may read any of them, got None")
            window = capacity, 0
        slots = sum(window)
        super().__init__(attention, slots if capacity is None else min(slots, capacity), capacity, softmax)
        self._first, self._ring = window
        self._pattern, self._whole = pattern, whole
        self._positions = torch.full((self.slots,), -1, device="cpu")  # the token in each slot; on the CPU, as indices

    def _own(self) -> None:
        super()._own()
        with torch.inference_mode(False):
            self._positions = self._positions.clone()

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None, gates: dict[str, Tensor]) -> Tensor:
        _no_gates(gates)
        held, n = self._keys_values(k, v), k.shape[-2]
        if n == 1:  # it is stored first: the token that it replaces is out of its reach
            slot = self._slot(self.length)
            for slots, x in zip(held, (k, v), strict=True):
                slots[..., slot, :] = x[..., 0, :]
            self._positions[slot] = self.length
            return self._read(q, *held, self._positions, scale)
        new = torch.arange(self.length, self.length + n, device="cpu")
        if self.length:
            keys, values = (torch.cat(pair, -2) for pair in zip(held, (k, v), strict=True))
            o = self._read(q, keys, values, torch.cat([self._positions, new]), scale)
        else:
            o = self._whole(q, spread_heads(k, _heads(q)), spread_heads(v, _heads(q)), is_causal=True, scale=scale)
        if self._ring:  # of tokens that share a slot, the last one stays
            new = new[(new < self._first) | (new > int(new[-1]) - self._ring)]
        places = torch.tensor([self._slot(position) for position in new.tolist()], device="cpu")
        self._positions[places] = new
        rows, places = (index.to(k.device) for index in (new - self.length, places))
        for slots, x in zip(held, (k, v), strict=True):
            slots.index_copy_(-2, places, x.index_select(-2, rows))
        return o

    def _slot(self, position: int) -> int:
        """The slot of the token at this position."""
        return position if position < self._first else self._first + (position - self._first) % self._ring

    def _read(self, q: Tensor, keys: Tensor, values: Tensor, positions: Tensor, scale: float | None) -> Tensor:
        """The outputs of the newest tokens' queries, over keys at these positions; -1 marks an empty slot."""
        n = q.shape[-2]
        i = torch.arange(self.length, self.length + n, device="cpu")[:, None]
        kept = self._pattern.rule(True)(i, positions) & (positions >= 0)  # (n, keys)
        read = kept.any(0)
        if not bool(read.any()):
            return values.new_zeros(*q.shape[:-1], values.shape[-1])
        if not bool(read.all()):
            picked = read.nonzero()[:, 0]
            kept, picked = kept[:, picked], picked.to(keys.device)
            keys, values = keys.index_select(-2, picked), values.index_select(-2, picked)
        return _shared_attention(self._softmax, q, keys, values, None if n == 1 else kept.to(keys.device), scale)


def _shared_attention(
    softmax: AttentionFunction,
    q: Float[Tensor, "*heads n K"],
    keys: Float[Tensor, "*kv_heads M K"],
    values: Float[Tensor, "*kv_heads M V"],
    mask: Bool[Tensor, "n M"] | None,
    scale: float | None,
) -> Float[Tensor, "*heads n V"]:
    """Softmax attention to keys that several query heads share: each key is read once for all of them.

    The query heads that share keys become rows of one product, (..., H, n, K) -> (..., G, H/G n, K).
    """
    n, several = q.shape[-2], q.dim() > 2
    rows = q.unflatten(-3, (_heads(keys), -1)).flatten(-3, -2) if several else q
    if mask is not None:
        mask = mask.repeat(rows.shape[-2] // n, 1)
    with _checks.unchecked_values():  # each number was checked when it came in
        o = softmax(rows, keys, values, attn_mask=mask, scale=scale)
    return o.unflatten(-2, (-1, n)).flatten(-4, -3) if several else o


def _no_gates(gates: dict[str, Tensor]) -> None:
    """Raise TypeError, as for an unknown argument, if there are gates for a mechanism that takes none."""
    if gates:
        raise TypeError(f"gates: expected none for this mechanism, got {', '.join(gates)}")
