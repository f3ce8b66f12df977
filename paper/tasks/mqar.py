"""Multi-query associative recall: several keys and values, then each key again, whose value is the answer.

The task of Arora et al. (2023, arXiv:2312.04927). Keys and values are tokens of their own, so that a value has to be
tied to the token before it, and then found by it: two layers of attention, or one after a short convolution. A state
of fixed size holds only so many pairs. So the task separates softmax attention from gated convolutions and recurrences,
the sooner the more pairs there are, and weights that follow the content from those that are fixed, or by position.

Sequences are laid out as theirs are: the pairs first, keys and values from disjoint halves of the vocabulary and no
token twice. The places at which keys are asked for are simpler here: they are drawn uniformly from all that are left,
and the others are blank. Theirs take every second place, early ones more often by a power law, and random tokens may
fill the others.
"""

from functools import partial

import torch

from paper.tasks.task import NONE, Batch, Task, orders

BLANK = 0  # keys follow it, and values are the upper half of the vocabulary


def task(*, pairs: int = 8, length: int = 32, vocab_size: int = 64) -> Task:
    """The task with `pairs` pairs in sequences of `length` tokens."""
    draw = partial(_draw, pairs=pairs, length=length, vocab_size=vocab_size)
    return Task(
        name="mqar",
        title=f"multi-query associative recall: {pairs} keys and values, of {vocab_size} tokens, in {length} places",
        vocab_size=vocab_size,
        longest=length,
        train=draw,
        validation=draw,
        tests={f"{pairs} pairs": draw},
        solve=partial(_solve, first_value=vocab_size // 2),
    )


def _draw(count: int, generator: torch.Generator, *, pairs: int, length: int, vocab_size: int) -> Batch:
    first_value = vocab_size // 2
    keys = 1 + orders(count, first_value - 1, generator=generator)[:, :pairs]
    values = first_value + orders(count, vocab_size - first_value, generator=generator)[:, :pairs]
    places = 2 * pairs + orders(count, length - 2 * pairs, generator=generator)[:, :pairs]
    tokens = torch.full((count, length), BLANK)
    tokens[:, : 2 * pairs] = torch.stack([keys, values], -1).flatten(1)
    answers = torch.full_like(tokens, NONE)
    return Batch((tokens.scatter(-1, places, keys),), answers.scatter(-1, places, values))


def _solve(tokens: list[int], *, first_value: int) -> list[int]:
    """The answers to one sequence, by a dictionary: a key that has been seen before is asked for."""
    memory: dict[int, int] = {}
    answers, before = [], BLANK
    for token in tokens:
        answers.append(memory.get(token, NONE))
        if token >= first_value:
            memory[before] = token
        before = token
    return answers
