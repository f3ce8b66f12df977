"""Copying: a random string, a delimiter, and then the string again.

As in Jelassi et al. (2024, arXiv:2402.01032), each token of the copy is shown after it was asked for. The task
separates models with a state of fixed size, which holds only strings up to some length, from those that look back at
the whole string. If all strings have one length (`shortest` = `length`), weights by position alone are enough: each
place has a fixed source. With several lengths the source has to be found, by the copy's last token: the answer follows
the same token in the string.
"""

from functools import partial

import torch

from paper.tasks.task import NONE, Batch, Task


def task(*, length: int = 16, shortest: int = 8, symbols: int = 16) -> Task:
    """The task with strings of `shortest` to `length` tokens out of `symbols`, every length equally often; blanks after
    the copy fill a sequence up to 2 * length tokens.
    """
    draw = partial(_draw, length=length, shortest=shortest, symbols=symbols)
    return Task(
        name="copying",
        title=f"copying forwards of {shortest} to {length} of {symbols} symbols",
        vocab_size=symbols + 2,
        longest=2 * length,
        train=draw,
        validation=draw,
        tests={"forwards": draw},
        solve=partial(_solve, delimiter=symbols),
    )


def _draw(count: int, generator: torch.Generator, *, length: int, shortest: int, symbols: int) -> Batch:
    delimiter, blank = symbols, symbols + 1
    size = torch.randint(shortest, length + 1, (count, 1), generator=generator)
    string = torch.randint(symbols, (count, length), generator=generator)
    place = torch.arange(2 * length).expand(count, -1)
    copied = place - size  # which of the copy's tokens is asked for there
    asked = (copied >= 0) & (copied < size)
    answers = torch.where(asked, string.gather(-1, torch.where(asked, copied, 0)), NONE)
    tokens = torch.full_like(answers, blank)
    tokens[:, 1:] = torch.where(asked[:, :-1], answers[:, :-1], blank)  # what was asked for is shown next
    tokens[:, :length] = torch.where(place[:, :length] < size, string, tokens[:, :length])
    return Batch((tokens.scatter(-1, size, delimiter),), answers)


def _solve(tokens: list[int], *, delimiter: int) -> list[int]:
    """The answers to one sequence: the string, as soon as the delimiter has come."""
    size = tokens.index(delimiter)
    return [NONE] * size + tokens[:size] + [NONE] * (len(tokens) - 2 * size)
