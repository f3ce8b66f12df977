"""Induction: find where a token stood last, and say what came after it.

The pattern is '... A B ... A' with the answer B, which induction heads complete (Olsson et al. 2022, arXiv:2209.11895),
in random sequences; it is the task of Sanford et al. (2024, arXiv:2402.09268) with one hop, which takes two layers of
attention. Weights that do not follow the content cannot do it.

Sequences are drawn uniformly from all in which neighbours differ: the match is then further back than the last token.
All places are asked for, except those of a symbol that stands there for the first time; Sanford et al. expect a blank
there.
"""

from functools import partial

import torch

from paper.tasks.task import NONE, Batch, Task


def task(*, length: int = 64, symbols: int = 16) -> Task:
    """The task in sequences of `length` tokens out of `symbols`; at least length - symbols places are asked for."""
    draw = partial(_draw, length=length, symbols=symbols)
    return Task(
        name="induction",
        title=f"induction, hops: 1, in {length} tokens of {symbols} symbols",
        vocab_size=symbols,
        longest=length,
        train=draw,
        validation=draw,
        tests={"hops: 1": draw},
        solve=_solve,
    )


def _draw(count: int, generator: torch.Generator, *, length: int, symbols: int) -> Batch:
    steps = torch.randint(1, symbols, (count, length), generator=generator)
    steps[:, 0] = torch.randint(symbols, (count,), generator=generator)
    tokens = steps.cumsum(-1) % symbols
    after = torch.zeros(count, symbols, dtype=torch.long)  # the place after each symbol's last one, 0 where none was
    found = []
    for t, column in enumerate(tokens.split(1, -1)):
        found.append(after.gather(-1, column))
        after = after.scatter(-1, column, t + 1)
    place = torch.cat(found, -1)
    return Batch((tokens,), torch.where(place > 0, tokens.gather(-1, place), NONE))


def _solve(tokens: list[int]) -> list[int]:
    """The answers to one sequence, by looking back from every place."""
    answers = []
    for place, token in enumerate(tokens):
        before = tokens[:place][::-1]
        answers.append(tokens[place - before.index(token)] if token in before else NONE)
    return answers
