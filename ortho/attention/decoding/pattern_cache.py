"""What a pattern's later tokens may still read, and nothing else."""

import torch

from ortho._typing import Tensor
from ortho._weights import spread_heads
from ortho.attention.decoding.keys_values import Slots, attend_rows, no_gates
from ortho.attention.indexing import indexing
from ortho.attention.mechanism import AttentionFunction
from ortho.attention.sparse.pattern import Pattern


class PatternCache(Slots):
    """The keys and values that a pattern's later queries may read: all, or the first few and a ring of the last.

    `Pattern.remembered` says which; in the ring the newest token takes the place of the oldest. A query takes part in
    products with the keys that its pattern allows, and no others. `softmax` is softmax attention and `whole` the
    pattern's, in the same form. Beside a ring there need be no `capacity`.
    """

    def __init__(
        self,
        attention: str,
        pattern: Pattern,
        softmax: AttentionFunction,
        whole: AttentionFunction,
        capacity: int | None,
    ) -> None:
        remembered = pattern.remembered()
        if remembered is None:
            if capacity is None:
                raise ValueError(f"capacity: expected a number of tokens, as {pattern} may read any of them, got None")
            remembered = capacity, 0
        slots = sum(remembered)
        super().__init__(attention, slots if capacity is None else min(slots, capacity), capacity)
        self._first, self._ring = remembered
        self._pattern, self._softmax, self._whole = pattern, softmax, whole
        self._positions = torch.full((self.slots,), -1, device="cpu")  # of each slot's token; on the CPU, like indices

    def _own(self) -> None:
        super()._own()
        self._positions = self._positions.clone()

    @indexing()
    def _attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None, gates: dict[str, Tensor]) -> Tensor:
        no_gates(gates)
        memory, n = self._memory(k, v), k.shape[-2]
        if n == 1:  # it takes a slot first: whose place it takes is out of its reach
            slot = self._slot(self.length)
            for held, x in zip(memory, (k, v), strict=True):
                held[..., slot, :] = x[..., 0, :]
            self._positions[slot] = self.length
            return self._read(q, *memory, self._positions, scale)
        new = torch.arange(self.length, self.length + n, device="cpu")
        if self.length:
            keys, values = (torch.cat(pair, -2) for pair in zip(memory, (k, v), strict=True))
            o = self._read(q, keys, values, torch.cat([self._positions, new]), scale)
        else:
            heads = q.shape[-3] if q.dim() > 2 else 1
            o = self._whole(q, spread_heads(k, heads), spread_heads(v, heads), is_causal=True, scale=scale)
        if self._ring:  # of those that share a slot the last stays
            new = new[(new < self._first) | (new > int(new[-1]) - self._ring)]
        slots = torch.tensor([self._slot(position) for position in new.tolist()], device="cpu")
        self._positions[slots] = new
        rows, slots = (index.to(k.device) for index in (new - self.length, slots))
        for held, x in zip(memory, (k, v), strict=True):
            held.index_copy_(-2, slots, x.index_select(-2, rows))
        return o

    def _slot(self, position: int) -> int:
        """Where the token at a position is kept."""
        return position if position < self._first else self._first + (position - self._first) % self._ring

    def _read(self, q: Tensor, keys: Tensor, values: Tensor, positions: Tensor, scale: float | None) -> Tensor:
        """The outputs of the newest tokens' queries, over keys that stand at these positions, or nowhere (-1)."""
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
        return attend_rows(self._softmax, q, keys, values, None if n == 1 else kept.to(keys.device), scale)
