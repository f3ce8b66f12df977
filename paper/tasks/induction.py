"""Induction: find where a token stood last, and say what came after it; or do so several times in a row.

The pattern is '... A B ... A' with the answer B, which induction heads complete (Olsson et al. 2022, arXiv:2209.11895),
in random sequences. For several hops it is the task of Sanford et al. (2024, arXiv:2402.09268): from the token that was
found one looks for its own last occurrence, and so on. One hop takes two layers of attention, and k hops can be done
in 2 + floor(log2 k) layers: the number of hops separates models by depth, and recurrences from attention. Weights that
do not follow the content cannot make the first hop.

Sequences are drawn uniformly from all in which neighbours differ: each hop then leads further back, while two equal
tokens in a row would end all hops. All places are asked for, except those from which fewer hops than wanted lead on;
Sanford et al. expect a blank there.
"""

from functools import partial

import torch

from paper.tasks.task import NONE, Batch, Task


def task(*, hops: int = 1, length: int = 64, symbols: int = 16) -> Task:
    """The task of `hops` hops, in sequences of `length` tokens out of `symbols`.

    At least length - hops * symbols places of each sequence are asked for: a hop fails where a symbol stands for the
    first time, which happens once for each symbol; and no two hops end in the same place, so that each further hop
    loses no more than that.
    """
    draw = partial(_draw, hops=hops, length=length, symbols=symbols)
    return Task(
        name="induction",
        title=f"induction, hops: {hops}, in {length} tokens of {symbols} symbols",
        vocab_size=symbols,
        longest=length,
        train=draw,
        validation=draw,
        tests={f"hops: {hops}": draw},
        solve=partial(_solve, hops=hops),
    )


def _draw(count: int, generator: torch.Generator, *, hops: int, length: int, symbols: int) -> Batch:
    steps = torch.randint(1, symbols, (count, length), generator=generator)
    steps[:, 0] = torch.randint(symbols, (count,), generator=generator)
    tokens = steps.cumsum(-1) % symbols
    after = torch.zeros(count, symbols, dtype=torch.long)  # the place after each symbol's last one, 0 where none was
    found = []
    for t, column in enumerate(tokens.split(1, -1)):
        found.append(after.gather(-1, column))
        after = after.scatter(-1, column, t + 1)
    hop = torch.cat(found, -1)  # place 0 marks a hop that fails; as no hop leads on from there, it stays failed
    place = hop
    for _ in range(hops - 1):
        place = hop.gather(-1, place)
    return Batch((tokens,), torch.where(place > 0, tokens.gather(-1, place), NONE))


def _solve(tokens: list[int], *, hops: int) -> list[int]:
    """The answers to one sequence, by looking back from every place."""
    answers = []
    for start in range(len(tokens)):
        place, left = start, hops
        while left and tokens[place] in tokens[:place]:
            back = tokens[:place][::-1].index(tokens[place])  # tokens between the two
            place, left = place - back, left - 1
        answers.append(NONE if left else tokens[place])
    return answers
