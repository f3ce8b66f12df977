"""What counting alone makes of a text, to compare trained models with: tables of the last few bytes, and repeats.

A repeat is a byte that follows a match: the bytes right before it also stand earlier in the window.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ortho.checks import positive_int
from paper.tasks.task import Task
from paper.tasks.text import whole_windows

Array = np.ndarray[Any, np.dtype[Any]]

LONGEST = 6  # bytes before the next one: the code of all seven is below 2^63


def table_bits(seen: Tensor, tested: Tensor, longest: int) -> tuple[float, ...]:
    """Bits a byte of tables of the last 1, 2, ..., `longest` bytes, counted on `seen` and tested on `tested`.

    Both are windows of bytes, (count, N + 1), as models get them: runs are counted within windows, and every tested
    byte except the first of its window is predicted from the bytes before it in the window. Each table is mixed with
    the next shorter one by the rule of Witten and Bell (1991, doi 10.1109/18.87000, method C): if a run was seen n
    times, with T different bytes after it, the shorter table has a share of T / (n + T). The shortest table is mixed
    with equal shares.

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


def task_bits(task: Task, seen: int, tested: int, longest: int) -> tuple[float, ...]:
    """`table_bits` of a task on a text, counted on `seen` windows, which are drawn to train on from the seed 0, and
    tested on `tested` windows of its test."""
    drawn = task.train(seen, torch.Generator().manual_seed(0))
    return table_bits(whole_windows(drawn), whole_windows(task.tests["test"](tested, torch.Generator())), longest)


def _codes(windows: Array, length: int) -> Array:
    """Each run of `length` bytes as a number, (count, N + 2 - length); the last byte has the least weight."""
    columns = windows.shape[1] - length + 1
    codes = np.zeros((len(windows), columns), dtype=np.int64)
    for i in range(length):
        codes = 256 * codes + windows[:, i : columns + i]
    return codes


def _found(keys: Array, values: Array, wanted: Array) -> Array:
    """The values of the wanted keys, where `keys` are sorted; 0 for keys that are not there."""
    at = np.searchsorted(keys, wanted).clip(max=len(keys) - 1)
    found: Array = np.where(keys[at] == wanted, values[at], 0)
    return found


class Repeats(NamedTuple):
    """For every byte but the first of each window, (count, N): how many bytes right before it, up to a limit, also
    stand earlier in the window, and whether it is the byte that followed the latest of these places."""

    length: Tensor
    right: Tensor


def repeats(windows: Tensor, longest: int = 16) -> Repeats:
    """What the bytes of windows (count, N + 1) repeat, with matches of at most `longest` bytes.

    The match is the longest one that ends right before the byte; if it stands in several places, the latest one counts.
    Without a match, no byte is right. Raises TypeError or ValueError for `longest` below 1.
    """
    positive_int("longest", longest)
    x = windows.long()
    count, N = len(x), x.shape[1] - 1
    run = torch.zeros(count, N, dtype=torch.int64)  # for each place: how long a match ends there and at the last byte
    places = torch.arange(N)
    lengths, right = [], []
    for t in range(N):
        run = torch.cat([run.new_zeros(count, 1), run[:, :-1]], 1)
        run = torch.where((x[:, :N] == x[:, t : t + 1]) & (places < t), (run + 1).clamp(max=longest), 0)
        length, place = (run * N + places).max(1).values, None
        length, place = length // N, length % N
        lengths.append(length)
        right.append((length > 0) & (x.gather(1, place[:, None] + 1)[:, 0] == x[:, t + 1]))
    return Repeats(torch.stack(lengths, 1), torch.stack(right, 1))
