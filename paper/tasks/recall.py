"""Associative recall of many keys, each written once, or twice, where the last value counts.

The task of Arora et al. (2023, arXiv:2312.04927), simplified: a key and its value come as one token, so that no layer
has to bring neighbours together, and only the memory is tested. Writes come in random order, then a query for each key,
in random order, too. A model that knows a key's two values but not their order is right half of the time.
"""

from collections.abc import Mapping
from functools import partial

import torch

from paper.tasks.task import NONE, Batch, Draw, Task, orders

KEYS, VALUES = 16, 8
QUERY = KEYS * VALUES  # the first token that asks for a key; those before it write a key and a value
ANSWER = QUERY + KEYS  # the first token that is a value
PAIRS = (4, 8, 16)
WRITES = {"once": 1, "twice": 2}
LONGEST = (max(WRITES.values()) + 1) * max(PAIRS)


def draw(count: int, generator: torch.Generator, *, pairs: int, writes: int) -> Batch:
    """`count` sequences: each of `pairs` keys is written `writes` times, with values that differ, then asked for."""
    keys = orders(count, KEYS, generator=generator)[:, :pairs]
    values = orders(count, pairs, VALUES, generator=generator)[..., :writes]
    values = values.transpose(1, 2).flatten(1)  # every key's first, every key's second, ...
    order = orders(count, writes * pairs, generator=generator)
    slots, values = order % pairs, values.gather(-1, order)
    places = torch.arange(writes * pairs).expand(count, -1)
    last = torch.zeros(count, pairs, dtype=torch.long).scatter_reduce(-1, slots, places, "amax")
    tokens = torch.cat([keys.gather(-1, slots) * VALUES + values, QUERY + keys], -1)
    answers = torch.full_like(tokens, NONE)
    answers[:, writes * pairs :] = ANSWER + values.gather(-1, last)
    return Batch((tokens,), answers)


def solve(tokens: list[int]) -> list[int]:
    """The answers to one sequence, by a dictionary."""
    memory: dict[int, int] = {}
    answers = []
    for token in tokens:
        if token < QUERY:
            memory[token // VALUES] = token % VALUES
        answers.append(NONE if token < QUERY else ANSWER + memory[token - QUERY])
    return answers


TESTS: Mapping[str, Draw] = {
    f"{pairs} keys {word}": partial(draw, pairs=pairs, writes=writes)
    for word, writes in WRITES.items()
    for pairs in PAIRS
}


def train(count: int, generator: torch.Generator) -> Batch:
    """A batch of the kind of one of the tests; the kind is drawn, too."""
    kinds = list(TESTS.values())
    return kinds[int(torch.randint(len(kinds), (), generator=generator))](count, generator)


TASK = Task(
    name="recall",
    title="associative recall: keys written once or twice, then asked for",
    vocab_size=ANSWER + VALUES,
    longest=LONGEST,
    train=train,
    validation=train,
    tests=TESTS,
    solve=solve,
)
