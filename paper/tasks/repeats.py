"""Which bytes of a text repeat what stands before them: how long a match the last bytes have, and if it goes on."""

from typing import NamedTuple

import torch
from torch import Tensor

from ortho._checks import positive_int

__all__ = ["Repeats", "repeats"]


class Repeats(NamedTuple):
    """Of every byte but the first of each window, (count, N): how many bytes before it (up to a most) stand earlier in
    the window, too, and whether it is the byte that followed the latest of these places."""

    length: Tensor
    right: Tensor


def repeats(windows: Tensor, longest: int = 16) -> Repeats:
    """What the bytes of windows (count, N + 1) repeat, of matches of at most `longest` bytes.

    The match is the longest one that ends right before the byte, and its place the latest one where there are several.
    Without any, no byte is right. Raises TypeError or ValueError for `longest` below 1.
    """
    positive_int("longest", longest)
    x = windows.long()
    count, N = len(x), x.shape[1] - 1
    run = torch.zeros(count, N, dtype=torch.int64)  # of each place: how long a match ends there and at the last byte
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
