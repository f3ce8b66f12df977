"""A needle in a haystack: noise in which a few marked keys and values are hidden, one of which is asked for.

This is the retrieval test of long-context language models as a synthetic task, that of Zhong & Andreas (2024,
arXiv:2410.04368), who use keys and values alone. Here they are surrounded by noise of the same symbols. A key counts
only after a mark, so a model has to look for two tokens, and not for the last place where the key stood. The task
separates weights that follow the content from weights that are fixed, or by position. Noise makes it harder for a
state, which must choose what to keep before it knows what is asked for.
"""

from functools import partial

import torch

from paper.tasks.task import NONE, Batch, Task, orders

MARK = 0  # the symbols follow it
NEEDLE, QUESTION = 3, 2  # tokens of a mark, a key and its value, and of a mark and the key that is asked for


def task(*, needles: int = 4, length: int = 64, symbols: int = 32) -> Task:
    """The task with `needles` needles, anywhere in sequences of `length` tokens; the last two tokens ask for one.

    The keys of a sequence differ; values and noise are any of the symbols. All ways to lay needles into the noise are
    equally likely, and each needle is equally likely to be asked for.
    """
    draw = partial(_draw, needles=needles, length=length, symbols=symbols)
    return Task(
        name="needle",
        title=f"one of {needles} needles among {length} tokens of {symbols} symbols",
        vocab_size=1 + symbols,
        longest=length,
        train=draw,
        validation=draw,
        tests={f"needles: {needles}": draw},
        solve=_solve,
    )


def _draw(count: int, generator: torch.Generator, *, needles: int, length: int, symbols: int) -> Batch:
    tokens = 1 + torch.randint(symbols, (count, length), generator=generator)
    keys = 1 + orders(count, symbols, generator=generator)[:, :needles]
    # Needles and tokens of noise in a row: which are needles? Each needle pushes what follows it two places on.
    things = length - QUESTION - (NEEDLE - 1) * needles
    picked = orders(count, things, generator=generator)[:, :needles].sort(-1).values
    marks = picked + (NEEDLE - 1) * torch.arange(needles)
    tokens = tokens.scatter(-1, marks, MARK).scatter(-1, marks + 1, keys)
    asked = torch.randint(needles, (count, 1), generator=generator)
    tokens[:, -QUESTION:-1] = MARK
    tokens[:, -1:] = keys.gather(-1, asked)
    answers = torch.full_like(tokens, NONE)
    answers[:, -1:] = tokens.gather(-1, marks.gather(-1, asked) + 2)
    return Batch((tokens,), answers)


def _solve(tokens: list[int]) -> list[int]:
    """The answer to one sequence, by a dictionary of the marked keys and values."""
    text, key = tokens[:-QUESTION], tokens[-1]
    marked = {text[i + 1]: text[i + 2] for i, token in enumerate(text) if token == MARK}
    return [NONE] * (len(tokens) - 1) + [marked[key]]
