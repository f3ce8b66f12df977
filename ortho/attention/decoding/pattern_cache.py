"""What a pattern's later tokens may still read, and nothing else."""

import torch

from ortho._typing import Tensor
from ortho._weights import spread_heads
from ortho.attention.decoding.keys_values import Slots, attend_rows, no_gates
from ortho.attention.indexing import indexing
from ortho.attention.mechanism import AttentionFunction
from ortho.attention.patterns.pattern import Pattern


class PatternCache(Slots):
    """The keys and values that a pattern's later queries may read: all, or the first few and a ring of the last.

    `Pattern.remembered` says which; in the ring the newest token takes the place of the oldest. A query takes part in
    products with the keys that its pattern allows, and no others. `softmax` is softmax attention and `whole` the
    pattern's, in the same form. Beside a ring there need be no `capacity`.
    """

    def __init__(
        self, pattern: Pattern, softmax: AttentionFunction, whole: AttentionFunction, capacity: int | None
    ) -> None:
        remembered = pattern.remembered()
        if remembered is None:
            if capacity is None:
                raise ValueError(f"capacity: expected a number of tokens, as {pattern} may read any of them, got None")
            remembered = capacity, 0
        slots = sum(remembered)
        super().__init__(slots if capacity is None else min(slots, capacity), capacity)
        self._first, self._ring = remembered
        self._pattern, self._softmax, self._whole = pattern, softmax, whole
        self._positions = torch.full((self.slots,), -1)  # of each slot's token; like all indices here on the CPU

    @indexing()
    def _attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None, gates: dict[str, Tensor]) -> Tensor:
        no_gates(gates)
        memory = self._memory(k, v)
        n = k.shape[-2]
        new = torch.arange(self.length, self.length + n)
        if n > 1 and not self.length:
            heads = q.shape[-3] if q.dim() > 2 else 1
            o = self._whole(q, spread_heads(k, heads), spread_heads(v, heads), is_causal=True, scale=scale)
            self._write(memory, (k, v), new)
            return o
        if n == 1:  # it takes a slot first: whose place it takes is out of its reach
            self._write(memory, (k, v), new)
            keys, values = memory
            j = self._positions
        else:
            keys, values = (torch.cat(pair, -2) for pair in zip(memory, (k, v), strict=True))
            j = torch.cat([self._positions, new])
            self._write(memory, (k, v), new)
        kept = self._pattern.kept(new[:, None], j, is_causal=True) & (j >= 0)  # (n, slots) or (n, slots + n)
        read = kept.any(0)
        if not bool(read.any()):
            return v.new_zeros(*q.shape[:-1], v.shape[-1])
        if not bool(read.all()):
            picked = read.nonzero()[:, 0]
            kept, picked = kept[:, picked], picked.to(k.device)
            keys, values = keys.index_select(-2, picked), values.index_select(-2, picked)
        return attend_rows(self._softmax, q, keys, values, None if n == 1 else kept.to(k.device), scale)

    def _write(self, memory: tuple[Tensor, Tensor], new: tuple[Tensor, Tensor], positions: Tensor) -> None:
        """Put tokens into their slots; of those that share one, the last alone."""
        first, ring = self._first, self._ring
        slots = positions
        if ring:
            stays = (positions < first) | (positions > int(positions[-1]) - ring)
            rows, positions = stays.nonzero()[:, 0], positions[stays]
            slots = torch.where(positions < first, positions, first + (positions - first) % ring)
            if len(rows) < len(stays):
                k, v = (x.index_select(-2, rows.to(x.device)) for x in new)
                new = k, v
        self._positions[slots] = positions
        for held, x in zip(memory, new, strict=True):
            held.index_copy_(-2, slots.to(x.device), x)
