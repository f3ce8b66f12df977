"""What a token costs that is decoded with a cache, and what the cache takes."""

from dataclasses import dataclass
from typing import Any

from ortho import _checks
from ortho._checks import checked
from ortho._typing import Size
from ortho.attention import MECHANISMS
from ortho.attention.cache import KeyValueCache, PatternCache, new_cache
from ortho.attention.sparse.pattern import Pattern, pattern_of
from ortho.cost.layers import shared_heads


@dataclass(frozen=True)
class DecodeCost:
    """forward: FLOPs of matrix products, 2 a multiply-add. nbytes: of a cache with room for the token and no more."""

    forward: Any
    nbytes: Any


@checked
def decoded(
    attention: str, B: Size, N: Size, H: Size, K: Size, V: Size, *, num_kv_heads: Size = None, itemsize: int = 4
) -> DecodeCost:
    """The N-th token of B sequences in H heads, read by `new_cache(attention, N)` in its fast form.

    Queries share `num_kv_heads` heads of keys, by default H. Of a pattern N is an integer; elsewhere a symbol will do.
    Raises TypeError or ValueError, naming the argument, for a mechanism that has no cache and for sizes that are none.
    """
    G = shared_heads(H, num_kv_heads)
    cache = new_cache(attention, N if isinstance(N, int) else 1)
    mechanism = MECHANISMS[attention]
    pattern = pattern_of(mechanism)
    if isinstance(cache, PatternCache) and pattern is not None:
        if not isinstance(N, int):
            raise TypeError(f"N: expected an integer, as the pairs of a pattern are counted, got {N!r}")
        return DecodeCost(2 * B * H * read_keys(pattern, N) * (K + V), itemsize * B * G * cache.slots * (K + V))
    if isinstance(cache, KeyValueCache):
        return DecodeCost(2 * B * H * N * (K + V), itemsize * B * G * N * (K + V))
    core = mechanism.cost(B, N, H, K, V, causal=True, itemsize=itemsize)  # heads are spread before
    return DecodeCost(core.decode, core.state_bytes)


@checked
def read_keys(pattern: Pattern, N: int) -> int:
    """How many keys the N-th token's query reads."""
    _checks.positive_int("N", N)
    before = pattern.pairs(N - 1, is_causal=True) if N > 1 else 0
    return pattern.pairs(N, is_causal=True) - before
