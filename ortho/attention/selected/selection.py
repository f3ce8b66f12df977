"""Choosing pairs by what queries and keys hold: what the mechanisms that do so share.

A choice is made once and is not differentiated: gradients reach the scores and values of the chosen pairs alone. Both
forms of a mechanism make it by the same function, in float32 at least, so that they cannot differ by a rounding.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from math import sqrt
from typing import Any, NamedTuple

import torch

from ortho import _checks
from ortho._autocast import no_autocast
from ortho._typing import Bool, Float, Int, State, Tensor
from ortho.attention.operands import mask_of_keys, with_past, working
from ortho.attention.softmax.softmax_attention import softmax_attention_reference
from ortho.attention.sparse.tiled_attention import tiled_attention
from ortho.attention.sparse.tiling import ABSENT, Tiling

# Scores that are looked at together: as many as a few tiles of a fused kernel have, so that memory stays linear.
SCORES = 2**22


class Call(NamedTuple):
    """What a choice is made of: one axis of sequences, float32 at least, without gradients."""

    q: Float[Tensor, "G N K"]  # times the sign of the scale: the highest products are then the highest scores
    k: Float[Tensor, "G M K"]
    visible: Bool[Tensor, "G M"] | None  # the keys that a mask leaves; None for all
    first: int  # position of the first query; the first key's is 0
    is_causal: bool
    scale: float

    @property
    def places(self) -> Int[Tensor, "N"]:
        """The queries' positions."""
        return torch.arange(self.first, self.first + self.q.shape[1], device=self.q.device)

    def scores(self, tile: slice, keys: Float[Tensor, "G m K"]) -> Float[Tensor, "G n m"]:
        """Products of a tile of queries with keys, made in the dtype that these have, whatever autocast says."""
        with no_autocast(keys):
            return self.q[:, tile] @ keys.mT

    def reachable(self, i: Int[Tensor, "n"]) -> Bool[Tensor, "G n M"]:
        """Whether queries at these positions could attend to each key."""
        j = torch.arange(self.k.shape[1], device=i.device)
        free = (j <= i[:, None])[None] if self.is_causal else torch.ones_like(i[:, None] + j, dtype=torch.bool)[None]
        return (free if self.visible is None else free & self.visible[:, None]).expand(len(self.k), -1, -1)

    def steps(self, width: int) -> Iterator[slice]:
        """All queries, in tiles of which each has about `SCORES` numbers, `width` a query."""
        N = self.q.shape[1]
        step = max(1, SCORES // (len(self.q) * width))
        for start in range(0, N, step):
            yield slice(start, min(N, start + step))


def choice_call(
    q: Tensor,
    keys: Tensor,
    *,
    is_causal: bool,
    attn_mask: Tensor | None,
    scale: float | None,
    first: int | None = None,
) -> Call:
    """The call of a choice among these keys, for checked operands; the first query stands at `first`, by default so
    that the last, in a causal call, is the last key, and else at 0."""
    _checks.scale_factor(scale)
    if first is None:
        first = keys.shape[-2] - q.shape[-2] if is_causal else 0
    sign = 1 if scale is None else (scale > 0) - (scale < 0)
    with no_autocast(q):
        return Call(
            flat(q.detach()) if sign == 1 else sign * flat(q.detach()),
            flat(keys.detach()),
            visible_keys(attn_mask, keys),
            first,
            is_causal,
            1 / sqrt(q.shape[-1]) if scale is None else scale,
        )


def visible_keys(attn_mask: Tensor | None, keys: Tensor) -> Bool[Tensor, "G M"] | None:
    """The keys that a mask leaves; ValueError for one that is not the same for all queries."""
    if attn_mask is None:
        return None
    mask_of_keys(attn_mask, keys.shape[-2])
    mask = attn_mask[None] if attn_mask.dim() == 1 else attn_mask
    return mask.expand(*keys.shape[:-2], 1, keys.shape[-2]).reshape(-1, keys.shape[-2])


def flat(x: Float[Tensor, "*batch N K"]) -> Float[Tensor, "G N K"]:
    """Float32 at least, with all leading axes in one."""
    return working(x).reshape(-1, *x.shape[-2:])


def flat_numbers(numbers: Tensor) -> Tensor:
    """(..., N), a number a token, as (G, N): all leading axes in one."""
    return numbers.reshape(-1, numbers.shape[-1])


def attend(q: Tensor, keys: Tensor, values: Tensor, call: Call, parts: list[Tiling]) -> Float[Tensor, "*batch N V"]:
    """Softmax attention over the pairs of the parts, of which each sequence has its own."""
    with no_autocast(q):
        mask = None if call.visible is None else call.visible[:, None]
        o = tiled_attention(
            flat(q), flat(keys), flat(values), parts, scale=call.scale, start=call.first, attn_mask=mask
        )
        return o.reshape(*q.shape[:-1], values.shape[-1]).to(q.dtype)


def attend_joined(
    q: Tensor, keys: Tensor, values: Tensor, scale: float, parts: list[Tiling]
) -> Float[Tensor, "*batch N V"]:
    """The same with all sequences as one: query i of sequence g stands at g N + i, key j at g M + j. What a part allows
    can then look up numbers that each token has of its own."""
    with no_autocast(q):
        joined_q, joined_k, joined_v = (working(x).reshape(1, -1, x.shape[-1]) for x in (q, keys, values))
        o = tiled_attention(joined_q, joined_k, joined_v, parts, scale=scale)
        return o.reshape(*q.shape[:-1], values.shape[-1]).to(q.dtype)


def attend_reference(
    q: Tensor, keys: Tensor, values: Tensor, call: Call, chosen: Bool[Tensor, "G N M"]
) -> Float[Tensor, "*batch N V"]:
    """Softmax attention under the mask of the chosen pairs."""
    mask = chosen.reshape(*q.shape[:-1], keys.shape[-2])
    o: Any = softmax_attention_reference(q, keys, values, attn_mask=mask, scale=call.scale)
    return o


_drawn: dict[tuple[str, int, torch.dtype, torch.device], Tensor] = {}


def drawn_once(name: str, draw: Callable[[int], Tensor], x: Float[Tensor, "*batch N K"]) -> Tensor:
    """draw(K), in float32 at least, on the device of x: drawn once for each width, dtype and device.

    A thread of its own draws, as in `favor.default_rows`: no mode of the caller may reach what outlives the call.
    """
    key = (name, x.shape[-1], torch.promote_types(x.dtype, torch.float32), x.device)
    if key not in _drawn:
        with ThreadPoolExecutor(1) as thread:
            _drawn[key] = thread.submit(lambda: draw(x.shape[-1]).to(x.device, key[2])).result()
    return _drawn[key]


def begin(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool,
    attn_mask: Tensor | None,
    scale: float | None,
    initial_state: State | None,
) -> tuple[Tensor, Tensor, Call]:
    """(keys, values, call) of a mechanism whose state is (keys, values)."""
    keys, values = with_past(q, k, v, is_causal, attn_mask, initial_state)
    past = keys.shape[-2] - k.shape[-2]
    return keys, values, choice_call(q, keys, is_causal=is_causal, attn_mask=attn_mask, scale=scale, first=past)


def best(scores: Float[Tensor, "... M"], count: int) -> Bool[Tensor, "... M"]:
    """True for the `count` highest of each row, of equal ones the first; never for -inf."""
    there = scores > -torch.inf
    if count >= scores.shape[-1]:
        return there
    highest = scores.topk(count).values
    least = highest[..., -1:]
    level = scores == least
    room = (highest == least).sum(-1, keepdim=True)
    return ((scores > least) | (level & (level.cumsum(-1, dtype=torch.int32) <= room))) & there


def places_of(chosen: Bool[Tensor, "... M"], count: int) -> Int[Tensor, "... count"]:
    """The places of at most `count` True in each row, from the first, and `ABSENT` behind them."""
    M = chosen.shape[-1]
    number = torch.arange(M, dtype=torch.int32, device=chosen.device)
    found = torch.where(chosen, number, M).topk(min(count, M), largest=False, sorted=True).values.long()
    return found.masked_fill_(found == M, ABSENT)


def best_places(scores: Float[Tensor, "... M"], count: int) -> Int[Tensor, "... count"]:
    """The places of the `count` highest of each row, as `best` has them and `places_of` says them."""
    return places_of(best(scores, count), count)


def joined(numbers: Int[Tensor, "G *rest"], size: int) -> Int[Tensor, "G *rest"]:
    """Numbers below `size`, of a sequence each, as numbers of all sequences in one; `ABSENT` stays."""
    offsets = size * torch.arange(len(numbers), device=numbers.device)
    return torch.where(numbers < 0, numbers, numbers + offsets.view(-1, *(1,) * (numbers.dim() - 1)))


def leaked_pairs(choose: Callable[[Tensor, Tensor], Tensor], q: Tensor, k: Tensor, cut: int) -> int:
    """How many pairs of the first `cut` tokens are chosen with the later ones there and not without them, or the other
    way round, by a mask `choose(q, k)` (..., N, M) of the queries and keys of the same tokens."""
    whole, alone = choose(q, k), choose(q[..., :cut, :], k[..., :cut, :])
    return int((whole[..., :cut, :cut] != alone).sum())


def left_out(chosen: Bool[Tensor, "*batch N M"]) -> int:
    """How many queries may attend to nothing."""
    return int((~chosen.any(-1)).sum())
