"""Tables of the last few bytes: what counting alone makes of a text, to hold trained models against."""

from typing import Any

import numpy as np
from torch import Tensor

from ortho._checks import positive_int

__all__ = ["table_bits"]

Array = np.ndarray[Any, np.dtype[Any]]

LONGEST = 6  # bytes before the next one: the code of all seven is below 2^63


def table_bits(seen: Tensor, tested: Tensor, longest: int) -> tuple[float, ...]:
    """Bits a byte of tables of the last 1, 2, ..., `longest` bytes, counted on `seen` and tested on `tested`.

    Both are windows of bytes, (count, N + 1), as models get them: runs are counted within windows, and every tested
    byte but the first of its window is asked for, by what its window has before it. A table takes over from the next
    shorter one by the rule of Witten and Bell (1991, doi 10.1109/18.87000, method C): where a run was seen n times,
    with T different bytes after it, the shorter table has a share of T / (n + T). The shortest takes over from equal
    shares.

    Raises TypeError or ValueError for `longest` outside [1, 6], and for windows that are not longer than it.
    """
    train, test = seen.numpy().astype(np.int64), tested.numpy().astype(np.int64)
    most = min(LONGEST, *(windows.shape[-1] - 1 for windows in (train, test)))
    if positive_int("longest", longest) > most:
        raise ValueError(f"longest: expected at most {most} for windows of these lengths, got {longest}")
    shares = np.full(test[:, 1:].shape, 1 / 256)
    bits = []
    for n in range(longest + 1):
        asked = _codes(test, n + 1)[:, 0 if n else 1 :]
        runs, times = np.unique(_codes(train, n + 1), return_counts=True)
        before, first, different = np.unique(runs // 256, return_index=True, return_counts=True)
        came, after = (_found(before, of, asked // 256) for of in (np.add.reduceat(times, first), different))
        known = shares[:, max(n, 1) - 1 :]  # of the bytes with so many before them; the others keep the shorter table's
        known += (_found(runs, times, asked) - came * known) / np.maximum(came + after, 1)
        bits.append(float(-np.log2(shares).mean()))
    return tuple(bits[1:])


def _codes(windows: Array, length: int) -> Array:
    """Each run of so many bytes as a number, (count, N + 2 - length); the last byte has the least weight."""
    columns = windows.shape[1] - length + 1
    codes = np.zeros((len(windows), columns), dtype=np.int64)
    for i in range(length):
        codes = 256 * codes + windows[:, i : columns + i]
    return codes


def _found(keys: Array, values: Array, wanted: Array) -> Array:
    """The values of the wanted keys, which are sorted; 0 for keys that are not there."""
    at = np.searchsorted(keys, wanted).clip(max=len(keys) - 1)
    found: Array = np.where(keys[at] == wanted, values[at], 0)
    return found
