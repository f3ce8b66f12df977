"""Pairs of texts as batches: the source with its mask, the target shifted by its start, and what is to be written."""

from collections.abc import Sequence

import torch
from torch import Tensor

from paper.tasks.task import NONE, Batch

__all__ = ["PAD", "SPECIAL", "START", "STOP", "UNKNOWN", "Pair", "batch_of", "until_stop"]

SPECIAL = ("<pad>", "<start>", "<stop>", "<unknown>")
PAD, START, STOP, UNKNOWN = range(len(SPECIAL))  # the first tokens of every vocabulary

Pair = tuple[Sequence[int], Sequence[int]]  # the tokens of a source and of its target, without any of these


def batch_of(pairs: Sequence[Pair], *, most: int | None = None) -> Batch:
    """Inputs source (B, M), target (B, N) and the source's mask (B, M), True = a token; answers (B, N).

    Each source ends with STOP, each target begins with START, and its answers end with STOP. Shorter texts are filled
    up to the longest of the batch with PAD, and with NONE in the answers. `most` limits the number of tokens: sources
    lose their last tokens before the STOP, answers lose their end.

    Raises ValueError for no pairs.
    """
    if not pairs:
        raise ValueError("pairs: expected at least one, got none")
    sources = [[*list(source)[: None if most is None else most - 1], STOP] for source, _ in pairs]
    answers = [[*target, STOP][:most] for _, target in pairs]
    source, said = _filled(sources, PAD), _filled(answers, NONE)
    target = torch.cat([torch.full_like(said[:, :1], START), said[:, :-1]], 1)
    lengths = torch.tensor([len(row) for row in sources])
    mask = torch.arange(source.shape[1]) < lengths[:, None]
    return Batch((source, target.masked_fill(target == NONE, PAD), mask), said)


def until_stop(tokens: Tensor) -> list[list[int]]:
    """The tokens before the first STOP, or before the first NONE, in each row of (B, N)."""
    rows = []
    for row in tokens.tolist():
        ends = [i for i, token in enumerate(row) if token in (STOP, NONE)]
        rows.append(row[: ends[0]] if ends else row)
    return rows


def _filled(rows: Sequence[Sequence[int]], value: int) -> Tensor:
    longest = max(map(len, rows))
    return torch.tensor([[*row, *([value] * (longest - len(row)))] for row in rows])
