"""Following a state: the product of all permutations read so far, asked for after each.

The permutations of two things are the parity of a bit string, which needs a state transition with an eigenvalue of -1
(Grazzi et al. 2024, arXiv:2411.12537). Those of three do not commute; one needs two reflections a token to follow them
in one layer (Siems et al. 2025, arXiv:2502.10297). Both are trained on short sequences and tested on longer ones.
"""

from collections.abc import Mapping, Sequence
from functools import cache, partial
from itertools import permutations
from typing import Any

import torch

from ortho._checks import positive_int
from ortho.experiments.learning import NONE, SEEDS, Batch, Draw, Task, experiment
from ortho.gates import ReflectingWriteStrength


def elements(things: int) -> list[tuple[int, ...]]:
    """The permutations of so many things, the identity first: token t stands for number t."""
    return list(permutations(range(positive_int("things", things))))


@cache
def products(things: int) -> torch.Tensor:
    """At [s, t], the number of the permutation that is s and then t."""
    table = elements(things)
    return torch.tensor([[table.index(tuple(t[i] for i in s)) for t in table] for s in table])


def draw(count: int, generator: torch.Generator, *, things: int, last: int, first: int = 1) -> Batch:
    """So many sequences of `last` random permutations, answered from token `first` on.

    Raises TypeError or ValueError for sizes below 1 and for a `first` after the `last`.
    """
    if positive_int("first", first) > positive_int("last", last):
        raise ValueError(f"first: expected at most last = {last}, got {first}")
    table = products(things)
    tokens = torch.randint(len(table), (positive_int("count", count), last), generator=generator)
    states = [tokens[:, 0]]
    for column in tokens.T[1:]:
        states.append(table[states[-1], column])
    answers = len(table) + torch.stack(states, -1)
    answers[:, : first - 1] = NONE
    return Batch(tokens, answers)


def solve(tokens: list[int], *, things: int) -> list[int]:
    """The answers to one sequence, by moving things from place to place."""
    moves = elements(things)
    place, answers = {thing: thing for thing in range(things)}, []
    for token in tokens:
        place = {thing: moves[token][at] for thing, at in place.items()}
        answers.append(len(moves) + moves.index(tuple(place.values())))
    return answers


def task(name: str, title: str, things: int, lengths: Sequence[int], arms: Sequence[str], **settings: Any) -> Task:
    """The task with so many things, trained on the first of the lengths, tested between each of them and the next."""
    tests: dict[str, Draw] = {
        f"tokens {before + 1} to {last}": partial(draw, things=things, first=before + 1, last=last)
        for before, last in zip((0, *lengths), lengths, strict=False)
    }
    return Task(
        name=name,
        title=title,
        vocab_size=2 * len(elements(things)),
        longest=lengths[0],
        train=partial(draw, things=things, last=lengths[0]),
        tests=tests,
        solve=partial(solve, things=things),
        arms={arm: ARMS[arm] for arm in arms},
        **settings,
    )


_TO_2 = {"gates": {"beta": ReflectingWriteStrength}}
ARMS: Mapping[str, Mapping[str, Any]] = {
    "softmax": {"attention": "softmax", "max_length": None},
    "linear": {"attention": "linear", "max_length": None},
    "delta": {"attention": "delta", "max_length": None},
    "delta, beta to 2": {"attention": "delta", "max_length": None, **_TO_2},
    "gated-delta": {"attention": "gated-delta", "max_length": None},
    "gated-delta, beta to 2": {"attention": "gated-delta", "max_length": None, **_TO_2},
    "delta-product": {"attention": "delta-product", "max_length": None},  # two steps a token, beta to 2
}

PARITY_TASK = task(
    "parity",
    "the parity of a bit string, trained to length 40 and tested to 256",
    things=2,
    lengths=(40, 80, 160, 256),
    arms=tuple(ARMS),
    rates=dict.fromkeys(("delta", "delta, beta to 2", "gated-delta, beta to 2", "delta-product"), 1e-2),
    steps=500,
)
PERMUTATIONS_TASK = task(
    "permutations",
    "products of permutations of three things, trained to length 16 and tested to 128",
    things=3,
    lengths=(16, 32, 64, 128),
    arms=("softmax", "delta", "delta, beta to 2", "gated-delta, beta to 2", "delta-product"),
    rates=dict.fromkeys(("delta", "delta, beta to 2", "delta-product"), 1e-2),
    steps=1500,
    seeds=(*SEEDS, 6, 7, 8, 9),  # some runs do not learn this task at all
)

_SOURCES = (
    "attention/chunking.py",
    "attention/delta.py",
    "attention/delta_kernels.py",
    "attention/delta_product.py",
    "attention/memory.py",
    "attention/product_gates.py",
    "experiments/state_tracking.py",
)
_LINEAR = (
    "attention/factored.py",
    "attention/factored_kernels.py",
    "attention/feature_map.py",
    "attention/linear.py",
)
PARITY = experiment(PARITY_TASK, *_SOURCES, *_LINEAR)
PERMUTATIONS = experiment(PERMUTATIONS_TASK, *_SOURCES)
