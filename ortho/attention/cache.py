"""Caches for decoding: what a mechanism keeps of a sequence that is read token by token, with one interface for all.

`new_cache("softmax", 4096).attend(q, k, v)` reads further tokens and returns their outputs. Softmax attention keeps
keys and values, a pattern keeps those that a later token may read, any other mechanism keeps its functions' state, and
a layer of several parts has a cache for each. Caches hold no layer: they can be copied, pickled and saved.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from ortho import checks
from ortho._typing import Bool, Float
from ortho.attention import MECHANISMS
from ortho.attention.options import check_options, described, sums_keys, takes_state
from ortho.attention.position_bias import rotary
from ortho.heads import repeat_kv

__all__ = ["Cache", "KeyValueCache", "PartsCache", "RingCache", "RotaryCache", "StateCache", "new_cache"]


CacheT = TypeVar("CacheT", bound="Cache")


def new_cache(
    attention: str | Callable[..., Any], capacity: int | None = None, *, form: str = "fast", **options: Any
) -> "Cache":
    """An empty cache for a mechanism, by its name and with its `options`, or for a function or module with a
    mechanism's signature.

    `capacity` is the total number of tokens that the cache can read. A cache that allocates its memory at once needs
    it; for others None means no limit. `form` is a mechanism's. In the fast form values must be as wide as keys if the
    fused kernels are used.

    Raises TypeError or ValueError, naming the argument, for a mechanism that is not causal, for unknown options, for a
    capacity below 1, and for a missing capacity where one is needed.
    """
    if not isinstance(attention, str):
        wanted = "a function or module that takes initial_state and return_state, to decode with"
        checks.expect(takes_state(attention), "attention", wanted, described(attention, {}))
        return StateCache(attention, capacity, form, options)
    mechanism = MECHANISMS[checks.one_of("attention", attention, MECHANISMS)]
    checks.expect(mechanism.causal, "attention", "a causal mechanism", repr(attention))
    check_options(mechanism, form, options)
    if mechanism.family == "sparse":
        return RingCache(attention, capacity, form, options)
    if mechanism.exact:
        return KeyValueCache(attention, capacity, form, options)
    kind = RotaryCache if mechanism is rotary.MECHANISM else StateCache
    return kind(attention, capacity, form, options)


class Cache(ABC):
    """What a causal mechanism keeps of the tokens read so far, to decode further ones. No gradient flows through it.

    `attention` describes the mechanism that the cache is for; `length` is the number of tokens read; `beside` is what a
    layer keeps besides, replaced with each call.
    """

    beside: tuple[Tensor, ...] = ()

    def __init__(
        self,
        attention: str | Callable[..., Any],
        capacity: int | None = None,
        form: str = "fast",
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.attention, self.length = described(attention, options or {}), 0
        self.capacity = None if capacity is None else checks.positive_int("capacity", capacity)
        self._made_for = (attention if isinstance(attention, str) else None, form, dict(options or {}))
        self._function: Any = None if isinstance(attention, str) else partial(attention, **(options or {}))
        self._held: tuple[Tensor, ...] = ()

    @torch.no_grad()
    def attend(
        self,
        q: Float[Tensor, "*heads n K"],
        k: Float[Tensor, "*kv_heads n K"],
        v: Float[Tensor, "*kv_heads n V"],
        *,
        scale: float | None = None,
        key_mask: Bool[Tensor, "B n"] | None = None,
        function: Callable[..., Any] | None = None,
        **gates: Tensor,
    ) -> Float[Tensor, "*heads n V"]:
        """The outputs of n more tokens, as a causal call on the whole sequence would give them; the tokens are kept.

        q is (..., H, n, K), k (..., G, n, K) and v (..., G, n, V), where H is a multiple of G: H/G successive heads of
        queries share a head of keys and values. `gates` are the mechanism's further operands for these tokens.
        `key_mask` (B, n), True = attend, leaves out padding, where a state sums up the keys. A copy of a cache that was
        made for a function or module gets it as `function`.

        Raises TypeError or ValueError, naming the argument, if shapes, dtypes or devices do not fit together or do not
        fit the earlier tokens, or if there is no room for the tokens. The cache then stays unchanged.
        """
        n = k.shape[-2]
        if self.capacity is not None and self.length + n > self.capacity:
            room = f"at most {self.capacity - self.length} tokens more in a cache of capacity {self.capacity}"
            raise ValueError(f"k: expected {room}, got {n}")
        if function is not None:
            self._function = function
        if key_mask is not None:
            if not sums_keys(self.function):
                how = "decode prompts of equal length together, as LanguageModel.generate does"
                wanted = f"None with {self.attention!r}, which keeps all keys"
                raise ValueError(f"key_mask: expected {wanted}, got a mask: {how}")
            checks.mask(key_mask, (len(q), n), "key_mask")
            gates = {"attn_mask": key_mask[:, None, None], **gates}
        o = self._attend(q, k, v, scale, gates)
        self.length += n
        return o

    @abstractmethod
    def _attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None, given: dict[str, Any]) -> Tensor:
        """`attend` after `length` tokens; `given` are gates and a mask of the new keys."""

    @property
    def function(self) -> Callable[..., Any]:
        """The attention function that the cache is for."""
        if self._function is None:
            name, form, options = self._made_for
            if name is None:
                raise ValueError(f"function: expected the {self.attention} that a copied cache was made for, got none")
            mechanism = MECHANISMS[name]
            given = {mechanism.option_names.get(option, option): value for option, value in options.items()}
            self._function = partial(mechanism.form(form), **given) if given else mechanism.form(form)
        return self._function

    @property
    def nbytes(self) -> int:
        """Bytes held; 0 before the first token."""
        return sum(x.nbytes for x in (*self._held, *self.beside))

    def copy(self: CacheT) -> CacheT:
        """An independent copy, to be used in and outside inference mode."""
        with torch.inference_mode(False):
            return copy.deepcopy(self)

    def __getstate__(self) -> dict[str, Any]:
        """All but the function, which may be, or belong to, a layer."""
        held = tuple(x.clone() if x.is_inference() else x for x in self._held)
        return {**self.__dict__, "_function": None, "_held": held}

    def fits(self, attention: str) -> None:
        """ValueError unless the cache is for the attention described so."""
        checks.expect(self.attention == attention, "cache", f"one for {attention!r}", f"one for {self.attention!r}")


class StateCache(Cache):
    """For any mechanism: keeps the state that it returns, and hands it back with the next tokens.

    A recurrent mechanism's state does not grow. A mechanism that keeps the keys of all tokens copies them into new
    memory with each token. Key heads that queries share are first repeated for each query head, which takes memory.
    """

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None, given: dict[str, Any]) -> Tensor:
        k, v, past = repeat_kv(k, _heads(q)), repeat_kv(v, _heads(q)), self._held or None
        if scale is not None:
            given = {**given, "scale": scale}
        o, state = self.function(q, k, v, is_causal=True, initial_state=past, return_state=True, **given)
        # The first call's state may be the operands themselves, which the caller may change later.
        self._held = tuple(state) if past else tuple(x.clone() for x in state)
        return o


class KeyValueCache(Cache):
    """Keeps all keys and values of at most `capacity` tokens, for softmax attention in one of its forms; all memory is
    allocated with the first token."""

    def __init__(self, attention: Any, capacity: int | None, form: str = "fast", options: Any = None) -> None:
        if capacity is None:
            raise ValueError(f"capacity: expected a number of tokens, as {attention} may read any of them, got None")
        super().__init__(attention, capacity, form, options)
        self.slots: int = capacity

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None, given: dict[str, Any]) -> Tensor:
        keys, values = self._keys_values(q, k, v, given)
        n, stop = k.shape[-2], self.length + k.shape[-2]
        keys[..., self.length : stop, :], values[..., self.length : stop, :] = k, v
        if n > 1 and not self.length:
            return self._whole(q, k, v, scale)
        return self._read(q, keys[..., :stop, :], values[..., :stop, :], scale)

    def _whole(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
        """The outputs of the first tokens."""
        return self.function(q, repeat_kv(k, _heads(q)), repeat_kv(v, _heads(q)), is_causal=True, scale=scale)

    def _read(self, q: Tensor, keys: Tensor, values: Tensor, scale: float | None) -> Tensor:
        """The outputs of the newest tokens' queries."""
        n, M = q.shape[-2], keys.shape[-2]
        mask = None if n == 1 else torch.ones(n, M, dtype=torch.bool, device=q.device).tril(M - n)
        return _shared_attention(self.function, q, keys, values, mask, scale)

    def _keys_values(self, q: Tensor, k: Tensor, v: Tensor, given: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """The slots of keys and values. Raises for tokens that they would take by broadcasting or casting."""
        if given:
            raise TypeError(f"gates: expected none for this mechanism, got {', '.join(given)}")
        if not self._held or not self.length:  # also after the first tokens were refused
            with torch.inference_mode(False):  # inference tensors cannot be written to outside that mode
                self._held = tuple(x.new_empty(*x.shape[:-2], self.slots, x.shape[-1]) for x in (k, v))
        for name, x, slots in zip("kv", (k, v), self._held, strict=True):
            shape = (*slots.shape[:-2], k.shape[-2], slots.shape[-1])
            if x.shape != shape or x.dtype != slots.dtype:
                wanted = f"{slots.dtype} of shape {shape} like the tokens before"
                raise ValueError(f"{name}: expected {wanted}, got {checks.describe(x)}")
        if q.shape[:-3] != k.shape[:-3] or q.shape[-2:] != k.shape[-2:] or _heads(q) % _heads(k):
            wanted = f"shape {tuple(k.shape)} like k, or a multiple of its heads"
            raise ValueError(f"q: expected {wanted}, got {tuple(q.shape)}")
        keys, values = self._held
        return keys, values


class RotaryCache(KeyValueCache):
    """`KeyValueCache` with rotary positions: it keeps rotated keys, and values."""

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None, given: dict[str, Any]) -> Tensor:
        _, form, options = self._made_for
        q, k = rotary.rotated(q, k, self.length, **options)
        self._function = MECHANISMS["softmax"].form(form)
        return super()._attend(q, k, v, scale, given)


class RingCache(KeyValueCache):
    """Keeps the keys and values that a pattern's later queries may read: all, or the first few and a ring of the last.

    `Pattern.kv_window` says which; in the ring the newest token replaces the oldest. A single query is multiplied only
    with the keys that its pattern allows; several at once with all keys that any of them may read, under a mask. With a
    ring, `capacity` may be None.
    """

    def __init__(self, attention: str, capacity: int | None, form: str = "fast", options: Any = None) -> None:
        self._pattern = MECHANISMS[attention].make(**(options or {}))
        window: tuple[int, int] = self._pattern.kv_window() or (0, capacity or 0)
        self._first, self._last = window
        super().__init__(attention, capacity or sum(window) or None, form, options)
        self.slots, self.capacity = min(self.slots, sum(window)), capacity

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None, given: dict[str, Any]) -> Tensor:
        if self._made_for[1] == "fast":  # tokens are read by the fused kernel
            wanted = f"width {k.shape[-1]} like q, for the fused kernel"
            checks.expect(v.shape[-1] == k.shape[-1], "v", wanted, v.shape[-1])
        n, first, last = k.shape[-2], self._first, self._last
        if self.length + n <= self.slots:
            return super()._attend(q, k, v, scale, given)
        slots, held = self._keys_values(q, k, v, given), min(self.length, self.slots)
        oldest = first + (self.length - first) % last
        if n == 1:  # it is stored first: the token that it replaces is out of its reach
            for x, y in zip(slots, (k, v), strict=True):
                x[..., oldest, :] = y[..., 0, :]
            return self._read(q, slots[0], slots[1], scale)
        parts = slice(0, min(first, held)), slice(oldest, held), slice(first, min(oldest, held))
        in_order = [
            torch.cat([*(x[..., part, :] for part in parts), y], -2) for x, y in zip(slots, (k, v), strict=True)
        ]
        keys, values = in_order
        o = self._read(q, keys, values, scale) if held else self._whole(q, k, v, scale)
        for x, y in zip(slots, in_order, strict=True):
            x[..., :first, :] = y[..., :first, :]
            x[..., first:, :] = y[..., -last:, :].roll((self.length + n - first) % last, -2)
        return o

    def _read(self, q: Tensor, keys: Tensor, values: Tensor, scale: float | None) -> Tensor:
        (n, held), stop = (q.shape[-2], keys.shape[-2]), self.length + q.shape[-2]
        j = torch.arange(held, device="cpu")
        if held < stop:  # the first few, and the last few: in order, or for a single token in the ring
            j[self._first :] += stop - held if n > 1 else (stop - 1 - j[self._first :]) // self._last * self._last
        allowed = self._pattern.rule(True)(torch.arange(self.length, stop, device="cpu")[:, None], j)  # (n, held)
        read = allowed.any(0)
        if not read.all():
            allowed, picked = allowed[:, read], read.nonzero()[:, 0].to(keys.device)
            keys, values = keys.index_select(-2, picked), values.index_select(-2, picked)
        if not keys.shape[-2]:
            return values.new_zeros(*q.shape[:-1], values.shape[-1])
        softmax, mask = MECHANISMS["softmax"].form(self._made_for[1]), None if n == 1 else allowed.to(keys.device)
        return _shared_attention(softmax, q, keys, values, mask, scale)


class PartsCache(Cache):
    """The caches of a layer's parts, read by a call of the layer."""

    def __init__(self, layer: str, parts: Iterable[Cache], capacity: int | None) -> None:
        self._parts = list(parts)
        super().__init__(layer, capacity)

    @property
    def parts(self) -> list[Cache]:
        """One cache for each part. Raises ValueError where a call has failed in a later part."""
        lengths = [part.length for part in self._parts]
        checks.expect(len(set(lengths)) <= 1, "cache", "parts that have read as many tokens", lengths)
        return self._parts

    @property
    def length(self) -> int:
        """The number of tokens read. Raises ValueError as `parts` does."""
        return self.parts[0].length

    @length.setter
    def length(self, _: int) -> None:
        """Nothing: the parts count."""

    @property
    def nbytes(self) -> int:
        return super().nbytes + sum(part.nbytes for part in self._parts)

    def _attend(self, *_: Any) -> Tensor:
        raise TypeError(f"cache: expected to be read by a {self.attention}, whose parts have q, k and v of their own")


def _shared_attention(
    softmax: Callable[..., Any], q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float | None
) -> Tensor:
    """Softmax attention of q (..., H, n, K) to keys (..., G, M, K) that several query heads share, under a mask (n, M):
    each key is read once for all of them.

    The query heads that share keys become rows of one product, (..., H, n, K) -> (..., G, H/G n, K).
    """
    n, G = q.shape[-2], _heads(keys)
    if _heads(q) == G:
        return softmax(q, keys, values, attn_mask=mask, scale=scale)
    rows = q.unflatten(-3, (G, -1)).flatten(-3, -2)
    mask = None if mask is None else mask.repeat(rows.shape[-2] // n, 1)
    return softmax(rows, keys, values, attn_mask=mask, scale=scale).unflatten(-2, (-1, n)).flatten(-4, -3)


def _heads(x: Tensor) -> int:
    return x.shape[-3] if x.dim() > 2 else 1
