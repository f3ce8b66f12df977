"""Decoding: what a mechanism keeps of a sequence that is read token by token, behind one interface.

`new_cache("softmax", 4096).attend(q, k, v)` reads further tokens and gives their outputs. Softmax attention keeps keys
and values, a pattern those that a later token may read, and any other mechanism the state that its functions carry.
"""

from torch import nn

from ortho import _checks
from ortho._checks import checked
from ortho.attention import MECHANISMS
from ortho.attention.decoding.cache import Cache
from ortho.attention.decoding.keys_values import KeyValueCache, RotaryCache
from ortho.attention.decoding.pattern_cache import PatternCache
from ortho.attention.decoding.state_cache import StateCache
from ortho.attention.positions import rotary
from ortho.attention.sparse.pattern import pattern_of

__all__ = ["Cache", "KeyValueCache", "PatternCache", "RotaryCache", "StateCache", "new_cache"]


@checked
def new_cache(attention: str | nn.Module, capacity: int | None = None, *, form: str = "fast") -> Cache:
    """An empty cache for a mechanism by its name, or for a module with a mechanism's signature.

    `capacity` is the number of tokens that it can read in all. A cache that takes its memory at once needs one, others
    read without end where it is None. In the fast form values are as wide as keys, as the fused kernels need them.

    Raises TypeError or ValueError, naming the argument, for a mechanism that is not causal, for a capacity below 1, and
    for none where one is needed.
    """
    if isinstance(attention, nn.Module):
        return StateCache(attention, attention, capacity)
    mechanism = MECHANISMS[_checks.one_of("attention", attention, MECHANISMS)]
    if not mechanism.causal:
        raise ValueError(f"attention: expected a causal mechanism, got {attention!r}")
    function, softmax = mechanism.form(form), MECHANISMS["softmax"].form(form)
    pattern = pattern_of(mechanism)
    if pattern is not None:
        return PatternCache(attention, pattern, softmax, function, capacity)
    if mechanism.exact:
        return KeyValueCache(attention, function, capacity)
    if mechanism is rotary.MECHANISM:
        return RotaryCache(attention, softmax, capacity)
    return StateCache(attention, function, capacity)
