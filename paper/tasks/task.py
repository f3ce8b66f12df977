"""What a task is: batches to train on, others to choose by, and others to test with."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ortho.checks import positive_int

NONE = -1  # the answer where none is asked for


class Batch(NamedTuple):
    """The inputs of a model, and the answers (integers) that its logits should give, `NONE` where none is asked for.

    For a model of tokens `inputs` are indices (B, N), and answers (B, N). For images they are pixels (B, C, H, W), with
    answers (B,). For pairs of texts they are the source, what is already written, and the mask of the source, with
    answers (B, N).
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
    """What is to be learnt. `train(count, generator)`, `validation` and each of `tests` draw `count` examples.

    If data are limited, validation and tests are separate parts that `train` never draws from. They give the same
    examples whatever the generator, so that two models are compared pair by pair. `vocab_size` is the number of
    possible answers, and of tokens if inputs are tokens; `longest` is the number of tokens of the longest example to
    train on. `solve`, if the answers can be computed, answers one sequence in plain Python, independently of how the
    answers were drawn.
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
    """`count` of a part's examples, drawn with replacement; `batch` makes a batch of those at indices below `size`."""
    return batch(torch.randint(size, (positive_int("count", count),), generator=generator))


def first_of(size: int, batch: Callable[[Tensor], Batch], count: int, _: torch.Generator) -> Batch:
    """A part's first examples, whatever the generator. Raises ValueError for more than there are."""
    if positive_int("count", count) > size:
        raise ValueError(f"count: expected at most {size}, all examples of this part, got {count}")
    return batch(torch.arange(count))


def orders(*shape: int, generator: torch.Generator) -> Tensor:
    """Independent random permutations of the indices along the last axis."""
    return torch.rand(*shape, generator=generator).argsort(-1)


def check_answers(task: Task, generator: torch.Generator) -> None:
    """Raise AssertionError unless every draw asks for answers, and all that it asks for are the solver's."""
    if task.solve is None:
        return
    for name, draw in {"training": task.train, "validation": task.validation, **task.tests}.items():
        inputs, answers = draw(2, generator)
        for tokens, row in zip(inputs[0].tolist(), answers.tolist(), strict=True):
            solved = task.solve(tokens)
            solved += [NONE] * (len(row) - len(solved))  # for the target of a pair, which is filled up to the longest
            pairs = [(a, b) for a, b in zip(row, solved, strict=True) if a != NONE]
            if not pairs or any(a != b for a, b in pairs):
                raise AssertionError(f"{task.name}, {name}: expected the answers {solved}, drawn were {row}")
