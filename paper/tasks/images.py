"""Classification of small images: a split of labelled images that their content decides, and the task on it."""

import hashlib
from collections.abc import Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ortho._checks import positive_int
from paper.tasks.task import Batch, Task

__all__ = ["Images", "classification", "split"]


class Images(NamedTuple):
    """Pixels (n, C, H, W) as bytes, and the class of each image, integers (n,)."""

    pixels: Tensor
    answers: Tensor

    def taken(self, picks: Tensor) -> "Images":
        """Those at the indices, in their order."""
        return Images(self.pixels[picks], self.answers[picks])


def split(images: Images, weights: Sequence[int]) -> list[Images]:
    """The images in parts, as large as the `weights` say, in each class; within a part in the order of the sha256 of
    their pixels, so that the first of a part are of all classes.

    The order in which the images come does not matter, and none is in two parts. Equal images of a class follow each
    other, and so are in one part, but for those that a cut falls between.
    """
    digests = [hashlib.sha256(image.tobytes()).digest() for image in images.pixels.numpy()]
    ordered = images.taken(torch.tensor(sorted(range(len(digests)), key=digests.__getitem__)))
    cuts = [0, *accumulate(weights)]
    parts = torch.empty(len(digests), dtype=torch.long)
    for label in ordered.answers.unique():
        places = (ordered.answers == label).nonzero().flatten()
        for part, (first, last) in enumerate(pairwise(len(places) * cut // cuts[-1] for cut in cuts)):
            parts[places[first:last]] = part
    return [ordered.taken((parts == part).nonzero().flatten()) for part in range(len(weights))]


def classification(
    name: str, title: str, *, classes: int, white: int, train: Images, validation: Images, test: Images
) -> Task:
    """The task to say an image's class: pixels (B, C, H, W), float32 from 0 to 1 (which `white` is), answers (B,).

    Training draws images with replacement. Validation and test give their first ones, whatever the generator, and
    raise ValueError for more than there are. `longest` counts pixels, the tokens of the smallest patches.
    """
    return Task(
        name=name,
        title=title,
        vocab_size=classes,
        longest=train.pixels[0, 0].numel(),
        train=partial(_any, train, white),
        validation=partial(_first, validation, white),
        tests={"test": partial(_first, test, white)},
    )


def _any(images: Images, white: int, count: int, generator: torch.Generator) -> Batch:
    picks = torch.randint(len(images.answers), (positive_int("count", count),), generator=generator)
    return _batch(images.taken(picks), white)


def _first(images: Images, white: int, count: int, _: torch.Generator) -> Batch:
    if positive_int("count", count) > len(images.answers):
        raise ValueError(f"count: expected at most the {len(images.answers)} images of this part, got {count}")
    return _batch(Images(images.pixels[:count], images.answers[:count]), white)


def _batch(images: Images, white: int) -> Batch:
    return Batch((images.pixels.float() / white,), images.answers)
