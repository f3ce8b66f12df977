"""Keys and values side by side, in memory that is taken once."""

import torch
from torch import nn

from ortho import _checks
from ortho._autocast import no_autocast
from ortho._typing import Bool, Float, Tensor
from ortho._weights import spread_heads
from ortho.attention.decoding.cache import Cache, apart, together
from ortho.attention.mechanism import AttentionFunction
from ortho.attention.operands import blocked_pairs, working
from ortho.attention.positions.rotary import angles, turn


class Slots(Cache):
    """A cache of keys and values with a slot for each of so many tokens, all taken with the first."""

    def __init__(self, attention: str | nn.Module, slots: int, capacity: int | None) -> None:
        super().__init__(attention, capacity)
        self.slots = slots
        self._held: tuple[Tensor, Tensor] | None = None

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in self._held or ())

    def _own(self) -> None:
        if self._held is not None:
            keys, values = self._held
            self._held = keys.clone(), values.clone()

    def _memory(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and the values in their slots."""
        if self._held is None or self._before is None:  # also where the first tokens were refused
            with torch.inference_mode(False):  # tensors of that mode could not be written to outside of it
                keys, values = (x.new_empty(*x.shape[:-2], self.slots, x.shape[-1]) for x in (k, v))
            self._held = keys, values
        return self._held


class KeyValueCache(Slots):
    """All keys and values of at most `capacity` tokens, for softmax attention in one of its forms.

    Queries that share a head of keys are rows of one product.
    """

    def __init__(self, attention: str, softmax: AttentionFunction, capacity: int | None) -> None:
        if capacity is None:
            raise ValueError("capacity: expected a number of tokens, as keys and values of all are kept, got None")
        super().__init__(attention, _checks.positive_int("capacity", capacity), capacity)
        self._softmax = softmax

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None, gates: dict[str, Tensor]) -> Tensor:
        no_gates(gates)
        keys, values = self._memory(k, v)
        n, stop = k.shape[-2], self.length + k.shape[-2]
        keys[..., self.length : stop, :], values[..., self.length : stop, :] = k, v
        if n > 1 and not self.length:
            heads = q.shape[-3] if q.dim() > 2 else 1
            return self._softmax(q, spread_heads(k, heads), spread_heads(v, heads), is_causal=True, scale=scale)
        blocked = None if n == 1 else blocked_pairs(n, stop, True, None, q.device)
        mask = None if blocked is None else ~blocked
        return attend_rows(self._softmax, q, keys[..., :stop, :], values[..., :stop, :], mask, scale)


class RotaryCache(KeyValueCache):
    """Turned keys, and values: `KeyValueCache` with rotary positions."""

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None, gates: dict[str, Tensor]) -> Tensor:
        with no_autocast(q):
            table = angles(self.length, self.length + q.shape[-2], q.shape[-1], device=q.device)
            wide = torch.promote_types(q.dtype, torch.float32)
            cos, sin = table.cos().to(wide), table.sin().to(wide)
            q, k = (turn(working(x), cos, sin).to(x.dtype) for x in (q, k))
        return super()._attend(q, k, v, scale, gates)


def attend_rows(
    softmax: AttentionFunction,
    q: Float[Tensor, "*heads n K"],
    keys: Float[Tensor, "*kv_heads M K"],
    values: Float[Tensor, "*kv_heads M V"],
    mask: Bool[Tensor, "n M"] | None,
    scale: float | None,
) -> Float[Tensor, "*heads n V"]:
    """Softmax attention of queries to keys that several heads share: no key is read once for each of them."""
    n, heads = q.shape[-2], keys.shape[-3] if keys.dim() > 2 else 1
    rows = together(q, heads)
    if mask is not None:
        mask = mask.repeat(rows.shape[-2] // n, 1)
    with _checks.unchecked_values():  # each number was looked at when it came
        return apart(softmax(rows, keys, values, attn_mask=mask, scale=scale), n)


def no_gates(gates: dict[str, Tensor]) -> None:
    """TypeError, as of an unknown argument, for gates of a mechanism that takes none."""
    if gates:
        raise TypeError(f"gates: expected none for this mechanism, got {', '.join(gates)}")
