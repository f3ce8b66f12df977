"""The flip-flop language: keep a bit through whatever comes between, however long that is.

The task of Liu et al. (2023, arXiv:2306.00946), with an instruction and its bit in one token: 'write 0' and 'write 1',
'ignore 0' and 'ignore 1', and 'read', whose answer is the bit written last. The first token writes. Models are trained
on sequences of `TRAINED` tokens, of which a share `IGNORED` is to be ignored. They are tested on longer ones, and on
sparse ones, in which nearly all tokens are to be ignored.
"""

from collections.abc import Mapping
from functools import partial

import torch

from paper.tasks.task import NONE, Batch, Draw, Task

WRITE, IGNORE, READ, ANSWER = 0, 2, 4, 5  # the first token of each kind
TRAINED = 64
IGNORED = {"dense": 0.8, "sparse": 0.98}
RANGES = ((1, 64), (65, 128), (129, 256), (257, 512))  # of tokens; a test asks for the reads in one range


def draw(count: int, generator: torch.Generator, *, ignored: float, first: int = 1, last: int = TRAINED) -> Batch:
    """`count` sequences of `last` tokens; a share `ignored` is ignored and half of the others write. Reads are asked
    for from token `first` on.
    """
    shape = count, last
    kinds, bits = torch.rand(shape, generator=generator), torch.randint(2, shape, generator=generator)
    reads, writes = kinds < (1 - ignored) / 2, kinds >= (1 + ignored) / 2
    writes[:, 0], reads[:, 0] = True, False
    reads[:, -1] |= last > 1
    writes &= ~reads
    tokens = torch.where(reads, READ, bits + torch.where(writes, WRITE, IGNORE))
    written = torch.where(writes, torch.arange(last), 0).cummax(-1).values  # where the last write was
    answers = torch.where(reads, ANSWER + bits.gather(-1, written), NONE)
    answers[:, : first - 1] = NONE
    return Batch((tokens,), answers)


def solve(tokens: list[int]) -> list[int]:
    """The answers to one sequence, by a bit that is kept."""
    bit, answers = 0, []
    for token in tokens:
        if token < IGNORE:
            bit = token
        answers.append(ANSWER + bit if token == READ else NONE)
    return answers


TESTS: Mapping[str, Draw] = {
    f"{word}, tokens {first} to {last}": partial(draw, ignored=ignored, first=first, last=last)
    for word, ignored in IGNORED.items()
    for first, last in RANGES
}

_DENSE = partial(draw, ignored=IGNORED["dense"])

TASK = Task(
    name="flip-flop",
    title="the flip-flop language, trained to length 64 and tested to 512, dense and sparse",
    vocab_size=ANSWER + 2,
    longest=TRAINED,
    train=_DENSE,
    validation=_DENSE,
    tests=TESTS,
    solve=solve,
)
