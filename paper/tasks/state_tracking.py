"""Following a state: the product of all permutations read so far, asked for after each.

The permutations of two things are the parity of a bit string, which needs a state transition with an eigenvalue of -1
(Grazzi et al. 2024, arXiv:2411.12537). Those of three do not commute; one needs two reflections a token to follow them
in one layer (Siems et al. 2025, arXiv:2502.10297). Both are trained on short sequences and tested on longer ones.
"""

from collections.abc import Sequence
from functools import cache, partial
from itertools import permutations

import torch

from paper.tasks.task import NONE, Batch, Draw, Task


def elements(things: int) -> list[tuple[int, ...]]:
    """The permutations of `things` things, the identity first: token t stands for number t."""
    return list(permutations(range(things)))


@cache
def products(things: int) -> torch.Tensor:
    """At [s, t], the number of the permutation that is s and then t."""
    table = elements(things)
    return torch.tensor([[table.index(tuple(t[i] for i in s)) for t in table] for s in table])


def draw(count: int, generator: torch.Generator, *, things: int, last: int, first: int = 1) -> Batch:
    """`count` sequences of `last` random permutations, answered from token `first` on."""
    table = products(things)
    tokens = torch.randint(len(table), (count, last), generator=generator)
    states = [tokens[:, 0]]
    for column in tokens.T[1:]:
        states.append(table[states[-1], column])
    answers = len(table) + torch.stack(states, -1)
    answers[:, : first - 1] = NONE
    return Batch((tokens,), answers)


def solve(tokens: list[int], *, things: int) -> list[int]:
    """The answers to one sequence, by moving things from place to place."""
    moves = elements(things)
    place, answers = {thing: thing for thing in range(things)}, []
    for token in tokens:
        place = {thing: moves[token][at] for thing, at in place.items()}
        answers.append(len(moves) + moves.index(tuple(place.values())))
    return answers


def task(name: str, title: str, things: int, lengths: Sequence[int]) -> Task:
    """The task with `things` things, trained on the first of the lengths, tested between each length and the next."""
    tests: dict[str, Draw] = {
        f"tokens {before + 1} to {last}": partial(draw, things=things, first=before + 1, last=last)
        for before, last in zip((0, *lengths), lengths, strict=False)
    }
    train = partial(draw, things=things, last=lengths[0])
    return Task(
        name=name,
        title=title,
        vocab_size=2 * len(elements(things)),
        longest=lengths[0],
        train=train,
        validation=train,
        tests=tests,
        solve=partial(solve, things=things),
    )


PARITY = task("parity", "the parity of a bit string, trained to length 40 and tested to 256", 2, (40, 80, 160, 256))
PERMUTATIONS = task(
    "permutations",
    "products of permutations of three things, trained to length 16 and tested to 128",
    3,
    (16, 32, 64, 128),
)
