"""What a task is: batches to train on, others to choose by, and others to test with."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ortho._checks import positive_int

NONE = -1  # the answer where none is asked for


class Batch(NamedTuple):
    """What a model is called with, and the answers (integers) that its logits are to say, `NONE` where none is asked.

    For a model of tokens `inputs` are indices (B, N), and answers (B, N); of images, pixels (B, C, H, W) and answers
    (B,); of pairs of texts, the source, what is already written, and the mask of the source, with answers (B, N).
    """

    inputs: tuple[Tensor, ...]
    answers: Tensor

    @property
    def asked(self) -> Tensor:
        """Where an answer is asked for, a mask of the answers' shape."""
        return self.answers != NONE

    def to(self, device: torch.device | str) -> "Batch":
        """The same on another device."""
        return Batch(tuple(part.to(device) for part in self.inputs), self.answers.to(device))


Draw = Callable[[int, torch.Generator], Batch]


@dataclass(frozen=True)
class Task:
    """What is to be learnt. `train(count, generator)`, `validation` and each of `tests` draw so many examples.

    Where data are limited, validation and tests are parts of their own of which `train` knows nothing, and give the
    same examples whatever the generator: those of two models are then compared pair by pair. `vocab_size` is how many
    answers there are to choose from, and where inputs are tokens, how many tokens; `longest` the number of tokens of
    the longest example to train on. `solve`, where there is a way to know, answers one sequence in plain Python,
    independently of how the answers were drawn.
    """

    name: str
    title: str
    vocab_size: int
    longest: int
    train: Draw
    validation: Draw
    tests: Mapping[str, Draw]
    solve: Callable[[list[int]], list[int]] | None = None


def any_of(size: int, batch: Callable[[Tensor], Batch], count: int, generator: torch.Generator) -> Batch:
    """So many of a part's examples, drawn with replacement; `batch` makes a batch of those at indices below `size`."""
    return batch(torch.randint(size, (positive_int("count", count),), generator=generator))


def first_of(size: int, batch: Callable[[Tensor], Batch], count: int, _: torch.Generator) -> Batch:
    """A part's first examples, whatever the generator. Raises ValueError for more than there are."""
    if positive_int("count", count) > size:
        raise ValueError(f"count: expected at most {size}, all examples of this part, got {count}")
    return batch(torch.arange(count))


def orders(*shape: int, generator: torch.Generator) -> Tensor:
    """Independent random orders, each along the last axis: the numbers from 0 to its length, in that order."""
    return torch.rand(*shape, generator=generator).argsort(-1)


def check_answers(task: Task, generator: torch.Generator) -> None:
    """Raise AssertionError unless the answers of every draw are the solver's, where any is asked for."""
    if task.solve is None:
        return
    for name, draw in {"training": task.train, "validation": task.validation, **task.tests}.items():
        inputs, answers = draw(2, generator)
        for tokens, row in zip(inputs[0].tolist(), answers.tolist(), strict=True):
            solved = task.solve(tokens)
            solved += [NONE] * (len(row) - len(solved))  # where a pair's target is made as long as the longest
            pairs = [(a, b) for a, b in zip(row, solved, strict=True) if a != NONE]
            if not pairs or any(a != b for a, b in pairs):
                raise AssertionError(f"{task.name}, {name}: expected the answers {solved}, drawn were {row}")
