"""What a mechanism's decoding with a cache costs."""

from dataclasses import dataclass
from typing import Any

from ortho._typing import Size
from ortho.attention import MECHANISMS
from ortho.attention.cache import KeyValueCache, RingCache, new_cache
from ortho.projections import kv_heads


def shared_heads(H: Size, num_kv_heads: Size | None) -> Size:
    """The number of heads of keys that H heads of queries share, by default H; numbers are checked, symbols are not."""
    if num_kv_heads is None or hasattr(num_kv_heads, "free_symbols"):
        return H if num_kv_heads is None else num_kv_heads
    return num_kv_heads if hasattr(H, "free_symbols") else kv_heads(H, num_kv_heads)


@dataclass(frozen=True)
class DecodeCost:
    """forward: FLOPs of matrix products, 2 a multiply-add. nbytes: bytes of a cache that the token just fills."""

    forward: Any
    nbytes: Any


def decoded(
    attention: str,
    B: Size,
    N: Size,
    H: Size,
    K: Size,
    V: Size,
    *,
    num_kv_heads: Size = None,
    itemsize: int = 4,
    **options: Any,
) -> DecodeCost:
    """The cost of the N-th token of B sequences in H heads, read by `new_cache(attention, N, **options)`.

    Queries share `num_kv_heads` heads of keys, by default H. For a pattern N is an integer; otherwise a symbol will do.
    Raises TypeError or ValueError, naming the argument, for a mechanism that has no cache and for sizes below 1.
    """
    G = shared_heads(H, num_kv_heads)
    cache = new_cache(attention, N if isinstance(N, int) else 1, **options)
    mechanism = MECHANISMS[attention]
    pattern = mechanism.make(**options) if mechanism.family == "sparse" else None
    if isinstance(cache, RingCache) and pattern is not None:
        if not isinstance(N, int):
            raise TypeError(f"N: expected an integer, as the pairs of a pattern are counted, got {N!r}")
        read = int(pattern.mask(N, first=N - 1, is_causal=True).sum())  # keys that the N-th token's query reads
        return DecodeCost(2 * B * H * read * (K + V), itemsize * B * G * cache.slots * (K + V))
    if isinstance(cache, KeyValueCache):
        return DecodeCost(2 * B * H * N * (K + V), itemsize * B * G * N * (K + V))
    core = mechanism.cost(B, N, H, K, V, causal=True, itemsize=itemsize, **options)  # heads of keys are copied before
    return DecodeCost(core.decode, core.state_bytes)
